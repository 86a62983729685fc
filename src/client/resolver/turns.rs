//! Who may wait for news at the registry, where there are more services than
//! long polls.
//!
//! The rule: a service waits for news while it has a seat, and without one reads
//! from time to time. A seat is had for one question. Where that ended with a
//! change the service keeps its seat, because where something has just changed
//! the next change is near; otherwise it goes to whoever has queued longest, and before
//! those to one whose read has found a change. Where there are
//! fewer seats than services, no question waits longer than the time between two reads, so
//! seats go round. Where there are seats for all, nothing of this shows. Where the registry
//! turns connections away there are fewer seats for a while.

use std::{
    fmt,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};

use super::{
    pace::Spacing,
    seats::{Before, Held, Seats, UNCOUNTED},
};
use crate::consul::BlockingIndex;

/// How many services begin at once, and how far apart the others. Our choice: a
/// thousand have begun after two seconds.
const BEGIN_AT_ONCE: u32 = 32;
const BEGIN_EVERY: Duration = Duration::from_millis(2);
/// How far apart the reads are that services in doubt make beyond those they would make
/// anyway. Our choice: a hundred a second, which an agent answers in passing.
const SOONER_EVERY: Duration = Duration::from_millis(10);

/// The seats that all resolvers of one `ConsulService` share.
#[derive(Clone)]
pub(crate) struct Turns {
    shared: Arc<Shared>,
}

struct Shared {
    rule: Rule,
    seats: Arc<Seats>,
    /// Who may want one, and who queues for one.
    joined: AtomicUsize,
    queued: AtomicUsize,
    starts: Mutex<Spacing>,
    sooner: Mutex<Spacing>,
}

/// The decisions, without time, chance or others.
#[derive(Clone, Copy, Debug)]
struct Rule {
    seats: usize,
    read_every: Duration,
}

/// One resolver's part in it.
pub(super) struct Turn {
    shared: Arc<Shared>,
    seat: Seat,
}

enum Seat {
    Without,
    Queued { granted: oneshot::Receiver<Held>, before: Before, _counted: Queued },
    Held(Held),
}

/// What has become of a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// The one that was queued for is there.
    Granted,
    /// The one that was had is to be given up, and is.
    Recalled,
}

/// Counts one who queues while it lives.
struct Queued(Arc<Shared>);

// === impl Rule ===

impl Rule {
    /// How long a question with a seat waits for news.
    fn wait(self, wait: Duration, crowded: bool) -> Duration {
        if crowded { wait.min(self.read_every) } else { wait }
    }

    /// Whether a seat is kept for the next question.
    fn keeps(self, changed: bool, others_queue: bool) -> bool {
        changed || !others_queue
    }

    /// How long after its last answer a service without a seat reads again: up to
    /// a quarter less than the time between reads, so that many do not stay in step.
    fn read_again_in(self, random: f64) -> Duration {
        self.read_every.mul_f64(1.0 - random / 4.0)
    }
}

// === impl Turns ===

impl Turns {
    /// `seats` long polls; a read at least every `read_every` without one.
    pub(crate) fn new(seats: usize, read_every: Duration) -> Self {
        let rule = Rule { seats: seats.max(1), read_every };
        Self {
            shared: Arc::new(Shared {
                rule,
                seats: Seats::new(rule.seats),
                joined: AtomicUsize::new(0),
                queued: AtomicUsize::new(0),
                starts: Mutex::new(Spacing::with_burst(BEGIN_EVERY, BEGIN_AT_ONCE)),
                sooner: Mutex::new(Spacing::with_burst(SOONER_EVERY, 1)),
            }),
        }
    }

    /// A seat for everybody: only Consul's long polls are known to be dear.
    pub(crate) fn for_all() -> Self {
        Self::new(UNCOUNTED, Duration::from_secs(10))
    }

    pub(super) fn join(&self) -> Turn {
        self.shared.joined.fetch_add(1, Ordering::Relaxed);
        Turn { shared: Arc::clone(&self.shared), seat: Seat::Without }
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.shared.rule, f)
    }
}

impl Shared {
    /// There are not seats for all.
    fn crowded(&self) -> bool {
        self.joined.load(Ordering::Relaxed) > self.seats.count()
    }

    fn others_queue(&self) -> bool {
        self.queued.load(Ordering::Relaxed) > 0
    }

    /// A seat, or a place in the queue for one.
    fn seat(self: &Arc<Self>, before: Before) -> Seat {
        match self.seats.try_take() {
            Some(seat) => Seat::Held(seat),
            None => {
                let granted = self.seats.take(before);
                Seat::Queued { granted, before, _counted: Queued::new(self) }
            }
        }
    }
}

