//! One attempt after another, each at the primary, or at whom may be it: see [`Lookout`].
//!
//! ```text
//! primary known? --yes--> send ----------------------------------------> judge (serial.rs)
//!      | no                ^                                               |
//!      +--> wait for it, --+    <--- refused: it never ran, so it waits ---+
//!           or for the turn to try
//! ```

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, sleep_until};
use tonic::Status;

use super::{Answered, CallContext, Outgoing, serial};
use crate::{
    InstanceId, NotPrimary,
    client::{
        answer::Answer,
        attempt::{Ended, attempt},
        balance::Chosen,
        binding::Binding,
        deadline::Deadline,
        endpoint::Endpoint,
        error::{CallError, CallErrorKind},
        primary::{Attempt, Lookout, Turn},
        replay::ReplayBody,
        retry::Tries,
    },
};

/// A refusal comes before the handler runs, so within a round trip: who has not refused for so long, and is
/// claimed to be the primary, is taken for it, though its handler takes longer. Our choice.
const NOT_REFUSED_AFTER: Duration = Duration::from_millis(25);

/// After so long another call may try another instance: one that is silent must not keep all from being tried.
/// Our choice.
const TURN: Duration = Duration::from_millis(100);

pub(super) async fn run(
    context: &CallContext,
    mut request: Outgoing<'_>,
    body: &mut ReplayBody,
) -> Result<Answered, CallError> {
    let lookout = context.lookout().expect("what follows nobody is sent otherwise");
    let mut search = Search::new(context, lookout, request.deadline);
    loop {
        let found = search.find().await;
        let (endpoint, turn) = found.map_err(|error| context.give_up(error.after(&search.tries)))?;
        let deadline = request.deadline.at();
        let tries = &mut search.tries;
        request.waited |= search.waited;
        if (tries.made > 0 || request.waited) && Instant::now() >= deadline {
            let error = CallError::new(CallErrorKind::DeadlineExceeded, None, tries.made).after(tries);
            return Err(context.give_up(error));
        }
        tries.made += 1;
        let attempt_body = body.attempt().expect("a body that is gone is not resent");
        let bounds = serial::bounds(context, body, &request, tries);
        let given_up = serial::given_up(context, &endpoint);
        let sent = request.attempt(context.path(), attempt_body, tries);
        let instance = endpoint.instance().clone();
        let at = Attempt { id: &instance.id, serial: endpoint.serial(), sent: Instant::now() };
        let tried = turn.is_some();
        let (ended, turn) = {
            let attempt =
                pin!(attempt(&endpoint, sent, context.whole(), given_up, context.latecomers(), bounds));
            match turn {
                None => (attempt.await, None),
                Some(turn) => try_it(attempt, turn, lookout, at).await,
            }
        };
        let wait = match ended {
            Ended::Answered(answer) => {
                if let Some((status, refusal)) = refusal(&answer) {
                    context.heard(&endpoint);
                    lookout.refused(at, refusal);
                    let resent = body.reclaim();
                    context.failed(Some(&instance), tries.made, &status, resent);
                    if !resent {
                        return Ok(Answered { answer, endpoint, attempts: tries.made });
                    }
                    tries.elsewhere += 1;
                    search.refusal = Some(status);
                    continue;
                }
                // UNAVAILABLE is also what a proxy says before an instance, or one that is not what it is listed as.
                if tried && answer.code() != Some(tonic::Code::Unavailable) {
                    lookout.answered(at);
                }
                drop(turn);
                match serial::judge(context, &answer, &endpoint, body, tries) {
                    Some(wait) => wait,
                    None => return Ok(Answered { answer, endpoint, attempts: tries.made }),
                }
            }
            unanswered => serial::judge_unanswered(context, unanswered, &endpoint, body, tries)?,
        };
        drop(endpoint);
        if !wait.is_zero() {
            sleep_until(deadline.min(Instant::now() + wait)).await;
        }
    }
}

/// The refusal, where it is one. A response that has begun has no status yet, and is none.
fn refusal(answer: &Answer) -> Option<(Status, NotPrimary)> {
    let code = answer.code()?;
    if code != tonic::Code::Unavailable {
        return None;
    }
    let status = answer.status()?;
    let refusal = NotPrimary::of(&status)?;
    Some((status, refusal))
}

/// Waits for the end of an attempt that is to tell whether its instance is the primary. Gives the turn back
/// where that comes in time: the next one is to know what came of it.
async fn try_it<'a>(
    mut attempt: impl Future<Output = Ended> + Unpin,
    turn: Turn<'a>,
    lookout: &Lookout,
    at: Attempt<'_>,
) -> (Ended, Option<Turn<'a>>) {
    tokio::select! {
        biased;
        ended = &mut attempt => return (ended, Some(turn)),
        () = sleep(NOT_REFUSED_AFTER) => lookout.not_refused(at),
    }
    tokio::select! {
        biased;
        ended = &mut attempt => return (ended, Some(turn)),
        () = sleep(TURN - NOT_REFUSED_AFTER) => drop(turn),
    }
    (attempt.await, None)
}

