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
    /// `None` is an agent in memory.
    pub(super) data_dir: Option<PathBuf>,
    pub(super) joined: Option<Peer>,
    pub(super) hcl: Vec<String>,
    pub(super) ports: Option<Ports>,
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
        Self { bin, datacenter, data_dir: None, joined: None, hcl: Vec::new(), ports: None }
    }

    /// The agent's datacenter. Consul takes lower-case letters, digits, `-` and
    /// `_`. Default: `dc1`.
    pub fn datacenter(mut self, name: impl Into<String>) -> Self {
        self.datacenter = name.into();
        self
    }

    /// A server in memory (`-dev`): ready in a fifth of a second, empty after a
    /// restart. The default.
    pub fn dev(mut self) -> Self {
        self.data_dir = None;
        self
    }

    /// A server that keeps its state in `data_dir`, alone in its datacenter, with
    /// `raft_multiplier = 1`: ready in 1.7 s instead of 8. Default: in memory.
    pub fn server(mut self, data_dir: impl AsRef<Path>) -> Self {
        self.data_dir = Some(data_dir.as_ref().to_owned());
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

    /// Runs the agent and waits until it has a leader and, where it joins
    /// another datacenter, until each of the two can ask the other. Waits 30 s
    /// at most.
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
}

/// Without the further configuration, which may hold tokens.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("bin", &self.bin)
            .field("datacenter", &self.datacenter)
            .field("data_dir", &self.data_dir)
            .field("joined", &self.joined)
            .field("ports", &self.ports)
            .finish_non_exhaustive()
    }
}
