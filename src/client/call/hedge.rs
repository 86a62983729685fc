//! Several attempts at once, each on a connection of its own: the first answer
//! wins, and dropping the others cancels them (gRFC A6, "Hedging Policy").

use std::pin::Pin;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep_until};
use tonic::Status;

use super::{Answered, CallContext, Outgoing};
use crate::client::{
    answer::Answer,
    attempt::{Bounds, Ended, attempt},
    balance::Chosen,
    error::{CallError, CallErrorKind},
    policy::{HedgeRules, Pushback},
    replay::ReplayBody,
    retry::{Setback, Tries},
};

pub(super) async fn run(
    context: &CallContext,
    rules: &HedgeRules,
    request: Outgoing<'_>,
    body: &ReplayBody,
) -> Result<Answered, CallError> {
    let deadline = request.deadline;
    let mut patience = context.patience();
    let mut hedges = Hedges::new(context, rules, request, body);
    let mut binding = context.shared().binding.clone();
    // Where a call is to go that says so itself.
    let mut reach = context.shared().reach.clone();
    loop {
        let now = Instant::now();
        // Seen before it is looked at: what comes later is a change.
        binding.mark_unchanged();
        reach.mark_unchanged();
        let waiting = hedges.send_due(now);
        if hedges.running.is_empty() {
            let Some(due) = hedges.due_at() else { return hedges.end() };
            if deadline.at() <= now {
                let error = CallError::new(CallErrorKind::DeadlineExceeded, None, hedges.tries.made);
                return Err(hedges.give_up(error));
            }
            if let Some(next) = waiting {
                let endpoint = match context.pick(&hedges.tries, &deadline, &mut patience).await {
                    Ok(endpoint) => endpoint,
                    Err(error) => return Err(hedges.give_up(error)),
                };
                let now = Instant::now();
                // Else it has passed in the wait: seen when this goes round.
                if now < deadline.at() {
                    hedges.send(next, endpoint, now);
                }
            } else {
                sleep_until(due.min(deadline.at())).await;
            }
            continue;
        }
        // Each attempt ends at the deadline by itself.
        let due = hedges.due_at().filter(|due| waiting.is_none() && *due < deadline.at());
        tokio::select! {
            biased;
            Some(ran) = hedges.running.next() => {
                if let Some(result) = hedges.settle(ran) {
                    return result;
                }
            }
            changed = binding.changed(), if waiting.is_some() => {
                if changed.is_err() {
                    hedges.stop();
                }
            }
            Ok(()) = reach.changed(), if waiting.is_some() => {}
            () = sleep_until(due.unwrap_or(deadline.at())), if due.is_some() => {}
        }
    }
}

/// An attempt that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The call's first, or one in place of such as never ran.
    Owed,
    Hedge,
}

/// An attempt that has ended.
struct Ran {
    endpoint: Chosen,
    attempt: u32,
    ended: Ended,
}

/// What the caller gets where nothing better comes.
#[expect(clippy::large_enum_variant, reason = "there is one of it")]
enum Ending {
    Answer { answer: Answer, status: Status, endpoint: Chosen, attempt: u32 },
    Error(CallError),
}

type Running = FuturesUnordered<Pin<Box<dyn Future<Output = Ran> + Send>>>;

/// The attempts of one call.
struct Hedges<'a> {
    context: &'a CallContext,
    rules: &'a HedgeRules,
    request: Outgoing<'a>,
    body: &'a ReplayBody,
    tries: Tries,
    running: Running,
    /// The connections that an attempt is out on.
    out: Vec<u64>,
    /// When the next hedge is due; `None` where there is none to come.
    hedge_at: Option<Instant>,
    /// Attempts that nothing has to pay for, and when they are due.
    owed: u32,
    owed_at: Instant,
    last: Option<Ending>,
}

impl<'a> Hedges<'a> {
    fn new(
        context: &'a CallContext,
        rules: &'a HedgeRules,
        request: Outgoing<'a>,
        body: &'a ReplayBody,
    ) -> Self {
        Self {
            context,
            rules,
            request,
            body,
            tries: Tries::default(),
            running: FuturesUnordered::new(),
            out: Vec::new(),
            hedge_at: None,
            owed: 1,
            owed_at: Instant::now(),
            last: None,
        }
    }

    fn due_at(&self) -> Option<Instant> {
        let owed = (self.owed > 0).then_some(self.owed_at);
        owed.into_iter().chain(self.hedge_at).min()
    }

    fn due(&self, now: Instant) -> Option<Next> {
        if self.owed > 0 && self.owed_at <= now {
            return Some(Next::Owed);
        }
        self.hedge_at.filter(|at| *at <= now).map(|_| Next::Hedge)
    }

    /// Sends what is due. What it gives back is due and has no connection.
    fn send_due(&mut self, now: Instant) -> Option<Next> {
        while let Some(next) = self.due(now) {
            let Some(endpoint) = self.free() else { return Some(next) };
            self.send(next, endpoint, now);
        }
        None
    }

    /// A connection that no attempt is out on, one not tried yet if there is one.
    fn free(&self) -> Option<Chosen> {
        let is_free = |endpoint: &Chosen| !self.out.contains(&endpoint.serial());
        let pick = |avoid| self.context.pick_now(avoid).filter(is_free);
        pick(&self.tries.on).or_else(|| pick(&self.out))
    }

