//! When the next question may be asked. Pure: time and chance come from outside.

use std::time::Duration;

use tokio::time::Instant;
use tower::util::rng::Rng;

/// Exponential back-off with full jitter: each delay is anywhere between nothing
/// and a bound that doubles
/// (<https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/>).
#[derive(Debug)]
pub(super) struct Backoff<R> {
    min: Duration,
    max: Duration,
    failures: u32,
    rng: R,
}

/// A token bucket. Of two tokens, as Consul's page on blocking queries suggests
/// for its questions
/// (<https://developer.hashicorp.com/consul/api-docs/features/blocking>).
#[derive(Debug)]
pub(super) struct Spacing {
    every: Duration,
    /// What a full bucket holds beyond the first token, in time.
    spare: Duration,
    /// When the bucket will be full again.
    full_at: Option<Instant>,
}

// === impl Backoff ===

impl<R: Rng> Backoff<R> {
    pub(super) fn new(min: Duration, max: Duration, rng: R) -> Self {
        Self { min, max: max.max(min), failures: 0, rng }
    }

    /// The delay after one more failure.
    pub(super) fn failed(&mut self) -> Duration {
        let doubled = self.min.saturating_mul(2_u32.saturating_pow(self.failures));
        self.failures = self.failures.saturating_add(1);
        doubled.min(self.max).mul_f64(self.rng.next_f64())
    }

    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// A random number from 0 to below 1, from the same source as the delays.
    pub(super) fn random(&mut self) -> f64 {
        self.rng.next_f64()
    }
}

// === impl Spacing ===

impl Spacing {
    pub(super) fn new(every: Duration) -> Self {
        Self::with_burst(every, 2)
    }

    /// `burst` at once, and then one in each `every`.
    pub(super) fn with_burst(every: Duration, burst: u32) -> Self {
        Self { every, spare: every * burst.saturating_sub(1), full_at: None }
    }

    /// Takes a token: when its question may be asked.
    pub(super) fn take(&mut self, now: Instant) -> Instant {
        let full_at = self.full_at.map_or(now, |it| it.max(now));
        self.full_at = Some(full_at + self.every);
        // A token is there while no more than the spare ones are owed.
        full_at.checked_sub(self.spare).map_or(now, |it| it.max(now))
    }

    /// Takes the first token that is to be had from `from` on, unless that is not
    /// before `limit`.
    pub(super) fn take_before(&mut self, from: Instant, limit: Instant) -> Option<Instant> {
        let before = self.full_at;
        let at = self.take(from);
        if at >= limit {
            self.full_at = before;
            return None;
        }
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    // Both name a trait so.
    use tower::util::rng::Rng;

    use super::*;

    struct Always(u64);

    impl Rng for Always {
        fn next_u64(&mut self) -> u64 {
            self.0
        }
    }

    const MS: Duration = Duration::from_millis(1);

    proptest! {
        #[test]
        fn in_no_span_do_more_go_than_the_burst_and_one_for_each_step(
            burst in 1..6_u32,
            pauses in prop::collection::vec(0..400_u32, 1..60),
        ) {
            let (mut now, mut spacing) = (Instant::now(), Spacing::with_burst(100 * MS, burst));
            let mut gone = Vec::new();
            for pause in pauses {
                now += pause * MS;
                let at = spacing.take(now);
                prop_assert!(at >= now);
                // Whoever asks waits for its turn.
                now = at;
                gone.push(at);
            }
            for (first, begin) in gone.iter().enumerate() {
                for (more, end) in gone[first..].iter().enumerate() {
                    let steps = (*end - *begin).as_millis() / 100;
                    prop_assert!(more as u128 <= u128::from(burst - 1) + steps, "{more} within {:?}", *end - *begin);
                }
            }
        }

        #[test]
        fn a_delay_is_below_its_bound_and_the_bound_below_the_largest(
            min in 0..2_000_u32,
            max in 0..20_000_u32,
            chances in prop::collection::vec(any::<u64>(), 1..80),
        ) {
            let mut backoff = Backoff::new(min * MS, max * MS, Always(0));
            for (failures, chance) in (0_u32..).zip(chances) {
                backoff.rng = Always(chance);
                let bound = (min * MS).saturating_mul(2_u32.saturating_pow(failures)).min(max.max(min) * MS);
                prop_assert!(backoff.failed() <= bound);
            }
        }
    }

    #[test]
    fn the_bound_of_the_delay_doubles_up_to_the_largest() {
        let mut backoff = Backoff::new(100 * MS, 450 * MS, Always(u64::MAX));
        let delays: Vec<_> = (0..5).map(|_| backoff.failed().as_millis()).collect();
        // Just below the bound, and rounded to it where that is nearer than a nanosecond.
        assert!(delays.iter().zip([100, 200, 400, 450, 450]).all(|(a, b)| b - a <= 1), "{delays:?}");
        backoff.reset();
        assert!(backoff.failed() <= 100 * MS);
    }

    #[test]
    fn the_delay_may_be_nothing() {
        assert_eq!(Backoff::new(100 * MS, 450 * MS, Always(0)).failed(), Duration::ZERO);
    }

    #[test]
    fn a_thousand_failures_do_not_overflow() {
        let mut backoff = Backoff::new(100 * MS, 450 * MS, Always(1 << 63));
        for _ in 0..1000 {
            assert!(backoff.failed() <= 450 * MS);
        }
    }

    #[test]
    fn two_questions_go_at_once_and_then_one_in_each_span() {
        let (now, mut spacing) = (Instant::now(), Spacing::new(100 * MS));
        let waits: Vec<_> = (0..4).map(|_| spacing.take(now) - now).collect();
        assert_eq!(waits, [Duration::ZERO, Duration::ZERO, 100 * MS, 200 * MS]);
    }

    #[test]
    fn a_token_that_comes_too_late_is_left_to_others() {
        let (now, mut spacing) = (Instant::now(), Spacing::with_burst(100 * MS, 1));
        assert_eq!(spacing.take_before(now, now + 150 * MS), Some(now));
        assert_eq!(spacing.take_before(now, now + 150 * MS), Some(now + 100 * MS));
        assert_eq!(spacing.take_before(now, now + 150 * MS), None);
        assert_eq!(spacing.take_before(now, now + 250 * MS), Some(now + 200 * MS));
    }

    #[test]
    fn the_burst_comes_back_after_a_quiet_time() {
        let (now, mut spacing) = (Instant::now(), Spacing::new(100 * MS));
        for _ in 0..4 {
            spacing.take(now);
        }
        let later = now + 400 * MS;
        let waits: Vec<_> = (0..3).map(|_| spacing.take(later) - later).collect();
        assert_eq!(waits, [Duration::ZERO, Duration::ZERO, 100 * MS]);
    }
}
