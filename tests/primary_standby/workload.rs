//! Callers that go on through every fault, and write down what they were told.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tonic_failover::{
    client::{CallError, FailoverChannel},
    demo::pb::counter_client::CounterClient,
};

use crate::{
    common::SOON,
    history::{Kind, Op},
    world::{Ask, ask},
};

/// Of one attempt. A takeover takes longer now and then, and the next attempt goes on waiting.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(5);
/// How long one request may take, all attempts together, before the test has failed.
const REQUEST: Duration = Duration::from_secs(60);

pub(crate) struct Workload {
    stop: watch::Sender<bool>,
    acknowledged: Arc<AtomicU64>,
    callers: JoinSet<Vec<Op>>,
}

struct Caller {
    name: usize,
    kind: Kind,
    channel: FailoverChannel,
    start: Instant,
    stop: watch::Receiver<bool>,
    acknowledged: Arc<AtomicU64>,
}

// === impl Workload ===

impl Workload {
    /// Starts a caller for each of `kinds`, each calling without pause.
    pub(crate) fn start(channel: &FailoverChannel, kinds: &[Kind]) -> Self {
        let (stop, _) = watch::channel(false);
        let acknowledged = Arc::new(AtomicU64::new(0));
        let start = Instant::now();
        let mut callers = JoinSet::new();
        for (name, kind) in kinds.iter().enumerate() {
            let (channel, stop) = (channel.clone(), stop.subscribe());
            let caller =
                Caller { name, kind: *kind, channel, start, stop, acknowledged: acknowledged.clone() };
            callers.spawn(caller.run());
        }
        Self { stop, acknowledged, callers }
    }

    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits for so many more to have been acknowledged.
    pub(crate) async fn go_on_for(&self, more: u64) {
        self.go_on_for_within(more, SOON).await;
    }

    pub(crate) async fn go_on_for_within(&self, more: u64, bound: Duration) {
        timeout(bound, self.acknowledges(more)).await.expect("requests are acknowledged again");
    }

    /// Whether so many more are acknowledged soon.
    pub(crate) async fn goes_on(&self, more: u64) -> bool {
        timeout(SOON, self.acknowledges(more)).await.is_ok()
    }

    async fn acknowledges(&self, more: u64) {
        let goal = self.acknowledged() + more;
        while self.acknowledged() < goal {
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Stops calling, when every request under way has its end.
    pub(crate) async fn stop(self) -> Vec<Op> {
        self.stop.send_replace(true);
        self.callers.join_all().await.into_iter().flatten().collect()
    }
}

// === impl Caller ===

impl Caller {
    async fn run(self) -> Vec<Op> {
        let mut ops = Vec::new();
        while !*self.stop.borrow() {
            let op = timeout(REQUEST, self.request(ops.len())).await.expect("a request has its end");
            ops.extend(op);
        }
        ops
    }

    async fn request(&self, number: usize) -> Option<Op> {
        let began = self.start.elapsed();
        let (kind, key) = (self.kind, format!("{}-{number}", self.name));
        let what = match kind {
            Kind::Add => Ask::Add(key),
            Kind::Increment => Ask::Increment,
        };
        loop {
            let answer = ask(CounterClient::new(self.channel.clone()), &what, ATTEMPT).await;
            let ended = self.start.elapsed();
            match answer {
                Ok(ack) => {
                    self.acknowledged.fetch_add(1, Ordering::Relaxed);
                    return Some(Op { kind, began, ended, ack: Some(ack) });
                }
                Err(status) if kind == Kind::Increment => {
                    // What never ran is no part of the history.
                    let ran = CallError::of(&status).is_none_or(CallError::may_have_run);
                    sleep(AGAIN).await;
                    return ran.then_some(Op { kind, began, ended, ack: None });
                }
                Err(_) => sleep(AGAIN).await,
            }
        }
    }
}
