//! What must hold: of each call's end, of the journal, and of the set of endpoints.

use std::time::Duration;

use tokio::time::Instant;
use tonic::Code;

use super::{
    ATTEMPTS, ATTEMPTS_BY_POLICY, CallError, Ended, Kept, Kind, LONG, Play, SITES, SLACK, TestCaseError,
    world::{BUSY, Fate, Mood, Record},
};
use crate::client::CallErrorKind;

/// An attempt that began while its instance was silent, and the longest rest while
/// nothing is usable: so long may nothing be usable while something answers.
const EMPTY_AT_MOST: Duration = Duration::from_secs(2);

/// What a scarce budget has for each time.
const SCARCE: (u32, Duration) = (10, Duration::from_secs(9));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// A call ends by its deadline.
    InTime,
    /// It ends with the answer of an instance, or with our typed error.
    Reason,
    /// What is not safe runs once at the most.
    RunsOnce,
    /// What the client says has not run has not.
    NeverRan,
    /// A safe call with time left is answered, while one that is known answers.
    Answered,
    /// The set is not empty while something answers.
    NeverEmpty,
    /// A call is sent only so often.
    Attempts,
    /// Calls are resent within the budget.
    Budget,
    /// What is not safe and was refused is sent once more.
    RefusedOnce,
    /// What has not run is lost to its caller only when it was sent as often as it may be.
    Unseen,
}

/// How often a call may be sent, and how often counted: what never ran is not.
fn bounds(kind: Kind) -> (u32, u32) {
    match kind {
        Kind::Unsafe | Kind::Safe => (ATTEMPTS, ATTEMPTS),
        Kind::Ruled => (ATTEMPTS_BY_POLICY + ATTEMPTS - 1, ATTEMPTS_BY_POLICY),
    }
}

impl Play {
    pub(super) fn rule(&self, rule: Rule, holds: bool, words: impl FnOnce() -> String) -> Kept {
        if holds || self.only.is_some_and(|only| only != rule) {
            return Ok(());
        }
        Err(TestCaseError::fail(format!("{rule:?}: {}", words())))
    }

    pub(super) fn look_at_the_end(&self, ended: &Ended) -> Kept {
        let Ended { call, at, result, attempts } = ended;
        let record = self.world.record(call.id);
        let words = || format!("{ended:?}, {record:?}");
        self.rule(Rule::InTime, *at <= call.began + call.within + SLACK, words)?;
        self.rule(Rule::Attempts, *attempts <= bounds(call.kind).0, words)?;
        let Err(status) = result else {
            return self.rule(Rule::Reason, record.ran() > 0, words);
        };
        let Some(error) = CallError::of(status) else {
            let is_answer =
                status.code() == Code::Unavailable && status.message() == BUSY && record.ran() > 0;
            self.rule(Rule::Reason, is_answer, words)?;
            return self.must_not_fail(ended, &record);
        };
        let nothing = match error.kind() {
            CallErrorKind::NothingUsable { .. } => true,
            CallErrorKind::DeadlineExceeded => *attempts == 0,
            _ => false,
        };
        // Of hedges it is the last one that tells.
        let hedged = call.kind == Kind::Ruled && self.setup.hedged;
        let due = match error.kind() {
            CallErrorKind::NeverSent => bounds(call.kind).0,
            CallErrorKind::Refused => 2,
            _ => 0,
        };
        self.rule(Rule::Unseen, hedged || *attempts >= due, words)?;
        if nothing {
            for site in 0..SITES {
                let is_new = self.good_since(site).is_none_or(|since| *at < since + EMPTY_AT_MOST);
                self.rule(Rule::Answered, is_new, || format!("{site} has long been good: {}", words()))?;
            }
        }
        self.must_not_fail(ended, &record)
    }

