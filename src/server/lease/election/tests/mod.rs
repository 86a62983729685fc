//! The rules one by one, at exact instants.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use self::model::Model;
use super::*;
use crate::{InstanceId, role::Primary, server::store::Version};

pub(crate) mod model;
mod simulation;

/// Reproducible chance.
#[derive(Clone, Debug)]
struct Seeded(u64);

impl Rng for Seeded {
    // splitmix64 (Steele, Lea, Flood 2014).
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// No jitter in a takeover; half of it in pauses.
struct Least;

impl Rng for Least {
    fn next_u64(&mut self) -> u64 {
        0
    }
}

fn claim(instance: &str, nonce: &str) -> Claim {
    Claim::new(instance, InstanceId::new("127.0.0.1", 1), Nonce::new(nonce))
}

fn unavailable() -> StoreError {
    StoreError::Unavailable { source: Arc::new(std::io::Error::other("away")) }
}

fn unanswered() -> StoreError {
    StoreError::Unanswered { source: Arc::new(std::io::Error::other("lost")) }
}

/// One instance and a store, on a clock that is moved by hand. Steps are answered at once.
struct Bench {
    model: Model,
    claim: Claim,
    election: Election<Least>,
    start: Instant,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let start = Instant::now();
        let claim = claim("a", "mine");
        let election = Election::new(Timing::default(), &claim, Least, start);
        Self { model: Model::new(), claim, election, start, now: start }
    }

    /// Another holds the lease, and it is known.
    fn with_other() -> (Self, Term) {
        let mut bench = Self::new();
        let term = bench.other_acquires();
        bench.run_until(0);
        (bench, term)
    }

    /// Holds the lease since 0.
    fn holding() -> Self {
        let mut bench = Self::new();
        bench.model.acquire(&LeaseRecord::empty(), &claim("b", "its")).unwrap();
        bench.model.record.released = true;
        bench.run_until(0);
        assert!(bench.is_primary(), "{:?}", bench.role());
        bench
    }

    fn other_acquires(&mut self) -> Term {
        self.model.acquire(&self.model.record.clone(), &claim("b", "its")).unwrap()
    }

    fn at(&self, ms: u64) -> Instant {
        self.start + Duration::from_millis(ms)
    }

    fn role(&self) -> Role {
        self.election.role(self.now)
    }

    fn is_primary(&self) -> bool {
        self.role().primary_at(self.now).is_some()
    }

    fn until(&self) -> Duration {
        match self.role() {
            Role::Primary { until, .. } => until - self.start,
            other => panic!("{other:?}"),
        }
    }

    fn answer(&mut self, step: Step, broken: Option<&StoreError>) {
        let model = &mut self.model;
        let or = |fault: Option<&StoreError>| fault.cloned().map_or(Ok(()), Err);
        let answer = match step {
            Step::Read => Answer::Read(or(broken).map(|()| model.record.clone())),
            Step::Acquire(seen) => {
                Answer::Acquire(or(broken).and_then(|()| model.acquire(&seen, &self.claim)))
            }
            Step::Renew(term) => Answer::Renew(term.token, or(broken).and_then(|()| model.renew(&term))),
            Step::Release(term, successor) => {
                let released = or(broken).and_then(|()| model.release(&term, successor.as_deref()));
                Answer::Release(term.token, released)
            }
        };
        self.election.answered(self.now, self.now, answer);
    }

    /// Goes on to `ms`, every step answered at once.
    fn run_until(&mut self, ms: u64) {
        self.run(ms, None);
    }

    fn run(&mut self, ms: u64, broken: Option<&StoreError>) {
        let end = self.at(ms);
        loop {
            while let Some(step) = self.election.next(self.now) {
                self.answer(step, broken);
            }
            match self.election.wake(self.now) {
                Some(at) if at <= end => {
                    assert!(at > self.now, "it does not turn on the spot");
                    self.now = at;
                }
                _ => break,
            }
        }
        self.now = end;
    }

    /// When it is primary first.
    fn primary_at(&mut self, latest: u64) -> u64 {
        for ms in (self.now - self.start).as_millis() as u64..=latest {
            self.run_until(ms);
            if self.is_primary() {
                return ms;
            }
        }
        panic!("not primary until {latest}: {:?}", self.role());
    }
}

