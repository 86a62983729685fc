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
            was_unusable: false,
        }
    }
}

impl<C> Tier<C> {
    /// Takes over a snapshot. Returns what was connected and is gone.
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
                    if was_empty {
                        member.reset();
                    }
                    member
                }
                None => Member::new(Arc::clone(instance), rank),
            };
            self.members.insert(id.clone(), member);
        }
        before.into_values().filter_map(|member| into_conn(member.link)).collect()
    }

    /// Calls are served well: nothing need be looked for elsewhere.
    pub(crate) fn is_sound(&self) -> bool {
        self.members.values().any(Member::is_sound)
    }

    pub(crate) fn has_ready(&self) -> bool {
        self.members.values().any(Member::is_ready)
    }

    /// Whether an attempt younger than the head start is under way.
    pub(crate) fn is_hopeful(&self, now: Instant) -> bool {
        self.members.values().any(|m| matches!(m.link, Link::Dialling { since, .. } if is_fresh(since, now)))
    }

    /// Asked just now, and not answered yet.
    pub(crate) fn is_pending(&self, now: Instant) -> bool {
        !self.word.answered
            && !self.word.failing
            && self.asked_since.is_some_and(|since| is_fresh(since, now))
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