    fn send(&mut self, next: Next, endpoint: Chosen, now: Instant) {
        let is_first = self.tries.made == 0;
        match next {
            Next::Owed => self.owed -= 1,
            Next::Hedge if !self.context.shared().retry.budget.pay() => {
                self.hedge_at = None;
                return;
            }
            Next::Hedge => {
                self.tries.counted += 1;
                self.tries.ran = true;
            }
        }
        if is_first || next == Next::Hedge {
            let more = self.tries.counted + 1 < self.rules.attempts;
            self.hedge_at = more.then(|| now + self.rules.delay);
        }
        self.tries.made += 1;
        self.tries.on.push(endpoint.serial());
        self.out.push(endpoint.serial());
        let body = self.body.attempt().expect("only a body that is kept whole comes here");
        // The first may have waited for its connection.
        self.request.waited |= is_first;
        let request = self.request.attempt(self.context.path(), body, &self.tries);
        let deadline = self.request.deadline.at();
        let suspect_after = self.context.shared().options.suspect_after;
        let bounds = Bounds { began: now, suspect_after, limit: deadline, deadline, drains: false };
        let (attempt_number, whole) = (self.tries.made, self.context.whole());
        let latecomers = self.context.shared().latecomers.clone();
        self.running.push(Box::pin(async move {
            let given_up = endpoint.link().left();
            let ended = attempt(&endpoint, request, whole, given_up, &latecomers, bounds).await;
            Ran { endpoint, attempt: attempt_number, ended }
        }));
    }

    /// No more attempts.
    fn stop(&mut self) {
        (self.owed, self.hedge_at) = (0, None);
    }

    /// Takes an attempt's end in; the call's result, where that is it.
    fn settle(&mut self, ran: Ran) -> Option<Result<Answered, CallError>> {
        let Ran { endpoint, attempt, ended } = ran;
        self.out.retain(|serial| *serial != endpoint.serial());
        let context = self.context;
        let (setback, ending) = match ended {
            Ended::Answered(answer) => match context.judge_answer(&answer, &endpoint) {
                None => return Some(Ok(self.win(answer, endpoint))),
                Some(status) => {
                    let setback = Setback::of(&status, Pushback::of(&answer));
                    (Some(setback), Ending::Answer { answer, status, endpoint, attempt })
                }
            },
            unanswered => {
                let (setback, error) = context.judge_unanswered(unanswered, &endpoint, attempt, &self.tries);
                if *error.kind() == CallErrorKind::DeadlineExceeded && !self.out.is_empty() {
                    // So do the others now: the last of them is what the call came to.
                    self.tries.ran = true;
                    self.keep(Ending::Error(error));
                    self.stop();
                    return None;
                }
                (setback, Ending::Error(error))
            }
        };
        let goes_on = setback.is_some_and(|setback| self.goes_on(setback));
        // Where it is over with an attempt out, that may have run.
        self.tries.ran |= !self.out.is_empty();
        self.keep(ending);
        if goes_on {
            return None;
        }
        self.stop();
        Some(self.end_now())
    }

    /// Whether the call goes on after that, and how.
    fn goes_on(&mut self, setback: Setback) -> bool {
        let (now, retry) = (Instant::now(), &self.context.shared().retry);
        if self.tries.is_unseen(setback) {
            if self.tries.made + self.owed < self.rules.sends {
                self.owed += 1;
                self.owed_at = now + retry.pace(self.tries.made);
            }
            return true;
        }
        let (goes_on, pushback) = match setback {
            Setback::Status(code, pushback) => (self.rules.non_fatal.contains(code), pushback),
            _ => (self.rules.outlives_lost(self.context.is_safe()), Pushback::Unsaid),
        };
        if goes_on || pushback == Pushback::Never {
            retry.budget.failed();
        }
        self.tries.ran |= setback != Setback::Refused;
        self.hedge_at = match pushback {
            Pushback::Never => None,
            Pushback::After(wait) => self.hedge_at.map(|_| now + wait),
            Pushback::Unsaid => self.hedge_at.map(|_| now),
        };
        goes_on
    }

    /// What an earlier attempt came to is not what the caller sees.
    fn keep(&mut self, ending: Ending) {
        if let Some(earlier) = self.last.replace(ending) {
            earlier.tell(self.context, true);
        }
    }

    fn win(&mut self, answer: Answer, endpoint: Chosen) -> Answered {
        if let Some(earlier) = self.last.take() {
            earlier.tell(self.context, true);
        }
        Answered { answer, endpoint, attempts: self.tries.made }
    }

    /// The call ends with what its last attempt came to.
    fn end(mut self) -> Result<Answered, CallError> {
        self.end_now()
    }

    fn end_now(&mut self) -> Result<Answered, CallError> {
        let ending = self.last.take().expect("an attempt is owed until one has been made");
        ending.tell(self.context, false);
        match ending {
            Ending::Answer { answer, endpoint, .. } => {
                Ok(Answered { answer, endpoint, attempts: self.tries.made })
            }
            Ending::Error(error) => Err(error.after(&self.tries).of_attempts(self.tries.made)),
        }
    }

    /// The call ends with an error that is not an attempt's.
    fn give_up(&mut self, error: CallError) -> CallError {
        if let Some(earlier) = self.last.take() {
            earlier.tell(self.context, true);
        }
        self.context.give_up(error.after(&self.tries))
    }
}

impl Ending {
    /// Tells the hook.
    fn tell(&self, context: &CallContext, resent: bool) {
        match self {
            Self::Answer { status, endpoint, attempt, .. } => {
                context.failed(Some(endpoint.instance()), *attempt, status, resent);
            }
            Self::Error(error) => context.failed_by(error, resent),
        }
    }
}