#[test]
fn an_empty_lease_is_taken_after_its_length() {
    // Its keys may have been deleted under a holder that does not know yet.
    let mut bench = Bench::new();
    assert_eq!(bench.role(), Role::Unknown);
    bench.run_until(0);
    assert_eq!(bench.role(), Role::Standby { primary: None });
    assert_eq!(bench.primary_at(3_000), 2_000);
}

#[test]
fn a_silent_holder_is_taken_over_when_its_length_has_passed_and_no_sooner() {
    let (mut bench, term) = Bench::with_other();
    bench.run_until(700);
    bench.model.renew(&term).unwrap();
    // The renewal is seen by the read at 800.
    assert_eq!(bench.primary_at(4_000), 2_800);
    assert_eq!(bench.election.term().unwrap().token, FencingToken::new(2));
}

#[test]
fn a_holder_that_renews_is_left_alone() {
    let (mut bench, term) = Bench::with_other();
    for n in 1..100 {
        bench.run_until(n * 400);
        bench.model.renew(&term).unwrap();
        let Role::Standby { primary: Some(primary) } = bench.role() else { panic!("{:?}", bench.role()) };
        assert_eq!((primary.instance.as_str(), primary.token), ("b", term.token));
    }
}

#[test]
fn a_released_lease_is_taken_at_once() {
    let (mut bench, term) = Bench::with_other();
    bench.run_until(500);
    bench.model.release(&term, None).unwrap();
    bench.election.woken(bench.now);
    assert_eq!(bench.primary_at(3_000), 500);
}

#[test]
fn the_successor_has_the_first_word_for_the_leases_length() {
    for (successor, at) in [("a", 500), ("c", 2_500)] {
        let (mut bench, term) = Bench::with_other();
        bench.run_until(500);
        bench.model.release(&term, Some(successor)).unwrap();
        bench.election.woken(bench.now);
        assert_eq!(bench.primary_at(4_000), at, "{successor}");
    }
}

#[test]
fn a_holder_stops_by_its_clock_from_before_it_sent() {
    let mut bench = Bench::holding();
    assert_eq!(bench.until(), Duration::from_millis(1_700));
    bench.now = bench.at(400);
    let Some(Step::Renew(term)) = bench.election.next(bench.now) else { panic!("it renews") };
    // The answer is long under way.
    bench.now = bench.at(1_500);
    bench.election.answered(bench.at(400), bench.now, Answer::Renew(term.token, Ok(())));
    assert_eq!(bench.until(), Duration::from_millis(2_100));
    // A late answer to an older one changes nothing.
    bench.election.answered(bench.at(100), bench.now, Answer::Renew(term.token, Ok(())));
    assert_eq!(bench.until(), Duration::from_millis(2_100));
    bench.now = bench.at(2_100);
    assert_eq!(bench.role(), Role::Unknown);
}

#[test]
fn a_renewal_that_hangs_does_not_hold_up_the_next() {
    let mut bench = Bench::holding();
    for n in 1..=3 {
        bench.now = bench.at(n * 400);
        assert!(matches!(bench.election.next(bench.now), Some(Step::Renew(_))), "{n}");
        assert!(bench.election.next(bench.now).is_none());
    }
    let token = bench.election.term().unwrap().token;
    bench.election.answered(bench.at(1_200), bench.at(1_210), Answer::Renew(token, Ok(())));
    assert_eq!(bench.until(), Duration::from_millis(2_900));
}

