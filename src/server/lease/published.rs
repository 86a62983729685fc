//! What the campaign tells: the role and the term.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{sync::watch, time::Instant};
use tower::util::rng::Rng;

use super::election::Election;
use crate::{instance::InstanceId, role::Role, server::store::Term};

#[derive(Debug)]
pub(super) struct Published {
    instance: String,
    address: InstanceId,
    role: watch::Sender<Role>,
    term: watch::Sender<Option<Arc<Term>>>,
    /// Nothing is told any more.
    ended: AtomicBool,
}

impl Published {
    pub(super) fn new(instance: String, address: InstanceId) -> Self {
        let (role, term) = (watch::Sender::new(Role::Unknown), watch::Sender::new(None));
        Self { instance, address, role, term, ended: AtomicBool::new(false) }
    }

    pub(super) fn role(&self) -> watch::Receiver<Role> {
        self.role.subscribe()
    }

    pub(super) fn term(&self) -> watch::Receiver<Option<Arc<Term>>> {
        self.term.subscribe()
    }

    /// What holds at `now`. Who is primary always has a term: it comes first and goes last.
    pub(super) fn publish<R: Rng>(&self, election: &Election<R>, now: Instant) {
        let (role, term) = (election.role(now), election.term());
        if term.is_some() {
            self.set_term(term);
        }
        self.set_role(role);
        if term.is_none() {
            self.set_term(None);
        }
    }

    /// The end: nothing is known any more, whatever the campaign still does.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        let unknown = |role: &mut Role| {
            let other = *role != Role::Unknown;
            self.log(role, &Role::Unknown);
            *role = Role::Unknown;
            other
        };
        self.role.send_if_modified(unknown);
        self.term.send_if_modified(|term| term.take().is_some());
    }

    fn set_term(&self, new: Option<&Term>) {
        self.term.send_if_modified(|term| {
            let same = term.as_deref() == new || self.ended.load(Ordering::SeqCst);
            if !same {
                *term = new.cloned().map(Arc::new);
            }
            !same
        });
    }

    fn set_role(&self, new: Role) {
        self.role.send_if_modified(|role| {
            if self.ended.load(Ordering::SeqCst) {
                return false;
            }
            let same = match (&*role, &new) {
                // A renewal moves its end on, and wakes nobody.
                (Role::Primary { token: old, .. }, Role::Primary { token, .. }) => old == token,
                (old, new) => old == new,
            };
            self.log(role, &new);
            if !same && let Some(address) = self.namesake(&new) {
                let instance = &self.instance;
                tracing::warn!(%instance, %address, "the primary has this instance's name: it is an older process of this instance, or two instances were given one name");
            }
            *role = new;
            !same
        });
    }

    /// Where a primary of the same name serves. At this instance's own address it is an older
    /// process of it, as after each restart.
    fn namesake<'a>(&self, role: &'a Role) -> Option<&'a InstanceId> {
        match role {
            Role::Standby { primary: Some(primary) } if primary.instance == self.instance => {
                Some(&primary.address).filter(|address| **address != self.address)
            }
            _ => None,
        }
    }

    fn log(&self, old: &Role, new: &Role) {
        let token = |role: &Role| match role {
            Role::Primary { token, .. } => Some(*token),
            _ => None,
        };
        let (instance, old, now) = (&self.instance, token(old), token(new));
        if old == now {
            return;
        }
        if let Some(token) = old {
            tracing::info!(%instance, %token, now = ?new, "lost primary role");
        }
        if let Some(token) = now {
            tracing::info!(%instance, %token, "became PRIMARY");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::role::{FencingToken, Primary};

    #[test]
    fn a_primary_of_the_same_name_at_another_address_is_a_namesake() {
        let here = InstanceId::new("10.0.0.7", 1);
        let published = Published::new("a".to_owned(), here.clone());
        let standby = |name: &str, address: &InstanceId| Role::Standby {
            primary: Some(Primary::new(name, address.clone(), FencingToken::new(1))),
        };
        let elsewhere = InstanceId::new("10.0.0.8", 1);
        assert_eq!(published.namesake(&standby("a", &elsewhere)), Some(&elsewhere));
        // Its own older process, and its ordinary primary.
        assert_eq!(published.namesake(&standby("a", &here)), None);
        assert_eq!(published.namesake(&standby("b", &elsewhere)), None);
        assert_eq!(published.namesake(&Role::Standby { primary: None }), None);
    }
}
