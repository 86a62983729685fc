//! The rules of one method, as the options and the service config come to it.

use std::time::Duration;

use tonic::Code;

use super::{Backoff, Codes, HedgingPolicy, MethodOptions, RetryPolicy};

/// What a call goes by.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// Bounds the call's own deadline.
    pub(crate) timeout: Option<Duration>,
    pub(crate) wait_for_ready: bool,
    pub(crate) retry: RetryRules,
    pub(crate) hedging: Option<HedgeRules>,
}

/// When a call is sent again.
#[derive(Clone, Debug)]
pub(crate) struct RetryRules {
    /// Attempts that may have run, at most.
    pub(crate) attempts: u32,
    /// Attempts in all.
    pub(crate) sends: u32,
    /// `None`: our own pace, but for its jitter.
    pub(crate) backoff: Option<Backoff>,
    pub(crate) jitter: f64,
    pub(crate) attempt_timeout: Option<Duration>,
    /// Declared: these are resent, whether the method is safe or not.
    pub(crate) codes: Option<Codes>,
}

/// When a call is sent twice.
#[derive(Clone, Debug)]
pub(crate) struct HedgeRules {
    pub(crate) attempts: u32,
    pub(crate) sends: u32,
    pub(crate) delay: Duration,
    pub(crate) non_fatal: Codes,
    pub(crate) declared: bool,
}

impl Rules {
    /// `cap` attempts in all where the method has no policy; where it has one,
    /// that many more than the policy's for what never ran.
    pub(crate) fn new(options: &MethodOptions, cap: u32) -> Self {
        Self {
            timeout: options.timeout,
            wait_for_ready: options.wait_for_ready,
            retry: RetryRules::new(&options.retry.clone().unwrap_or_default(), cap),
            hedging: options.hedging.as_ref().map(|policy| HedgeRules::new(policy, cap)),
        }
    }
}

impl RetryRules {
    fn new(policy: &RetryPolicy, cap: u32) -> Self {
        let jitter = policy.jitter.unwrap_or(Backoff::OURS.jitter);
        Self {
            attempts: policy.max_attempts.unwrap_or(cap),
            sends: policy.max_attempts.map_or(cap, |attempts| sends(attempts, cap)),
            backoff: policy.backoff.map(|backoff| Backoff { jitter, ..backoff }),
            jitter,
            attempt_timeout: policy.attempt_timeout,
            codes: policy.codes,
        }
    }

    /// Whether a status that came over the wire is resent.
    pub(crate) fn resends(&self, code: Code, safe: bool) -> bool {
        match self.codes {
            Some(codes) => codes.contains(code),
            None => safe && code == Code::Unavailable,
        }
    }

    /// Whether a failure of our own finding is.
    pub(crate) fn resends_lost(&self, safe: bool) -> bool {
        safe || self.resends(Code::Unavailable, safe)
    }
}

impl HedgeRules {
    fn new(policy: &HedgingPolicy, cap: u32) -> Self {
        Self {
            attempts: policy.max_attempts,
            sends: sends(policy.max_attempts, cap),
            delay: policy.delay,
            non_fatal: policy.non_fatal,
            declared: policy.declared,
        }
    }

    /// Whether calls of such a method are hedged at all.
    pub(crate) fn allows(&self, safe: bool) -> bool {
        safe || self.declared
    }

    /// Whether the call goes on after a failure of our own finding.
    pub(crate) fn outlives_lost(&self, safe: bool) -> bool {
        safe || self.non_fatal.contains(Code::Unavailable)
    }
}

/// Attempts in all: gRFC A6 does not count those that never ran, and we bound them.
fn sends(attempts: u32, cap: u32) -> u32 {
    attempts.saturating_add(cap.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(policy: RetryPolicy) -> RetryRules {
        Rules::new(&MethodOptions::new().retry(policy), 5).retry
    }

    #[test]
    fn without_a_policy_only_unavailable_answers_of_safe_methods_are_resent() {
        let rules = rules(RetryPolicy::new());
        for code in (0..17).map(Code::from_i32) {
            assert_eq!(rules.resends(code, true), code == Code::Unavailable);
            assert!(!rules.resends(code, false));
        }
        assert!(rules.resends_lost(true) && !rules.resends_lost(false));
        assert_eq!((rules.attempts, rules.sends), (5, 5));
    }

    #[test]
    fn a_code_that_is_named_is_resent_of_any_method_and_unavailable_stands_for_losses() {
        let aborted = rules(RetryPolicy::new().retry_on([Code::Aborted]));
        assert!(aborted.resends(Code::Aborted, false));
        assert!(!aborted.resends(Code::Unavailable, true), "not named");
        assert!(!aborted.resends_lost(false), "UNAVAILABLE is not named");
        assert!(aborted.resends_lost(true), "safe is safe");
        assert!(rules(RetryPolicy::new().retry_on([Code::Unavailable])).resends_lost(false));
    }

    #[test]
    fn attempts_that_never_ran_have_a_bound_of_their_own() {
        let rules = rules(RetryPolicy::new().max_attempts(3));
        assert_eq!((rules.attempts, rules.sends), (3, 7));
    }
}