#[test]
fn a_term_that_reads_call_ours_and_that_cannot_be_renewed_is_followed_by_another() {
    let mut bench = Bench::holding();
    bench.run_until(400);
    let old = bench.election.term().unwrap().clone();
    // Its record stays as it is.
    let mut asked = 0;
    let mut refuse = |bench: &mut Bench| {
        while let Some(step) = bench.election.next(bench.now) {
            asked += 1;
            assert!(asked < 100, "it turns on the spot");
            match step {
                Step::Renew(term) if term == old => {
                    let no = Answer::Renew(term.token, Err(StoreError::Superseded));
                    bench.election.answered(bench.now, bench.now, no);
                }
                Step::Release(term, _) if term == old => {
                    let no = Answer::Release(term.token, Err(StoreError::Superseded));
                    bench.election.answered(bench.now, bench.now, no);
                }
                step => bench.answer(step, None),
            }
        }
    };
    let mut ends = Bench::holding();
    ends.run_until(400);
    ends.election.live(false, ends.now);
    refuse(&mut ends);
    assert!(!ends.election.may_hold());
    for ms in 800..3_000 {
        bench.now = bench.at(ms);
        refuse(&mut bench);
    }
    assert!(bench.is_primary(), "{:?}", bench.role());
    assert!(bench.election.term().unwrap().token > old.token);
}

#[test]
fn a_renewal_that_fails_is_soon_tried_again() {
    let mut bench = Bench::holding();
    bench.run_until(399);
    bench.run(400, Some(&unavailable()));
    bench.run_until(500);
    // Half of a quarter of 400 ms, without jitter.
    assert_eq!(bench.until(), Duration::from_millis(450 + 1_700));
}

#[test]
fn a_store_that_comes_back_finds_the_same_primary_in_the_same_term() {
    for fault in [unavailable(), unanswered()] {
        let mut bench = Bench::holding();
        let term = bench.election.term().cloned();
        bench.run(1_699, Some(&fault));
        assert!(bench.is_primary());
        bench.run(20_000, Some(&fault));
        assert_eq!(bench.role(), Role::Unknown);
        assert_eq!(bench.election.term(), term.as_ref());
        bench.primary_at(20_400);
        assert_eq!(bench.election.term(), term.as_ref());
    }
}

#[test]
fn a_standby_leaves_the_holder_the_first_word_after_an_outage() {
    let (mut bench, _) = Bench::with_other();
    bench.run_until(400);
    bench.run(10_000, Some(&unavailable()));
    assert_eq!(bench.role(), Role::Unknown);
    let at = bench.primary_at(20_000);
    assert!((12_000..=12_400).contains(&at), "{at}: it counts from the first good answer");
}

#[test]
fn one_read_that_fails_is_forgiven() {
    let (mut bench, _) = Bench::with_other();
    bench.run_until(799);
    bench.run(801, Some(&unavailable()));
    assert!(matches!(bench.role(), Role::Standby { primary: Some(_) }));
    assert_eq!(bench.primary_at(4_000), 2_000);
}

#[test]
fn a_standby_that_stood_still_counts_anew() {
    let (mut bench, _) = Bench::with_other();
    bench.run_until(400);
    // Nothing ran for 5 s; the holder may have renewed at any time.
    bench.now = bench.at(5_400);
    assert_eq!(bench.primary_at(9_000), 7_400);
}

#[test]
fn a_deposed_holder_steps_down_and_can_win_again() {
    let mut bench = Bench::holding();
    let term = bench.other_acquires();
    bench.run_until(400);
    let Role::Standby { primary: Some(primary) } = bench.role() else { panic!("{:?}", bench.role()) };
    assert_eq!((primary.instance.as_str(), primary.token), ("b", term.token));
    assert_eq!(bench.election.term(), None);
    assert_eq!(bench.primary_at(4_000), 2_400);
}

#[test]
fn a_lease_whose_record_is_gone_has_no_primary_until_its_length_has_passed() {
    let mut bench = Bench::holding();
    bench.model.lose();
    bench.run_until(400);
    assert_eq!(bench.role(), Role::Standby { primary: None });
    assert_eq!(bench.primary_at(4_000), 2_400);
    assert_eq!(bench.election.term().unwrap().token, FencingToken::new(3));
}

#[test]
fn an_acquisition_without_an_answer_is_found_by_its_nonce() {
    let (mut bench, _) = Bench::with_other();
    bench.run_until(1_999);
    bench.now = bench.at(2_000);
    let Some(Step::Acquire(seen)) = bench.election.next(bench.now) else { panic!("it acquires") };
    let term = bench.model.acquire(&seen, &bench.claim).unwrap();
    bench.election.answered(bench.now, bench.at(2_300), Answer::Acquire(Err(unanswered())));
    bench.now = bench.at(2_300);
    bench.run_until(2_310);
    assert_eq!(bench.election.term(), Some(&term));
    // Counted from the renewal that made it sure.
    assert_eq!(bench.until(), Duration::from_millis(2_300 + 1_700));
}

