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
        let mut before = None;
        self.role.send_if_modified(|role| {
            let other = *role != Role::Unknown;
            before = Some(std::mem::replace(role, Role::Unknown));
            other
        });
        if let Some(before) = before {
            self.log(&before, &Role::Unknown);
        }
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
        let mut before = None;
        let changed = self.role.send_if_modified(|role| {
            if self.ended.load(Ordering::SeqCst) {
                return false;
            }
            let same = match (&*role, &new) {
                // A renewal moves its end on, and wakes nobody.
                (Role::Primary { token: old, .. }, Role::Primary { token, .. }) => old == token,
                (old, new) => old == new,
            };
            before = Some(std::mem::replace(role, new.clone()));
            !same
        });
        // Not under the lock: who writes the lines may want to know the role, or take its time.
        let Some(before) = before.filter(|_| changed) else { return };
        self.log(&before, &new);
        if let Some(address) = self.namesake(&new) {
            let instance = &self.instance;
            tracing::warn!(%instance, %address, "the primary has this instance's name: it is an older process of this instance, or two instances were given one name");
        }
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

    /// Asks for the role whenever a line is written.
    struct Asks(Arc<Published>, std::sync::mpsc::Sender<Role>);

    impl tracing::Subscriber for Asks {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

        fn event(&self, _: &tracing::Event<'_>) {
            self.1.send(self.0.role().borrow().clone()).unwrap();
        }

        fn enter(&self, _: &tracing::span::Id) {}

        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn whoever_writes_the_lines_may_ask_for_the_role() {
        let here = InstanceId::new("10.0.0.7", 1);
        let published = Arc::new(Published::new("a".to_owned(), here));
        let (lines, read) = std::sync::mpsc::channel();
        let asks = Asks(published.clone(), lines);
        let primary = Role::Primary { token: FencingToken::new(1), until: Instant::now() };
        let elsewhere = Primary::new("a", InstanceId::new("10.0.0.8", 1), FencingToken::new(2));
        let standby = Role::Standby { primary: Some(elsewhere) };
        let roles = [primary.clone(), standby.clone(), primary.clone()];
        // A thread of its own: it would hang.
        std::thread::spawn(move || {
            tracing::subscriber::with_default(asks, || {
                roles.into_iter().for_each(|role| published.set_role(role));
                published.end();
            });
        });
        let mut seen = Vec::new();
        // Became, lost, the namesake, became, lost.
        for line in 0..5 {
            let role = read.recv_timeout(std::time::Duration::from_secs(30));
            seen.push(role.unwrap_or_else(|_| panic!("line {line} is written")));
        }
        assert_eq!(seen, [primary.clone(), standby.clone(), standby, primary, Role::Unknown]);
    }

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
