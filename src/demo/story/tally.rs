//! The books: every call, by act. Pure; asked with instants.

use std::time::Duration;

use tokio::time::Instant;

use crate::demo::calls::{Answer, Failed, Method, SLOW};

/// All calls of the story, and the acts they belong to.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    acts: Vec<Act>,
    calls: Vec<Call>,
    rebinds: Vec<Rebind>,
    /// Ended calls of each outcome, kept so that a live line costs nothing.
    pub(crate) sums: Sums,
}

/// A part of the story; a call belongs to the one in which it ended.
#[derive(Debug)]
pub(crate) struct Act {
    pub(crate) title: String,
    /// The only failures that this act excuses.
    pub(crate) excuse: Excuse,
}

/// Which calls of `Increment` may fail in an act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Excuse {
    /// None: no process died or hung.
    None,
    /// None, of any method: a process was asked to end.
    Gentle,
    /// Those that this process (by its place in the list of all) had in hand
    /// when it was killed.
    Killed(usize),
    /// Those that a process had or was given while it was paused.
    Paused { from: Instant, until: Instant },
}

#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) act: usize,
    pub(crate) method: Method,
    pub(crate) id: String,
    pub(crate) began: Instant,
    pub(crate) end: Option<End>,
}

#[derive(Debug)]
pub(crate) struct End {
    pub(crate) at: Instant,
    pub(crate) result: Result<Answer, Failed>,
}

/// The calls went over to another instance.
#[derive(Clone, Debug)]
pub(crate) struct Rebind {
    pub(crate) act: usize,
    pub(crate) at: Instant,
    pub(crate) to: String,
    pub(crate) took: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    pub(crate) answered: u64,
    pub(crate) resent: u64,
    pub(crate) slow: u64,
    pub(crate) failed: u64,
}

// === impl Tally ===

impl Tally {
    /// From now on calls belong to this act, and so do those under way: what
    /// happens next happens to them.
    pub(crate) fn open(&mut self, title: impl Into<String>) {
        self.acts.push(Act { title: title.into(), excuse: Excuse::None });
        let act = self.act();
        for call in self.calls.iter_mut().filter(|call| call.end.is_none()) {
            call.act = act;
        }
    }

    pub(crate) fn acts(&self) -> &[Act] {
        &self.acts
    }

    /// The act that is being played.
    pub(crate) fn act(&self) -> usize {
        self.acts.len().saturating_sub(1)
    }

    pub(crate) fn excuse(&mut self, excuse: Excuse) {
        if let Some(act) = self.acts.last_mut() {
            act.excuse = excuse;
        }
    }

    /// Books a call's begin and gives its number.
    pub(crate) fn begin(&mut self, method: Method, id: String, now: Instant) -> usize {
        self.calls.push(Call { act: self.act(), method, id, began: now, end: None });
        self.calls.len() - 1
    }

    /// Books its end.
    pub(crate) fn end(&mut self, call: usize, now: Instant, result: Result<Answer, Failed>) -> Option<&Call> {
        let call = self.calls.get_mut(call)?;
        match &result {
            Ok(answer) => {
                self.sums.answered += 1;
                self.sums.resent += u64::from(answer.attempts > 1);
            }
            Err(_) => self.sums.failed += 1,
        }
        self.sums.slow += u64::from(result.is_ok() && now - call.began > SLOW);
        call.end = Some(End { at: now, result });
        Some(call)
    }

    pub(crate) fn rebound(&mut self, to: String, took: Duration, now: Instant) {
        self.rebinds.push(Rebind { act: self.act(), at: now, to, took });
    }

    /// Who answered the latest call.
    pub(crate) fn latest(&self) -> Option<&Answer> {
        let answers = self.calls.iter().filter_map(|call| {
            let end = call.end.as_ref()?;
            Some((end.at, end.result.as_ref().ok()?))
        });
        answers.max_by_key(|(at, _)| *at).map(|(_, answer)| answer)
    }

    /// When the first call that began at `since` or later was answered by an
    /// instance that `fits`.
    pub(crate) fn first_answer(
        &self,
        since: Instant,
        fits: impl Fn(&Answer) -> bool,
    ) -> Option<(Instant, &Answer)> {
        let answers = self.since(since).filter_map(|call| {
            let end = call.end.as_ref()?;
            let answer = end.result.as_ref().ok()?;
            fits(answer).then_some((end.at, answer))
        });
        answers.min_by_key(|(at, _)| *at)
    }

    /// How many calls of the method least answered have been answered that began
    /// at `since` or later, by instances that `fit`.
    pub(crate) fn answered(&self, since: Instant, fits: impl Fn(&Answer) -> bool) -> usize {
        let fits =
            |call: &&Call| call.end.as_ref().and_then(|end| end.result.as_ref().ok()).is_some_and(&fits);
        let of = |method| self.since(since).filter(|call| call.method == method).filter(fits).count();
        Method::ALL.into_iter().map(of).min().unwrap_or_default()
    }

    /// Whether every call that began before `before` has ended.
    pub(crate) fn settled(&self, before: Instant) -> bool {
        self.calls.iter().all(|call| call.began >= before || call.end.is_some())
    }

