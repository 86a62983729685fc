//! All tasks of one connection, run as one.
//!
//! tonic and hyper spawn a task for each connection, one for the queue before it, and one for each call's
//! response. As tasks of the runtime's own, each is made, scheduled and ended by itself, and on a
//! runtime of several threads one thread wakes another for it. Here they wake each other within one task:
//! a call takes two wake-ups of the runtime less, and answers that come together are handed over together
//! (`cargo bench --bench call_path -- --only cost`: "the published channel by itself").
//!
//! Whoever wants to act on what all of them have done is woken last: the socket writes then.
//!
//! A caller's own stream, which hyper polls in a task while it sends the request, may take its time
//! over a message, and may panic. All other calls of the connection would wait for it, or end with it:
//! its task is one of the runtime's own, as it is without this.

use std::{
    cell::Cell,
    future::Future,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker, ready},
};

use futures_util::{Stream, stream::FuturesUnordered};
use hyper::rt::Executor;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::connector::BoxFuture;

/// After so many have ended the runtime's other tasks have their turn. Our choice: more than calls
/// come together mostly, and done in some ten microseconds.
const ENDED_AT_ONCE: usize = 256;

/// The tasks of h2's connection, of hyper's before it and of tonic's queue: what there is beyond them are calls.
pub(crate) const OWN: usize = 3;

thread_local! {
    /// What is being polled on this thread has polled a caller's own stream.
    static CALLERS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// A caller's own stream, as the transport polls it. It is not polled before it has a task of its own: what
/// polls a body first is the very task that sends all requests of the connection.
#[derive(Default)]
pub(crate) struct CallersOwn {
    asked: bool,
}

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
    /// Who is to be woken when there is nothing else to do.
    last: Option<Waker>,
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
    tasks: FuturesUnordered<Part>,
    /// Room for what is new, kept from one look to the next.
    new: Vec<BoxFuture<()>>,
    /// It has found nothing left to do; another may be running by now.
    over: bool,
}

/// One of those it runs; `None` when that has ended or runs apart.
struct Part(Option<BoxFuture<()>>);

/// One that has a task of its own.
struct Apart(BoxFuture<()>);

/// Whatever follows on this thread is something else.
struct Forget;

// === impl CallersOwn ===

impl CallersOwn {
    /// Whether it may be polled now. To be asked each time.
    #[inline]
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        CALLERS_OWN.set(true);
        if mem::replace(&mut self.asked, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

// === impl Together ===

impl Executor<BoxFuture<()>> for Together {
    fn execute(&self, task: BoxFuture<()>) {
        // hyper polls a request's body once by itself, and has a task made for what is left of it.
        if CALLERS_OWN.take() {
            return spawn(Apart(task));
        }
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
            None => spawn(Run::of(self)),
        }
    }
}

impl Together {
    /// Wakes `waker` when all that runs here has done what it can for now. False where nothing runs.
    pub(crate) fn wake_last(&self, waker: &Waker) -> bool {
        let mut state = self.0.state.lock();
        if state.phase == Phase::Ended {
            return false;
        }
        let run = match mem::replace(&mut state.phase, Phase::Runs) {
            Phase::Waits => state.waker.clone(),
            Phase::Runs | Phase::Ended => None,
        };
        let before = state.last.replace(waker.clone());
        drop(state);
        drop(before);
        if let Some(run) = run {
            run.wake();
        }
        true
    }

    /// Nobody need be woken any more.
    pub(crate) fn forget_last(&self) {
        let last = self.0.state.lock().last.take();
        // The lock is free by now: whatever goes with a waker may come here.
        drop(last);
    }

    /// How many calls are under way, about.
    pub(crate) fn calls(&self) -> usize {
        self.0.running.load(Ordering::Relaxed).saturating_sub(OWN)
    }
}

fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    // Without a runtime nothing can run: dropped, as tasks are that come when it has ended.
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(task);
    }
}

// === impl Part ===

impl Future for Part {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let _forget = Forget;
        let part = &mut self.0;
        // One that panics ends alone, as a task of the runtime's does.
        let polled = catch_unwind(AssertUnwindSafe(|| {
            if let Some(task) = part {
                ready!(task.as_mut().poll(cx));
                *part = None;
            }
            Poll::Ready(())
        }));
        if !matches!(polled, Ok(Poll::Pending)) {
            return Poll::Ready(());
        }
        if CALLERS_OWN.get()
            && let Some(task) = part.take()
        {
            spawn(Apart(task));
            return Poll::Ready(());
        }
        Poll::Pending
    }
}

// === impl Apart ===

impl Future for Apart {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let _forget = Forget;
        self.0.as_mut().poll(cx)
    }
}

// === impl Forget ===

impl Drop for Forget {
    #[inline]
    fn drop(&mut self) {
        CALLERS_OWN.set(false);
    }
}

// === impl Run ===

impl Run {
    fn of(together: &Together) -> Self {
        Self { of: together.clone(), tasks: FuturesUnordered::new(), new: Vec::new(), over: false }
    }

