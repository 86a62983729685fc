//! What calls want to be connected, whether or not the policy does.

use std::collections::BTreeSet;

use tokio::time::Instant;

use super::{Fleet, Link, Member, Tier};
use crate::InstanceId;

/// Datacenters by their place, and instances in whatever datacenter they are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) tiers: BTreeSet<usize>,
    pub(crate) ids: BTreeSet<InstanceId>,
}

/// Whether what is wanted can be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outlook {
    Ready,
    /// It may be soon.
    Open,
    /// Not as things are, and why.
    Bleak(String),
    /// The same, because there is no such thing.
    Unknown(String),
}

impl<C: Clone> Fleet<C> {
    pub(crate) fn want(&mut self, wanted: Wanted) {
        self.wanted = wanted;
    }

    /// What is ready in each datacenter, by its place, the preferred ones first.
    pub(crate) fn reach(&self) -> Vec<(usize, Vec<C>)> {
        let ready = |tier: &Tier<C>| {
            let ranked = tier.ranked().into_iter().filter_map(|id| tier.members.get(id));
            let ready = ranked.filter_map(|member| match &member.link {
                Link::Ready { conn, .. } => Some(conn.clone()),
                Link::Idle | Link::Dialling { .. } => None,
            });
            ready.collect::<Vec<_>>()
        };
        let tiers = self.tiers.iter().enumerate().map(|(place, tier)| (place, ready(tier)));
        tiers.filter(|(_, ready)| !ready.is_empty()).collect()
    }

    /// Of an instance in `tier`, or in whatever datacenter it is known in.
    pub(crate) fn outlook_of(&self, id: &InstanceId, tier: Option<usize>, now: Instant) -> Outlook {
        let mut tiers = self.tiers.iter().enumerate().filter(|(place, _)| tier.is_none_or(|it| it == *place));
        let members: Vec<_> = tiers.clone().filter_map(|(_, tier)| tier.members.get(id)).collect();
        if members.is_empty() {
            let unheard = tiers.any(|(_, tier)| tier.is_unheard());
            return if unheard {
                Outlook::Open
            } else {
                Outlook::Unknown("no such instance is known".to_owned())
            };
        }
        if members.iter().any(|member| member.is_ready()) {
            return Outlook::Ready;
        }
        match members.iter().find_map(|member| resting(member, now)) {
            Some(reason) => Outlook::Bleak(reason),
            None => Outlook::Open,
        }
    }

    /// Of a datacenter: that anything there is ready.
    pub(crate) fn outlook_in(&self, tier: usize, now: Instant) -> Outlook {
        let Some(tier) = self.tiers.get(tier) else { return Outlook::Open };
        if tier.has_any_ready() {
            return Outlook::Ready;
        }
        if tier.members.is_empty() {
            let why = if tier.word.failing { "its registry does not answer" } else { "it lists no instance" };
            return if tier.is_unheard() { Outlook::Open } else { Outlook::Bleak(why.to_owned()) };
        }
        let reasons: Vec<_> = tier.members.values().map(|member| resting(member, now)).collect();
        match reasons.into_iter().collect::<Option<Vec<_>>>() {
            Some(reasons) => Outlook::Bleak(reasons.into_iter().next().unwrap_or_default()),
            None => Outlook::Open,
        }
    }
}

/// Why the instance is left alone, if it is.
fn resting<C>(member: &Member<C>, now: Instant) -> Option<String> {
    let idle = matches!(member.link, Link::Idle);
    (idle && member.is_ejected(now)).then(|| {
        let name = &member.instance.name;
        format!("{name} has failed ({})", member.last_failure().unwrap_or("and is left alone"))
    })
}
