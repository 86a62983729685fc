//! What one call is about, and what each of its attempts is judged by.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use http::uri::PathAndQuery;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status};

use super::CallShared;
use crate::{
    Instance, NotPrimary,
    client::{
        answer::Answer,
        attempt::{Ended, Failure},
        balance::Chosen,
        choice::{Aim, CallOptions, Unreached},
        deadline::{Deadline, FOR_EVER},
        endpoint::Endpoint,
        error::{CallError, CallErrorKind},
        latecomers::Latecomers,
        mechanisms::CallMechanism,
        methods::Method,
        outcome::{self, Proof},
        policy::{HedgeRules, Rules},
        primary::Lookout,
        report::Report,
        retry::{Setback, Tries},
    },
};

/// One call.
pub(crate) struct CallContext {
    shared: Arc<CallShared>,
    path: PathAndQuery,
    method: Method,
    /// What it wants otherwise than the settings have it. Boxed, because most calls want nothing.
    wishes: Option<Box<CallOptions>>,
}

impl CallContext {
    /// Begins a call, which ends when this is dropped.
    ///
    /// # Errors
    /// As many are under way as may be.
    #[inline]
    pub(super) fn begin(
        shared: &Arc<CallShared>,
        path: PathAndQuery,
        wishes: Option<Box<CallOptions>>,
    ) -> Result<Self, CallError> {
        if let Err(kind) = shared.admission.begin() {
            return Err(shared.refuse(kind, path.path()));
        }
        shared.retry.budget.begun();
        let method = shared.methods.get(path.path());
        Ok(Self { shared: shared.clone(), path, method, wishes })
    }

    #[inline]
    pub(super) fn path(&self) -> &PathAndQuery {
        &self.path
    }

    #[inline]
    pub(super) fn shared(&self) -> &CallShared {
        &self.shared
    }

    #[inline]
    pub(crate) fn latecomers(&self) -> &Latecomers {
        &self.shared.latecomers
    }

    /// The rules it goes by.
    #[inline]
    pub(super) fn rules(&self) -> &Rules {
        self.shared.methods.rules(self.method)
    }

    /// The rules of its hedges, where it may have any.
    #[inline]
    pub(super) fn hedging(&self) -> Option<&HedgeRules> {
        self.rules().hedging.as_ref().filter(|rules| rules.allows(self.method.safe))
    }

    #[inline]
    pub(super) fn is_safe(&self) -> bool {
        self.method.safe || self.lacks(CallMechanism::Safety)
    }

    #[inline]
    pub(crate) fn has_unary_response(&self) -> bool {
        self.method.unary_response
    }

    /// Where it finds the primary, if it is to go there.
    #[inline]
    pub(super) fn lookout(&self) -> Option<&Lookout> {
        // What says itself where it wants to go goes there, whoever is primary.
        self.shared.lookout.as_deref().filter(|_| self.aim().is_none())
    }

    /// How much of an answer is taken in before it is handed over.
    #[inline]
    pub(super) fn whole(&self) -> Option<usize> {
        (self.method.safe && self.method.unary_response).then(|| self.shared.options.answer_limit())
    }

    /// How long it waits for usable instances, all waits together.
    pub(super) fn patience(&self) -> Duration {
        if self.waits() { FOR_EVER } else { self.shared.options.fail_fast_after }
    }

    /// Until its deadline, if need be.
    fn waits(&self) -> bool {
        let said = self.wishes.as_deref().and_then(CallOptions::waits);
        said.unwrap_or(self.rules().wait_for_ready || self.shared.options.traffic.wait_for_ready)
    }

    /// Where it wants to go.
    #[inline]
    fn aim(&self) -> Option<&Aim> {
        self.wishes.as_deref().and_then(CallOptions::aim)
    }

    /// It may be ended when its instance has left, where it is a stream.
    #[inline]
    pub(crate) fn drains(&self) -> bool {
        self.shared.options.traffic.drain_after.is_some()
    }

    pub(crate) fn failures_to_eject(&self) -> u32 {
        self.shared.options.failures_to_eject
    }

    /// Whether a test has switched it off.
    #[inline]
    pub(crate) fn lacks(&self, mechanism: CallMechanism) -> bool {
        self.shared.without.lacks(mechanism)
    }

