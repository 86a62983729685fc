//! The embedded agent: a stand-in for one Consul server, alone in its datacenter,
//! on a real socket.
//!
//! A request's way: `server` (connections) -> `respond` (faults for all) -> `api`
//! -> `catalog` (the state, pure). Checks write to the catalog, blocked queries
//! wait for it to change.

mod api;
mod catalog;
mod checks;
mod cluster;
mod counters;
mod definition;
mod duration;
mod faults;
mod filter;
mod node;
mod respond;
mod server;
#[cfg(test)]
mod tests;
mod waiting;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use tokio::sync::{mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

use super::{port::Port, registry::Registry};
use node::Node;
use server::{Restart, Server};

pub use cluster::Cluster;
pub use counters::{Counters, NotSeen};
pub use faults::{Faults, Switch};

/// An agent in this process, alone in its datacenter. Dropping it closes its
/// socket and ends all of its tasks.
#[derive(Debug)]
pub struct Agent {
    node: Arc<Node>,
    registry: Registry,
    restarts: mpsc::Sender<Restart>,
    server: AbortOnDropHandle<()>,
    reaper: AbortOnDropHandle<()>,
}

/// Why an agent does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// Not a name that Consul would take.
    #[error("datacenter {name:?} is not a name: lower-case letters, digits, `-` and `_` make one")]
    Name {
        /// The name given.
        name: String,
    },
    /// Two agents were to have one datacenter.
    #[error("datacenter {name:?} is there twice: one agent for each")]
    Twice {
        /// The name given.
        name: String,
    },
}

// === impl Agent ===

impl Agent {
    /// Starts an agent for `datacenter` on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// Where the name is none that Consul would take, or no port is free.
    pub async fn start(datacenter: impl Into<String>) -> Result<Self, AgentError> {
        Self::start_on(datacenter, (Ipv4Addr::LOCALHOST, 0)).await
    }

    /// The same on a given address; port 0 is one that is free.
    ///
    /// # Errors
    /// Where the name is none that Consul would take, or the address cannot be
    /// listened on.
    pub async fn start_on(
        datacenter: impl Into<String>,
        addr: impl Into<SocketAddr>,
    ) -> Result<Self, AgentError> {
        let (name, addr) = (datacenter.into(), addr.into());
        let allowed = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '-' || it == '_';
        if name.is_empty() || !name.chars().all(allowed) {
            return Err(AgentError::Name { name });
        }
        let failed = |source| AgentError::Listen { addr, source };
        let port = Port::hold(addr).map_err(failed)?;
        let listener = port.listen().map_err(failed)?;
        let node = Node::new(&name, port.addr());
        let (restarts, receiver) = mpsc::channel(1);
        let server = tokio::spawn(Server::new(Arc::clone(&node), port, receiver).run(listener));
        let reaper = tokio::spawn(Arc::clone(&node).reap());
        Ok(Self {
            registry: Registry::new(format!("http://{}", node.addr)),
            node,
            restarts,
            server: AbortOnDropHandle::new(server),
            reaper: AbortOnDropHandle::new(reaper),
        })
    }

    /// Where it answers HTTP.
    pub fn http_addr(&self) -> SocketAddr {
        self.node.addr
    }

    /// The same as a URL, without a slash at its end.
    pub fn url(&self) -> String {
        self.registry.url().to_owned()
    }

    /// The same, ready to register and ask.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Its datacenter.
    pub fn datacenter(&self) -> &str {
        &self.node.datacenter
    }

    /// Joins another datacenter's agent: each can be asked through the other.
    /// Joining an agent's own datacenter, or one twice, does nothing.
    pub fn join(&self, other: &Agent) {
        if !self.node.datacenters().contains(&other.node.datacenter) {
            self.node.join(&other.node);
        }
    }

    /// Its switchboard of faults.
    pub fn faults(&self) -> Faults<'_> {
        Faults::new(&self.node)
    }

    /// What it has seen up to now.
    pub fn counters(&self) -> Counters {
        self.node.tally.read()
    }

    /// Starts counting anew. What is open or waiting now still counts.
    pub fn reset_counters(&self) {
        self.node.tally.reset();
    }

    /// Waits until the counters are as `met` wants them, for example
    /// `|it| it.blocked == 1`, and gives them. Waits 10 s at most.
    ///
    /// # Errors
    /// Where they are not within that time.
    pub async fn wait_for(&self, met: impl Fn(&Counters) -> bool) -> Result<Counters, NotSeen> {
        self.node.tally.wait_for(met).await
    }

    /// Restarts it as an agent in memory: connections break, every registration
    /// is gone, and the index is back where a fresh agent's is. Returns when that
    /// is done. Faults stay on, counters go on.
    pub async fn restart_empty(&self) {
        let (done, restarted) = oneshot::channel();
        // It fails only when the server is gone, and then all is lost anyway.
        if self.restarts.send(done).await.is_ok() {
            let _ = restarted.await;
        }
    }

    /// Ends it, and returns when its socket is closed and its tasks are gone.
    pub async fn shutdown(mut self) {
        self.node.close();
        self.server.abort();
        self.reaper.abort();
        // Both were aborted, which is what they end with.
        let _ = (&mut self.server).await;
        let _ = (&mut self.reaper).await;
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.node.close();
    }
}
