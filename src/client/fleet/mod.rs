//! Everything known of one service's instances, and what follows from it: pure,
//! told what happened and asked with `now`.
//!
//! ```text
//! registry, connections, reports -> Fleet -> plan: dial, retire, bind, ask, wake
//! ```
//!
//! The worker does the rest: it dials what the plan says and publishes what it binds.

mod dialling;
mod member;
mod plan;
mod quality;
mod tier;
mod wanted;

#[cfg(test)]
mod tests;

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

pub(crate) use self::{
    member::{Ejection, Health},
    plan::{Dial, Plan},
    tier::Word,
    wanted::{Outlook, Wanted},
};
use self::{
    member::{Link, Member},
    tier::{Tier, into_conn},
};
use super::{mechanisms::FleetWithout, options::Policy, status::DatacenterStatus};
use crate::{Instance, InstanceId, Snapshot};

/// An instance in a datacenter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) tier: usize,
    pub(crate) id: InstanceId,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) policy: Policy,
    pub(crate) spares: usize,
    /// Keep the registry's order instead of the client's own.
    pub(crate) registry_order: bool,
    pub(crate) ejection: Ejection,
    /// How long a better datacenter must have been usable before calls return to it.
    pub(crate) failback_after: Duration,
    /// How long a list must stay empty before its old instances are demoted.
    pub(crate) demote_after: Duration,
    /// Keep one connection to each other datacenter ready.
    pub(crate) keep_warm: bool,
    /// The share of the known instances that must be left, in percent, for one that
    /// answers badly to be ejected.
    pub(crate) panic_threshold: u8,
    /// Calls go to the primary alone: every instance may become it, and is kept ready.
    pub(crate) primary_only: bool,
    /// Instances say themselves whether they serve.
    pub(crate) watches_health: bool,
    /// The client's own order among equals.
    pub(crate) seed: u64,
    pub(crate) without: FleetWithout,
}

/// The instances of one service, by datacenter in the order of preference.
/// `C` is a connection.
#[derive(Debug)]
pub(crate) struct Fleet<C> {
    settings: Settings,
    tiers: Vec<Tier<C>>,
    /// The preferred instance.
    bound: Option<Key>,
    attempts: u64,
    /// What calls want to be connected besides.
    wanted: Wanted,
}

impl<C: Clone> Fleet<C> {
    /// A fleet with the own datacenter alone, asked from `now` on.
    pub(crate) fn new(settings: Settings, now: Instant) -> Self {
        let own = Tier { asked_since: Some(now), ..Tier::default() };
        Self { settings, tiers: vec![own], bound: None, attempts: 0, wanted: Wanted::default() }
    }

    /// The other datacenters have become known, or are others than before: for
    /// each, its place before if it had one. What is known of those that stay is
    /// kept. Returns the connections to those that are no more.
    pub(crate) fn set_others(&mut self, from: &[Option<usize>]) -> Vec<C> {
        let mut before: Vec<_> = self.tiers.drain(1..).map(Some).collect();
        let mut take = |old: usize| before.get_mut(old.checked_sub(1)?)?.take();
        self.tiers.extend(from.iter().map(|old| old.and_then(&mut take).unwrap_or_default()));
        self.bound = self.bound.take().and_then(|key| {
            let place =
                if key.tier == 0 { 0 } else { from.iter().position(|&old| old == Some(key.tier))? + 1 };
            Some(Key { tier: place, ..key })
        });
        before.into_iter().flatten().flat_map(|mut tier| tier.clear()).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.tiers.len()
    }

    /// The worker asks the registry about this datacenter from `now` on.
    pub(crate) fn asked(&mut self, tier: usize, now: Instant) {
        self.tiers[tier].asked_since = Some(now);
    }

    /// It is no longer asked. Returns the connections to give up.
    pub(crate) fn unasked(&mut self, tier: usize) -> Vec<C> {
        self.tiers[tier].clear()
    }

    /// The registry has spoken. Returns the connections to instances that left.
    pub(crate) fn hear(&mut self, tier: usize, word: Word, snapshot: Option<&Snapshot>) -> Vec<C> {
        let settings = self.settings;
        let tier = &mut self.tiers[tier];
        // Looks at the word before: what comes back after an empty list starts anew.
        let gone = match snapshot {
            Some(snapshot) if word.empty_since.is_none() => tier.apply(snapshot, |place, id| {
                if settings.registry_order { place as u64 } else { own_order(settings.seed, id) }
            }),
            _ => Vec::new(),
        };
        tier.word = word;
        gone
    }