    /// The latest call of `Increment`, where it has been out for no longer than `at_most`.
    pub(crate) fn just_out(&self, now: Instant, at_most: Duration) -> Option<&str> {
        let latest = self.calls.iter().rev().find(|call| call.method == Method::Increment)?;
        (latest.end.is_none() && now - latest.began <= at_most).then_some(&latest.id)
    }

    /// The calls of `method` that were out at some time between the two.
    pub(crate) fn out_between(
        &self,
        method: Method,
        from: Instant,
        until: Instant,
    ) -> impl Iterator<Item = &Call> {
        self.calls.iter().filter(move |call| {
            let ended_before = call.end.as_ref().is_some_and(|end| end.at < from);
            call.method == method && call.began <= until && !ended_before
        })
    }

    pub(crate) fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// The rebinds of an act, in order.
    pub(crate) fn rebinds(&self, act: usize) -> impl Iterator<Item = &Rebind> {
        self.rebinds.iter().filter(move |rebind| rebind.act == act)
    }

    /// The sums of one act, and its longest answered call.
    pub(crate) fn sums_of(&self, act: usize) -> (Sums, Duration) {
        let (mut sums, mut longest) = (Sums::default(), Duration::ZERO);
        for call in self.calls.iter().filter(|call| call.act == act) {
            let Some(end) = &call.end else { continue };
            let Ok(answer) = &end.result else {
                sums.failed += 1;
                continue;
            };
            let took = end.at - call.began;
            sums.answered += 1;
            sums.resent += u64::from(answer.attempts > 1);
            sums.slow += u64::from(took > SLOW);
            longest = longest.max(took);
        }
        (sums, longest)
    }

    /// How many calls of `method` have failed in the act being played.
    pub(crate) fn failed_now(&self, method: Method) -> u64 {
        let act = self.act();
        let failed = self.calls.iter().filter(|call| {
            call.act == act
                && call.method == method
                && call.end.as_ref().is_some_and(|end| end.result.is_err())
        });
        failed.count() as u64
    }

    fn since(&self, since: Instant) -> impl Iterator<Item = &Call> {
        self.calls.iter().filter(move |call| call.began >= since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn by(instance: &str, attempts: u32) -> Result<Answer, Failed> {
        Ok(Answer { instance: instance.into(), datacenter: "dc1".into(), attempts })
    }

    fn failed() -> Result<Answer, Failed> {
        let message = "gone".to_owned();
        Err(Failed { code: tonic::Code::Unavailable, message, instance: None, may_have_run: Some(true) })
    }

    #[test]
    fn a_call_belongs_to_the_act_in_which_it_ended() {
        let mut tally = Tally::default();
        let now = Instant::now();
        tally.open("one");
        let call = tally.begin(Method::Get, "1".into(), now);
        let other = tally.begin(Method::Get, "2".into(), now);
        tally.end(call, now + ms(300), by("a", 2));
        tally.open("two");
        tally.end(other, now + ms(10), failed());
        assert_eq!(tally.sums_of(0), (Sums { answered: 1, resent: 1, slow: 1, failed: 0 }, ms(300)));
        assert_eq!(tally.sums_of(1), (Sums { failed: 1, ..Sums::default() }, Duration::ZERO));
        assert_eq!(tally.sums, Sums { answered: 1, resent: 1, slow: 1, failed: 1 });
    }

    #[test]
    fn the_first_answer_is_of_calls_begun_since_and_the_earliest_ended() {
        let mut tally = Tally::default();
        let now = Instant::now();
        for (begin, end) in [(0, 90), (20, 80), (30, 60)] {
            let call = tally.begin(Method::Get, begin.to_string(), now + ms(begin));
            tally.end(call, now + ms(end), by("a", 1));
        }
        let first = |since| tally.first_answer(now + ms(since), |it| it.instance == "a").map(|(at, _)| at);
        assert_eq!(first(20), Some(now + ms(60)));
        assert_eq!(first(31), None);
        assert_eq!(tally.answered(now, |_| true), 0, "no Add and no Increment yet");
    }

    #[test]
    fn what_is_out_is_told_by_age_and_by_span() {
        let mut tally = Tally::default();
        let now = Instant::now();
        let first = tally.begin(Method::Increment, "1".into(), now);
        tally.begin(Method::Increment, "2".into(), now + ms(50));
        tally.end(first, now + ms(20), by("a", 1));
        assert_eq!(tally.just_out(now + ms(60), ms(20)), Some("2"));
        assert_eq!(tally.just_out(now + ms(71), ms(20)), None, "the next one may be on its way");
        let out = |from, until| {
            let calls = tally.out_between(Method::Increment, now + ms(from), now + ms(until));
            calls.map(|call| call.id.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(out(10, 40), ["1"]);
        assert_eq!(out(10, 60), ["1", "2"]);
        assert_eq!(out(30, 40), [""; 0]);
        assert!(tally.settled(now + ms(50)) && !tally.settled(now + ms(51)));
    }
}
