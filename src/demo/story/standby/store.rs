//! Where the lease of the story is kept: Consul, the embedded agent, or files.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use clap::ValueEnum;

use super::wire::Wire;
use crate::{
    demo::{cli::Failure, story::registry::Choice},
    testkit::{Agent, ConsulProcess},
};

/// Where the lease is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StoreKind {
    /// In Consul (see --registry), where the servers are found as well.
    Consul,
    /// In files: one host, no Consul.
    File,
}

/// It ends when dropped.
pub(super) enum Store {
    Consul(Box<ConsulProcess>),
    Embedded(Box<Agent>),
    Files(PathBuf),
}

// === impl Store ===

impl Store {
    /// Starts it, or makes its folder in `dir`; and what it is in words.
    pub(super) async fn start(
        kind: StoreKind,
        choice: Choice,
        dir: &Path,
    ) -> Result<(Self, String), Failure> {
        if kind == StoreKind::File {
            let words = "files in a folder, on this host; no Consul".to_owned();
            return Ok((Self::Files(dir.join("lease")), words));
        }
        match (choice, ConsulProcess::find()) {
            (Choice::Consul, None) => {
                Err("no consul was found: put one on PATH, name it in CONSUL_BIN, or use --registry embedded"
                    .into())
            }
            (Choice::Consul | Choice::Auto, Some(bin)) => {
                // With a data folder, so that a restart keeps what it has.
                let consul = ConsulProcess::builder(&bin).datacenter("dc1").server(dir.join("consul"));
                let consul = consul.start().await?;
                let words = format!("Consul ({}), one server started for this story alone", bin.display());
                Ok((Self::Consul(Box::new(consul)), words))
            }
            (Choice::Embedded, _) | (Choice::Auto, None) => {
                let words = "the embedded test agent, which forgets all when it ends".to_owned();
                Ok((Self::Embedded(Box::new(Agent::start("dc1").await?)), words))
            }
        }
    }

    /// A server's `--lease`.
    pub(super) fn lease(&self) -> String {
        match self {
            Self::Consul(_) | Self::Embedded(_) => "consul".to_owned(),
            Self::Files(folder) => format!("file:{}", folder.display()),
        }
    }

    /// Where Consul answers, if there is one.
    pub(super) fn url(&self) -> Option<String> {
        self.address().map(|address| format!("http://{address}"))
    }

    /// A way to Consul of one's own, if there is one.
    pub(super) async fn wire(&self) -> Result<Option<Wire>, Failure> {
        match self.address() {
            Some(address) => Ok(Some(Wire::to(address).await?)),
            None => Ok(None),
        }
    }

    fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Consul(consul) => Some(consul.http_addr()),
            Self::Embedded(agent) => Some(agent.http_addr()),
            Self::Files(_) => None,
        }
    }
}