#[test]
fn an_acquisition_whose_answer_comes_late_holds_from_before_it_was_sent() {
    let (mut bench, _) = Bench::with_other();
    bench.run_until(1_999);
    bench.now = bench.at(2_000);
    let Some(Step::Acquire(seen)) = bench.election.next(bench.now) else { panic!("it acquires") };
    let term = bench.model.acquire(&seen, &bench.claim).unwrap();
    bench.now = bench.at(3_000);
    bench.election.answered(bench.at(2_000), bench.now, Answer::Acquire(Ok(term)));
    assert_eq!(bench.until(), Duration::from_millis(3_700));
}

#[test]
fn a_lost_race_is_followed_by_a_read() {
    let (mut bench, _) = Bench::with_other();
    bench.run_until(1_999);
    let term = bench.model.acquire(&bench.model.record.clone(), &claim("c", "others")).unwrap();
    bench.run_until(2_010);
    let Role::Standby { primary: Some(primary) } = bench.role() else { panic!("{:?}", bench.role()) };
    assert_eq!((primary.instance.as_str(), primary.token), ("c", term.token));
}

#[test]
fn a_process_that_started_anew_waits_for_the_one_before_it() {
    let mut bench = Bench::new();
    // The same name, another process, which may live.
    bench.model.acquire(&LeaseRecord::empty(), &claim("a", "of the process before")).unwrap();
    assert_eq!(bench.primary_at(4_000), 2_000);
}

#[test]
fn an_old_record_of_our_own_that_comes_back_is_not_ours() {
    let mut bench = Bench::holding();
    let old = bench.model.record.clone();
    bench.other_acquires();
    bench.run_until(400);
    assert!(matches!(bench.role(), Role::Standby { primary: Some(_) }));
    bench.model.record = old;
    bench.run_until(900);
    assert_eq!(bench.role(), Role::Standby { primary: None });
    bench.primary_at(4_000);
    assert_eq!(bench.election.term().unwrap().token, FencingToken::new(4));
}

#[test]
fn who_gives_up_is_primary_no_more_and_leaves_others_the_first_word() {
    let mut bench = Bench::holding();
    bench.run_until(100);
    assert!(bench.election.give_up(None, bench.now, bench.now));
    // Before the store has heard of it.
    assert_eq!(bench.role(), Role::Standby { primary: None });
    bench.run_until(101);
    assert!(bench.model.record.released);
    assert!(!bench.election.is_giving_up(bench.now));
    assert_eq!(bench.primary_at(4_000), 2_100);
}

#[test]
fn a_hand_over_renews_until_what_is_in_flight_has_ended() {
    let mut bench = Bench::holding();
    bench.run_until(100);
    let successor = Some("b".to_owned());
    assert!(bench.election.give_up(successor.clone(), bench.at(5_100), bench.now));
    bench.run_until(3_000);
    assert_eq!(bench.role(), Role::Standby { primary: None });
    assert!(bench.election.is_draining(bench.now) && !bench.model.record.released);
    assert!(bench.election.term().is_some(), "calls in flight may still write");
    bench.election.drained(bench.now);
    bench.run_until(3_000);
    assert!(bench.model.record.released);
    assert_eq!(bench.model.record.successor, successor);
    // Or until its time is over.
    let mut bench = Bench::holding();
    bench.election.give_up(None, bench.at(5_000), bench.now);
    bench.run_until(4_999);
    assert!(!bench.model.record.released);
    bench.run_until(5_000);
    assert!(bench.model.record.released);
}

