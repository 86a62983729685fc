//! What an instance is to do next about a lease: pure, asked with `now`.
//!
//! ```text
//!              acquired, or own nonce found            given up, or another holds
//!  Watching ------------------------------> Holding -----------------------------> Watching
//!  reads; counts how long nothing changed   renews; primary until sent + length - margin
//! ```
//!
//! Its rules, all on this process's own monotonic clock:
//! * A holder is primary until the lease's length, less the margin, has passed since *before* it sent
//!   its last renewal that was answered. Then it is not, and renews on: once an answer comes that the
//!   lease is still its own, it is primary again, in the same term.
//! * What a standby waits is the holder's own length, which its record says.
//! * A standby counts from when it *got* the answer that first showed what is there now, and only
//!   while it is in contact. Whatever was renewed before that answer was sent before it too, so the
//!   holder has stopped when the length has passed. After an outage it counts anew, which leaves the
//!   holder the first word.
//! * A step without an answer may have happened: the next read tells, by the own nonce. Where the store
//!   then does not let it be renewed it is taken over as another's is, in a new term.
//! * What is released is taken at once, by the one it is left to first.
//! * Who gives up leaves the others the first word, until one of them has taken it.

mod holding;
mod reads;
mod watching;

use std::time::Duration;

use tokio::time::Instant;
use tower::util::rng::Rng;

use self::{
    holding::Holding,
    watching::{Refrain, Watching},
};
use super::timing::{LENGTHS, Timing};
use crate::{
    role::{FencingToken, Role},
    server::store::{Claim, Holder, LeaseRecord, Nonce, StoreError, Term},
};

/// What to ask of the store.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Read,
    Acquire(LeaseRecord),
    Renew(Term),
    Release(Term, Option<String>),
}

/// What it said.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Read(Result<LeaseRecord, StoreError>),
    Acquire(Result<Term, StoreError>),
    Renew(FencingToken, Result<(), StoreError>),
    Release(FencingToken, Result<(), StoreError>),
}

impl Answer {
    /// Where the store could not say, or would not: a "no" is an answer.
    pub(super) fn failure(&self) -> Option<&StoreError> {
        let error = match self {
            Self::Read(it) => it.as_ref().err(),
            Self::Acquire(it) => it.as_ref().err(),
            Self::Renew(_, it) | Self::Release(_, it) => it.as_ref().err(),
        };
        error.filter(|error| !matches!(error, StoreError::Superseded))
    }
}

/// An instance's part in who is primary.
#[derive(Debug)]
pub(super) struct Election<R> {
    timing: Timing,
    instance: String,
    nonce: Nonce,
    /// What serves nothing holds nothing.
    alive: bool,
    stand: Stand,
    /// The others have the first word until then.
    stand_back: Option<Instant>,
    /// The greatest token seen. What is below it is an old record that has come back.
    highest: FencingToken,
    /// The last term that was given up, or that a read found to be ours and the store did not let be renewed.
    barren: Option<Term>,
    /// How long the lease of the last holder was that was seen.
    held_for: Option<Duration>,
    rng: R,
}

#[derive(Debug)]
enum Stand {
    Watching(Watching),
    Holding(Holding),
}

impl<R: Rng> Election<R> {
    pub(super) fn new(timing: Timing, claim: &Claim, rng: R, now: Instant) -> Self {
        Self {
            timing,
            instance: claim.instance.clone(),
            nonce: claim.nonce.clone(),
            alive: true,
            stand: Stand::Watching(Watching::new(now)),
            stand_back: None,
            highest: FencingToken::new(0),
            barren: None,
            held_for: None,
            rng,
        }
    }

    /// The next thing to ask, until there is none. What it gives counts as sent at `now`.
    pub(super) fn next(&mut self, now: Instant) -> Option<Step> {
        match &mut self.stand {
            Stand::Watching(watching) => {
                let refrain = Refrain { alive: self.alive, until: self.stand_back };
                watching.next(&self.timing, &self.instance, &refrain, now)
            }
            Stand::Holding(holding) => holding.next(&self.timing, now),
        }
    }

    /// When to come back at the latest, if nothing is answered before.
    pub(super) fn wake(&self, now: Instant) -> Option<Instant> {
        match &self.stand {
            Stand::Watching(watching) => {
                let refrain = Refrain { alive: self.alive, until: self.stand_back };
                watching.wake(&self.timing, &self.instance, &refrain, now)
            }
            Stand::Holding(holding) => holding.wake(now),
        }
    }

