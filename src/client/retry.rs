//! What may be sent again, and how soon: pure, but for the budget.

use std::time::Duration;

use parking_lot::Mutex;
use tower::{
    retry::budget::{Budget, TpsBudget},
    util::rng::{HasherRng, Rng},
};

use super::{options::ServiceOptions, outcome::Proof};

/// How long the budget looks back.
const BUDGET_WINDOW: Duration = Duration::from_secs(10);

/// The wait before the second resend; the first is immediate. It grows by 1.6
/// (as gRPC's connection back-off does) up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The attempts of one call.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    /// Attempts made, each on a connection.
    pub(crate) made: u32,
    /// Of them, those resent within the budget: what
    /// `grpc-previous-rpc-attempts` tells the server (gRFC A6).
    pub(crate) counted: u32,
    /// One of them may have run: it was not merely refused.
    pub(crate) ran: bool,
    /// Refused once and resent for it already.
    refused: bool,
    /// The connections tried.
    pub(crate) on: Vec<u64>,
}

/// Shared by all calls of one service.
pub(crate) struct Retry {
    max_attempts: u32,
    budget: TpsBudget,
    rng: Mutex<HasherRng>,
}

impl Retry {
    pub(crate) fn new(options: &ServiceOptions) -> Self {
        Self {
            max_attempts: options.max_attempts,
            budget: TpsBudget::new(BUDGET_WINDOW, options.retries_per_second, options.retry_ratio),
            rng: Mutex::new(HasherRng::new()),
        }
    }

    /// A call has begun: it adds its share to the budget.
    pub(crate) fn begin(&self) {
        self.budget.deposit();
    }

    /// Whether the call is sent again, given what its last attempt proved.
    /// Takes from the budget where that must pay for it.
    pub(crate) fn may_resend(&self, proof: Proof, safe: bool, replayable: bool, tries: &mut Tries) -> bool {
        if !replayable || tries.made >= self.max_attempts {
            return false;
        }
        match proof {
            Proof::NeverSent => true,
            Proof::Refused if !tries.refused => {
                tries.refused = true;
                true
            }
            _ if safe && self.budget.withdraw() => {
                tries.counted += 1;
                tries.ran |= proof == Proof::MayHaveRun;
                true
            }
            _ => false,
        }
    }

    /// The wait before the next attempt, jittered between half and all of it.
    pub(crate) fn pause(&self, tries: &Tries) -> Duration {
        if tries.made < 2 {
            return Duration::ZERO;
        }
        let exponent = i32::try_from(tries.made - 2).unwrap_or(i32::MAX).min(16);
        let full = FIRST_PAUSE.mul_f64(1.6_f64.powi(exponent)).min(LONGEST_PAUSE);
        full.mul_f64(0.5 + 0.5 * self.rng.lock().next_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry() -> Retry {
        Retry::new(&ServiceOptions::new("x").max_attempts(4).retry_budget(0.0, 1))
    }

    fn tries(made: u32) -> Tries {
        Tries { made, ..Tries::default() }
    }

    #[tokio::test]
    async fn what_was_never_sent_is_resent_up_to_the_cap() {
        let retry = retry();
        assert!(retry.may_resend(Proof::NeverSent, false, true, &mut tries(3)));
        assert!(!retry.may_resend(Proof::NeverSent, false, true, &mut tries(4)), "the cap");
        assert!(!retry.may_resend(Proof::NeverSent, false, false, &mut tries(1)), "the body is gone");
    }

    #[tokio::test]
    async fn what_was_refused_is_resent_once() {
        let (retry, mut tries) = (retry(), tries(1));
        assert!(retry.may_resend(Proof::Refused, false, true, &mut tries));
        assert!(!retry.may_resend(Proof::Refused, false, true, &mut tries));
    }

    #[tokio::test]
    async fn what_may_have_run_is_resent_only_if_safe_and_within_the_budget() {
        let (retry, mut tries) = (retry(), tries(1));
        assert!(!retry.may_resend(Proof::MayHaveRun, false, true, &mut tries));
        let resent = (0..100).filter(|_| retry.may_resend(Proof::MayHaveRun, true, true, &mut tries)).count();
        assert_eq!(resent, 10, "one a second over the window of ten");
        assert_eq!(tries.counted, 10);
    }

    #[tokio::test]
    async fn the_first_resend_is_immediate_and_later_ones_wait_longer_and_longer() {
        let retry = retry();
        assert_eq!(retry.pause(&tries(1)), Duration::ZERO);
        for made in 2..40 {
            let pause = retry.pause(&tries(made));
            assert!(pause >= FIRST_PAUSE / 2 && pause <= LONGEST_PAUSE, "{made}: {pause:?}");
        }
    }
}