/// The search of one call.
struct Search<'a> {
    context: &'a CallContext,
    lookout: &'a Lookout,
    deadline: Deadline,
    tries: Tries,
    /// For the waits in which nothing at all was usable, all together.
    patience: Duration,
    waited: bool,
    /// The last one.
    refusal: Option<Status>,
}

impl<'a> Search<'a> {
    fn new(context: &'a CallContext, lookout: &'a Lookout, deadline: Deadline) -> Self {
        let patience = context.patience();
        let tries = Tries::default();
        Self { context, lookout, deadline, tries, patience, waited: false, refusal: None }
    }

    /// The primary, or an instance that it is this call's turn to try.
    async fn find(&mut self) -> Result<(Chosen, Option<Turn<'a>>), CallError> {
        if let Some(endpoint) = self.context.open_at(self.lookout) {
            return Ok((endpoint, None));
        }
        self.waited = true;
        // Boxed, so that calls which find it at once are spared the place for it.
        Box::pin(self.wait()).await
    }

    async fn wait(&mut self) -> Result<(Chosen, Option<Turn<'a>>), CallError> {
        let (context, lookout) = (self.context, self.lookout);
        let shared = context.shared();
        let _waiting = shared.admission.wait().map_err(|kind| self.error(kind))?;
        let (mut sight, mut binding) = (lookout.watch(), shared.binding.clone());
        let mut reach = shared.reach.clone();
        let mut turn = None;
        let mut bare_since = None;
        loop {
            // Seen before it is looked at: what comes later is a change.
            let leader = sight.borrow_and_update().leader.clone();
            binding.mark_unchanged();
            reach.mark_unchanged();
            let now = Instant::now();
            let found = context.open_at(lookout);
            let candidates = context.candidates(leader.as_ref());
            // Where nothing is usable, that is another trouble, with a bound of its own.
            let bare = if candidates.is_empty() { Some(*bare_since.get_or_insert(now)) } else { None };
            if bare.is_none()
                && let Some(since) = bare_since.take()
            {
                self.patience = self.patience.saturating_sub(now - since);
            }
            if let Some(endpoint) = found {
                return Ok((endpoint, None));
            }
            let mut limit = self.deadline.at();
            let mut wake = limit;
            if let Some(since) = bare {
                context.starve();
                limit = limit.min(since + self.patience);
                (wake, turn) = (limit, None);
            } else if turn.is_some() {
                let ids: Vec<_> = candidates.iter().map(|it| &it.instance().id).collect();
                match lookout.next(&ids, now) {
                    Ok(place) => return Ok((shared.picker.choose(&candidates[place]), turn)),
                    Err(due) => wake = due.map_or(limit, |due| due.min(limit)),
                }
            }
            if now >= limit {
                return Err(self.too_late(limit, &candidates));
            }
            let closed = tokio::select! {
                biased;
                changed = sight.changed() => changed.is_err(),
                changed = binding.changed() => changed.is_err(),
                changed = reach.changed() => changed.is_err(),
                right = lookout.turn(), if turn.is_none() && bare.is_none() => {
                    turn = Some(right);
                    false
                }
                () = sleep_until(wake) => false,
            };
            if closed {
                return Err(self.error(CallErrorKind::Closed));
            }
        }
    }

    fn error(&self, kind: CallErrorKind) -> CallError {
        CallError::new(kind, None, self.tries.made).after(&self.tries)
    }

    fn too_late(&self, limit: Instant, candidates: &[Arc<Endpoint>]) -> CallError {
        if candidates.is_empty() {
            return self.context.nothing_usable(limit, &self.deadline, &self.tries);
        }
        let reason = match self.lookout.leader() {
            Some(leader) => format!("{} may be, and does not answer", leader.instance),
            None => format!("{} connected, and none is", candidates.len()),
        };
        let error = self.error(CallErrorKind::NoPrimary { reason });
        match self.refusal.clone() {
            Some(refusal) => error.caused_by(Arc::new(refusal)),
            None => error,
        }
    }
}

impl CallContext {
    /// The primary, where it is known and connected.
    fn open_at(&self, lookout: &Lookout) -> Option<Chosen> {
        let serial = lookout.open()?;
        let endpoint = self.connected(|endpoint| endpoint.serial() == serial)?;
        Some(self.shared().picker.choose(&endpoint))
    }

    /// Whom a call may try: the instances of the datacenter in use, and whoever claims to be the primary.
    fn candidates(&self, leader: Option<&InstanceId>) -> Vec<Arc<Endpoint>> {
        let binding = self.shared().binding.borrow().clone();
        let mut found: Vec<_> = binding.endpoints().iter().filter(|it| it.is_usable()).cloned().collect();
        if let Some(leader) = leader.filter(|id| !found.iter().any(|it| it.instance().id == **id)) {
            found.extend(self.connected(|endpoint| endpoint.instance().id == *leader));
        }
        found
    }

    /// A connection, in the datacenter in use or out of it.
    fn connected(&self, wanted: impl Fn(&Endpoint) -> bool) -> Option<Arc<Endpoint>> {
        let find =
            |binding: &Binding| binding.endpoints().iter().find(|it| it.is_usable() && wanted(it)).cloned();
        let in_use = find(&self.shared().binding.borrow());
        in_use.or_else(|| self.shared().reach.borrow().iter().find_map(|(_, binding)| find(binding)))
    }
}
