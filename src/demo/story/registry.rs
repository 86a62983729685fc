//! The registry of the story: one that it started itself, never another.

use std::path::Path;

use clap::ValueEnum;

use crate::demo::text::chain;
use crate::testkit::{Agent, AgentError, Cluster, ConsulProcess, StartError};

/// Which registry to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Choice {
    /// Consul where there is one, else the embedded agents.
    Auto,
    /// Consul, from $CONSUL_BIN, PATH or target/consul.
    Consul,
    /// The embedded agents.
    Embedded,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistryError {
    #[error("no consul was found: put one on PATH, name it in CONSUL_BIN, or use --registry embedded")]
    NotFound,
    #[error("consul could not be started")]
    Start(#[from] StartError),
    #[error("the embedded agents could not be started")]
    Embedded(#[from] AgentError),
}

/// Two datacenters, dc1 and dc2, that know of each other. All ends when dropped.
pub(crate) struct Registry {
    agents: Agents,
    words: String,
}

enum Agents {
    Consul(Box<[ConsulProcess; 2]>),
    Embedded(Cluster),
}

impl Registry {
    pub(crate) async fn start(choice: Choice) -> Result<Self, RegistryError> {
        let bin = ConsulProcess::find();
        match (choice, bin) {
            (Choice::Consul, None) => Err(RegistryError::NotFound),
            (Choice::Consul, Some(bin)) => Ok(Self::consul(&bin).await?),
            (Choice::Embedded, _) => Self::embedded("as asked for").await,
            (Choice::Auto, None) => Self::embedded("for no consul was found").await,
            (Choice::Auto, Some(bin)) => match Self::consul(&bin).await {
                Ok(registry) => Ok(registry),
                // The end of its log follows on further lines.
                Err(error) => {
                    let why = chain(&error);
                    let why = why.lines().next().unwrap_or_default();
                    Self::embedded(&format!("for consul did not start: {why}")).await
                }
            },
        }
    }

    async fn consul(bin: &Path) -> Result<Self, StartError> {
        let dc1 = ConsulProcess::builder(bin).datacenter("dc1").start().await?;
        let dc2 = ConsulProcess::builder(bin).datacenter("dc2").join_wan(&dc1).start().await?;
        let words = format!("Consul ({}), two agents started for this story alone", bin.display());
        Ok(Self { agents: Agents::Consul(Box::new([dc1, dc2])), words })
    }

    async fn embedded(why: &str) -> Result<Self, RegistryError> {
        let cluster = Cluster::start(["dc1", "dc2"]).await?;
        Ok(Self { agents: Agents::Embedded(cluster), words: format!("the embedded test agents, {why}") })
    }

    /// Which one it is.
    pub(crate) fn words(&self) -> &str {
        &self.words
    }

    /// The address of a datacenter's agent.
    pub(crate) fn url(&self, datacenter: &str) -> String {
        let url = match &self.agents {
            Agents::Consul(agents) => {
                agents.iter().find(|agent| agent.datacenter() == datacenter).map(ConsulProcess::url)
            }
            Agents::Embedded(cluster) => cluster.agent(datacenter).map(Agent::url),
        };
        url.expect("the story has these two datacenters alone")
    }
}