#[test]
fn a_release_without_an_answer_is_repeated_and_ends_in_standing_by() {
    for applied in [false, true] {
        let mut bench = Bench::holding();
        bench.run_until(100);
        bench.election.give_up(None, bench.now, bench.now);
        let Some(Step::Release(term, None)) = bench.election.next(bench.now) else { panic!("it releases") };
        if applied {
            bench.model.release(&term, None).unwrap();
        }
        bench.election.answered(bench.now, bench.now, Answer::Release(term.token, Err(unanswered())));
        assert!(bench.election.is_giving_up(bench.now));
        bench.run_until(400);
        assert!(bench.model.record.released && !bench.election.is_giving_up(bench.now));
        assert!(bench.primary_at(4_000) >= 2_100, "the others had the first word");
    }
}

#[test]
fn who_gave_up_is_no_slower_once_another_has_taken_over() {
    // The other has it 100 ms later, dies at once or gives it back.
    for (successor, gives_back) in [(None, false), (Some("b"), false), (None, true), (Some("b"), true)] {
        let mut bench = Bench::holding();
        bench.election.give_up(successor.map(str::to_owned), bench.now, bench.now);
        bench.run_until(100);
        assert!(bench.model.record.released);
        let term = bench.other_acquires();
        bench.election.woken(bench.now);
        bench.run_until(500);
        assert!(matches!(bench.role(), Role::Standby { primary: Some(_) }), "{:?}", bench.role());
        let most = if gives_back {
            bench.model.release(&term, Some("a")).unwrap();
            900
        } else {
            2_500
        };
        let at = bench.primary_at(6_000);
        assert!(at <= most, "{successor:?}, {gives_back}: {at}");
    }
}

#[test]
fn where_nobody_comes_who_gave_up_is_primary_again_within_the_time_of_a_takeover() {
    for (successor, least) in [(Some("b"), 2_450), (None, 2_000)] {
        let mut bench = Bench::holding();
        bench.election.give_up(successor.map(str::to_owned), bench.now, bench.now);
        bench.run_until(10);
        let at = bench.primary_at(6_000);
        assert!((least..=2_600).contains(&at), "{successor:?}: {at}");
    }
}

#[test]
fn who_gave_up_leaves_the_first_word_though_its_own_term_is_still_seen() {
    let mut bench = Bench::holding();
    let before = bench.model.record.clone();
    bench.election.give_up(Some("b".to_owned()), bench.now, bench.now);
    bench.run_until(100);
    // An old state of the store is back, with an older holder.
    let released = std::mem::replace(&mut bench.model.record, before);
    bench.run_until(500);
    bench.model.record = released;
    assert!((2_500..=3_000).contains(&bench.primary_at(8_000)));
}

#[test]
fn a_standby_has_nothing_to_give_up() {
    let (mut bench, _) = Bench::with_other();
    assert!(!bench.election.give_up(None, bench.now, bench.now));
}

#[test]
fn what_is_given_up_while_it_is_acquired_is_released() {
    let (mut bench, _) = Bench::with_other();
    bench.run_until(1_999);
    bench.now = bench.at(2_000);
    let Some(step) = bench.election.next(bench.now) else { panic!("it acquires") };
    assert!(bench.election.give_up(None, bench.now, bench.now));
    bench.answer(step, None);
    assert!(!bench.is_primary());
    bench.run_until(2_001);
    assert!(bench.model.record.released);
    assert!(bench.primary_at(6_000) >= 4_000);
}

#[test]
fn what_serves_nothing_gives_the_lease_up_and_takes_none() {
    let mut bench = Bench::holding();
    bench.run_until(100);
    bench.election.live(false, bench.now);
    assert_eq!(bench.role(), Role::Standby { primary: None });
    bench.run_until(20_000);
    assert!(bench.model.record.released);
    assert!(!bench.is_primary());
    bench.election.live(true, bench.now);
    assert_eq!(bench.primary_at(20_400), 20_000);
}

#[test]
fn a_read_that_was_overtaken_is_no_news() {
    let (mut bench, term) = Bench::with_other();
    let old = bench.model.record.clone();
    bench.now = bench.at(400);
    assert!(matches!(bench.election.next(bench.now), Some(Step::Read)));
    bench.model.renew(&term).unwrap();
    bench.now = bench.at(800);
    let Some(step) = bench.election.next(bench.now) else { panic!("it reads on") };
    bench.answer(step, None);
    bench.election.answered(bench.at(400), bench.at(900), Answer::Read(Ok(old)));
    bench.now = bench.at(900);
    assert_eq!(bench.primary_at(4_000), 2_800);
}

