//! Queries that wait for news, and those whose client has gone meanwhile: Consul goes on with
//! such a query until its wait is over or there is news, and counts its connection as long.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use super::{counters::Counted, node::Node};

/// A query that waits. Where it is dropped before it is over, its client has gone.
pub(crate) struct Waiting {
    node: Arc<Node>,
    left: Option<Left>,
    _counted: Counted,
}

/// What a client has left behind.
#[derive(Debug)]
struct Left {
    until: Instant,
    news: watch::Receiver<()>,
}

/// All that clients have left behind at one agent.
#[derive(Debug, Default)]
pub(crate) struct Abandoned(Mutex<Vec<Left>>);

// === impl Waiting ===

impl Waiting {
    pub(crate) fn new(node: &Arc<Node>, news: &watch::Receiver<()>, until: Instant) -> Self {
        let left = Some(Left { until, news: news.clone() });
        Self { node: Arc::clone(node), left, _counted: node.tally.blocked() }
    }

    pub(crate) fn end(mut self) {
        self.left = None;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(left) = self.left.take() {
            self.node.abandoned.0.lock().push(left);
        }
    }
}

// === impl Abandoned ===

impl Abandoned {
    /// How many connections count although they are closed.
    pub(crate) fn connections(&self) -> usize {
        let (mut all, now) = (self.0.lock(), Instant::now());
        all.retain(|it| now < it.until && it.news.has_changed().is_ok_and(|news| !news));
        all.len()
    }

    /// The agent has cut all connections by itself.
    pub(crate) fn forget(&self) {
        self.0.lock().clear();
    }
}