// === impl Turn ===

impl Turn {
    /// When the first question is to be asked: many that begin together are spread.
    pub(super) fn begin(&self, now: Instant) -> Instant {
        self.shared.starts.lock().take(now)
    }

    /// The question to ask next, if it is to go beyond `after`: one that waits needs
    /// a seat, and without one it is a read.
    pub(super) fn question(&mut self, after: BlockingIndex, wait: Duration) -> (BlockingIndex, Duration) {
        let waits = after.get().is_some() && self.sit();
        let after = if waits { after } else { BlockingIndex::NONE };
        let wait = self.shared.rule.wait(wait, self.shared.crowded());
        (after, self.shared.seats.wait(wait, Instant::now()))
    }

    /// Takes a seat, or queues for one. True where it has one now.
    pub(super) fn sit(&mut self) -> bool {
        if let Seat::Without = self.seat {
            self.seat = self.shared.seat(Before::Nobody);
        }
        matches!(self.seat, Seat::Held(_))
    }

    /// Waits until a seat that was queued for is there, or one that was had is to be given
    /// up; for ever where there is neither. Cancel safe.
    pub(super) async fn moved(&mut self) -> Moved {
        match &mut self.seat {
            Seat::Queued { granted, .. } => {
                let seat = granted.await.expect("the seats keep who queues until a seat is sent");
                self.seat = Seat::Held(seat);
                Moved::Granted
            }
            Seat::Held(seat) => {
                seat.recalled().await;
                self.seat = Seat::Without;
                Moved::Recalled
            }
            Seat::Without => pending().await,
        }
    }

    /// A question was answered: who has a seat may have to hand it on, and who queues
    /// for one may go before others.
    pub(super) fn answered(&mut self, changed: bool) {
        self.shared.seats.answered(Instant::now());
        match self.seat {
            Seat::Held(_) if !self.shared.rule.keeps(changed, self.shared.others_queue()) => {
                self.seat = Seat::Without;
            }
            _ if changed => self.changed(),
            _ => {}
        }
    }

    /// A change was found, by whatever question: who queues goes before others.
    pub(super) fn changed(&mut self) {
        if let Seat::Queued { before: Before::Nobody, .. } = self.seat {
            self.seat = self.shared.seat(Before::TheRest);
        }
    }

    /// A question has failed: what comes next does not wait. Where the registry has
    /// `turned_away` its connection, there are fewer seats from now on.
    pub(super) fn leave(&mut self, turned_away: bool) {
        if turned_away {
            self.shared.seats.too_many(Instant::now());
        }
        self.seat = Seat::Without;
    }

    /// When to read again, without a seat and with the registry in doubt: `after` so
    /// long, or later where many want to. `None`: not before `next`.
    pub(super) fn sooner(&self, now: Instant, after: Duration, next: Instant) -> Option<Instant> {
        self.shared.sooner.lock().take_before(now + after, next)
    }