    /// A connection has answered. Returns the connection itself where nobody
    /// waits for it any more, else whether it ends an ejection.
    pub(crate) fn connected(&mut self, key: &Key, attempt: u64, conn: C, now: Instant) -> Result<bool, C> {
        let health = if self.settings.watches_health { Health::Unknown } else { Health::Serving };
        match self.dialling(key, attempt) {
            Some(member) => Ok(member.ready(conn, health, now)),
            None => Err(conn),
        }
    }

    /// An attempt failed. Returns the instance and its rest when this begins
    /// an ejection; later failures of the same episode say nothing.
    pub(crate) fn refused(
        &mut self,
        key: &Key,
        attempt: u64,
        cause: String,
        random: f64,
        now: Instant,
    ) -> Option<(Arc<Instance>, Duration)> {
        let times = self.settings.ejection;
        let member = self.dialling(key, attempt)?;
        let first = !member.is_on_probation();
        let rest = member.eject(cause, times, random, now);
        first.then(|| (Arc::clone(&member.instance), rest))
    }

    fn dialling(&mut self, key: &Key, attempt: u64) -> Option<&mut Member<C>> {
        // Its datacenter may have another place by now; the attempt's number is unique.
        let is_it = |member: &&mut Member<C>| matches!(member.link, Link::Dialling { attempt: current, .. } if current == attempt);
        self.tiers.iter_mut().find_map(|tier| tier.members.get_mut(&key.id).filter(is_it))
    }

    /// The connection that `is_it` knows was lost: dialled again at once, unless
    /// it keeps dying young without having `served` a call. Returns the instance and its rest when it is ejected.
    pub(crate) fn lost(
        &mut self,
        is_it: impl Fn(&C) -> bool,
        served: bool,
        cause: &str,
        random: f64,
        now: Instant,
    ) -> Option<(Arc<Instance>, Duration)> {
        let times = self.settings.ejection;
        let member = self.find(is_it)?;
        if member.lost(served, now) {
            return None;
        }
        let rest = member.eject(format!("{cause}, again and again"), times, random, now);
        Some((Arc::clone(&member.instance), rest))
    }

    /// Takes the connected instance that `is_it` knows out for a while.
    /// Returns it and its rest.
    pub(crate) fn eject(
        &mut self,
        is_it: impl Fn(&C) -> bool,
        cause: String,
        random: f64,
        now: Instant,
    ) -> Option<(Arc<Instance>, Duration)> {
        let Settings { ejection: times, without, .. } = self.settings;
        let member = self.find(is_it)?;
        if without.removal {
            return Some((Arc::clone(&member.instance), times.first));
        }
        let rest = member.eject(cause, times, random, now);
        Some((Arc::clone(&member.instance), rest))
    }

    fn ready(&self, wanted: impl Fn(&Member<C>) -> bool) -> Vec<C> {
        let members = self.tiers.iter().flat_map(|tier| tier.members.values()).filter(|m| wanted(m));
        members
            .filter_map(|m| match &m.link {
                Link::Ready { conn, .. } => Some(conn.clone()),
                Link::Idle | Link::Dialling { .. } => None,
            })
            .collect()
    }

    /// Puts `conn` in the place of the connection that `is_it` knows. Gives it
    /// back where there is none such any more.
    pub(crate) fn replace(&mut self, is_it: impl Fn(&C) -> bool, conn: C) -> Option<C> {
        match self.find(is_it).map(|member| &mut member.link) {
            Some(Link::Ready { conn: current, .. }) => {
                *current = conn;
                None
            }
            _ => Some(conn),
        }
    }

    /// Gives `anew` each connection and what the registry says of its instance now,
    /// and puts what comes of it in the connection's place.
    pub(crate) fn describe(&mut self, anew: impl Fn(&C, &Arc<Instance>) -> Option<C>) {
        for member in self.tiers.iter_mut().flat_map(|tier| tier.members.values_mut()) {
            if let Link::Ready { conn, .. } = &mut member.link
                && let Some(described) = anew(conn, &member.instance)
            {
                *conn = described;
            }
        }
    }

    fn find(&mut self, is_it: impl Fn(&C) -> bool) -> Option<&mut Member<C>> {
        self.tiers
            .iter_mut()
            .flat_map(|tier| tier.members.values_mut())
            .find(|m| matches!(&m.link, Link::Ready { conn, .. } if is_it(conn)))
    }

