//! The checks that run: one task each.

mod probe;

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use tower::util::rng::{HasherRng, Rng};

use super::{
    catalog::{Catalog, Health},
    definition::{CheckDefinition, CheckKind, Probe},
    node::Node,
};

/// The tasks, by check id.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    tasks: Mutex<Tasks>,
}

#[derive(Debug, Default)]
struct Tasks {
    running: HashMap<String, (u64, AbortOnDropHandle<()>)>,
    started: u64,
    closed: bool,
}

/// What a check's task speaks with.
struct Voice {
    node: Arc<Node>,
    check: String,
    number: u64,
}

/// Lets a status count only after it was seen often enough.
struct Threshold {
    needed: (u64, u64),
    seen: (u64, u64),
}

// === impl Checks ===

impl Checks {
    /// Starts a check that was registered, or starts it anew.
    pub(crate) fn start(&self, node: &Arc<Node>, check: &CheckDefinition) {
        self.run(node, &check.id, &check.kind, (check.successes, check.failures));
    }

    pub(crate) fn run(&self, node: &Arc<Node>, id: &str, kind: &CheckKind, needed: (u64, u64)) {
        let mut tasks = self.tasks.lock();
        if tasks.closed {
            return;
        }
        tasks.started += 1;
        let voice = Voice { node: Arc::clone(node), check: id.to_owned(), number: tasks.started };
        let task = match kind.clone() {
            CheckKind::Ttl(ttl) => tokio::spawn(voice.expire(ttl)),
            CheckKind::Tcp(probe) => tokio::spawn(voice.repeat(probe, false, Threshold::new(needed))),
            CheckKind::Grpc(probe) => tokio::spawn(voice.repeat(probe, true, Threshold::new(needed))),
        };
        let number = tasks.started;
        tasks.running.insert(id.to_owned(), (number, AbortOnDropHandle::new(task)));
    }

    pub(crate) fn stop(&self, id: &str) {
        self.tasks.lock().running.remove(id);
    }

    pub(crate) fn stop_all(&self) {
        self.tasks.lock().running.clear();
    }

    /// Ends all checks and starts no more.
    pub(crate) fn close(&self) {
        let mut tasks = self.tasks.lock();
        tasks.closed = true;
        tasks.running.clear();
    }
}

// === impl Voice ===

impl Voice {
    async fn expire(self, ttl: Duration) {
        sleep(ttl).await;
        self.say(|catalog, check| catalog.expire(check, Instant::now()));
    }

    async fn repeat(self, probe: Probe, grpc: bool, mut threshold: Threshold) {
        // A real agent spreads its checks like this.
        sleep(probe.interval.mul_f64(HasherRng::new().next_f64())).await;
        loop {
            let result = if grpc { probe::grpc(&probe).await } else { probe::tcp(&probe).await };
            let (status, output) = match result {
                Ok(output) => (Health::Passing, output),
                Err(output) => (Health::Critical, output),
            };
            if threshold.counts(status) {
                self.say(|catalog, check| catalog.set(check, status, &output, Instant::now()));
            }
            sleep(probe.interval).await;
        }
    }

    /// Changes the catalog, unless a later task has taken over: the abortion of
    /// this one may come a moment late.
    fn say(&self, change: impl FnOnce(&mut Catalog, &str)) {
        let tasks = self.node.checks.tasks.lock();
        if tasks.running.get(&self.check).is_some_and(|it| it.0 == self.number) {
            change(&mut self.node.catalog.lock(), &self.check);
            drop(tasks);
            self.node.changed();
        }
    }
}

// === impl Threshold ===

impl Threshold {
    /// The first result always counts.
    fn new(needed: (u64, u64)) -> Self {
        Self { needed, seen: needed }
    }

    fn counts(&mut self, status: Health) -> bool {
        if status == Health::Critical {
            self.seen = (0, self.seen.1 + 1);
            self.seen.1 >= self.needed.1
        } else {
            self.seen = (self.seen.0 + 1, 0);
            self.seen.0 >= self.needed.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_result_counts_and_later_ones_when_seen_often_enough() {
        let mut threshold = Threshold::new((2, 3));
        let seen = "pccpcccpp".chars().map(|it| if it == 'p' { Health::Passing } else { Health::Critical });
        let counted: Vec<_> = seen.map(|status| threshold.counts(status)).collect();
        assert_eq!(counted, [true, false, false, false, false, false, true, false, true]);
    }
}
