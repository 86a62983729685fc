//! One attempt after another.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{Answered, CallContext, Outgoing};
use crate::client::{
    answer::Answer,
    attempt::{Bounds, Ended, Exchange, attempt, go_on},
    balance::Chosen,
    endpoint::Endpoint,
    error::{CallError, CallErrorKind},
    policy::Pushback,
    replay::ReplayBody,
    retry::{Setback, Tries},
};

/// An attempt that was begun before.
pub(super) struct Started {
    pub(super) endpoint: Chosen,
    pub(super) bounds: Bounds,
    pub(super) so_far: SoFar,
}

/// What came of it up to now.
pub(super) enum SoFar {
    Ended(Ended),
    /// It goes on, and its answer is late.
    Late(Exchange),
}

/// `started` is the first attempt, where that has been begun.
pub(super) async fn run(
    context: &CallContext,
    mut request: Outgoing<'_>,
    body: &mut ReplayBody,
    mut started: Option<Started>,
) -> Result<Answered, CallError> {
    let mut tries = Tries::default();
    // For all waits of the call together, and not for what it waits for answers.
    let mut patience = context.patience();
    let patience_at_first = patience;
    let deadline = request.deadline;
    loop {
        let (endpoint, ended) = if let Some(Started { endpoint, bounds, so_far }) = started.take() {
            tries.made += 1;
            let ended = match so_far {
                SoFar::Ended(ended) => ended,
                SoFar::Late(exchange) => {
                    let given_up = given_up(context, &endpoint);
                    let late =
                        go_on(&endpoint, exchange, context.whole(), given_up, context.latecomers(), bounds);
                    late.await
                }
            };
            (endpoint, ended)
        } else {
            let endpoint = match context.pick(&tries, &deadline, &mut patience).await {
                Ok(endpoint) => endpoint,
                Err(error) => return Err(context.give_up(error)),
            };
            request.waited |= patience < patience_at_first;
            if (tries.made > 0 || request.waited) && Instant::now() >= deadline.at() {
                let error = CallError::new(CallErrorKind::DeadlineExceeded, None, tries.made).after(&tries);
                return Err(context.give_up(error));
            }
            tries.made += 1;
            let attempt_body = body.attempt().expect("a body that is gone is not resent");
            let bounds = bounds(context, body, &request, &tries);
            let given_up = given_up(context, &endpoint);
            let sent = request.attempt(context.path(), attempt_body, &tries);
            let sent = attempt(&endpoint, sent, context.whole(), given_up, context.latecomers(), bounds);
            let ended = sent.await;
            (endpoint, ended)
        };
        let wait = match ended {
            Ended::Answered(answer) => match judge(context, &answer, &endpoint, body, &mut tries) {
                Some(wait) => wait,
                None => return Ok(Answered { answer, endpoint, attempts: tries.made }),
            },
            unanswered => judge_unanswered(context, unanswered, &endpoint, body, &mut tries)?,
        };
        // Only now: nearly all calls are spared the list.
        tries.on.push(endpoint.serial());
        drop(endpoint);
        // A deadline that ends the wait is found by the next attempt.
        if !wait.is_zero() {
            sleep_until(deadline.at().min(Instant::now() + wait)).await;
        }
    }
}

/// How long the attempt about to be made may go on.
#[inline]
pub(super) fn bounds(
    context: &CallContext,
    body: &ReplayBody,
    request: &Outgoing<'_>,
    tries: &Tries,
) -> Bounds {
    let deadline = request.deadline.at();
    Bounds {
        began: request.began(tries),
        suspect_after: context.shared().options.suspect_after,
        limit: limit(context, body, tries).map_or(deadline, |limit| limit.min(deadline)),
        deadline,
        // What is a stream of its caller's may be as long as any.
        drains: context.drains() && !body.is_whole(),
    }
}

/// What tells a call to wait for its instance no longer.
pub(super) fn given_up<'a>(context: &CallContext, endpoint: &'a Endpoint) -> &'a CancellationToken {
    if context.is_safe() { endpoint.link().left() } else { endpoint.link().abandoned() }
}

/// Judges an attempt without an answer: the wait before the next one.
///
/// # Errors
/// The call's, where it is not sent again.
pub(super) fn judge_unanswered(
    context: &CallContext,
    ended: Ended,
    endpoint: &Endpoint,
    body: &mut ReplayBody,
    tries: &mut Tries,
) -> Result<Duration, CallError> {
    let timed = matches!(ended, Ended::DeadlinePassed | Ended::TimedOut);
    let (mut setback, mut error) = context.judge_unanswered(ended, endpoint, tries.made, tries);
    if let Some(status) = body.own_error().filter(|_| !timed) {
        let instance = error.instance().cloned();
        (setback, error) = (None, CallError::of_request(status, instance, tries.made).after(tries));
    }
    let wait = setback.and_then(|setback| again(context, setback, body, tries));
    context.failed_by(&error, wait.is_some());
    wait.ok_or(error)
}

/// Judges an answer: the wait before the next attempt, or `None` where the
/// answer is the caller's.
pub(super) fn judge(
    context: &CallContext,
    answer: &Answer,
    endpoint: &Endpoint,
    body: &mut ReplayBody,
    tries: &mut Tries,
) -> Option<Duration> {
    let status = context.judge_answer(answer, endpoint)?;
    let setback = Setback::of(&status, Pushback::of(answer));
    let wait = again(context, setback, body, tries);
    context.failed(Some(endpoint.instance()), tries.made, &status, wait.is_some());
    wait
}

/// The wait before the next attempt, if there is to be one.
fn again(
    context: &CallContext,
    setback: Setback,
    body: &mut ReplayBody,
    tries: &mut Tries,
) -> Option<Duration> {
    let rules = &context.rules().retry;
    context.shared().retry.again(rules, setback, context.is_safe(), body.reclaim(), tries)
}

/// Until when the attempt about to be made may go on, where it can be followed
/// by another one.
#[inline]
fn limit(context: &CallContext, body: &ReplayBody, tries: &Tries) -> Option<Instant> {
    let rules = &context.rules().retry;
    let timeout = rules.attempt_timeout?;
    let is_last = tries.sends() >= rules.sends || tries.counted + 1 >= rules.attempts;
    (!is_last && body.is_whole() && rules.resends_lost(context.is_safe())).then(|| Instant::now() + timeout)
}
