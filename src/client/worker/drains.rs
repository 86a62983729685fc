//! Streams on instances that have left the registry.
//!
//! A connection that gets no new calls is kept by the calls that it still has, and
//! those may be streams without an end. Where that is wanted, these are ended
//! when their instance has been gone for a while.

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::Instant;

use super::Worker;
use crate::{
    Instance,
    client::{
        endpoint::{Endpoint, Link},
        event::FailoverEvent,
        hook::Drain,
    },
};

/// Connections out of use, of which nobody knows but their calls.
pub(super) struct Drains {
    /// How long after its instance has left a stream is ended.
    after: Option<Duration>,
    parted: Vec<Parted>,
}

struct Parted {
    instance: Arc<Instance>,
    /// Gone with the last call.
    link: Weak<Link>,
    /// When its streams end, once its instance has left.
    due: Option<Instant>,
    /// Nobody asks any more whether it has left.
    unasked: bool,
}

impl Drains {
    pub(super) fn new(after: Option<Duration>) -> Self {
        Self { after, parted: Vec::new() }
    }

    /// A connection goes out of use.
    pub(super) fn part(&mut self, endpoint: &Endpoint) {
        let (instance, link) = (endpoint.instance().clone(), Arc::downgrade(endpoint.link()));
        if self.after.is_some() && !self.parted.iter().any(|parted| parted.link.ptr_eq(&link)) {
            self.parted.push(Parted { instance, link, due: None, unasked: false });
        }
    }
}

impl Worker {
    /// A datacenter is asked no more: none of its instances has left for that.
    pub(super) fn unask(&mut self, tier: usize) {
        for parted in &mut self.drains.parted {
            parted.unasked |= parted.due.is_none() && self.fleet.tier_of(&parted.instance.id) == Some(tier);
        }
        self.fleet.unasked(tier).iter().for_each(|endpoint| endpoint.link().retire());
    }

    /// Some instances may have left, and others be back.
    pub(super) fn begin_drains(&mut self, now: Instant) {
        let Some(after) = self.drains.after else { return };
        let mut leaving = BTreeSet::new();
        let mut events = Vec::new();
        for parted in &mut self.drains.parted {
            let id = &parted.instance.id;
            if self.fleet.lists(id) {
                (parted.due, parted.unasked) = (None, false);
            } else if parted.due.is_none() && !parted.unasked {
                parted.due = Some(now + after);
                if leaving.insert(id.clone()) {
                    events.push(parted.instance.clone());
                }
            }
        }
        for instance in events {
            let service = self.publisher.service();
            if let Some(hook) = &self.options.traffic.on_drain {
                hook.tell(&Drain { service: &service, instance: &instance, ends_in: after });
            }
            self.publisher.event(FailoverEvent::Draining { service, instance, ends_in: after });
        }
    }

    /// Ends what is due. Returns when something is next.
    pub(super) fn end_drains(&mut self, now: Instant) -> Option<Instant> {
        self.drains.parted.retain(|parted| {
            let Some(link) = parted.link.upgrade() else { return false };
            let is_due = parted.due.is_some_and(|due| due <= now);
            if is_due {
                link.drain();
            }
            !is_due
        });
        self.drains.parted.iter().filter_map(|parted| parted.due).min()
    }
}
