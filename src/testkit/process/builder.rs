//! What an agent is to be.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use super::{ConsulProcess, Ports, StartError};

/// Sets up a [`ConsulProcess`].
#[derive(Clone)]
#[must_use]
pub struct Builder {
    pub(super) bin: PathBuf,
    pub(super) datacenter: String,
    pub(super) node: Option<String>,
    pub(super) role: Role,
    pub(super) joined: Option<Peer>,
    /// Where others of the same datacenter listen for gossip.
    pub(super) retry_join: Vec<u16>,
    pub(super) hcl: Vec<String>,
    pub(super) ports: Option<Ports>,
}

/// What part the agent has in its datacenter.
#[derive(Clone, Debug)]
pub(super) enum Role {
    /// A server in memory.
    Memory,
    /// One of `expect` servers.
    Server { data_dir: PathBuf, expect: usize },
    /// An agent that asks servers.
    Client { data_dir: PathBuf },
}

/// The datacenter to join.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) datacenter: String,
    pub(super) serf_wan: u16,
    pub(super) url: String,
}

// === impl Builder ===

impl Builder {
    pub(super) fn new(bin: PathBuf) -> Self {
        let datacenter = "dc1".to_owned();
        Self {
            bin,
            datacenter,
            node: None,
            role: Role::Memory,
            joined: None,
            retry_join: Vec::new(),
            hcl: Vec::new(),
            ports: None,
        }
    }

    /// The agent's datacenter. Consul takes lower-case letters, digits, `-` and
    /// `_`. Default: `dc1`.
    pub fn datacenter(mut self, name: impl Into<String>) -> Self {
        self.datacenter = name.into();
        self
    }

    /// The agent's name in its datacenter. Default: the datacenter's with `-s1` behind it.
    pub fn node(mut self, name: impl Into<String>) -> Self {
        self.node = Some(name.into());
        self
    }

    /// A server in memory (`-dev`): ready in a fifth of a second, empty after a
    /// restart. The default.
    pub fn dev(mut self) -> Self {
        self.role = Role::Memory;
        self
    }

    /// A server that keeps its state in `data_dir`, alone in its datacenter, with
    /// `raft_multiplier = 1`: ready in 1.7 s instead of 8. Default: in memory.
    pub fn server(self, data_dir: impl AsRef<Path>) -> Self {
        self.server_of(1, data_dir)
    }

    /// One of `servers` servers of a datacenter, which have a leader only once as
    /// many have [joined](Self::retry_join): start them at the same time, or
    /// have a [`ConsulCluster`](super::ConsulCluster) do it. Otherwise as
    /// [`server`](Self::server).
    pub fn server_of(mut self, servers: usize, data_dir: impl AsRef<Path>) -> Self {
        self.role = Role::Server { data_dir: data_dir.as_ref().to_owned(), expect: servers };
        self
    }

    /// A client agent, which keeps its own services and asks the servers of the
    /// datacenter it [joins](Self::retry_join) for everything else.
    pub fn client(mut self, data_dir: impl AsRef<Path>) -> Self {
        self.role = Role::Client { data_dir: data_dir.as_ref().to_owned() };
        self
    }

    /// Joins the agents of the same datacenter that listen for gossip on these
    /// ports ([`Ports::serf_lan`]), whenever they are there. Default: none.
    pub fn retry_join(mut self, serf_lan: impl IntoIterator<Item = u16>) -> Self {
        self.retry_join.extend(serf_lan);
        self
    }

    /// Joins the datacenter of `other`, which must be running: [`start`](Self::start)
    /// waits until each can ask the other. Default: alone.
    pub fn join_wan(mut self, other: &ConsulProcess) -> Self {
        let datacenter = other.datacenter().to_owned();
        self.joined = Some(Peer { datacenter, serf_wan: other.ports().serf_wan, url: other.url() });
        self
    }

    /// Further configuration in Consul's own language, for example
    /// `acl { enabled = true }`. May be called several times. Default: none.
    pub fn hcl(mut self, text: impl Into<String>) -> Self {
        self.hcl.push(text.into());
        self
    }

    /// The ports to use. Default: free ones, chosen anew where another process
    /// was faster.
    pub fn ports(mut self, ports: Ports) -> Self {
        self.ports = Some(ports);
        self
    }

    /// Runs the agent and waits until it has a leader, is in the catalog and, where it joins
    /// another datacenter, until each of the two can ask the other. Waits 60 s
    /// at most: one that fails to enter itself into the catalog tries again only after 15 to 30 s.
    ///
    /// # Errors
    /// Where the program cannot be run, ends early or does not become ready; the
    /// error carries the end of its log.
    ///
    /// # Cancel safety
    /// Dropping the future kills the process.
    pub async fn start(self) -> Result<ConsulProcess, StartError> {
        ConsulProcess::start(self).await
    }

    pub(super) fn node_name(&self) -> String {
        self.node.clone().unwrap_or_else(|| format!("{}-s1", self.datacenter))
    }

    /// Where it keeps its state, if on disk.
    pub(super) fn data_dir(&self) -> Option<&Path> {
        match &self.role {
            Role::Memory => None,
            Role::Server { data_dir, .. } | Role::Client { data_dir } => Some(data_dir),
        }
    }
}

/// Without the further configuration, which may hold tokens.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("bin", &self.bin)
            .field("datacenter", &self.datacenter)
            .field("node", &self.node_name())
            .field("role", &self.role)
            .field("joined", &self.joined)
            .field("ports", &self.ports)
            .finish_non_exhaustive()
    }
}
