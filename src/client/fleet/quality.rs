//! Instances that are connected and answer, but badly, or say that they are not serving.

use super::{Fleet, Health, Link, Member};

impl<C: Clone> Fleet<C> {
    /// The connection that `is_it` knows serves badly and there may be nothing better:
    /// it stays in use, and others are looked for.
    pub(crate) fn doubt(&mut self, is_it: impl Fn(&C) -> bool, doubted: bool) {
        if let Some(member) = self.find(is_it) {
            member.doubted = doubted;
        }
    }

    /// The connections in doubt. What is listed no longer goes by itself.
    pub(crate) fn doubted(&self) -> Vec<C> {
        self.ready(|member| member.doubted && !member.unlisted)
    }

    /// Whether the calls of a connection in doubt, the one that `is_it` knows, are
    /// better off without it: not where nothing good is ready, and not where so few
    /// of its datacenter would be left that they might not bear the load of all. That counts
    /// only as long as its datacenter has to bear it: where nothing good is ready there, and
    /// something is elsewhere, calls go over.
    pub(crate) fn can_do_without(&self, is_it: impl Fn(&C) -> bool) -> bool {
        let is_it = |member: &Member<C>| matches!(&member.link, Link::Ready { conn, .. } if is_it(conn));
        let Some(tier) = self.tiers.iter().find(|tier| tier.members.values().any(is_it)) else {
            return false;
        };
        // Nobody else does what it does.
        if tier.members.values().any(|member| is_it(member) && member.preferred) {
            return false;
        }
        if self.settings.without.last_resort {
            return true;
        }
        if !tier.is_sound() {
            return self.tiers.iter().any(|tier| tier.is_sound());
        }
        // One that is not connected is left as well, unless it has failed.
        let left = tier.listed().filter(|m| !m.doubted && !m.is_on_probation()).count();
        left * 100 >= tier.listed().count() * usize::from(self.settings.panic_threshold)
    }

    /// What the instance behind the connection that `is_it` knows says of itself.
    /// True where that is news: not where its first word is that it is serving.
    pub(crate) fn heard_of_health(&mut self, is_it: impl Fn(&C) -> bool, serving: bool) -> bool {
        let health = if serving { Health::Serving } else { Health::NotServing };
        self.find(is_it).is_some_and(|member| {
            let before = std::mem::replace(&mut member.health, health);
            before != health && !(serving && before == Health::Unknown)
        })
    }
}
