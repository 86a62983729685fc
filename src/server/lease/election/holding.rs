//! A lease that is held: renewed, and given up.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Step,
    reads::{AT_ONCE, Reads},
};
use crate::{
    role::Role,
    server::{lease::timing::Timing, store::Term},
};

#[derive(Debug)]
pub(super) struct Holding {
    pub(super) term: Term,
    /// It is primary until then; not known to be, where no renewal has been answered.
    until: Option<Instant>,
    renewals: u32,
    next_renewal: Instant,
    /// Sent while renewals get no answer: what another holds is known by them alone.
    pub(super) reads: Reads,
    parting: Option<Parting>,
}

/// It is being given up.
#[derive(Debug)]
struct Parting {
    successor: Option<String>,
    drain_until: Instant,
    releasing: bool,
    next_release: Instant,
}

impl Holding {
    /// Where it is not known since when, it is renewed at once.
    pub(super) fn new(timing: &Timing, term: Term, until: Option<Instant>, now: Instant) -> Self {
        let first = until.map_or(now, |until| until - timing.held() + timing.renewal);
        Self {
            term,
            until,
            renewals: 0,
            next_renewal: first,
            reads: Reads::new(now, now + timing.renewal),
            parting: None,
        }
    }

    pub(super) fn next(&mut self, timing: &Timing, now: Instant) -> Option<Step> {
        let held = self.is_held(now);
        if let Some(parting) = &mut self.parting
            && parting.drain_until <= now
        {
            if !parting.releasing && parting.next_release <= now {
                parting.releasing = true;
                return Some(Step::Release(self.term.clone(), parting.successor.clone()));
            }
        } else if self.renewals < AT_ONCE && self.next_renewal <= now {
            self.renewals += 1;
            self.next_renewal = now + timing.renewal;
            return Some(Step::Renew(self.term.clone()));
        }
        if held {
            self.reads.not_before(now + timing.renewal);
            return None;
        }
        self.reads.send(now, timing.renewal).then_some(Step::Read)
    }

    pub(super) fn wake(&self, now: Instant) -> Option<Instant> {
        let is_renewed = self.parting.as_ref().is_none_or(|parting| now < parting.drain_until);
        let renewal = (is_renewed && self.renewals < AT_ONCE).then_some(self.next_renewal);
        let end = self.until.filter(|until| now < *until);
        let read = if end.is_none() { self.reads.due() } else { None };
        let release = self.parting.as_ref().filter(|parting| !parting.releasing);
        let release = release.map(|parting| parting.drain_until.max(parting.next_release));
        [renewal, end, read, release].into_iter().flatten().min()
    }

    /// The record of this term has been written anew by somebody else, from a copy perhaps.
    pub(super) fn rewritten(&mut self, term: Term, now: Instant) {
        self.term = term;
        self.until = None;
        self.next_renewal = now;
    }

    /// One that was sent at `sent` has been done.
    pub(super) fn renewed(&mut self, timing: &Timing, sent: Instant) {
        self.renewals = self.renewals.saturating_sub(1);
        self.until = self.until.max(Some(sent + timing.held()));
    }

    /// One failed; the next is sent at `again` at the latest.
    pub(super) fn not_renewed(&mut self, again: Instant) {
        self.renewals = self.renewals.saturating_sub(1);
        self.next_renewal = self.next_renewal.min(again);
    }

    /// Begins to give it up. What was said before about it stands, but that it may be sooner.
    pub(super) fn part(&mut self, successor: Option<String>, drain_until: Instant) {
        match &mut self.parting {
            Some(_) => self.drained(drain_until),
            None => {
                self.parting =
                    Some(Parting { successor, drain_until, releasing: false, next_release: drain_until });
            }
        }
    }

    /// Nothing is left to wait for at `now`.
    pub(super) fn drained(&mut self, now: Instant) {
        // Not once more for a release that has been tried: that goes at its own pace.
        if let Some(parting) = self.parting.as_mut().filter(|parting| now < parting.drain_until) {
            parting.drain_until = now;
            parting.next_release = now;
        }
    }

    pub(super) fn not_released(&mut self, again: Instant) {
        if let Some(parting) = &mut self.parting {
            parting.releasing = false;
            parting.next_release = again;
        }
    }

    pub(super) fn is_parting(&self) -> bool {
        self.parting.is_some()
    }

    /// For how long others have the first word, where it is being given up: the successor, if one is
    /// named, and then everybody else, until they must have seen that it did not come.
    pub(super) fn words_to_leave(&self, timing: &Timing) -> Option<Duration> {
        let parting = self.parting.as_ref()?;
        Some(match parting.successor {
            Some(_) => timing.length + timing.renewal + 2 * timing.least(),
            None => timing.length,
        })
    }

    pub(super) fn is_draining(&self, now: Instant) -> bool {
        self.parting.as_ref().is_some_and(|parting| now < parting.drain_until)
    }

    /// Whether it was acquired here, or a renewal has been answered since it was found to be ours.
    pub(super) fn was_renewed(&self) -> bool {
        self.until.is_some()
    }

    /// Whether nobody else can have it.
    pub(super) fn is_held(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    pub(super) fn role(&self, now: Instant) -> Role {
        match self.until {
            _ if self.parting.is_some() => Role::Standby { primary: None },
            Some(until) if now < until => Role::Primary { token: self.term.token, until },
            _ => Role::Unknown,
        }
    }
}