    /// The connection that `is_it` knows.
    pub(crate) fn connection(&self, is_it: impl Fn(&C) -> bool) -> Option<C> {
        self.tiers.iter().flat_map(|tier| tier.members.values()).find_map(|m| match &m.link {
            Link::Ready { conn, .. } if is_it(conn) => Some(conn.clone()),
            _ => None,
        })
    }

    /// What the registry says of a member.
    pub(crate) fn instance(&self, key: &Key) -> Option<Arc<Instance>> {
        self.tiers.get(key.tier)?.members.get(&key.id).map(|m| Arc::clone(&m.instance))
    }

    /// The instances that the registries list, each with its datacenter's place.
    pub(crate) fn known(&self) -> Vec<(usize, Arc<Instance>)> {
        let tiers = self.tiers.iter().enumerate();
        tiers.flat_map(|(place, tier)| tier.listed().map(move |m| (place, Arc::clone(&m.instance)))).collect()
    }

    /// The place of the datacenter that lists it; of several, the preferred one's.
    pub(crate) fn tier_of(&self, id: &InstanceId) -> Option<usize> {
        self.tiers.iter().position(|tier| tier.members.contains_key(id))
    }

    /// This one is better than any other, whatever is said of it; none is, where that is `None`.
    pub(crate) fn prefer(&mut self, id: Option<&InstanceId>) {
        for (other, member) in self.tiers.iter_mut().flat_map(|tier| &mut tier.members) {
            member.preferred = Some(other) == id;
        }
    }

    /// The datacenter of the preferred instance.
    pub(crate) fn bound_tier(&self) -> Option<usize> {
        self.bound.as_ref().map(|b| b.tier)
    }

    /// How many instances of the bound datacenter are ready.
    pub(crate) fn ready_peers(&self) -> usize {
        self.bound
            .as_ref()
            .and_then(|b| self.tiers.get(b.tier))
            .map_or(0, |tier| tier.members.values().filter(|m| m.is_ready()).count())
    }

    /// Whether the registry lists it, or did when it last listed any.
    pub(crate) fn lists(&self, id: &InstanceId) -> bool {
        self.tiers.iter().any(|tier| tier.members.get(id).is_some_and(|member| !member.unlisted))
    }

    /// Everything that is connected.
    pub(crate) fn connections(&self) -> Vec<C> {
        self.ready(|_| true)
    }

    /// Nothing is connected that any registry lists; or, where calls go to the primary alone, no primary:
    /// whoever was ejected may be the one by now, and nobody else can take its calls.
    fn is_starving(&self) -> bool {
        let has_primary =
            || self.tiers.iter().flat_map(|it| it.members.values()).any(|it| it.preferred && it.is_ready());
        !self.tiers.iter().any(Tier::has_ready) || self.settings.primary_only && !has_primary()
    }

    /// Everything connected, given up.
    pub(crate) fn clear(&mut self) -> Vec<C> {
        self.bound = None;
        self.tiers.iter_mut().flat_map(Tier::clear).collect()
    }

    /// What the status says of one datacenter; name and errors are the worker's to add.
    pub(crate) fn status(&self, tier: usize, now: Instant) -> DatacenterStatus {
        let data = &self.tiers[tier];
        let members = || data.listed();
        DatacenterStatus {
            asked: data.asked_since.is_some(),
            known: members().count(),
            ready: members().filter(|m| m.is_ready()).count(),
            ejected: members().filter(|m| m.is_ejected(now)).count(),
            unlisted: data.members.len() - members().count(),
            not_serving: members().filter(|m| m.is_ready() && !m.serves()).count(),
            last_failure: members().find_map(|m| m.last_failure().map(str::to_owned)),
            empty_since: data.word.empty_since,
            demoted: self.is_demoted(tier, now),
            answered: data.word.answered,
            ..DatacenterStatus::default()
        }
    }

    fn is_demoted(&self, tier: usize, now: Instant) -> bool {
        self.tiers[tier]
            .word
            .empty_since
            .is_some_and(|since| now.saturating_duration_since(since) >= self.settings.demote_after)
    }

    /// Takes a member's connection away, without prejudice.
    fn disconnect(&mut self, key: &Key) -> Option<C> {
        let member = self.tiers[key.tier].members.get_mut(&key.id)?;
        into_conn(std::mem::replace(&mut member.link, Link::Idle))
    }
}

/// Each client has its own order, so that many clients spread over equals.
fn own_order(seed: u64, id: &InstanceId) -> u64 {
    let mut hasher = DefaultHasher::new();
    (seed, id).hash(&mut hasher);
    hasher.finish()
}
