//! The agent's socket: every connection is a task of one set, which ends with
//! the task that accepts.

use std::{io, sync::Arc};

use axum::Router;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot},
    task::JoinSet,
};

use super::{super::port::Port, api, faults::Effect, node::Node, respond::respond};

/// Connections from one address; what comes above it is reset. The default of
/// `http_max_conns_per_client`:
/// <https://developer.hashicorp.com/consul/docs/agent/config/config-files#http_max_conns_per_client>
const MOST_CONNECTIONS: usize = 200;

/// Asks the server to close all connections and forget everything, and to say
/// when it has.
pub(crate) type Restart = oneshot::Sender<()>;

/// Accepts for one agent.
pub(crate) struct Server {
    node: Arc<Node>,
    port: Port,
    router: Router,
    restarts: mpsc::Receiver<Restart>,
    connections: JoinSet<()>,
    cuts: u64,
}

/// Whether connections are taken; else they are refused.
enum Door {
    Open(TcpListener),
    Shut,
}

// === impl Server ===

impl Server {
    pub(crate) fn new(node: Arc<Node>, port: Port, restarts: mpsc::Receiver<Restart>) -> Self {
        let router = api::router(Arc::clone(&node));
        Self { node, port, router, restarts, connections: JoinSet::new(), cuts: 0 }
    }

    pub(crate) async fn run(mut self, listener: TcpListener) {
        let mut door = Door::Open(listener);
        let mut faults = self.node.faults.subscribe();
        loop {
            faults.mark_unchanged();
            self.cut().await;
            let refuses = self.node.faults.is(|it| matches!(it, Effect::Refuse));
            door = match door.turned(refuses, &self.port) {
                Ok(door) => door,
                Err(error) => {
                    tracing::error!(addr = %self.node.addr, %error, "the test agent cannot listen again");
                    return;
                }
            };
            tokio::select! {
                changed = faults.changed() => if changed.is_err() { return },
                restart = self.restarts.recv() => match restart {
                    Some(done) => self.restart(done).await,
                    None => return,
                },
                Some(_) = self.connections.join_next() => {}
                stream = door.accept() => self.serve(stream),
            }
        }
    }

    async fn cut(&mut self) {
        let cuts = self.node.faults.cuts();
        if cuts != self.cuts {
            self.cuts = cuts;
            self.end_all().await;
        }
    }

    async fn end_all(&mut self) {
        self.connections.shutdown().await;
        self.node.abandoned.forget();
    }

    async fn restart(&mut self, done: Restart) {
        self.end_all().await;
        self.node.forget();
        // Whoever asked may have gone away.
        let _ = done.send(());
    }

    fn serve(&mut self, stream: TcpStream) {
        if self.node.faults.is(|it| matches!(it, Effect::DropConnections)) {
            return;
        }
        let limit = self.node.faults.find(|rule| match rule.effect {
            Effect::Connections(most) => Some(most),
            _ => None,
        });
        let taken = self.connections.len() + self.node.abandoned.connections();
        if taken >= limit.unwrap_or(MOST_CONNECTIONS) {
            // Failing that it is closed, which the peer can hardly tell apart.
            let _ = stream.set_zero_linger();
            return;
        }
        let _ = stream.set_nodelay(true);
        let counted = self.node.tally.connection();
        let (node, router) = (Arc::clone(&self.node), self.router.clone());
        self.connections.spawn(async move {
            let _counted = counted;
            let service = service_fn(move |request: http::Request<Incoming>| {
                let (node, router) = (Arc::clone(&node), router.clone());
                async move { respond(&node, router, request).await }
            });
            // A client that goes away in the middle is no news.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

// === impl Door ===

impl Door {
    fn turned(self, shut: bool, port: &Port) -> io::Result<Self> {
        match self {
            Self::Open(_) if shut => Ok(Self::Shut),
            Self::Shut if !shut => port.listen().map(Self::Open),
            same => Ok(same),
        }
    }

    /// The next connection; never where nobody listens.
    async fn accept(&self) -> TcpStream {
        let Self::Open(listener) = self else { return std::future::pending().await };
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return stream,
                // Out of file descriptors, or the peer is gone already: others may come.
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }
}
