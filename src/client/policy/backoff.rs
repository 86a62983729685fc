//! How long to wait before another attempt: pure.

use std::time::Duration;

use crate::client::deadline::FOR_EVER;

/// An exponential back-off (gRFC A6, "Exponential Backoff").
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Backoff {
    pub(crate) initial: Duration,
    pub(crate) max: Duration,
    pub(crate) multiplier: f64,
    /// The wait is varied by this share of it, either way.
    pub(crate) jitter: f64,
}

impl Backoff {
    /// The pace of calls without a policy, from the second resend on: the first
    /// one is immediate. Our choice; it grows as gRPC's connection back-off does.
    pub(crate) const OURS: Self = Self {
        initial: Duration::from_millis(20),
        max: Duration::from_millis(500),
        multiplier: 1.6,
        jitter: 0.2,
    };

    /// The wait before the resend number `n`, from 0; `chance` is from 0 to 1.
    pub(crate) fn wait(&self, n: u32, chance: f64) -> Duration {
        let n = i32::try_from(n).unwrap_or(i32::MAX);
        // May be infinite, which the longest bounds.
        let grown = self.initial.as_secs_f64() * self.multiplier.powi(n);
        let varied = grown.min(self.max.as_secs_f64()) * (1.0 - self.jitter + 2.0 * self.jitter * chance);
        Duration::try_from_secs_f64(varied).unwrap_or(FOR_EVER).min(FOR_EVER)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_grows_to_the_longest_and_varies_by_a_fifth() {
        let backoff = Backoff {
            initial: Duration::from_millis(100),
            max: Duration::from_secs(1),
            multiplier: 2.0,
            jitter: 0.2,
        };
        for (n, millis) in [(0, 100), (1, 200), (2, 400), (3, 800), (4, 1000), (1_000_000, 1000)] {
            let full = Duration::from_millis(millis);
            let wait = |chance| backoff.wait(n, chance).as_secs_f64();
            assert!((wait(0.5) - full.as_secs_f64()).abs() < 1e-9, "{n}");
            assert!((wait(0.0) - 0.8 * full.as_secs_f64()).abs() < 1e-9, "{n}");
            assert!((wait(1.0) - 1.2 * full.as_secs_f64()).abs() < 1e-9, "{n}");
        }
    }

    proptest! {
        #[test]
        fn no_numbers_make_it_panic_or_wait_longer_than_it_may(
            initial in any::<u64>(), max in any::<u64>(), multiplier in 0.0_f64..f64::MAX, n in any::<u32>(),
            chance in 0.0_f64..1.0,
        ) {
            let max = Duration::from_millis(max).min(FOR_EVER);
            let backoff = Backoff { initial: Duration::from_millis(initial), max, multiplier, jitter: 0.2 };
            prop_assert!(backoff.wait(n, chance) <= max.mul_f64(1.21));
        }
    }
}
