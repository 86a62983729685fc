//! What follows from what the fleet knows.

use tokio::time::Instant;

use super::{
    Fleet, Key,
    member::{Health, Link, Member},
    tier::{HEAD_START, Tier},
};
use crate::InstanceId;

/// What the worker is to do now.
#[derive(Debug)]
pub(crate) struct Plan<C> {
    /// Instances to dial.
    pub(crate) dial: Vec<Dial>,
    /// Connections no longer wanted; calls on them finish.
    pub(crate) retire: Vec<C>,
    /// What is bound; `None` when nothing is usable.
    pub(crate) bound: Option<Bound<C>>,
    /// For each datacenter, whether it is to be asked.
    pub(crate) ask: Vec<bool>,
    /// Whether others than the own datacenter are wanted, known or not.
    pub(crate) need_others: bool,
    /// Nothing is usable, and no attempt that has just begun may change that.
    pub(crate) hopeless: bool,
    /// When the plan changes by itself.
    pub(crate) wake: Option<Instant>,
}

#[derive(Debug)]
pub(crate) struct Dial {
    pub(crate) key: Key,
    pub(crate) attempt: u64,
}

/// The ready connections of one datacenter, the preferred one first.
#[derive(Debug)]
pub(crate) struct Bound<C> {
    pub(crate) tier: usize,
    pub(crate) endpoints: Vec<C>,
}

/// The earliest of several moments, all after `now`.
pub(super) struct Wake {
    now: Instant,
    at: Option<Instant>,
}

impl Wake {
    pub(super) fn at(&mut self, at: Instant) {
        if at > self.now {
            self.at = Some(self.at.map_or(at, |earliest| earliest.min(at)));
        }
    }
}

impl<C: Clone> Fleet<C> {
    /// What to do now. Marks what it says to dial as being dialled.
    pub(crate) fn plan(&mut self, now: Instant) -> Plan<C> {
        let mut wake = Wake { now, at: None };
        let mut retire: Vec<_> = self.tiers.iter_mut().flat_map(Tier::leave).collect();
        let order = self.order(now, &mut wake);
        let dial = self.dials(&order, now, &mut wake);
        self.note_usability(now, &mut wake);
        let tier = self.choose(&order, now, &mut wake);
        let ask = self.asks(&order, tier, now, &mut wake);
        self.bind(tier);
        retire.extend(self.retirements(&order, tier));
        let bound = tier.map(|tier| Bound { tier, endpoints: self.endpoints(tier) });
        let own_serves = self.tiers[0].is_sound() && !self.is_demoted(0, now);
        let need_others = self.settings.keep_warm || !(own_serves || self.is_being_replaced(now));
        let hopeless = bound.is_none() && !self.tiers.iter().any(|t| t.is_hopeful(now) || t.is_pending(now));
        Plan { dial, retire, bound, ask, need_others, hopeless, wake: wake.at }
    }

    /// Datacenters in the order of preference; demoted ones come last.
    fn order(&self, now: Instant, wake: &mut Wake) -> Vec<usize> {
        let mut order: Vec<_> = (0..self.tiers.len()).collect();
        order.sort_by_key(|&tier| self.is_demoted(tier, now));
        for tier in &self.tiers {
            if let Some(since) = tier.word.empty_since {
                wake.at(since + self.settings.demote_after);
            }
        }
        order
    }

    fn note_usability(&mut self, now: Instant, wake: &mut Wake) {
        for tier in &mut self.tiers {
            // The status counts who is ejected: it changes when a rest ends.
            tier.members.values().filter_map(|m| m.rests_until(false)).for_each(|until| wake.at(until));
            if tier.serves() {
                tier.usable_since.get_or_insert(now);
                tier.seeking_since = None;
                continue;
            }
            tier.usable_since = None;
            let unheard = tier.asked_since.is_none() || (!tier.word.answered && !tier.word.failing);
            if !unheard && !tier.is_hopeful(now) {
                tier.was_unusable = true;
            }
        }
    }

    /// The datacenter to bind to. One where only those are ready that the registry
    /// lists no longer comes behind all others.
    fn choose(&mut self, order: &[usize], now: Instant, wake: &mut Wake) -> Option<usize> {
        let first = |is_so: fn(&Tier<C>) -> bool| order.iter().copied().find(|&t| is_so(&self.tiers[t]));
        // What says that it is not serving is better than what is listed no longer.
        let grades: [fn(&Tier<C>) -> bool; 3] = [Tier::serves, Tier::has_ready, Tier::has_any_ready];
        let (best, is_ready) = grades.into_iter().find_map(|is_so| Some((first(is_so)?, is_so)))?;
        let place = |tier: usize| order.iter().position(|&t| t == tier).unwrap_or(usize::MAX);
        let bound = self.bound.as_ref().map(|b| b.tier);
        let Some(current) = bound.filter(|&t| is_ready(&self.tiers[t])) else {
            // Nothing is bound, or the last resort. The own datacenter gets its head
            // start where an attempt there has just begun; the others cost each other
            // nothing.
            if place(0) < place(best) && self.is_being_replaced(now) {
                return bound.filter(|&t| self.tiers[t].has_any_ready());
            }
            return Some(best);
        };
        if place(best) >= place(current) {
            return Some(current);
        }
        if self.is_demoted(current, now) {
            return Some(best);
        }
        // A better one is usable again.
        let tier = &self.tiers[best];
        let due = tier.usable_since.unwrap_or(now)
            + if tier.was_unusable { self.settings.failback_after } else { std::time::Duration::ZERO };
        if due <= now {
            return Some(best);
        }
        wake.at(due);
        Some(current)
    }

