//! The settings of a method.

use std::time::Duration;

use tonic::Code;

use super::{Backoff, Codes};
use crate::client::deadline::FOR_EVER;

/// How the calls of one method, of one service or of all services are made:
/// see [`ServiceOptions::method`](crate::client::ServiceOptions::method).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MethodOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) wait_for_ready: bool,
    pub(crate) retry: Option<RetryPolicy>,
    pub(crate) hedging: Option<HedgingPolicy>,
}

/// When, how often and how soon a call is sent again.
///
/// What is proven never to have run is resent whatever the policy says, as often
/// as [`max_attempts`](crate::client::ServiceOptions::max_attempts) of the
/// service allows. A policy is about the rest:
///
/// * A **status that came over the wire** is resent when it is one of
///   [`retry_on`](Self::retry_on). As in every gRPC implementation, naming a code
///   there declares that a call which got it may be sent again, *whether its
///   method is safe or not*. Without `retry_on` only UNAVAILABLE is resent, and
///   only of safe methods.
/// * A **failure of our own finding** after which the call may have run (the
///   connection was lost, its stream reset, its instance silent, the attempt's
///   time over) counts as UNAVAILABLE: it is resent when UNAVAILABLE is named in
///   `retry_on`, or the method is safe.
///
/// All within the service's budget. A response that has begun, and a request of
/// which more than [`replay_limit`](crate::client::ServiceOptions::replay_limit)
/// has been taken, are never sent again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RetryPolicy {
    pub(crate) max_attempts: Option<u32>,
    pub(crate) backoff: Option<Backoff>,
    pub(crate) jitter: Option<f64>,
    pub(crate) attempt_timeout: Option<Duration>,
    pub(crate) codes: Option<Codes>,
}

/// Further attempts elsewhere before the first has ended (gRFC A6, "Hedging
/// Policy"): the first answer wins, the others are cancelled.
///
/// Only safe methods are hedged; `build()` refuses it for a name that covers none. (A
/// service config's `hedgingPolicy` is its author's word that the methods it names are.)
/// Each attempt goes to another instance while there is one; none is sent where one is
/// still out. What is cancelled counts against nobody. Each attempt beyond the first must be
/// within the service's budget.
///
/// A request that cannot be kept whole, because it is a stream that is not
/// there at once or is larger than
/// [`replay_limit`](crate::client::ServiceOptions::replay_limit), is sent once.
#[derive(Clone, Debug, PartialEq)]
pub struct HedgingPolicy {
    pub(crate) max_attempts: u32,
    pub(crate) delay: Duration,
    pub(crate) non_fatal: Codes,
    /// The methods are declared safe by whoever wrote this.
    pub(crate) declared: bool,
}

// === impl MethodOptions ===

impl MethodOptions {
    /// As without any: the service's own settings hold.
    pub fn new() -> Self {
        Self::default()
    }

    /// The deadline of its calls, responses and streams included. The sooner of
    /// it and the call's own holds; for calls without one it takes the place of
    /// [`default_timeout`](crate::client::ServiceOptions::default_timeout). The
    /// server is told. Default: none.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout.min(FOR_EVER));
        self
    }

    /// Calls wait for a usable instance until their deadline, and not only for
    /// [`fail_fast_after`](crate::client::ServiceOptions::fail_fast_after).
    /// Default: no.
    pub fn wait_for_ready(mut self, yes: bool) -> Self {
        self.wait_for_ready = yes;
        self
    }

    /// How its calls are sent again. Default: what may have run is resent if it
    /// is safe, up to [`max_attempts`](crate::client::ServiceOptions::max_attempts),
    /// at once the first time and then at a growing pace from 20 ms to 500 ms.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = Some(policy);
        self
    }

    /// How its calls are hedged; excludes [`retry`](Self::retry). Default: not at all.
    pub fn hedging(mut self, policy: HedgingPolicy) -> Self {
        self.hedging = Some(policy);
        self
    }
}

// === impl RetryPolicy ===

impl RetryPolicy {
    /// As without a policy.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many attempts a call has, the first included. Attempts that never ran
    /// do not count (gRFC A6). 1: no other. Default:
    /// [`max_attempts`](crate::client::ServiceOptions::max_attempts), for all together.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// The wait before each further attempt: `initial`, then `multiplier` times
    /// as long each time, up to `max`. A server's `grpc-retry-pushback-ms` takes
    /// its place, and begins it anew. Default: none the first time, then from
    /// 20 ms, 1.6 times as long each time, up to 500 ms.
    pub fn backoff(mut self, initial: Duration, max: Duration, multiplier: f64) -> Self {
        let (initial, max) = (initial.min(FOR_EVER), max.min(FOR_EVER));
        self.backoff = Some(Backoff { initial, max, multiplier, jitter: Backoff::OURS.jitter });
        self
    }

    /// By which share of itself each wait is varied, either way. Default: 0.2 (gRFC A6).
    pub fn jitter(mut self, share: f64) -> Self {
        self.jitter = Some(share);
        self
    }

    /// How long one attempt may take until its response begins (for a unary call
    /// that is safe: until all of it is here). It counts against the instance then, and the
    /// call goes on elsewhere.
    ///
    /// An attempt that could not be followed by another one, because it is the
    /// last or the call may not be sent again, is left alone. Default: none.
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = Some(timeout.min(FOR_EVER));
        self
    }

    /// The statuses that are resent, whether the method is safe or not. Default:
    /// UNAVAILABLE, of safe methods.
    pub fn retry_on(mut self, codes: impl IntoIterator<Item = Code>) -> Self {
        self.codes = Some(codes.into_iter().collect());
        self
    }
}

// === impl HedgingPolicy ===

impl HedgingPolicy {
    /// One attempt more after each `delay` without an answer, up to two in all.
    /// Nothing: all at once.
    pub fn new(delay: Duration) -> Self {
        let non_fatal = [Code::Unavailable].into_iter().collect();
        Self { max_attempts: 2, delay: delay.min(FOR_EVER), non_fatal, declared: false }
    }

    /// How many attempts a call has, the first included. Default: 2.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// The statuses upon which the next attempt is made at once. Any other ends
    /// the call. Default: UNAVAILABLE.
    pub fn non_fatal(mut self, codes: impl IntoIterator<Item = Code>) -> Self {
        self.non_fatal = codes.into_iter().collect();
        self
    }
}
