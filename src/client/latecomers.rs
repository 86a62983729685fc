//! Calls that wait for their answer, and are woken when that is late.
//!
//! A timer of its own costs a call more than any other stage of its way (`cargo bench --bench
//! call_path -- --only stages`), and nearly every call is answered before it would be of use. So
//! each takes a place in a list instead, and one timer ticks for all of them, as long as there are
//! any. Who is woken looks at the clock, and waits on with a timer of its own.

use std::{
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use slab::Slab;
use tokio::{
    runtime::{self, EnterGuard, Handle},
    sync::Notify,
    time::sleep,
};

/// Between two ticks. Our choice: a fortieth of a second is seldom, and soon beside a probe's 500 ms.
const TICK: Duration = Duration::from_millis(25);

/// A call is late at the second tick that it sees: after more than [`AT_LEAST`], and after this where
/// the runtime is not busy.
pub(crate) const LATE: Duration = TICK.saturating_mul(2);

/// So long at the least a late call has waited.
pub(crate) const AT_LEAST: Duration = TICK;

/// The calls of one service that wait.
pub(crate) struct Latecomers {
    /// Where the timer runs. A call on another runtime has one of its own: it must not depend on
    /// this one for its deadline. A call on none has this one's.
    runtime: Handle,
    id: runtime::Id,
    list: Mutex<List>,
    begun: Notify,
}

struct List {
    waiting: Slab<Waiting>,
    ticks: u64,
    ticking: bool,
    /// Somebody came since the last tick.
    used: bool,
    /// Nobody ticks any more.
    closed: bool,
}

struct Waiting {
    waker: Waker,
    since: u64,
    late: bool,
}

/// A call's place in the list, until it is dropped.
pub(crate) struct Place<'a> {
    of: &'a Latecomers,
    key: usize,
}

/// Ticks as long as it lives; then everybody waits by himself.
struct Ticker(Arc<Latecomers>);

// === impl Latecomers ===

impl Latecomers {
    /// A list whose timer is to run on `runtime`.
    pub(crate) fn new(runtime: &Handle) -> Arc<Self> {
        let list = List { waiting: Slab::new(), ticks: 0, ticking: false, used: false, closed: false };
        Arc::new(Self {
            runtime: runtime.clone(),
            id: runtime.id(),
            list: Mutex::new(list),
            begun: Notify::new(),
        })
    }

    /// Lends this runtime's timers to a call that is polled on none, as any executor may do.
    pub(crate) fn timers(&self) -> Option<EnterGuard<'_>> {
        Handle::try_current().is_err().then(|| self.runtime.enter())
    }

    /// Ticks while anybody waits. Dropping the future makes all of them late.
    pub(crate) async fn run(self: Arc<Self>) {
        let ticker = Ticker(self);
        loop {
            ticker.0.begun.notified().await;
            loop {
                sleep(TICK).await;
                if !ticker.0.tick() {
                    break;
                }
            }
        }
    }

    /// A place for the call that `cx` wakes; `None` where it has to wait by itself.
    pub(crate) fn place(&self, cx: &Context<'_>) -> Option<Place<'_>> {
        Some(Place { of: self, key: self.enter(cx)? })
    }

    /// The same, to be [left](Self::leave) by whoever holds the key.
    #[inline]
    pub(crate) fn enter(&self, cx: &Context<'_>) -> Option<usize> {
        if Handle::try_current().is_ok_and(|current| current.id() != self.id) {
            return None;
        }
        let waker = cx.waker().clone();
        let mut list = self.list.lock();
        if list.closed {
            return None;
        }
        if !std::mem::replace(&mut list.ticking, true) {
            self.begun.notify_one();
        }
        list.used = true;
        let since = list.ticks;
        Some(list.waiting.insert(Waiting { waker, since, late: false }))
    }

    /// Whether the call at this place has become late; else it is woken when it does.
    #[inline]
    pub(crate) fn is_late(&self, key: usize, cx: &Context<'_>) -> bool {
        let mut list = self.list.lock();
        let waiting = &mut list.waiting[key];
        let late = waiting.late;
        let has_moved = !late && !waiting.waker.will_wake(cx.waker());
        let gone = has_moved.then(|| std::mem::replace(&mut waiting.waker, cx.waker().clone()));
        drop(list);
        // As in `leave`.
        drop(gone);
        late
    }

    /// Gives a place up.
    #[inline]
    pub(crate) fn leave(&self, key: usize) {
        let gone = self.list.lock().waiting.try_remove(key);
        // Its waker may be the last hold on a task: not dropped under the lock.
        drop(gone);
    }

    /// False where nobody waits nor has waited since the last one.
    fn tick(&self) -> bool {
        let mut late = Vec::new();
        let mut list = self.list.lock();
        list.ticks += 1;
        let List { waiting, ticks, used, ticking, .. } = &mut *list;
        for (_, it) in waiting.iter_mut() {
            if !it.late && *ticks - it.since >= 2 {
                it.late = true;
                late.push(it.waker.clone());
            }
        }
        let goes_on = std::mem::take(used) || waiting.iter().any(|(_, it)| !it.late);
        *ticking = goes_on;
        drop(list);
        late.into_iter().for_each(Waker::wake);
        goes_on
    }

    fn close(&self) {
        let mut list = self.list.lock();
        list.closed = true;
        let late: Vec<_> =
            list.waiting.iter_mut().map(|(_, it)| (it.late = true, it.waker.clone()).1).collect();
        drop(list);
        late.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.0.close();
    }
}