    /// Tells the hook of one failed attempt.
    pub(crate) fn failed(
        &self,
        instance: Option<&Arc<Instance>>,
        attempt: u32,
        status: &Status,
        resent: bool,
    ) {
        self.shared.failed(self.path.path(), instance, attempt, status, resent);
    }

    /// Tells the hook of an attempt that came to an error of our own.
    pub(super) fn failed_by(&self, error: &CallError, resent: bool) {
        self.failed(error.instance(), error.attempts(), error.status(), resent);
    }

    /// The call fails for its caller.
    pub(super) fn give_up(&self, error: CallError) -> CallError {
        self.failed_by(&error, false);
        error
    }

    /// A usable endpoint at once, one not in `avoid` if there is one.
    #[inline]
    pub(super) fn pick_now(&self, avoid: &[u64]) -> Option<Chosen> {
        match self.aim() {
            None => self.shared.picker.pick(&self.shared.binding.borrow(), avoid),
            Some(aim) => aim.find(&self.shared, avoid),
        }
    }

    /// A usable endpoint; waits for one as long as there is `patience`, and takes
    /// the wait from it.
    pub(super) async fn pick(
        &self,
        tries: &Tries,
        deadline: &Deadline,
        patience: &mut Duration,
    ) -> Result<Chosen, CallError> {
        if let Some(endpoint) = self.pick_now(&tries.on) {
            return Ok(endpoint);
        }
        let started = Instant::now();
        let limit = deadline.at().min(started + *patience);
        let error = |kind| CallError::new(kind, None, tries.made).after(tries);
        let waiting = self.shared.admission.wait().map_err(error)?;
        let found = match self.aim() {
            Some(aim) => aim.reach(&self.shared, &tries.on, limit, self.waits()).await,
            None => self.wait(&tries.on, limit).await,
        };
        drop(waiting);
        *patience = patience.saturating_sub(started.elapsed());
        found.map_err(|why| match why {
            Unreached::Kind(kind) => error(kind),
            Unreached::TimedOut => self.nothing_usable(limit, deadline, tries),
        })
    }

    /// Nothing was usable until `limit`.
    pub(super) fn nothing_usable(&self, limit: Instant, deadline: &Deadline, tries: &Tries) -> CallError {
        let reason = self.shared.status.borrow().reason();
        let reason = reason.unwrap_or_else(|| "the last one was just lost".to_owned());
        if limit < deadline.at() {
            return CallError::new(CallErrorKind::NothingUsable { reason }, None, tries.made).after(tries);
        }
        let late = CallError::new(CallErrorKind::DeadlineExceeded, None, tries.made);
        late.because(&reason).after(tries)
    }

    /// Tells the worker that nothing is usable, unless it has been told.
    pub(super) fn starve(&self) {
        if !self.shared.starving.swap(true, Ordering::AcqRel) {
            let _ = self.shared.reports.send(Report::Starved);
        }
    }

    async fn wait(&self, avoid: &[u64], limit: Instant) -> Result<Chosen, Unreached> {
        let shared = &*self.shared;
        self.starve();
        let mut binding = shared.binding.clone();
        loop {
            if let Some(endpoint) = shared.picker.pick(&binding.borrow_and_update(), avoid) {
                return Ok(endpoint);
            }
            match timeout_at(limit, binding.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(Unreached::Kind(CallErrorKind::Closed)),
                Err(_) => return Err(Unreached::TimedOut),
            }
        }
    }

    /// The instance has answered.
    #[inline]
    pub(crate) fn heard(&self, endpoint: &Endpoint) {
        endpoint.link().heard();
        self.used(endpoint);
    }

    #[inline]
    fn succeeded(&self, endpoint: &Endpoint) {
        endpoint.link().succeeded();
        self.used(endpoint);
    }

    /// What a call has chosen is kept for a while after it was last used.
    #[inline]
    fn used(&self, endpoint: &Endpoint) {
        if self.aim().is_some() {
            endpoint.link().used();
        }
    }

