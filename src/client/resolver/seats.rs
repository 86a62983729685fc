//! How many seats there are for those who wait for news: as many as were asked for, and
//! fewer while the registry takes no more connections.
//!
//! Whoever waits for news holds a connection. Where others on this host hold most of those
//! that an agent takes from one address, the seats would take the rest, and every read would
//! be turned away for good. So a connection that is turned away halves the seats: those who
//! have waited longest are called back and read instead. One seat after another comes back.
//!
//! To call back a question does not free its connection: Consul counts that until the question's
//! wait is over, whether or not anybody still listens (of 8 s, 7.8 s with Consul 1.8.7). So while
//! it is not known that there is room, nobody waits for long.

use std::{collections::VecDeque, future::pending, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, oneshot},
    time::Instant,
};

/// As many seats as anybody wants: nobody counts connections.
pub(super) const UNCOUNTED: usize = usize::MAX;

/// How long a question waits at most while there may be no room for all. Our choice.
const CAUTIOUS_WAIT: Duration = Duration::from_secs(2);
/// For how long that is, from the beginning and from each connection that is turned away. Our
/// choice: some rounds of such waits.
const CAUTIOUS_FOR: Duration = Duration::from_secs(10);
/// Connections that are turned away within this time are turned away for one reason, and
/// the seats are halved once. Our choice: the seats that are given back are to be felt first,
/// and Consul adds up to a sixteenth to a wait.
const ONE_WAVE: Duration = Duration::from_secs(3);
/// How long no connection must have been turned away until one more seat is tried. Our choice.
const GROW_EVERY: Duration = Duration::from_secs(10);

/// The seats, whether taken or not.
pub(super) struct Seats {
    places: Mutex<Places>,
    /// Has a permit for each seat that is taken and is to be given up.
    recalled: Semaphore,
}

struct Places {
    size: Size,
    free: usize,
    /// Those who queue, each in the order of asking. Who has gone may still be in there.
    first: VecDeque<oneshot::Sender<Held>>,
    rest: VecDeque<oneshot::Sender<Held>>,
}

/// Before whom one queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// Before all who wait only for their turn: something has just changed.
    TheRest,
    Nobody,
}

/// How many there are. Pure.
#[derive(Debug)]
struct Size {
    most: usize,
    now: usize,
    /// When it last changed, or was last found to be too large.
    at: Option<Instant>,
    /// Until then there may be no room for all; `None` before anybody has asked.
    cautious_until: Option<Instant>,
}

/// A seat that is taken. Dropping it gives it back.
pub(super) struct Held {
    /// `None` once it is given back.
    seats: Option<Arc<Seats>>,
}

// === impl Seats ===

impl Seats {
    pub(super) fn new(seats: usize) -> Arc<Self> {
        let size = Size { most: seats, now: seats, at: None, cautious_until: None };
        let places = Places { size, free: seats, first: VecDeque::new(), rest: VecDeque::new() };
        Arc::new(Self { places: Mutex::new(places), recalled: Semaphore::new(0) })
    }

    /// A seat, if one is free.
    pub(super) fn try_take(self: &Arc<Self>) -> Option<Held> {
        let mut places = self.places.lock();
        places.free = places.free.checked_sub(1)?;
        Some(Held { seats: Some(Arc::clone(self)) })
    }

    /// A seat, as soon as it is this one's turn. Dropping what is returned leaves the queue.
    pub(super) fn take(self: &Arc<Self>, before: Before) -> oneshot::Receiver<Held> {
        let (granted, queued) = oneshot::channel();
        let mut places = self.places.lock();
        let queue = match before {
            Before::TheRest => &mut places.first,
            Before::Nobody => &mut places.rest,
        };
        // Before it grows: where changes come without end nobody of the rest is ever next, and
        // those who have left it would stay.
        if queue.len() == queue.capacity() {
            queue.retain(|it| !it.is_closed());
        }
        queue.push_back(granted);
        let is_free = places.free.checked_sub(1).map(|free| places.free = free).is_some();
        drop(places);
        if is_free {
            self.give();
        }
        queued
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.places.lock().size.now
    }

