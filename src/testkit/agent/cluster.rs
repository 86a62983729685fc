//! Several datacenters that know each other.

use std::net::{Ipv4Addr, SocketAddr};

use super::{Agent, AgentError};

/// Joined datacenters, one agent each.
#[derive(Debug)]
pub struct Cluster {
    agents: Vec<Agent>,
}

// === impl Cluster ===

impl Cluster {
    /// Starts an agent for each of the datacenters, on free ports of 127.0.0.1,
    /// and joins them all.
    ///
    /// # Errors
    /// Where a name is none or there twice, or no port is free.
    pub async fn start<T: Into<String>>(
        datacenters: impl IntoIterator<Item = T>,
    ) -> Result<Self, AgentError> {
        Self::start_on(datacenters.into_iter().map(|name| (name, (Ipv4Addr::LOCALHOST, 0)))).await
    }

    /// The same on given addresses; port 0 is one that is free.
    ///
    /// # Errors
    /// As [`start`](Self::start), or where an address cannot be listened on.
    pub async fn start_on<T: Into<String>, A: Into<SocketAddr>>(
        datacenters: impl IntoIterator<Item = (T, A)>,
    ) -> Result<Self, AgentError> {
        let mut cluster = Self { agents: Vec::new() };
        for (name, addr) in datacenters {
            let name = name.into();
            if cluster.agent(&name).is_some() {
                return Err(AgentError::Twice { name });
            }
            let agent = Agent::start_on(name, addr).await?;
            for other in &cluster.agents {
                agent.join(other);
            }
            cluster.agents.push(agent);
        }
        Ok(cluster)
    }

    /// The agent of a datacenter.
    pub fn agent(&self, datacenter: &str) -> Option<&Agent> {
        self.agents.iter().find(|agent| agent.datacenter() == datacenter)
    }

    /// All agents, in the order they were named.
    pub fn agents(&self) -> &[Agent] {
        &self.agents
    }

    /// Takes the agent of a datacenter out, for example to drop it: the others
    /// go on listing its datacenter, and find its port refused.
    pub fn take(&mut self, datacenter: &str) -> Option<Agent> {
        let position = self.agents.iter().position(|agent| agent.datacenter() == datacenter)?;
        Some(self.agents.remove(position))
    }

    /// All agents, each to its own fate:
    /// `let [dc1, dc2] = cluster.into_agents().try_into()...`.
    pub fn into_agents(self) -> Vec<Agent> {
        self.agents
    }
}
