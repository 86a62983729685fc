//! Looking the service up afresh: because a call failed, or because
//! `update_grpc_client` was called. Both share one flight.

use std::{sync::atomic::Ordering, time::Duration};

use tokio::{sync::oneshot, time::Instant};

use super::Worker;
use crate::{
    client::{binding::Binding, error::UpdateError},
    consul::RegistryError,
};

/// The shortest time between two look-ups that failing calls cause.
const LOOK_UP_SPACING: Duration = Duration::from_millis(500);

pub(super) type Update = oneshot::Sender<Result<Binding, UpdateError>>;

/// Who waits for a look-up, and how it stands.
#[derive(Default)]
pub(super) struct LookUps {
    /// A failure wants one.
    pub(super) wanted: bool,
    /// A call that finds nothing usable wants one, unless something is by then.
    pub(super) starved: bool,
    last_at: Option<Instant>,
    last_error: Option<RegistryError>,
    /// Those who share the flight under way.
    waiting: Vec<Update>,
    /// Those who came after its look-up had ended: the next one is theirs.
    next: Vec<Update>,
    /// The end of that look-up.
    looked: Option<Looked>,
}

struct Looked {
    error: Option<RegistryError>,
    /// When those who wait are answered at the latest: what was found must be connected to.
    due: Instant,
}

impl Worker {
    /// Something failed. Many failures at once share what is under way.
    pub(super) fn want_look_up(&mut self) {
        self.look_ups.wanted |= !self.sources.is_looking_up();
    }

    pub(super) fn look_up_if_due(&mut self, now: Instant) -> Option<Instant> {
        if !(self.look_ups.wanted || self.look_ups.starved) || self.sources.is_looking_up() {
            return None;
        }
        let due = self.look_ups.last_at.map_or(now, |at| at + LOOK_UP_SPACING);
        if due > now {
            return Some(due);
        }
        self.look_up(now);
        None
    }

    fn look_up(&mut self, now: Instant) {
        (self.look_ups.wanted, self.look_ups.starved) = (false, false);
        self.look_ups.last_at = Some(now);
        self.look_ups.last_error = None;
        let bound = self.fleet.bound_tier().filter(|&tier| tier != 0);
        self.sources.look_up([0].into_iter().chain(bound));
    }

    pub(super) fn on_looked_up(&mut self, error: Option<RegistryError>) {
        self.look_ups.last_error = error.or(self.look_ups.last_error.take());
        if !self.sources.is_looking_up() {
            self.starving.store(false, Ordering::Release);
            // Failing calls cause further ones, which put nobody off.
            if !self.look_ups.waiting.is_empty() && self.look_ups.looked.is_none() {
                let due = Instant::now() + self.options.connect_timeout + LOOK_UP_SPACING;
                self.look_ups.looked = Some(Looked { error: self.look_ups.last_error.clone(), due });
            }
        }
    }

    /// Who comes while another's look-up is under way shares it; who comes later
    /// must not hold up those who wait already.
    pub(super) fn on_update(&mut self, reply: Update, now: Instant) {
        if self.look_ups.looked.is_some() {
            self.look_ups.next.push(reply);
            return;
        }
        self.look_ups.waiting.push(reply);
        if self.look_ups.waiting.len() == 1 {
            self.start_update(now);
        }
    }

    fn start_update(&mut self, now: Instant) {
        if !self.sources.is_looking_up() {
            self.look_up(now);
        }
        if let Some(endpoint) = self.publisher.current().preferred().filter(|e| e.is_usable()) {
            self.probe(endpoint.clone(), now);
        }
    }

    /// Answers once the registry has been asked and the bound instance has, and
    /// something is usable or there has been time enough for it.
    pub(super) fn answer_updates(&mut self, now: Instant) {
        let Some(looked) = &self.look_ups.looked else { return };
        let binding = self.publisher.current();
        let preferred = binding.preferred().filter(|e| e.is_usable());
        if preferred.is_some_and(|e| self.probes.is_asking(e.serial())) {
            return;
        }
        let result = if binding.is_usable() {
            Ok(binding)
        } else if looked.due > now {
            return;
        } else {
            Err(match looked.error.clone() {
                Some(error) => UpdateError::Registry(error),
                None => UpdateError::NothingUsable { reason: self.status(now).reason().unwrap_or_default() },
            })
        };
        self.look_ups.looked = None;
        let next = std::mem::take(&mut self.look_ups.next);
        for update in std::mem::replace(&mut self.look_ups.waiting, next) {
            // A caller that has gone needs no answer.
            let _ = update.send(result.clone());
        }
        if !self.look_ups.waiting.is_empty() {
            self.start_update(now);
        }
    }

    /// When the updates that wait are answered at the latest.
    pub(super) fn updates_due(&self) -> Option<Instant> {
        self.look_ups.looked.as_ref().map(|looked| looked.due)
    }

    /// The end: nobody is left waiting.
    pub(super) fn refuse_updates(&mut self) {
        for update in self.look_ups.waiting.drain(..).chain(self.look_ups.next.drain(..)) {
            let _ = update.send(Err(UpdateError::Closed));
        }
    }
}