    /// How long a question waits, of `wait`.
    pub(super) fn wait(&self, wait: Duration, now: Instant) -> Duration {
        if self.places.lock().size.is_cautious(now) { wait.min(CAUTIOUS_WAIT) } else { wait }
    }

    /// The registry has turned a connection away.
    pub(super) fn too_many(&self, now: Instant) {
        // Held until all is done: what grows and what shrinks must not mix.
        let mut places = self.places.lock();
        let gone = places.size.halve(now);
        let free = gone.min(places.free);
        places.free -= free;
        self.recalled.add_permits(gone - free);
    }

    /// The registry answers.
    pub(super) fn answered(self: &Arc<Self>, now: Instant) {
        let mut places = self.places.lock();
        if !places.size.grow(now) {
            return;
        }
        // One less to be given up is one more.
        if let Ok(recalled) = self.recalled.try_acquire() {
            recalled.forget();
            return;
        }
        drop(places);
        self.give();
    }

    /// Hands a seat that nobody has to whoever is next.
    fn give(self: &Arc<Self>) {
        let mut seat = Held { seats: Some(Arc::clone(self)) };
        loop {
            let mut places = self.places.lock();
            let Some(next) = places.first.pop_front().or_else(|| places.rest.pop_front()) else {
                places.free += 1;
                // Not given back a second time.
                seat.seats = None;
                return;
            };
            drop(places);
            match next.send(seat) {
                Ok(()) => return,
                // Has left the queue.
                Err(back) => seat = back,
            }
        }
    }
}

// === impl Size ===

impl Size {
    fn is_cautious(&mut self, now: Instant) -> bool {
        // Where nobody counts connections, none is turned away.
        self.most < UNCOUNTED && now < *self.cautious_until.get_or_insert(now + CAUTIOUS_FOR)
    }

    /// Returns how many are fewer.
    fn halve(&mut self, now: Instant) -> usize {
        self.cautious_until = Some(now + CAUTIOUS_FOR);
        if self.at.is_some_and(|at| now.saturating_duration_since(at) < ONE_WAVE) {
            return 0;
        }
        self.at = Some(now);
        let before = self.now;
        self.now = (before / 2).max(1);
        before - self.now
    }

    /// True where there is one more.
    fn grow(&mut self, now: Instant) -> bool {
        let still = self.at.is_some_and(|at| now.saturating_duration_since(at) < GROW_EVERY);
        if self.now >= self.most || still {
            return false;
        }
        self.at = Some(now);
        self.now += 1;
        true
    }
}

// === impl Held ===

