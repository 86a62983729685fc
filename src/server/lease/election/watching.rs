//! A lease that is not held: what is seen of it, and when it is taken.

use std::time::Duration;

use tokio::time::Instant;

use super::{Step, reads::Reads};
use crate::{
    role::Role,
    server::{
        lease::timing::Timing,
        store::{LeaseRecord, Nonce, StoreError},
    },
};

#[derive(Debug)]
pub(super) struct Watching {
    pub(super) reads: Reads,
    seen: Option<Seen>,
    /// A takeover is on its way.
    pub(super) acquiring: bool,
    /// Where one failed, the next is not tried before.
    again_at: Option<Instant>,
}

/// What is there.
#[derive(Debug)]
struct Seen {
    record: LeaseRecord,
    /// When the first answer came that showed it, in the contact that lasts.
    since: Instant,
    /// When the last one came.
    heard: Instant,
    /// From `since` on, before it is taken from a holder.
    patience: Duration,
}

/// What keeps an instance from taking over.
#[derive(Debug)]
pub(super) struct Refrain {
    pub(super) alive: bool,
    /// It has given the lease up.
    pub(super) until: Option<Instant>,
}

impl Watching {
    pub(super) fn new(now: Instant) -> Self {
        Self { reads: Reads::new(now, now), seen: None, acquiring: false, again_at: None }
    }

    pub(super) fn next(
        &mut self,
        timing: &Timing,
        instance: &str,
        refrain: &Refrain,
        now: Instant,
    ) -> Option<Step> {
        if let Some((record, at)) = self.takeover(timing, instance, refrain, now)
            && at <= now
        {
            let record = record.clone();
            self.acquiring = true;
            return Some(Step::Acquire(record));
        }
        self.reads.send(now, timing.renewal).then_some(Step::Read)
    }

    pub(super) fn wake(
        &self,
        timing: &Timing,
        instance: &str,
        refrain: &Refrain,
        now: Instant,
    ) -> Option<Instant> {
        let takeover = self.takeover(timing, instance, refrain, now).map(|(_, at)| at);
        let contact = self.seen.as_ref().map(|seen| seen.heard + timing.contact()).filter(|end| *end >= now);
        // The moment after it: then it is out of contact.
        let contact = contact.map(|end| end + Duration::from_nanos(1));
        [self.reads.due(), takeover, contact].into_iter().flatten().min()
    }

    /// What would be taken over, and when, as things are.
    fn takeover(
        &self,
        timing: &Timing,
        instance: &str,
        refrain: &Refrain,
        now: Instant,
    ) -> Option<(&LeaseRecord, Instant)> {
        let seen = self.seen.as_ref().filter(|_| refrain.alive && !self.acquiring)?;
        if !seen.is_fresh(timing, now) {
            return None;
        }
        let at = match (seen.record.released, seen.record.successor.as_deref()) {
            (true, None) => seen.since,
            (true, Some(successor)) if successor == instance => seen.since,
            // Somebody else's first word, or a holder that may live. Where there is no holder the
            // record may have been lost under one that does not know yet.
            _ => seen.since + seen.patience,
        };
        let held_back = [refrain.until, self.again_at].into_iter().flatten();
        Some((&seen.record, held_back.fold(at, Instant::max)))
    }

    /// A read showed this.
    pub(super) fn saw(&mut self, timing: &Timing, record: LeaseRecord, patience: Duration, now: Instant) {
        match &mut self.seen {
            Some(seen) if seen.record == record && seen.is_fresh(timing, now) => seen.heard = now,
            _ => self.seen = Some(Seen { record, since: now, heard: now, patience }),
        }
    }

    /// The takeover was not done, or may have been: a read tells.
    pub(super) fn not_acquired(&mut self, error: &StoreError, now: Instant, pause: Duration) {
        self.again_at = Some(now + pause);
        self.reads.hurry(now, Duration::ZERO);
        if matches!(error, StoreError::Superseded) {
            // What was seen is not there any more, whatever a read says.
            self.seen = None;
        }
    }

    pub(super) fn record(&self) -> Option<&LeaseRecord> {
        self.seen.as_ref().map(|seen| &seen.record)
    }

    pub(super) fn role(&self, timing: &Timing, own: &Nonce, now: Instant) -> Role {
        match self.seen.as_ref().filter(|seen| seen.is_fresh(timing, now)) {
            Some(Seen { record, .. }) => {
                // One of our own that is seen here is an old one.
                let holder = record.holder.as_ref().filter(|it| !record.released && it.nonce != *own);
                Role::Standby { primary: holder.map(|it| it.primary.clone()) }
            }
            None => Role::Unknown,
        }
    }
}

impl Seen {
    /// Whether the contact in which it was seen lasts.
    fn is_fresh(&self, timing: &Timing, now: Instant) -> bool {
        now.saturating_duration_since(self.heard) <= timing.contact()
    }
}