    /// How long after an answer to read again, without a seat.
    pub(super) fn read_again_in(&self, random: f64) -> Duration {
        self.shared.rule.read_again_in(random)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.shared.joined.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl Queued ===

impl Queued {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.queued.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(shared))
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use proptest::prelude::*;

    use super::*;

    const RULE: Rule = Rule { seats: 2, read_every: Duration::from_secs(10) };
    const MINUTE: Duration = Duration::from_secs(60);

    proptest! {
        /// Services ask, are answered, fail and leave in any order.
        #[test]
        fn no_more_sit_than_there_are_seats_and_who_queues_sits_as_soon_as_one_is_free(
            seats in 1..4_usize,
            steps in prop::collection::vec((0..5_u8, 0..6_usize, any::<bool>()), 0..80),
        ) {
            let turns = Turns::new(seats, RULE.read_every);
            let mut all: Vec<Turn> = (0..6).map(|_| turns.join()).collect();
            for (step, which, changed) in steps {
                match step {
                    0 | 1 => _ = all[which].sit(),
                    2 => all[which].answered(changed),
                    3 => all[which].leave(false),
                    _ => all[which] = turns.join(),
                }
                // As its task does: whoever is given a seat hears of it.
                for turn in &mut all {
                    let _ = turn.moved().now_or_never();
                }
                let sit = all.iter().filter(|it| matches!(it.seat, Seat::Held(_))).count();
                let queue = all.iter().filter(|it| matches!(it.seat, Seat::Queued { .. })).count();
                prop_assert!(sit <= seats);
                prop_assert!(queue == 0 || sit == seats, "{queue} queue while {sit} of {seats} sit");
                prop_assert_eq!(turns.shared.others_queue(), queue > 0);
            }
        }
    }

    #[test]
    fn a_question_waits_no_longer_than_between_two_reads_where_there_are_not_seats_for_all() {
        assert_eq!(RULE.wait(MINUTE, false), MINUTE);
        assert_eq!(RULE.wait(MINUTE, true), RULE.read_every);
        assert_eq!(RULE.wait(Duration::from_secs(1), true), Duration::from_secs(1));
    }

    #[test]
    fn a_seat_is_kept_after_a_change_or_where_nobody_queues() {
        assert_eq!([true, false].map(|changed| RULE.keeps(changed, true)), [true, false]);
        assert_eq!([true, false].map(|changed| RULE.keeps(changed, false)), [true, true]);
    }

    #[test]
    fn reads_are_never_further_apart_than_asked_for() {
        let times = [0.0, 0.5, 0.999_999].map(|random| RULE.read_again_in(random));
        assert_eq!(times[0], RULE.read_every);
        assert!(times.iter().all(|it| (RULE.read_every.mul_f64(0.75)..=RULE.read_every).contains(it)));
    }

    #[tokio::test]
    async fn seats_go_round_in_the_order_of_asking_and_to_nobody_who_has_left() {
        let turns = Turns::new(1, RULE.read_every);
        let [mut a, mut b, mut c, mut gone] = [(); 4].map(|()| turns.join());
        assert!(a.sit() && !b.sit() && !gone.sit() && !c.sit());
        for queued in [&mut b, &mut gone, &mut c] {
            assert!(futures_util::poll!(Box::pin(queued.moved())).is_pending());
        }
        drop(gone);
        a.answered(true);
        assert!(a.sit(), "it has changed");
        a.answered(false);
        assert!(!a.sit(), "it goes to the end of the queue");
        assert!(futures_util::poll!(Box::pin(c.moved())).is_pending());
        b.moved().await;
        b.leave(false);
        c.moved().await;
        drop(c);
        a.moved().await;
        assert!(!turns.shared.others_queue());
        a.answered(false);
        assert!(a.sit(), "nobody else wants it");
    }

    #[tokio::test]
    async fn whose_read_has_found_a_change_sits_before_those_who_only_queue() {
        let turns = Turns::new(1, RULE.read_every);
        let [mut sits, mut queues, mut changes] = [(); 3].map(|()| turns.join());
        assert!(sits.sit() && !queues.sit() && !changes.sit());
        changes.answered(true);
        queues.answered(false);
        sits.answered(false);
        changes.moved().await;
        assert!(queues.moved().now_or_never().is_none());
        drop(changes);
        queues.moved().await;
    }

    #[test]
    fn where_there_is_a_seat_for_everybody_a_thousand_sit() {
        let turns = Turns::for_all();
        let mut all: Vec<_> = (0..1000).map(|_| turns.join()).collect();
        assert!(all.iter_mut().all(Turn::sit));
    }

    /// A second after an answer each of `services` reads again, or later: the longest
    /// time between two reads.
    fn longest_unread_in_doubt(services: usize) -> Duration {
        let (turns, start) = (Turns::new(1, RULE.read_every), Instant::now());
        let (turn, mut longest) = (turns.join(), Duration::ZERO);
        let mut reads = vec![start; services];
        let mut last = None;
        loop {
            let earliest = reads.iter_mut().min().expect("there are services");
            if *earliest >= start + MINUTE {
                return longest;
            }
            let next = *earliest + RULE.read_again_in(0.5);
            let sooner = turn.sooner(*earliest, Duration::from_secs(1), next);
            if let Some(at) = sooner {
                assert!(last.replace(at).is_none_or(|last| at - last >= SOONER_EVERY));
            }
            let again = sooner.unwrap_or(next);
            longest = longest.max(again - *earliest);
            *earliest = again;
        }
    }

    #[test]
    fn in_doubt_a_few_read_each_second_and_a_thousand_no_more_than_the_agent_can_bear() {
        assert_eq!(longest_unread_in_doubt(1), Duration::from_secs(1));
        assert!(longest_unread_in_doubt(50) <= Duration::from_millis(1500));
        assert!(longest_unread_in_doubt(1000) <= RULE.read_every);
    }

    #[test]
    fn a_thousand_begin_within_two_seconds_and_never_many_at_once() {
        let (turns, now) = (Turns::new(64, MINUTE), Instant::now());
        let starts: Vec<_> = (0..1000).map(|_| turns.join().begin(now) - now).collect();
        assert_eq!(starts[0], Duration::ZERO);
        assert!(starts[999] < Duration::from_secs(2), "{:?}", starts[999]);
        for at in &starts {
            assert!(starts.iter().filter(|it| it == &at).count() <= BEGIN_AT_ONCE as usize);
        }
    }
}
