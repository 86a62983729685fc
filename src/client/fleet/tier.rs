//! The instances of one datacenter.

use std::{collections::BTreeMap, sync::Arc};

use tokio::time::Instant;

use super::member::{Link, Member};
use crate::{InstanceId, Snapshot};

/// What the registry's latest word means for one datacenter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Word {
    /// It has answered at least once.
    pub(crate) answered: bool,
    /// It does not answer now.
    pub(crate) failing: bool,
    /// It answers with an empty list since then, after one that was not.
    pub(crate) empty_since: Option<Instant>,
}

/// One datacenter, in the order of preference.
#[derive(Debug)]
pub(crate) struct Tier<C> {
    pub(crate) members: BTreeMap<InstanceId, Member<C>>,
    pub(crate) word: Word,
    /// Since when it is asked; `None` while it is not.
    pub(crate) asked_since: Option<Instant>,
    /// Since when it has had a ready connection without a break.
    pub(crate) usable_since: Option<Instant>,
    /// Since when it has been dialled without having become usable.
    pub(crate) seeking_since: Option<Instant>,
    /// It has been found unusable since it was first asked: calls return to it
    /// only once it has been usable for a while. One that was merely not heard
    /// yet is moved to at once.
    pub(crate) was_unusable: bool,
}

impl<C> Default for Tier<C> {
    fn default() -> Self {
        Self {
            members: BTreeMap::new(),
            word: Word::default(),
            asked_since: None,
            usable_since: None,
            seeking_since: None,
            was_unusable: false,
        }
    }
}

impl<C> Tier<C> {
    /// Takes over a snapshot. What is not in it and not connected is forgotten; what
    /// is connected stays as the last resort, see [`leave`](Self::leave). An empty
    /// snapshot leaves nothing at all. Returns what was connected and is gone.
    ///
    /// An instance that is listed again after it was not (a new entry, or any
    /// entry after the list was empty) starts with a clean record: the registry
    /// has seen it come back.
    pub(crate) fn apply(&mut self, snapshot: &Snapshot, rank: impl Fn(usize, &InstanceId) -> u64) -> Vec<C> {
        let was_empty = self.word.empty_since.is_some();
        let mut before = std::mem::take(&mut self.members);
        for (place, instance) in snapshot.instances.iter().enumerate() {
            let id = &instance.id;
            let rank = (instance.warning, rank(place, id));
            let member = match before.remove(id) {
                Some(mut member) => {
                    // The same one as long as nothing has changed: see `describe`.
                    if member.instance != *instance {
                        member.instance = Arc::clone(instance);
                    }
                    member.rank = rank;
                    if std::mem::take(&mut member.unlisted) || was_empty {
                        member.reset();
                    }
                    member
                }
                None => Member::new(Arc::clone(instance), rank),
            };
            self.members.insert(id.clone(), member);
        }
        for (id, mut member) in before {
            member.unlisted = true;
            self.members.insert(id, member);
        }
        if snapshot.instances.is_empty() { self.unlisted(|_| true) } else { self.leave() }
    }

    /// Lets those go that are on the list no longer: at once where one that is listed
    /// is ready, else each as soon as it is not connected any more; it is never
    /// dialled again. Returns the connections to give up.
    pub(crate) fn leave(&mut self) -> Vec<C> {
        let replaced = self.has_ready();
        self.unlisted(|member| replaced || !member.is_ready())
    }

    /// Takes out those on the list no longer that `goes` says.
    fn unlisted(&mut self, goes: impl Fn(&Member<C>) -> bool) -> Vec<C> {
        let goes = |member: &Member<C>| member.unlisted && goes(member);
        if !self.members.values().any(goes) {
            return Vec::new();
        }
        let members = std::mem::take(&mut self.members);
        let (gone, stay): (Vec<_>, Vec<_>) = members.into_iter().partition(|(_, member)| goes(member));
        self.members = stay.into_iter().collect();
        gone.into_iter().filter_map(|(_, member)| into_conn(member.link)).collect()
    }

    /// Those that the registry lists, or listed when it last knew any.
    pub(crate) fn listed(&self) -> impl Iterator<Item = &Member<C>> {
        self.members.values().filter(|member| !member.unlisted)
    }

    /// Calls are served well: nothing need be looked for elsewhere.
    pub(crate) fn is_sound(&self) -> bool {
        self.members.values().any(Member::is_sound)
    }

    /// Something there may be serving, for all that is known.
    pub(crate) fn serves(&self) -> bool {
        self.members.values().any(Member::serves)
    }

    /// One that is listed is ready.
    pub(crate) fn has_ready(&self) -> bool {
        self.members.values().any(Member::is_ready_by_list)
    }

    /// One is ready, listed or not.
    pub(crate) fn has_any_ready(&self) -> bool {
        self.members.values().any(Member::is_ready)
    }

    /// Whether an attempt younger than the head start is under way. A datacenter has one
    /// head start in each outage: where it has many instances and all are silent, there is always
    /// a young attempt, and calls would never go elsewhere.
    pub(crate) fn is_hopeful(&self, now: Instant) -> bool {
        self.seeking_since.is_none_or(|since| is_fresh(since, now))
            && self
                .members
                .values()
                .any(|m| matches!(m.link, Link::Dialling { since, .. } if is_fresh(since, now)))
    }

    /// Asked just now, and not answered yet.
    pub(crate) fn is_pending(&self, now: Instant) -> bool {
        !self.word.answered
            && !self.word.failing
            && self.asked_since.is_some_and(|since| is_fresh(since, now))
    }

    /// Nothing has been heard of it yet, and something may be.
    pub(crate) fn is_unheard(&self) -> bool {
        !self.word.answered && !self.word.failing
    }

    /// Members in the client's order.
    pub(crate) fn ranked(&self) -> Vec<&InstanceId> {
        let mut members: Vec<_> = self.members.iter().collect();
        members.sort_by_key(|(_, m)| m.rank);
        members.into_iter().map(|(id, _)| id).collect()
    }

    /// Gives up every connection and forgets what was known.
    pub(crate) fn clear(&mut self) -> Vec<C> {
        let tier = std::mem::take(self);
        tier.members.into_values().filter_map(|member| into_conn(member.link)).collect()
    }
}

pub(crate) fn into_conn<C>(link: Link<C>) -> Option<C> {
    match link {
        Link::Ready { conn, .. } => Some(conn),
        Link::Idle | Link::Dialling { .. } => None,
    }
}

/// How long an attempt has the field for itself before the next is started
/// beside it (RFC 8305, section 5: Connection Attempt Delay).
pub(crate) const HEAD_START: std::time::Duration = std::time::Duration::from_millis(250);

pub(crate) fn is_fresh(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) < HEAD_START
}
