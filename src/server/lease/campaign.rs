//! The task that campaigns: it asks the store what the election says, and tells what comes of it.
//!
//! It waits for everything at once and for nothing alone, so that a renewal is sent when it is due,
//! whatever else is under way or hangs. It runs on the lease's own thread.

use std::{future::Future, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::task::TaskTracker;
use tower::util::rng::Rng;

use super::{
    HandOverError,
    election::{Answer, Election, Step},
    episode::Episode,
    published::Published,
    timing::Timing,
};
use crate::{
    role::FencingToken,
    server::{
        probe::Probe,
        store::{Claim, LeaseRecord, LeaseStore, StoreError},
    },
};

/// A store is let wait for a change so long, and asked again. Consul's own default is 5 min
/// (`wait` of blocking queries); shorter, so that what a proxy silently drops is missed soon.
const WAIT: Duration = Duration::from_secs(10);
/// The end waits so long for a release: a process must be able to stop without its store.
const FAREWELL: Duration = Duration::from_secs(1);

/// What a handle asks for.
pub(super) enum Command {
    GiveUp { successor: Option<String>, drain: Duration, reply: Reply },
    Shutdown,
}

/// How many calls were still in flight when it was released.
pub(super) type Reply = oneshot::Sender<Result<usize, HandOverError>>;

pub(super) struct Campaign<R> {
    pub(super) timing: Timing,
    pub(super) election: Election<R>,
    pub(super) store: Arc<dyn LeaseStore>,
    pub(super) claim: Claim,
    pub(super) published: Arc<Published>,
    /// Always closed: then it can be waited for at any time.
    pub(super) calls: TaskTracker,
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
    /// Whether this instance serves, where that is looked after, and what looks after it.
    pub(super) alive: Option<(watch::Receiver<bool>, Option<Probe>)>,
    pub(super) under_way: UnderWay,
}

/// What has been asked for and not been answered.
#[derive(Default)]
pub(super) struct UnderWay {
    steps: JoinSet<Done>,
    /// The store waits for a change.
    waiting: bool,
    /// Not before does it again.
    wait_again: Option<Instant>,
    replies: Vec<GivingUp>,
    episode: Episode,
    /// The term whose primary was said to have another length.
    told_of: Option<FencingToken>,
}

/// Who waits for the lease to be given up.
struct GivingUp {
    reply: Reply,
    /// So long at the most is it waited for.
    until: Instant,
    calls_left: Option<usize>,
    /// Why it takes so long.
    last: Option<StoreError>,
}

enum Done {
    Answered { sent: Instant, answer: Answer },
    Waited(Result<LeaseRecord, StoreError>),
}

/// A store did not bound its own time.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {0:?}")]
struct Overdue(Duration);

#[derive(Debug, thiserror::Error)]
#[error("the store panicked")]
struct Panicked;

impl<R: Rng> Campaign<R> {
    /// Campaigns until the last handle is gone or says that it is over, then releases what is held.
    pub(super) async fn run(mut self) {
        let mut end: Option<Instant> = None;
        loop {
            self.hear_life(end.is_some());
            let now = Instant::now();
            while let Some(step) = self.election.next(now) {
                self.send(step, now);
            }
            self.wait_for_change(now);
            self.published.publish(&self.election, now);
            self.reply(now);
            if end.is_some_and(|end| now >= end || !self.election.may_hold()) {
                break;
            }
            let draining = self.election.is_draining(now);
            let wake = [self.election.wake(now), end, self.replies_due(), self.under_way.waits_again()];
            let wake = wake.into_iter().flatten().min();
            let Self { commands, alive, under_way, calls, .. } = &mut self;
            tokio::select! {
                command = commands.recv(), if end.is_none() => match command {
                    Some(Command::GiveUp { successor, drain, reply }) => self.give_up(successor, drain, reply),
                    Some(Command::Shutdown) | None => end = Some(Instant::now() + FAREWELL),
                },
                Some(done) = under_way.steps.join_next() => self.done(done.ok()),
                () = changed(alive) => {}
                () = calls.wait(), if draining => self.election.drained(Instant::now()),
                () = until(wake) => {}
            }
        }
        self.published.end();
    }

    /// Who is to end serves nothing any more.
    fn hear_life(&mut self, ends: bool) {
        let alive = match &mut self.alive {
            // What looked after it is gone: it is not known to serve.
            Some((alive, _)) => *alive.borrow_and_update() && alive.has_changed().is_ok(),
            None => true,
        };
        self.election.live(alive && !ends, Instant::now());
    }

    fn give_up(&mut self, successor: Option<String>, drain: Duration, reply: Reply) {
        let now = Instant::now();
        if !self.election.give_up(successor, now + drain, now) {
            let _ = reply.send(Err(HandOverError::NotHeld));
            return;
        }
        // Whoever waits is told by then: without a release the lease is over.
        let until = now + drain + self.timing.length;
        self.under_way.replies.push(GivingUp { reply, until, calls_left: None, last: None });
    }

    fn replies_due(&self) -> Option<Instant> {
        self.under_way.replies.iter().map(|it| it.until).min()
    }

    fn reply(&mut self, now: Instant) {
        let (giving_up, draining) = (self.election.is_giving_up(now), self.election.is_draining(now));
        for mut waiter in std::mem::take(&mut self.under_way.replies) {
            if !draining {
                waiter.calls_left.get_or_insert_with(|| self.calls.len());
            }
            if giving_up && now < waiter.until {
                self.under_way.replies.push(waiter);
                continue;
            }
            let _ = waiter.reply.send(match waiter.last {
                Some(source) if giving_up => Err(HandOverError::Store { source }),
                _ if giving_up => Err(HandOverError::Store { source: overdue(self.timing.length) }),
                _ => Ok(waiter.calls_left.unwrap_or_default()),
            });
        }
    }

    fn send(&mut self, step: Step, sent: Instant) {
        let (store, claim, within) = (self.store.clone(), self.claim.clone(), self.timing.length);
        self.under_way.steps.spawn(async move {
            let answer = match step {
                Step::Read => Answer::Read(bounded(within, store.read()).await),
                Step::Acquire(seen) => Answer::Acquire(bounded(within, store.acquire(&seen, &claim)).await),
                Step::Renew(term) => Answer::Renew(term.token, bounded(within, store.renew(&term)).await),
                Step::Release(term, successor) => {
                    let released = bounded(within, store.release(&term, successor.as_deref())).await;
                    Answer::Release(term.token, released)
                }
            };
            Done::Answered { sent, answer }
        });
    }

    fn wait_for_change(&mut self, now: Instant) {
        let UnderWay { steps, waiting, wait_again, .. } = &mut self.under_way;
        if *waiting || wait_again.is_some_and(|again| now < again) {
            return;
        }
        *wait_again = None;
        let Some(seen) = self.election.watched().cloned() else { return };
        *waiting = true;
        let store = self.store.clone();
        let within = WAIT + self.timing.length;
        steps.spawn(async move { Done::Waited(bounded(within, store.changed(&seen, WAIT)).await) });
    }

    fn done(&mut self, done: Option<Done>) {
        let now = Instant::now();
        match done {
            Some(Done::Answered { sent, answer }) => {
                let failed = answer.failure().cloned();
                self.under_way.episode.step(&self.claim.instance, failed.as_ref(), self.timing.length, now);
                if let (Answer::Release(..), Some(error)) = (&answer, failed) {
                    for waiter in &mut self.under_way.replies {
                        waiter.last = Some(error.clone());
                    }
                }
                self.election.answered(sent, now, answer);
                self.tell_of_another_length();
            }
            Some(Done::Waited(change)) => {
                self.under_way.waiting = false;
                // One that ends at once, always, must make no hot loop.
                let pause = if change.is_ok() { self.timing.least() } else { self.timing.renewal };
                self.under_way.wait_again = Some(now + pause);
                if change.is_ok() {
                    self.election.woken(now);
                }
            }
            // It was aborted, which only this task does, when it ends.
            None => {}
        }
    }
}

impl<R: Rng> Campaign<R> {
    /// It is heeded, but hardly meant.
    fn tell_of_another_length(&mut self) {
        let Some(holder) = self.election.watched().and_then(|record| record.holder.as_ref()) else { return };
        let own = self.claim.holder(holder.primary.token).length;
        let (Some(its), Some(own)) = (holder.length, own) else { return };
        let token = holder.primary.token;
        if its != own && self.under_way.told_of.replace(token) != Some(token) {
            let (instance, primary) = (&self.claim.instance, &holder.primary.instance);
            tracing::warn!(%instance, %primary, ?its, ?own, "the primary's lease has another length than this instance's; it is waited for by its own: give all instances of a lease the same");
        }
    }
}

impl UnderWay {
    /// When the store is to wait for a change again.
    fn waits_again(&self) -> Option<Instant> {
        self.wait_again.filter(|_| !self.waiting)
    }
}

/// Ends when it may be otherwise.
async fn changed(alive: &mut Option<(watch::Receiver<bool>, Option<Probe>)>) {
    match alive {
        Some((alive, _)) if alive.has_changed().is_ok() => {
            let _ = alive.changed().await;
        }
        _ => std::future::pending().await,
    }
}

async fn until(wake: Option<Instant>) {
    match wake {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// A store's step, which neither hangs nor panics.
async fn bounded<T>(
    within: Duration,
    step: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match timeout(within, AssertUnwindSafe(step).catch_unwind()).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(StoreError::Unanswered { source: Arc::new(Panicked) }),
        Err(_) => Err(overdue(within)),
    }
}

fn overdue(within: Duration) -> StoreError {
    StoreError::Unanswered { source: Arc::new(Overdue(within)) }
}
