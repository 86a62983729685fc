//! What an agent has seen, for tests to assert on.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::timeout};

/// How long [`wait_for`](super::Agent::wait_for) waits. Our choice.
const PATIENCE: Duration = Duration::from_secs(10);

/// A snapshot of what an agent has seen since it started or since
/// [`reset_counters`](super::Agent::reset_counters).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Requests by path, without their queries.
    pub requests: BTreeMap<String, u64>,
    /// Blocking queries that are waiting now.
    pub blocked: usize,
    /// The most that waited at once.
    pub most_blocked: usize,
    /// Connections open now.
    pub connections: usize,
    /// The most that were open at once.
    pub most_connections: usize,
    /// Connections taken in all.
    pub connects: u64,
}

/// What was waited for did not happen.
#[derive(Debug, thiserror::Error)]
#[error("not seen within {waited:?}; seen: {seen:?}")]
#[non_exhaustive]
pub struct NotSeen {
    /// How long it was waited for.
    pub waited: Duration,
    /// The counters at the end.
    pub seen: Counters,
}

#[derive(Debug)]
pub(crate) struct Tally {
    counters: Mutex<Counters>,
    moved: watch::Sender<()>,
}

/// Counts one while it lives.
#[derive(Debug)]
pub(crate) struct Counted {
    tally: Arc<Tally>,
    which: fn(&mut Counters) -> &mut usize,
}

// === impl Counters ===

impl Counters {
    /// How many requests were seen for `path` or anything under it, for example
    /// `/v1/health/service/counter`, or `/v1/health` for all of them.
    pub fn requests_to(&self, path: &str) -> u64 {
        let path = path.trim_end_matches('/');
        let under =
            |seen: &str| seen.strip_prefix(path).is_some_and(|it| it.is_empty() || it.starts_with('/'));
        self.requests.iter().filter(|(seen, _)| under(seen)).map(|(_, count)| count).sum()
    }
}

// === impl Tally ===

impl Tally {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { counters: Mutex::default(), moved: watch::Sender::default() })
    }

    pub(crate) fn read(&self) -> Counters {
        self.counters.lock().clone()
    }

    /// Starts anew; what is open or waiting now still is.
    pub(crate) fn reset(&self) {
        let mut counters = self.counters.lock();
        let Counters { blocked, connections, .. } = *counters;
        *counters = Counters {
            blocked,
            connections,
            most_blocked: blocked,
            most_connections: connections,
            ..Counters::default()
        };
    }

    pub(crate) fn request(&self, path: &str) {
        *self.counters.lock().requests.entry(path.to_owned()).or_default() += 1;
        self.moved.send_replace(());
    }

    pub(crate) fn connection(self: &Arc<Self>) -> Counted {
        self.counters.lock().connects += 1;
        self.count(|it| &mut it.connections, |it| &mut it.most_connections)
    }

    pub(crate) fn blocked(self: &Arc<Self>) -> Counted {
        self.count(|it| &mut it.blocked, |it| &mut it.most_blocked)
    }

    pub(crate) async fn wait_for(&self, met: impl Fn(&Counters) -> bool) -> Result<Counters, NotSeen> {
        let mut moved = self.moved.subscribe();
        let seen = async {
            loop {
                moved.mark_unchanged();
                let counters = self.read();
                // The sender lives in `self`, so the channel cannot close.
                if met(&counters) || moved.changed().await.is_err() {
                    return counters;
                }
            }
        };
        timeout(PATIENCE, seen).await.map_err(|_| NotSeen { waited: PATIENCE, seen: self.read() })
    }

    fn count(
        self: &Arc<Self>,
        which: fn(&mut Counters) -> &mut usize,
        most: fn(&mut Counters) -> &mut usize,
    ) -> Counted {
        let mut counters = self.counters.lock();
        *which(&mut counters) += 1;
        let now = *which(&mut counters);
        let most = most(&mut counters);
        *most = now.max(*most);
        drop(counters);
        self.moved.send_replace(());
        Counted { tally: Arc::clone(self), which }
    }
}

// === impl Counted ===

impl Drop for Counted {
    fn drop(&mut self) {
        *(self.which)(&mut self.tally.counters.lock()) -= 1;
        self.tally.moved.send_replace(());
    }
}