impl Held {
    /// Waits until this seat is to be given up, and gives it up. Cancel safe; for ever where it
    /// has been given up.
    pub(super) async fn recalled(&mut self) {
        let Some(seats) = &self.seats else { return pending().await };
        let recalled = seats.recalled.acquire().await.expect("the semaphore is never closed");
        recalled.forget();
        self.seats = None;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(seats) = self.seats.take() else { return };
        match seats.recalled.try_acquire() {
            Ok(recalled) => recalled.forget(),
            Err(_) => seats.give(),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Seats are taken and given back, connections turned away or not, in any order.
        #[test]
        fn there_are_never_more_seats_than_asked_for_nor_none_and_all_come_back(
            most in 1..70_usize,
            steps in prop::collection::vec((0..5_u8, 0..20_000_u64), 0..120),
        ) {
            let (seats, mut now) = (Seats::new(most), Instant::now());
            let mut held: Vec<Held> = Vec::new();
            for (step, later) in steps {
                now += Duration::from_millis(later);
                match step {
                    0 | 1 => held.extend(seats.try_take()),
                    2 => drop(held.pop()),
                    3 => seats.too_many(now),
                    _ => seats.answered(now),
                }
                held.retain_mut(|it| it.recalled().now_or_never().is_none());
                let size = seats.count();
                prop_assert!((1..=most).contains(&size));
                prop_assert_eq!(held.len() + seats.places.lock().free, size);
            }
            drop(held);
            for _ in 0..most {
                now += GROW_EVERY;
                seats.answered(now);
            }
            prop_assert_eq!(seats.places.lock().free, most);
        }
    }

    #[test]
    fn nobody_waits_for_long_in_the_beginning_and_after_a_connection_was_turned_away() {
        let (seats, now) = (Seats::new(2), Instant::now());
        let (long, short) = (Duration::from_secs(60), Duration::from_secs(1));
        assert_eq!([long, short].map(|it| seats.wait(it, now)), [CAUTIOUS_WAIT, short]);
        assert_eq!(seats.wait(long, now + CAUTIOUS_FOR), long);
        let later = now + 2 * CAUTIOUS_FOR;
        for _ in 0..2 {
            seats.too_many(later);
        }
        assert_eq!(seats.wait(long, later), CAUTIOUS_WAIT);
        assert_eq!(seats.wait(long, later + CAUTIOUS_FOR), long);
    }

    #[test]
    fn a_wave_of_connections_that_are_turned_away_halves_the_seats_once() {
        let (seats, now) = (Seats::new(64), Instant::now());
        for _ in 0..300 {
            seats.too_many(now);
        }
        assert_eq!(seats.count(), 32);
        for second in 1..20 {
            seats.too_many(now + second * ONE_WAVE);
        }
        assert_eq!(seats.count(), 1);
    }

    #[tokio::test]
    async fn who_sits_is_called_back_and_who_queues_is_not_given_what_is_gone() {
        let (seats, now) = (Seats::new(2), Instant::now());
        let (mut first, second) = (seats.try_take().expect("one is free"), seats.try_take());
        assert!(seats.try_take().is_none());
        let mut queued = seats.take(Before::Nobody);
        assert!(futures_util::poll!(&mut queued).is_pending());
        assert!(first.recalled().now_or_never().is_none());
        seats.too_many(now);
        assert!(first.recalled().now_or_never().is_some());
        drop(first);
        assert!(futures_util::poll!(&mut queued).is_pending(), "that one is gone");
        drop(second);
        assert!(queued.await.is_ok());
    }

    #[tokio::test]
    async fn where_something_has_changed_one_sits_before_the_rest_and_who_has_gone_does_not() {
        let seats = Seats::new(1);
        let mut held = seats.try_take();
        let order = [Before::Nobody, Before::TheRest, Before::Nobody, Before::TheRest, Before::TheRest];
        let mut queued: Vec<_> = order.map(|before| Some(seats.take(before))).into();
        queued[1] = None;
        for next in [3, 4, 0, 2] {
            for waits in queued.iter_mut().flatten() {
                assert!(futures_util::poll!(waits).is_pending());
            }
            drop(held);
            held = queued[next].take().expect("queued").await.ok();
        }
        drop((held, seats.take(Before::TheRest)));
        assert_eq!(seats.places.lock().free, 1, "what was granted and not fetched comes back");
    }

    #[tokio::test]
    async fn who_has_left_the_queue_takes_no_room_in_it_though_nobody_of_the_rest_is_ever_next() {
        let seats = Seats::new(1);
        let mut held = seats.try_take();
        let mut rest = seats.take(Before::Nobody);
        for _ in 0..1000 {
            let next = seats.take(Before::TheRest);
            // Found a change, and queues anew before the rest.
            drop(seats.take(Before::Nobody));
            drop(held);
            held = next.await.ok();
        }
        let queue = seats.places.lock().rest.len();
        assert!(queue < 10, "{queue} queue, of whom one is there");
        assert!(futures_util::poll!(&mut rest).is_pending());
        drop(held);
        assert!(rest.await.is_ok());
    }
}
