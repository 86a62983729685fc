//! The primary of a service whose calls go to it alone: found among what the registry lists, kept
//! connected wherever it is, preferred in the binding, and told of.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::Worker;
use crate::{
    FencingToken, Instance, InstanceId, Primary,
    client::{
        choice::Aim,
        endpoint::Endpoint,
        event::{FailoverEvent, RebindCause},
        primary::{Leader, Lookout, Rivals},
    },
};

/// How long other datacenters are asked for an instance that has been named. Our choice: a dead one's registry
/// fails within ten seconds, mostly.
const SOUGHT_FOR: Duration = Duration::from_secs(10);

/// Who has been told to be the primary.
#[derive(Default)]
pub(super) struct Followed {
    /// `None` where calls go to any instance.
    pub(super) lookout: Option<Arc<Lookout>>,
    primary: Option<Arc<Instance>>,
    /// The present one, as the status has it.
    pub(super) now: Option<(Arc<Instance>, Option<FencingToken>)>,
    /// Named, and listed nowhere.
    sought: Option<Primary>,
    /// Two primaries of one term have been told of.
    has_rivals: bool,
}

impl Followed {
    pub(super) fn new(lookout: Option<Arc<Lookout>>) -> Self {
        Self { lookout, ..Self::default() }
    }

    /// Whether other datacenters are needed for it, known or not.
    pub(super) fn needs_others(&self) -> bool {
        self.sought.is_some()
    }
}

impl Worker {
    /// Hears what the registry and the calls say of the primary. Before what is wanted is taken up.
    pub(super) fn follow_primary(&mut self, now: Instant) {
        let Some(lookout) = self.followed.lookout.clone() else { return };
        let in_use = self.fleet.bound_tier().unwrap_or(0);
        lookout.listed(self.fleet.known().into_iter().map(|(tier, instance)| (instance, tier == in_use)));
        self.tell_rivals(&lookout);
        let leader = lookout.leader();
        let id = leader.as_ref().map(|leader| &leader.instance.id);
        if let Some(tier) = id.and_then(|id| self.fleet.tier_of(id)).filter(|&tier| tier != in_use) {
            self.want(id.cloned(), tier, super::wants::KEPT_FOR, now);
        }
        let open = leader.filter(|leader| leader.open.is_some());
        self.seek(lookout.sought().filter(|_| open.is_none()), now);
        if open.is_none() && self.followed.now.is_some() {
            // Whoever has taken over may be so new that the registry's news of it is still to come.
            self.want_look_up();
        }
        self.fleet.prefer(open.as_ref().map(|leader| &leader.instance.id));
        self.followed.now = open.as_ref().map(|leader| (leader.instance.clone(), leader.token));
        if let Some(leader) = open {
            self.tell_primary(leader, in_use, now);
        }
    }

    /// An instance was named that no registry lists: they are asked afresh, once, and those of other
    /// datacenters are asked at all.
    fn seek(&mut self, sought: Option<Primary>, now: Instant) {
        if sought.is_some() {
            for tier in 1..self.sources.len() {
                self.want(None, tier, SOUGHT_FOR, now);
            }
        }
        if sought != self.followed.sought {
            self.followed.sought = sought;
            if self.followed.sought.is_some() {
                self.want_look_up();
            }
        }
    }

    fn want(&mut self, instance: Option<InstanceId>, tier: usize, time: Duration, now: Instant) {
        let datacenter = Some(self.sources.get(tier).name.clone());
        self.wants.keep(Aim { instance, datacenter }, now + time);
    }

    /// Once, until it is over.
    fn tell_rivals(&mut self, lookout: &Lookout) {
        let rivals = lookout.rivals();
        let is_new = rivals.is_some() && !self.followed.has_rivals;
        self.followed.has_rivals = rivals.is_some();
        if let Some(Rivals { instances: [one, other], token }) = rivals.filter(|_| is_new) {
            let service = self.publisher.service();
            tracing::warn!(%service, %one, %other, %token, "two instances are primary of the same term: they do not share a lease (another folder, prefix or Consul), and each has a state of its own");
        }
    }

    fn tell_primary(&mut self, leader: Leader, in_use: usize, now: Instant) {
        let Leader { instance: to, token, .. } = leader;
        if self.followed.primary.as_ref().is_some_and(|from| from.id == to.id) {
            return;
        }
        let is_other = |it: &&Arc<Endpoint>| it.instance().id != to.id;
        if self.fleet.tier_of(&to.id) == Some(in_use)
            && let Some(preferred) = self.publisher.current().preferred().filter(is_other)
        {
            self.publisher.lost(preferred, RebindCause::PrimaryMoved, now);
        }
        let (service, from) = (self.publisher.service(), self.followed.primary.replace(to.clone()));
        self.publisher.event(FailoverEvent::PrimaryChanged { service, from, to, token });
    }
}