    /// A step that was sent at `sent` has been answered.
    pub(super) fn answered(&mut self, sent: Instant, now: Instant, answer: Answer) {
        match answer {
            Answer::Read(read) => self.on_read(sent, now, read),
            Answer::Acquire(acquired) => self.on_acquired(sent, now, acquired),
            Answer::Renew(token, renewed) => {
                let pause = self.pause(now);
                if let Stand::Holding(holding) = &mut self.stand
                    && holding.term.token == token
                {
                    match renewed {
                        Ok(()) => holding.renewed(&self.timing, sent),
                        Err(StoreError::Superseded) => {
                            // Else a read would find it once more, and so on without an end.
                            if !holding.was_renewed() {
                                self.barren = Some(holding.term.clone());
                            }
                            self.step_down(now);
                        }
                        Err(_) => holding.not_renewed(now + pause),
                    }
                }
            }
            Answer::Release(token, released) => {
                let pause = self.pause(now);
                if let Stand::Holding(holding) = &mut self.stand
                    && holding.term.token == token
                {
                    match released {
                        Ok(()) | Err(StoreError::Superseded) => {
                            self.barren = Some(holding.term.clone());
                            self.step_down(now);
                        }
                        Err(_) => holding.not_released(now + pause),
                    }
                }
            }
        }
    }

    fn on_read(&mut self, sent: Instant, now: Instant, read: Result<LeaseRecord, StoreError>) {
        let reads = match &mut self.stand {
            Stand::Watching(watching) => &mut watching.reads,
            Stand::Holding(holding) => &mut holding.reads,
        };
        let is_news = reads.answered(sent, read.is_ok());
        let (true, Ok(record)) = (is_news, read) else { return };
        let own = self.own_term(&record);
        if let Some(holder) = &record.holder {
            self.highest = self.highest.max(holder.primary.token);
            self.held_for = Some(holder.length.unwrap_or(self.timing.length));
        }
        if self.others_have_spoken(&record) {
            self.stand_back = None;
        }
        let length = self.length_of(&record);
        match (&mut self.stand, own) {
            (Stand::Holding(holding), Some(term)) if holding.term == term => {}
            (Stand::Holding(holding), Some(term)) if holding.term.token == term.token => {
                holding.rewritten(term, now);
            }
            // It was not known that it is ours. Renewing it tells since when.
            (_, Some(term)) => self.hold(term, None, now),
            (Stand::Watching(watching), None) => {
                let patience = length + self.timing.least().mul_f64(self.rng.next_f64());
                watching.saw(&self.timing, record, patience, now);
            }
            (Stand::Holding(_), None) => self.step_down(now),
        }
    }

    /// When so much has passed without a renewal, nobody is primary by this record. A holder goes by
    /// its own length, whatever this instance's is. Where there is none the last one may not know yet.
    fn length_of(&self, record: &LeaseRecord) -> Duration {
        let (own, held_for) = (self.timing.length, self.held_for.unwrap_or(self.timing.length));
        let length = if record.holder.is_some() { held_for } else { own.max(held_for) };
        // What no lease can be is rubbish; it must not keep everybody waiting for ever.
        length.clamp(*LENGTHS.start(), *LENGTHS.end())
    }

    fn on_acquired(&mut self, sent: Instant, now: Instant, acquired: Result<Term, StoreError>) {
        if let Stand::Watching(watching) = &mut self.stand {
            watching.acquiring = false;
        }
        match acquired {
            Ok(term) if term.token > self.highest => {
                self.highest = term.token;
                self.hold(term, Some(sent + self.timing.held()), now);
            }
            // Found by a read before its answer came.
            Ok(term) => {
                if let Stand::Holding(holding) = &mut self.stand
                    && holding.term.token == term.token
                {
                    holding.renewed(&self.timing, sent);
                }
            }
            Err(error) => {
                let pause = self.pause(now);
                if let Stand::Watching(watching) = &mut self.stand {
                    watching.not_acquired(&error, now, pause);
                }
            }
        }
    }

    /// The term that the record gives to this process. A record with a token below one that has been
    /// seen is old, from before data were lost: it is nobody's. So is one that is barren.
    fn own_term(&self, record: &LeaseRecord) -> Option<Term> {
        let holder = record.holder.as_ref().filter(|_| !record.released)?;
        let token = holder.primary.token;
        (holder.nonce == self.nonce && token >= self.highest)
            .then(|| Term::new(token, record.holder_version, self.nonce.clone()))
            .filter(|term| self.barren.as_ref() != Some(term))
    }