    /// Which datacenters to ask: the own one always; the others when no better
    /// one is usable, when they are bound, or when they are kept warm. A fresh
    /// attempt in the own one delays the question and does not take it back: a
    /// slow registry would never come to its answer.
    fn asks(&self, order: &[usize], bound: Option<usize>, now: Instant, wake: &mut Wake) -> Vec<bool> {
        let mut ask = vec![self.settings.keep_warm; self.tiers.len()];
        let replaced = self.is_being_replaced(now);
        for tier in self.tiers.iter().filter(|tier| tier.is_pending(now)) {
            wake.at(tier.asked_since.unwrap_or(now) + HEAD_START);
        }
        let mut need = true;
        for &tier in order {
            let asked = self.tiers[tier].asked_since.is_some();
            let wanted = self.wanted.tiers.contains(&tier);
            ask[tier] |= wanted || tier == 0 || bound == Some(tier) || (need && (asked || !replaced));
            need &= !self.tiers[tier].is_sound();
        }
        ask
    }

    /// The own datacenter has an attempt that has just begun, or has not been
    /// heard yet: no need to look elsewhere so soon.
    fn is_being_replaced(&self, now: Instant) -> bool {
        self.tiers[0].is_hopeful(now) || self.tiers[0].is_pending(now)
    }

    /// Keeps the preferred instance while none is of a better grade (which says that it
    /// is serving, answers well, passes its checks); else takes the first in rank of the best.
    fn bind(&mut self, tier: Option<usize>) {
        let Some(tier) = tier else {
            // Remembered, so that a reconnection of the same one is no rebind.
            if self.bound.as_ref().is_some_and(|b| !self.tiers[b.tier].members.contains_key(&b.id)) {
                self.bound = None;
            }
            return;
        };
        let members = &self.tiers[tier].members;
        let best = members.iter().filter(|(_, m)| m.is_ready()).min_by_key(|(_, m)| (m.grade(), m.rank));
        let Some((first, best)) = best else { return };
        let kept = self.bound.as_ref().filter(|b| b.tier == tier).and_then(|b| members.get(&b.id));
        if kept.is_some_and(|kept| kept.is_ready() && kept.grade() <= best.grade()) {
            return;
        }
        self.bound = Some(Key { tier, id: first.clone() });
    }

    /// Connections beyond what is wanted: surplus spares, and those to
    /// datacenters behind the one in use.
    fn retirements(&mut self, order: &[usize], bound: Option<usize>) -> Vec<C> {
        let Some(bound) = bound else { return Vec::new() };
        let mut surplus = Vec::new();
        let mut behind = false;
        for &tier in order {
            let keep = self.quota(tier, behind);
            let mut ready: Vec<_> = self.tiers[tier]
                .members
                .iter()
                .filter(|(_, m)| m.is_ready())
                .map(|(id, m)| (id, m.grade(), m.rank))
                .collect();
            let preferred = self.bound.as_ref().filter(|b| b.tier == tier).map(|b| &b.id);
            ready.sort_by_key(|(id, grade, rank)| (Some(*id) != preferred, *grade, *rank));
            // What is not serving is listened to until there are enough that are: given
            // up before, it would be dialled again at once.
            let enough =
                ready.iter().filter(|(_, (_, health, ..), _)| *health != Health::NotServing).count() >= keep;
            let is_surplus = |id: &InstanceId, health| {
                (enough || health != Health::NotServing) && !self.wanted.ids.contains(id)
            };
            let ready =
                ready.into_iter().skip(keep).filter(|(id, (_, health, ..), _)| is_surplus(id, *health));
            surplus.extend(ready.map(|(id, ..)| Key { tier, id: id.clone() }));
            behind |= tier == bound;
        }
        surplus.iter().filter_map(|key| self.disconnect(key)).collect()
    }

    /// The ready connections. Turns are taken by those that say they are serving, as
    /// long as one does, and of these by those that pass, as long as one does.
    fn endpoints(&self, tier: usize) -> Vec<C> {
        let members = &self.tiers[tier].members;
        let mut ready: Vec<_> = members
            .iter()
            .filter_map(|(id, m)| match &m.link {
                Link::Ready { conn, .. } => Some((id, m, conn)),
                _ => None,
            })
            .collect();
        if self.settings.policy.spreads() {
            // What answers badly stays, or it would have been ejected: see `can_do_without`.
            let standing = |m: &Member<C>| (m.health, m.instance.warning);
            let best = ready.iter().map(|(_, m, _)| standing(m)).min();
            ready.retain(|(_, m, _)| m.preferred || Some(standing(m)) <= best);
        }
        let preferred = self.bound.as_ref().map(|b| &b.id);
        ready.sort_by_key(|(id, m, _)| (Some(*id) != preferred, m.grade(), m.rank));
        ready.into_iter().map(|(_, _, conn)| conn.clone()).collect()
    }
}