#[test]
fn a_store_that_refuses_for_ever_makes_no_hot_loop() {
    let mut bench = Bench::holding();
    let refused = StoreError::Refused { reason: "no right".to_owned() };
    let (mut steps, end) = (0, bench.at(60_000));
    while bench.now < end {
        while let Some(step) = bench.election.next(bench.now) {
            steps += 1;
            bench.answer(step, Some(&refused));
        }
        bench.now = bench.election.wake(bench.now).expect("it goes on");
    }
    assert!((200..900).contains(&steps), "{steps} steps in a minute");
}

#[test]
fn a_release_that_fails_for_ever_makes_no_hot_loop() {
    let mut bench = Bench::holding();
    let (mut steps, end) = (0, bench.at(60_000));
    while bench.now < end {
        // Said again and again.
        bench.election.live(false, bench.now);
        while let Some(step) = bench.election.next(bench.now) {
            steps += 1;
            bench.answer(step, Some(&unavailable()));
            bench.election.live(false, bench.now);
        }
        bench.now = bench.election.wake(bench.now).expect("it goes on");
    }
    assert!((200..900).contains(&steps), "{steps} steps in a minute");
}

#[test]
fn a_holder_that_may_not_renew_learns_from_reads_that_another_holds() {
    let mut bench = Bench::holding();
    let term = bench.other_acquires();
    let refused = StoreError::Refused { reason: "no right".to_owned() };
    let end = bench.at(3_000);
    while bench.now < end {
        while let Some(step) = bench.election.next(bench.now) {
            let broken = if matches!(step, Step::Renew(_)) { Some(&refused) } else { None };
            bench.answer(step, broken);
        }
        bench.now = bench.election.wake(bench.now).expect("it goes on");
    }
    assert!(matches!(bench.role(), Role::Standby { primary: Some(it) } if it.token == term.token));
}

#[test]
fn a_record_that_is_not_understood_is_replaced_after_the_length() {
    let (mut bench, _) = Bench::with_other();
    bench.run_until(300);
    // Somebody wrote rubbish over it.
    bench.model.record.holder = None;
    bench.model.record.holder_version = Version::new(900);
    assert_eq!(bench.primary_at(4_000), 2_400);
}

#[test]
fn a_standby_waits_by_the_holders_length_whatever_its_own() {
    // 2 s is its own.
    for (length, waited) in [
        (Some(5_000), 5_000),
        (Some(1_000), 1_000),
        (None, 2_000),
        (Some(1_000_000), 300_000),
        (Some(0), 100),
    ] {
        let mut bench = Bench::new();
        let other = claim("b", "its");
        let other = match length {
            Some(ms) => other.with_length(Duration::from_millis(ms)),
            None => other,
        };
        bench.model.acquire(&LeaseRecord::empty(), &other).unwrap();
        assert_eq!(bench.primary_at(400_000), waited, "{length:?}");
    }
}

#[test]
fn where_the_record_is_gone_the_last_holders_length_is_waited() {
    for (length, at) in [(5_000, 5_400), (1_000, 2_400)] {
        let mut bench = Bench::new();
        let other = claim("b", "its").with_length(Duration::from_millis(length));
        bench.model.acquire(&LeaseRecord::empty(), &other).unwrap();
        bench.run_until(300);
        bench.model.lose();
        assert_eq!(bench.primary_at(10_000), at);
    }
}

#[test]
fn a_holder_is_not_shown_its_own_record_as_another() {
    let holder = Holder::new(
        Primary::new("a", InstanceId::new("127.0.0.1", 1), FencingToken::new(1)),
        Nonce::new("mine"),
    );
    let mut bench = Bench::new();
    bench.model.record.holder = Some(holder);
    bench.model.record.holder_version = Version::new(7);
    bench.model.record.released = true;
    bench.election.live(false, bench.now);
    bench.run_until(0);
    assert_eq!(bench.role(), Role::Standby { primary: None });
}
