//! Whom to dial now, and how many at once.
//!
//! Those that were lost while they served go first, then those not tried yet in the order of
//! preference, then those that failed, the longest untried first ([`Turn`]). An attempt that has
//! not answered within [`HEAD_START`] holds up no other; while nothing at all is usable, as many
//! are begun in its place as are known to be silent or to have failed. One good instance among thirty
//! is so dialled within a second and a half, and one among many more after about a second for each
//! 128 that are silent, or each 256 that refuse.

use std::{cmp::Reverse, collections::BinaryHeap};

use tokio::time::Instant;

use super::{
    Dial, Fleet, Key,
    member::{Link, Turn},
    plan::Wake,
    tier::{HEAD_START, is_fresh},
};
use crate::InstanceId;

/// How many attempts may have the field at once in one datacenter: 128 silent instances are tried
/// in a second. Where a thousand instances are wanted, the first are ready before the
/// last are begun. Our choice.
pub(super) const DIALS_AT_ONCE: usize = 32;

/// How many may fail in one datacenter within a head start before the next one is begun. A
/// refusal frees its place at once; a list of a thousand instances that all refuse must not become
/// a flood, nor the only work that the runtime does. Our choice: 256 in a second.
pub(super) const FAILURES_AT_ONCE: usize = 64;

/// How many may be under way in one datacenter, young and old: a quarter of the 1,024 files that
/// a process may mostly open. Reached where the connect time-out is longer than two
/// seconds and hundreds are silent. Our choice.
const UNDER_WAY_AT_MOST: usize = 256;

/// What is under way in a datacenter.
#[derive(Default)]
struct Field {
    /// Ready, or being dialled and young.
    counted: usize,
    /// Of these, those that pass: what warns does not stand in for what passes.
    passing: usize,
    young: usize,
    silent: usize,
    /// Have failed since they last answered; the silent ones besides.
    failing: usize,
    /// Have failed within the last head start.
    failed: usize,
}

impl Field {
    /// How many attempts may be begun.
    fn room(&self) -> usize {
        let young = DIALS_AT_ONCE.saturating_sub(self.young);
        let failed = FAILURES_AT_ONCE.saturating_sub(self.failed);
        young.min(failed).min(UNDER_WAY_AT_MOST.saturating_sub(self.young + self.silent))
    }

    fn has_enough(&self, warning: bool, wanted: usize) -> bool {
        (if warning { self.counted } else { self.passing }) >= wanted
    }
}

impl<C: Clone> Fleet<C> {
    /// Instances to dial, and marks them. Only up to the datacenter that is
    /// usable: those behind it are not needed, unless they are kept warm.
    pub(super) fn dials(&mut self, order: &[usize], now: Instant, wake: &mut Wake) -> Vec<Dial> {
        let mut dials = Vec::new();
        let mut behind = false;
        for &tier in order {
            if self.tiers[tier].asked_since.is_some() {
                self.dial_up_to(tier, self.quota(tier, behind), now, wake, &mut dials);
            }
            behind |= self.tiers[tier].is_sound();
        }
        dials
    }

    /// How many connections a datacenter is to have; `behind` another that is usable,
    /// only what calls want there, or what is kept warm.
    pub(super) fn quota(&self, tier: usize, behind: bool) -> usize {
        let wanted = self.wanted.tiers.contains(&tier);
        if self.settings.primary_only && !behind {
            return usize::MAX;
        }
        match self.settings.policy {
            policy if policy.spreads() && (wanted || !behind) => usize::MAX,
            _ if !behind => self.settings.spares.saturating_add(1),
            _ => usize::from(wanted || self.settings.keep_warm),
        }
    }

    /// Starts attempts until as many connections are ready or freshly under
    /// way. An attempt that has been out for the head start counts no more, so
    /// that a silent host holds nobody up.
    fn dial_up_to(
        &mut self,
        tier: usize,
        wanted: usize,
        now: Instant,
        wake: &mut Wake,
        dials: &mut Vec<Dial>,
    ) {
        let starving = self.is_starving();
        let mut field = self.field(tier, now, wake);
        // The more have been tried in vain, the more at once: all have their turn soon.
        let wanted = if starving { wanted.max(field.failing.min(DIALS_AT_ONCE)) } else { wanted };
        let mut turns = self.turns(tier, starving, now, wake);
        let mut chosen = Vec::new();
        let room = field.room();
        while chosen.len() < room
            && let Some(Reverse((_, warning, id))) = turns.pop()
        {
            if field.has_enough(warning, wanted) && !self.wanted.ids.contains(id) {
                continue;
            }
            chosen.push(id.clone());
            field.counted += 1;
            field.passing += usize::from(!warning);
        }
        if chosen.is_empty() {
            return;
        }
        let tier_now = &mut self.tiers[tier];
        wake.at(now + HEAD_START);
        wake.at(*tier_now.seeking_since.get_or_insert(now) + HEAD_START);
        for id in chosen {
            self.attempts += 1;
            if let Some(member) = tier_now.members.get_mut(&id) {
                member.dialled(self.attempts, now);
            }
            dials.push(Dial { key: Key { tier, id }, attempt: self.attempts });
        }
    }

    fn field(&self, tier: usize, now: Instant, wake: &mut Wake) -> Field {
        let mut field = Field::default();
        let mut first_failed = now;
        for member in self.tiers[tier].listed() {
            let mut counts = false;
            let mut silent = false;
            match member.link {
                Link::Ready { .. } => counts = member.serves(),
                Link::Dialling { since, .. } if is_fresh(since, now) => {
                    wake.at(since + HEAD_START);
                    field.young += 1;
                    counts = true;
                }
                Link::Dialling { .. } => silent = true,
                Link::Idle => {}
            }
            if let Some(since) = member.failed_since(HEAD_START, now) {
                field.failed += 1;
                first_failed = first_failed.min(since);
            }
            field.silent += usize::from(silent);
            field.failing += usize::from(silent || member.is_on_probation());
            field.counted += usize::from(counts);
            field.passing += usize::from(counts && !member.instance.warning);
        }
        if field.failed > FAILURES_AT_ONCE - DIALS_AT_ONCE {
            // Then there is more room again.
            wake.at(first_failed + HEAD_START);
        }
        field
    }

    /// Those that may be dialled, with their turns and whether they warn; the first is on top. A heap, for
    /// of ten thousand only a few are taken.
    fn turns(
        &self,
        tier: usize,
        starving: bool,
        now: Instant,
        wake: &mut Wake,
    ) -> BinaryHeap<Reverse<(Turn, bool, &InstanceId)>> {
        let mut turns = Vec::new();
        for (id, member) in &self.tiers[tier].members {
            if member.unlisted || !matches!(member.link, Link::Idle) {
                continue;
            }
            match member.rests_until(starving).filter(|&until| until > now) {
                Some(until) => wake.at(until),
                None => turns.push(Reverse((member.turn(), member.instance.warning, id))),
            }
        }
        turns.into()
    }
}