    /// Takes what is new, or wakes who waits for all others; false where there is neither, and then `phase` is what
    /// comes next.
    fn take(&mut self, phase: Phase, cx: &Context<'_>) -> bool {
        let mut state = self.of.0.state.lock();
        let any = !state.new.is_empty();
        let last = if any || phase == Phase::Runs { None } else { state.last.take() };
        if any {
            mem::swap(&mut state.new, &mut self.new);
        } else if last.is_none() {
            state.phase = phase;
            if phase == Phase::Waits && !state.waker.as_ref().is_some_and(|it| it.will_wake(cx.waker())) {
                state.waker = Some(cx.waker().clone());
            }
        }
        drop(state);
        self.tasks.extend(self.new.drain(..).map(|task| Part(Some(task))));
        let Some(last) = last else { return any };
        last.wake();
        true
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
        let left = (mem::take(&mut state.new), state.last.take());
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

    /// Without the runtime's doing.
    async fn yield_in_place() {
        let mut polled = false;
        std::future::poll_fn(|cx| {
            cx.waker().wake_by_ref();
            if mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    #[tokio::test]
    async fn who_is_to_be_woken_last_is_woken_when_all_others_have_done_what_they_can() {
        let together = Together::default();
        assert!(!together.wake_last(Waker::noop()), "nothing runs");
        let steps = Arc::new(Mutex::new(Vec::new()));
        let (mut polls, theirs, notes) = (0, together.clone(), steps.clone());
        together.execute(Box::pin(std::future::poll_fn(move |cx| {
            notes.lock().push("last");
            polls += 1;
            if polls == 3 {
                return Poll::Ready(());
            }
            let notes = notes.clone();
            theirs.execute(Box::pin(async move {
                notes.lock().push("other");
                yield_in_place().await;
                notes.lock().push("other again");
            }));
            assert!(theirs.wake_last(cx.waker()));
            Poll::Pending
        })));
        until_ended().await;
        let round = ["last", "other", "other again"];
        assert_eq!(*steps.lock(), [&round[..], &round, &["last"]].concat());
    }

    #[tokio::test]
    async fn who_need_not_be_woken_any_more_is_not_and_one_that_waits_outside_is() {
        let (together, polls) = (Together::default(), Arc::new(AtomicUsize::new(0)));
        let (theirs, polled) = (together.clone(), polls.clone());
        let (send, mut receive) = oneshot::channel::<()>();
        together.execute(Box::pin(std::future::poll_fn(move |cx| {
            polled.fetch_add(1, Ordering::Relaxed);
            assert!(theirs.wake_last(cx.waker()));
            theirs.forget_last();
            Pin::new(&mut receive).poll(cx).map(drop)
        })));
        for _ in 0..5 {
            yield_now().await;
        }
        assert_eq!(polls.load(Ordering::Relaxed), 1);
        // From a task that is none of them.
        let mut asked = false;
        std::future::poll_fn(|cx| {
            if mem::replace(&mut asked, true) {
                return Poll::Ready(());
            }
            assert!(together.wake_last(cx.waker()));
            Poll::Pending
        })
        .await;
        send.send(()).unwrap();
        until_ended().await;
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
    async fn what_polls_a_callers_own_stream_goes_on_by_itself() {
        let together = Together::default();
        let (go, gone) = oneshot::channel::<()>();
        // Another is made by one that has done so, and it itself stays.
        let (inner, said) = (together.clone(), Arc::new(AtomicUsize::new(0)));
        let at_its_turn = said.clone();
        together.execute(Box::pin(async move {
            CALLERS_OWN.set(true);
            inner.execute(Box::pin(async move {
                CALLERS_OWN.set(true);
                yield_now().await;
                let _ = gone.await;
            }));
            yield_now().await;
            at_its_turn.store(alive(), Ordering::Relaxed);
            std::future::pending().await
        }));
        while said.load(Ordering::Relaxed) == 0 {
            yield_now().await;
        }
        assert_eq!(said.load(Ordering::Relaxed), 2);
        go.send(()).unwrap();
        while alive() > 1 {
            yield_now().await;
        }
        let (go, gone) = oneshot::channel::<()>();
        together.execute(Box::pin(async move {
            CALLERS_OWN.set(true);
            let _ = gone.await;
        }));
        while alive() < 2 {
            yield_now().await;
        }
        // What comes later is none of it.
        together.execute(Box::pin(std::future::pending()));
        yield_now().await;
        assert_eq!(alive(), 2);
        go.send(()).unwrap();
        while alive() > 1 {
            yield_now().await;
        }
    }

    #[tokio::test]
    async fn one_that_panics_ends_alone() {
        let together = Together::default();
        let (go, gone) = oneshot::channel::<()>();
        let (said, heard) = oneshot::channel();
        together.execute(Box::pin(async move {
            gone.await.unwrap();
            said.send(()).unwrap();
        }));
        let panics = Arc::new(());
        let held = panics.clone();
        together.execute(Box::pin(async move {
            let _held = held;
            panic!("as it should");
        }));
        while Arc::strong_count(&panics) > 1 {
            yield_now().await;
        }
        go.send(()).unwrap();
        heard.await.unwrap();
        until_ended().await;
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