    /// Whether one of those who had the first word has taken the lease. From then on it is a holder like
    /// any other, and taken over in the same time when it dies.
    fn others_have_spoken(&self, record: &LeaseRecord) -> bool {
        // While an acquisition is on its way the time says that the lease is to be given up.
        let watching = matches!(&self.stand, Stand::Watching(watching) if !watching.acquiring);
        let newest = |holder: &Holder| holder.nonce != self.nonce && holder.primary.token >= self.highest;
        watching && record.holder.as_ref().is_some_and(newest)
    }

    fn hold(&mut self, term: Term, until: Option<Instant>, now: Instant) {
        let mut holding = Holding::new(&self.timing, term, until, now);
        // It has been given up before it was known to be held.
        if !self.alive || self.is_giving_up(now) || self.stand_back.is_some_and(|back| now < back) {
            holding.part(None, now);
        }
        self.stand = Stand::Holding(holding);
    }

    /// It is no longer held, or not known to be: a read is next.
    fn step_down(&mut self, now: Instant) {
        if let Stand::Holding(holding) = &self.stand
            && let Some(words) = holding.words_to_leave(&self.timing)
        {
            self.stand_back = Some(now + words);
        }
        self.stand = Stand::Watching(Watching::new(now));
    }

    /// Whether this instance serves. One that does not gives the lease up, and takes none.
    pub(super) fn live(&mut self, alive: bool, now: Instant) {
        self.alive = alive;
        if let Stand::Holding(holding) = &mut self.stand
            && !alive
        {
            holding.part(None, now);
        }
    }

    /// Gives the lease up, to `successor` first, once [`drained`](Self::drained) or at `drain_until`.
    /// False: there is nothing to give up.
    pub(super) fn give_up(&mut self, successor: Option<String>, drain_until: Instant, now: Instant) -> bool {
        match &mut self.stand {
            Stand::Holding(holding) => holding.part(successor, drain_until),
            Stand::Watching(watching) if watching.acquiring => {
                self.stand_back = Some(now + self.timing.length);
            }
            Stand::Watching(_) => return false,
        }
        true
    }

    /// What was in flight under the lease has ended.
    pub(super) fn drained(&mut self, now: Instant) {
        if let Stand::Holding(holding) = &mut self.stand {
            holding.drained(now);
        }
    }

    /// Whether a release waits for what is in flight.
    pub(super) fn is_draining(&self, now: Instant) -> bool {
        matches!(&self.stand, Stand::Holding(holding) if holding.is_draining(now))
    }

    /// Whether the lease is being given up and that is not done yet.
    pub(super) fn is_giving_up(&self, now: Instant) -> bool {
        match &self.stand {
            Stand::Watching(watching) => watching.acquiring && self.stand_back.is_some_and(|back| now < back),
            Stand::Holding(holding) => holding.is_parting(),
        }
    }

    /// Whether it may hold the lease, or soon: an acquisition is on its way.
    pub(super) fn may_hold(&self) -> bool {
        match &self.stand {
            Stand::Watching(watching) => watching.acquiring,
            Stand::Holding(_) => true,
        }
    }

    /// The store says that there is news: a read is next.
    pub(super) fn woken(&mut self, now: Instant) {
        if let Stand::Watching(watching) = &mut self.stand {
            watching.reads.hurry(now, self.timing.least());
        }
    }

    /// What a standby waits to see changed.
    pub(super) fn watched(&self) -> Option<&LeaseRecord> {
        match &self.stand {
            Stand::Watching(watching) => watching.record(),
            Stand::Holding(_) => None,
        }
    }

    /// The term that is held, as far as is known. Whether it may be used now is for
    /// [`role`](Self::role) to say.
    pub(super) fn term(&self) -> Option<&Term> {
        match &self.stand {
            Stand::Watching(_) => None,
            Stand::Holding(holding) => Some(&holding.term),
        }
    }

    pub(super) fn role(&self, now: Instant) -> Role {
        match &self.stand {
            Stand::Watching(watching) => watching.role(&self.timing, &self.nonce, now),
            Stand::Holding(holding) => holding.role(now),
        }
    }

    /// Before something that failed is tried again: soon while there is a term to save, else at the
    /// pace of renewals; and not all at once.
    fn pause(&mut self, now: Instant) -> Duration {
        let saves = matches!(&self.stand, Stand::Holding(holding) if holding.is_held(now));
        let at_most = if saves { self.timing.soon() } else { self.timing.renewal };
        at_most.mul_f64(0.5 + self.rng.next_f64() / 2.0)
    }
}

#[cfg(test)]
pub(super) mod tests;