    /// Whether an answer is a good one, and noted as such: only others need to be judged.
    #[inline]
    pub(super) fn is_good(&self, answer: &Answer, endpoint: &Endpoint) -> bool {
        match answer.code() {
            // Without a status yet the response has begun, and ends in its trailers.
            // grpc-java counts it as a success too: it is committed.
            None => self.heard(endpoint),
            Some(Code::Ok) => self.succeeded(endpoint),
            Some(_) => return false,
        }
        self.shared.retry.budget.succeeded();
        true
    }

    /// Looks at an answer: the status where it is one of a failure.
    pub(super) fn judge_answer(&self, answer: &Answer, endpoint: &Endpoint) -> Option<Status> {
        if self.is_good(answer, endpoint) {
            return None;
        }
        let code = answer.code()?;
        if outcome::counts_against(code) {
            // That it is not the primary, or no longer, is no fault of an instance, and no merit. Nor is what the primary
            // answers while its store is away: nobody could do better, and it may be the primary again at once.
            let of_roles = || answer.status().is_some_and(|status| NotPrimary::or_no_longer(&status));
            match self.lookout().is_some() || of_roles() {
                true => self.heard(endpoint),
                false => endpoint.link().failed(self.failures_to_eject()),
            }
        } else {
            self.succeeded(endpoint);
        }
        Some(answer.status().unwrap_or_else(|| Status::new(code, "")))
    }

    /// Judges an attempt that got no (whole) answer: what it means for the call and for
    /// the instance, and the error for the caller. The deadline, and that the instance is
    /// drained, mean nothing for the call: they end it.
    pub(super) fn judge_unanswered(
        &self,
        ended: Ended,
        endpoint: &Endpoint,
        attempt: u32,
        tries: &Tries,
    ) -> (Option<Setback>, CallError) {
        let error = |kind| self.error(kind, endpoint, attempt);
        match ended {
            Ended::Failed(failure) => self.judge_failure(failure, endpoint, attempt, tries),
            Ended::Abandoned => (Some(Setback::Lost), error(CallErrorKind::Unresponsive)),
            Ended::TimedOut => {
                endpoint.link().timed_out(self.failures_to_eject());
                (Some(Setback::Lost), error(CallErrorKind::AttemptTimedOut))
            }
            Ended::Drained => (None, error(CallErrorKind::Drained)),
            Ended::DeadlinePassed | Ended::Answered(_) => (None, error(CallErrorKind::DeadlineExceeded)),
        }
    }

    fn judge_failure(
        &self,
        failure: Failure,
        endpoint: &Endpoint,
        attempt: u32,
        tries: &Tries,
    ) -> (Option<Setback>, CallError) {
        let Failure { verdict, cut, error } = failure;
        match verdict.lost {
            Some(cause) => endpoint.link().lose(cause),
            // Nor is the instance to blame for a request that failed by itself.
            None if verdict.timed_out || verdict.own => {}
            None => endpoint.link().failed(self.failures_to_eject()),
        }
        let unproven = verdict.proof == Proof::MayHaveRun && self.lacks(CallMechanism::Proof);
        let proof = if unproven { Proof::NeverSent } else { verdict.proof };
        let setback = match proof {
            _ if verdict.timed_out || verdict.own => None,
            Proof::NeverSent => Some(Setback::NeverSent),
            Proof::Refused => Some(Setback::Refused),
            Proof::MayHaveRun => Some(Setback::Lost),
        };
        let kind = match proof {
            _ if verdict.timed_out => CallErrorKind::DeadlineExceeded,
            _ if verdict.own => CallErrorKind::RequestFailed,
            _ if cut => CallErrorKind::ResponseCut,
            Proof::NeverSent => CallErrorKind::NeverSent,
            Proof::Refused => CallErrorKind::Refused,
            Proof::MayHaveRun if verdict.lost.is_none() => CallErrorKind::StreamReset,
            Proof::MayHaveRun => CallErrorKind::ConnectionLost,
        };
        let error = self.error(kind, endpoint, attempt).after(tries).caused_by(error);
        (setback, error)
    }

    /// An error of our own about an attempt.
    pub(super) fn error(&self, kind: CallErrorKind, endpoint: &Endpoint, attempt: u32) -> CallError {
        CallError::new(kind, Some(endpoint.instance().clone()), attempt)
    }
}

impl Drop for CallContext {
    #[inline]
    fn drop(&mut self) {
        self.shared.admission.end();
    }
}