// === impl Place ===

impl Place<'_> {
    /// Whether the call has become late; else it is woken when it does.
    pub(crate) fn is_late(&mut self, cx: &Context<'_>) -> bool {
        self.of.is_late(self.key, cx)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.of.leave(self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, task::Poll};

    use tokio::{task::yield_now, time::Instant};
    use tokio_util::task::AbortOnDropHandle;

    use super::*;

    fn ticking() -> (Arc<Latecomers>, AbortOnDropHandle<()>) {
        let list = Latecomers::new(&Handle::current());
        let ticker = AbortOnDropHandle::new(tokio::spawn(list.clone().run()));
        (list, ticker)
    }

    /// How long it took until the call was late.
    async fn late(list: &Latecomers) -> Duration {
        let began = Instant::now();
        let mut place = None;
        poll_fn(|cx| {
            let place = place.get_or_insert_with(|| list.place(cx).unwrap());
            if place.is_late(cx) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_waits_is_woken_at_the_second_tick() {
        let (list, _ticker) = ticking();
        assert_eq!(late(&list).await, LATE);
        let (first, second) = tokio::join!(late(&list), async {
            sleep(TICK / 2).await;
            late(&list).await
        });
        for waited in [first, second] {
            assert!((AT_LEAST..=LATE).contains(&waited), "{waited:?}");
        }
        assert!(list.list.lock().waiting.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_ticks_when_nobody_waits_and_it_does_again_for_the_next_one() {
        let (list, _ticker) = ticking();
        late(&list).await;
        sleep(4 * TICK).await;
        let ticks = list.list.lock().ticks;
        sleep(100 * TICK).await;
        assert_eq!(list.list.lock().ticks, ticks);
        assert_eq!(late(&list).await, LATE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_call_that_stays_keeps_no_timer_going() {
        let (list, _ticker) = ticking();
        let mut place = None;
        poll_fn(|cx| {
            let place = place.get_or_insert_with(|| list.place(cx).unwrap());
            if place.is_late(cx) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        sleep(4 * TICK).await;
        let ticks = list.list.lock().ticks;
        sleep(100 * TICK).await;
        assert_eq!(list.list.lock().ticks, ticks);
    }

    #[tokio::test(start_paused = true)]
    async fn everybody_is_late_when_the_timer_ends_and_waits_by_himself_from_then_on() {
        let (list, ticker) = ticking();
        let waits = tokio::spawn({
            let list = list.clone();
            async move { late(&list).await }
        });
        while list.list.lock().waiting.is_empty() {
            yield_now().await;
        }
        drop(ticker);
        assert_eq!(waits.await.unwrap(), Duration::ZERO);
        assert!(poll_fn(|cx| Poll::Ready(list.enter(cx).is_none())).await);
    }

    /// An executor's waker may hold all of a task, with the calls in it.
    #[tokio::test]
    async fn a_waker_that_ends_calls_when_it_goes_may_be_exchanged_for_another() {
        struct Task(Arc<Latecomers>, usize);

        impl std::task::Wake for Task {
            fn wake(self: Arc<Self>) {}
        }

        impl Drop for Task {
            fn drop(&mut self) {
                self.0.leave(self.1);
            }
        }

        let list = Latecomers::new(&Handle::current());
        let noop = Context::from_waker(Waker::noop());
        let other = list.enter(&noop).unwrap();
        let task = Waker::from(Arc::new(Task(list.clone(), other)));
        let moved = list.enter(&Context::from_waker(&task)).unwrap();
        drop(task);
        assert!(!list.is_late(moved, &noop));
        assert!(list.list.lock().waiting.get(other).is_none());
    }

    #[test]
    fn a_call_on_another_runtime_waits_by_itself() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (one, other) = (runtime(), runtime());
        let list = Latecomers::new(one.handle());
        let enters = || poll_fn(|cx| Poll::Ready(list.enter(cx).is_some()));
        assert!(one.block_on(enters()));
        assert!(!other.block_on(enters()));
    }
}