    /// One that is safe and has time, and of which an instance is known that was good all the while.
    fn must_not_fail(&self, ended: &Ended, record: &Record) -> Kept {
        let Ended { call, attempts, result, .. } = ended;
        let (sends, counted) = bounds(call.kind);
        // All hedges may be out on silent ones.
        let kind = call.kind == Kind::Safe || (call.kind == Kind::Ruled && !self.setup.hedged);
        // The last attempt has not told how many were counted before it, where it did not arrive.
        let unheard = result.as_ref().err().and_then(CallError::of).is_some();
        let spent = *attempts >= sends || record.resent + 1 >= counted || (unheard && *attempts >= counted);
        // Who answers probes and no calls is not silent: then the deadline decides.
        let stuck = record.fates.iter().any(|(_, fate)| *fate == Fate::Stuck);
        if !kind || call.within < LONG || self.setup.scarce || spent || stuck {
            return Ok(());
        }
        let was_good = |&&site: &&usize| self.good_since(site).is_some_and(|since| since < call.began);
        let good = call.known.iter().find(was_good);
        self.rule(Rule::Answered, good.is_none(), || format!("{good:?} was good: {ended:?}, {record:?}"))
    }

    pub(super) fn look_at_the_journal(&self) -> Kept {
        let out = self.out.values().map(|call| (call.id, call.kind, false));
        let over = self.over.iter().map(|(&id, &(kind, never_ran))| (id, kind, never_ran));
        for (id, kind, never_ran) in out.chain(over) {
            let record = self.world.record(id);
            let words = || format!("{kind:?} {id}: {record:?}");
            let (sends, counted) = bounds(kind);
            let arrived = u32::try_from(record.fates.len()).unwrap();
            let may_have_run = u32::try_from(record.ran()).unwrap();
            let is_bounded = arrived <= sends && record.resent < counted && may_have_run <= counted;
            self.rule(Rule::Attempts, is_bounded, words)?;
            self.rule(Rule::NeverRan, !never_ran || record.ran() == 0, words)?;
            if kind == Kind::Unsafe {
                self.rule(Rule::RunsOnce, record.ran() <= 1, words)?;
                let refused = record.fates.iter().filter(|(_, fate)| *fate == Fate::Refused).count();
                self.rule(Rule::RefusedOnce, refused <= 2, words)?;
            }
        }
        for call in self.out.values() {
            let in_time = Instant::now() <= call.began + call.within + SLACK;
            self.rule(Rule::InTime, in_time, || format!("still out: {call:?}"))?;
        }
        if self.setup.scarce {
            let (each, time) = SCARCE;
            let times = self.began.elapsed().as_secs() / time.as_secs() + 1;
            let (resent, most) = (self.world.resent(), each * u32::try_from(times).unwrap());
            self.rule(Rule::Budget, resent <= most, || format!("{resent} resent, of {most}"))?;
        }
        Ok(())
    }

    /// Not empty at all while one that was in it answers, and not for long while any does.
    pub(super) fn look_at_the_set(&mut self) -> Kept {
        let now = Instant::now();
        let usable = self.usable();
        if !usable.is_empty() {
            let answers = |&site: &usize| {
                self.listed[site].is_some()
                    && matches!(self.world.mood(site), Mood::Up | Mood::Slow | Mood::Bad)
            };
            self.before = usable.into_iter().filter(answers).collect();
            self.empty_since = None;
            return Ok(());
        }
        self.before.retain(|site| self.published.lock().contains(site));
        self.rule(Rule::NeverEmpty, self.before.is_empty(), || format!("{:?} still answer", self.before))?;
        let empty_since = *self.empty_since.get_or_insert(now);
        for site in 0..SITES {
            let Some(good) = self.good_since(site) else { continue };
            let since = empty_since.max(good);
            let words = || format!("for {:?} while {site} answers", now - since);
            self.rule(Rule::NeverEmpty, now - since <= EMPTY_AT_MOST, words)?;
        }
        Ok(())
    }
}
