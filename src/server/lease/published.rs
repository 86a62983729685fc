//! What the campaign tells: the role and the term.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{sync::watch, time::Instant};
use tower::util::rng::Rng;

use super::election::Election;
use crate::{role::Role, server::store::Term};

#[derive(Debug)]
pub(super) struct Published {
    instance: String,
    role: watch::Sender<Role>,
    term: watch::Sender<Option<Arc<Term>>>,
    /// Nothing is told any more.
    ended: AtomicBool,
}

impl Published {
    pub(super) fn new(instance: String) -> Self {
        let (role, term) = (watch::Sender::new(Role::Unknown), watch::Sender::new(None));
        Self { instance, role, term, ended: AtomicBool::new(false) }
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
            *role = new;
            !same
        });
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
