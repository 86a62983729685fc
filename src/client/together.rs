//! All tasks of one connection, run as one.
//!
//! tonic and hyper spawn a task for each connection, one for the queue before it, and one for each call's
//! response. As tasks of the runtime's own, each is made, scheduled and ended by itself, and on a
//! runtime of several threads one thread wakes another for it. Here they wake each other within one task:
//! a call takes two wake-ups of the runtime less, and answers that come together are handed over together
//! (`cargo bench --bench call_path -- --only cost`: "the published channel by itself").

use std::{
    future::Future,
    mem,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use futures_util::{Stream, stream::FuturesUnordered};
use hyper::rt::Executor;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::connector::BoxFuture;

/// After so many have ended the runtime's other tasks have their turn. Our choice: more than calls
/// come together mostly, and done in some ten microseconds.
const ENDED_AT_ONCE: usize = 256;

/// The connection's own task, and the queue's before it: what there is beyond them are calls.
const OWN: usize = 2;

/// Runs what it is given in one task of the runtime, which ends when all of that has ended.
#[derive(Clone, Default)]
pub(crate) struct Together(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// How many there were when the task ran last.
    running: AtomicUsize,
}

#[derive(Default)]
struct State {
    /// What has come since the task looked last.
    new: Vec<BoxFuture<()>>,
    phase: Phase,
    waker: Option<Waker>,
}

/// What the task is doing.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// There is none.
    #[default]
    Ended,
    /// It looks at what is new before it waits.
    Runs,
    Waits,
}

/// The task.
struct Run {
    of: Together,
    tasks: FuturesUnordered<BoxFuture<()>>,
    /// Room for what is new, kept from one look to the next.
    new: Vec<BoxFuture<()>>,
    /// It has found nothing left to do; another may be running by now.
    over: bool,
}

// === impl Together ===

impl Executor<BoxFuture<()>> for Together {
    fn execute(&self, task: BoxFuture<()>) {
        let mut state = self.0.state.lock();
        state.new.push(task);
        let waker = match mem::replace(&mut state.phase, Phase::Runs) {
            Phase::Runs => return,
            Phase::Waits => state.waker.clone(),
            Phase::Ended => None,
        };
        drop(state);
        match waker {
            Some(waker) => waker.wake(),
            None => self.start(),
        }
    }
}

impl Together {
    /// How many calls are under way, about.
    pub(crate) fn calls(&self) -> usize {
        self.0.running.load(Ordering::Relaxed).saturating_sub(OWN)
    }

    fn start(&self) {
        let run = Run::of(self);
        // Without a runtime nothing can run: dropped, as tasks are that come when it has ended.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(run);
        }
    }
}

// === impl Run ===

impl Run {
    fn of(together: &Together) -> Self {
        Self { of: together.clone(), tasks: FuturesUnordered::new(), new: Vec::new(), over: false }
    }

    /// Takes what is new; false where nothing is, and then `phase` is what comes next.
    fn take(&mut self, phase: Phase, cx: &Context<'_>) -> bool {
        let mut state = self.of.0.state.lock();
        let any = !state.new.is_empty();
        if any {
            mem::swap(&mut state.new, &mut self.new);
        } else {
            state.phase = phase;
            if phase == Phase::Waits && !state.waker.as_ref().is_some_and(|it| it.will_wake(cx.waker())) {
                state.waker = Some(cx.waker().clone());
            }
        }
        drop(state);
        self.tasks.extend(self.new.drain(..));
        any
    }
}

impl Future for Run {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        this.take(Phase::Runs, cx);
        this.of.0.running.store(this.tasks.len(), Ordering::Relaxed);
        let mut ended = 0;
        loop {
            match Pin::new(&mut this.tasks).poll_next(cx) {
                Poll::Ready(Some(())) if ended == ENDED_AT_ONCE => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(Some(())) => ended += 1,
                Poll::Ready(None) if !this.take(Phase::Ended, cx) => {
                    this.over = true;
                    return Poll::Ready(());
                }
                Poll::Pending if !this.take(Phase::Waits, cx) => return Poll::Pending,
                Poll::Ready(None) | Poll::Pending => {}
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        // With its runtime, perhaps before all has ended. What it has not taken goes too.
        let mut state = self.of.0.state.lock();
        state.phase = Phase::Ended;
        let left = mem::take(&mut state.new);
        drop(state);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::{
        sync::{mpsc, oneshot},
        task::yield_now,
    };

    use super::*;

    fn alive() -> usize {
        Handle::current().metrics().num_alive_tasks()
    }

    async fn until_ended() {
        while alive() > 0 {
            yield_now().await;
        }
    }

    #[tokio::test]
    async fn all_run_in_one_task_which_ends_with_the_last_and_begins_again() {
        let together = Together::default();
        for _ in 0..3 {
            let (said, mut hears) = mpsc::unbounded_channel();
            let (go, gone) = oneshot::channel::<()>();
            let (inner, again) = (together.clone(), said.clone());
            // One that waits, and one that has another run while it runs itself.
            together.execute(Box::pin(async move {
                let _ = gone.await;
                said.send("first").unwrap();
            }));
            together.execute(Box::pin(async move {
                let more = again.clone();
                inner.execute(Box::pin(async move { more.send("third").unwrap() }));
                again.send("second").unwrap();
            }));
            assert_eq!(hears.recv().await, Some("second"));
            assert_eq!(hears.recv().await, Some("third"));
            assert_eq!(alive(), 1);
            // From without, while it waits.
            let (late, came) = oneshot::channel();
            together.execute(Box::pin(async move { late.send(()).unwrap() }));
            came.await.unwrap();
            assert_eq!(alive(), 1);
            go.send(()).unwrap();
            assert_eq!(hears.recv().await, Some("first"));
            until_ended().await;
        }
    }

    #[tokio::test]
    async fn however_many_end_together_others_have_their_turn() {
        let (together, ended) = (Together::default(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..10 * ENDED_AT_ONCE {
            let ended = ended.clone();
            together.execute(Box::pin(async move {
                ended.fetch_add(1, Ordering::Relaxed);
            }));
        }
        let at_its_turn = ended.clone();
        let other = tokio::spawn(async move { at_its_turn.load(Ordering::Relaxed) });
        let so_far = other.await.unwrap();
        assert!((1..=ENDED_AT_ONCE + 1).contains(&so_far), "{so_far}");
        until_ended().await;
        assert_eq!(ended.load(Ordering::Relaxed), 10 * ENDED_AT_ONCE);
    }

    #[tokio::test]
    async fn one_that_comes_just_when_all_have_ended_is_not_lost() {
        let together = Together::default();
        let mut first = Run::of(&together);
        assert!(Pin::new(&mut first).poll(&mut Context::from_waker(Waker::noop())).is_ready());
        let (late, came) = oneshot::channel();
        together.execute(Box::pin(async move { late.send(()).unwrap() }));
        // As on another thread, where the runtime has not dropped it yet.
        drop(first);
        came.await.unwrap();
    }

    #[test]
    fn all_of_it_goes_with_its_runtime_and_nothing_runs_without_one() {
        let (together, held) = (Together::default(), Arc::new(()));
        let waits = |held: &Arc<()>| -> BoxFuture<()> {
            let held = held.clone();
            Box::pin(async move {
                std::future::pending::<()>().await;
                drop(held);
            })
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            together.execute(waits(&held));
            yield_now().await;
            together.execute(waits(&held));
        });
        assert_eq!(Arc::strong_count(&held), 3);
        drop(runtime);
        assert_eq!(Arc::strong_count(&held), 1);
        together.execute(waits(&held));
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
