//! What may be sent again, and how soon: pure, but for the budget.

use std::time::Duration;

use parking_lot::Mutex;
use tonic::{Code, Status};
use tower::util::rng::{HasherRng, Rng};

use super::{
    mechanisms::{CallMechanism, CallWithout},
    policy::{Backoff, Budget, Pushback, RetryRules},
};
use crate::NotPrimary;

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
    /// Of them, those that were refused by who is not the primary, and sent on for it:
    /// no bound counts them.
    pub(crate) elsewhere: u32,
    /// Refused once and resent for it already.
    refused: bool,
    /// Of the counted, those since the server last said when.
    backed_off: u32,
    /// The connections tried.
    pub(crate) on: Vec<u64>,
}

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setback {
    /// It never left: it may be sent elsewhere, any number of times.
    NeverSent,
    /// The server has not processed it: it may be sent again, once (gRFC A6).
    Refused,
    /// It may have run, and no status came of it. Counts as UNAVAILABLE.
    Lost,
    /// The server's own status.
    Status(Code, Pushback),
}

impl Setback {
    /// What a status of failure means. Who refuses because it is not the primary has not
    /// run the call.
    pub(crate) fn of(status: &Status, pushback: Pushback) -> Self {
        match NotPrimary::of(status) {
            Some(_) => Self::Refused,
            None => Self::Status(status.code(), pushback),
        }
    }
}

impl Tries {
    /// The first one is being made.
    pub(crate) fn first() -> Self {
        Self { made: 1, ..Self::default() }
    }

    /// Attempts that count for how often a call may be sent.
    pub(crate) fn sends(&self) -> u32 {
        self.made - self.elsewhere
    }

    /// Whether a call that has not run is resent for that alone.
    pub(crate) fn is_unseen(&mut self, setback: Setback) -> bool {
        match setback {
            Setback::NeverSent => true,
            Setback::Refused => !std::mem::replace(&mut self.refused, true),
            Setback::Lost | Setback::Status(..) => false,
        }
    }
}

/// Shared by all calls of one service.
pub(crate) struct Retry {
    pub(crate) budget: Budget,
    rng: Mutex<HasherRng>,
    without: CallWithout,
}

impl Retry {
    pub(crate) fn new(budget: Budget, without: CallWithout) -> Self {
        Self { budget, rng: Mutex::new(HasherRng::new()), without }
    }

    /// The wait before the call is sent again, or `None` where it is not. Takes
    /// from the budget where that must pay for it.
    pub(crate) fn again(
        &self,
        rules: &RetryRules,
        setback: Setback,
        safe: bool,
        replayable: bool,
        tries: &mut Tries,
    ) -> Option<Duration> {
        let lacks = |mechanism| self.without.lacks(mechanism);
        let capped = |count: u32, cap: u32| count >= cap && !lacks(CallMechanism::Cap);
        let resendable = replayable && !capped(tries.sends(), rules.sends);
        let forgetful = setback == Setback::Refused && lacks(CallMechanism::RefusedOnce);
        if tries.is_unseen(setback) || forgetful {
            let resendable = resendable && !lacks(CallMechanism::Unseen);
            return resendable.then(|| self.pace(tries.sends()));
        }
        let (meant, pushback) = match setback {
            Setback::Status(code, pushback) => (rules.resends(code, safe), pushback),
            _ => (rules.resends_lost(safe), Pushback::Unsaid),
        };
        if meant || pushback == Pushback::Never {
            self.budget.failed();
        }
        let resend = meant
            && pushback != Pushback::Never
            && resendable
            && !capped(tries.counted + 1, rules.attempts)
            && !lacks(CallMechanism::Replay)
            && (self.budget.pay() || lacks(CallMechanism::Budget));
        if !resend {
            return None;
        }
        tries.counted += 1;
        tries.ran |= setback != Setback::Refused;
        Some(self.wait(rules, pushback, tries))
    }

    fn wait(&self, rules: &RetryRules, pushback: Pushback, tries: &mut Tries) -> Duration {
        if let Pushback::After(wait) = pushback {
            tries.backed_off = 0;
            return wait;
        }
        let Some(backoff) = &rules.backoff else {
            return self.varied_pace(tries.sends(), rules.jitter);
        };
        let nth = tries.backed_off;
        tries.backed_off += 1;
        backoff.wait(nth, self.chance())
    }

    /// Our own pace, after so many attempts: at once the first time.
    pub(crate) fn pace(&self, made: u32) -> Duration {
        self.varied_pace(made, Backoff::OURS.jitter)
    }

    fn varied_pace(&self, made: u32, jitter: f64) -> Duration {
        match made.checked_sub(2) {
            None => Duration::ZERO,
            Some(nth) => Backoff { jitter, ..Backoff::OURS }.wait(nth, self.chance()),
        }
    }

    fn chance(&self) -> f64 {
        self.rng.lock().next_f64()
    }
}

#[cfg(test)]
mod tests;
