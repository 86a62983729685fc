//! Who is let through, and for how long that holds.

use std::future::Future;

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

use crate::{
    not_primary::NotPrimary,
    role::{FencingToken, Primary, Role},
    server::role_source::RoleSource,
};

/// The role, and what has been decided beyond it. Clones share it.
#[derive(Clone)]
pub(super) struct Gate {
    source: RoleSource,
    /// Terms up to this one are refused.
    shut: watch::Sender<Option<FencingToken>>,
    /// The calls that were let through. Always closed: then it can be waited for at any time.
    calls: TaskTracker,
}

/// A call that was let through: it counts until this is dropped.
pub(super) struct Passage {
    token: FencingToken,
    gate: Gate,
    _call: TaskTrackerToken,
}

// === impl Gate ===

impl Gate {
    pub(super) fn new(source: RoleSource) -> Self {
        let calls = source.calls.clone().unwrap_or_default();
        calls.close();
        Self { source, shut: watch::Sender::new(None), calls }
    }

    pub(super) fn pass(&self, now: Instant) -> Result<Passage, NotPrimary> {
        // Counted before it is looked: whoever closes and then waits misses none.
        let call = self.calls.token();
        match self.term_at(now) {
            Some(token) => Ok(Passage { token, gate: self.clone(), _call: call }),
            None => Err(NotPrimary::new(self.primary())),
        }
    }

    /// The term in which calls are let through at `now`.
    fn term_at(&self, now: Instant) -> Option<FencingToken> {
        let token = self.source.role.borrow().primary_at(now)?;
        (*self.shut.borrow() < Some(token)).then_some(token)
    }

    /// Who else is primary, if that is known.
    fn primary(&self) -> Option<Primary> {
        match &*self.source.role.borrow() {
            Role::Standby { primary } => primary.clone(),
            Role::Primary { .. } | Role::Unknown => None,
        }
    }

    pub(super) fn close(&self) {
        if let Role::Primary { token, .. } = *self.source.role.borrow() {
            self.shut.send_replace(Some(token));
        }
    }

    pub(super) fn open(&self) {
        self.shut.send_replace(None);
    }

    pub(super) async fn idle(&self) {
        self.calls.wait().await;
    }

    pub(super) fn in_flight(&self) -> usize {
        self.calls.len()
    }
}

// === impl Passage ===

impl Passage {
    pub(super) fn token(&self) -> FencingToken {
        self.token
    }

    /// Whether its term goes on.
    pub(super) fn holds(&self, now: Instant) -> bool {
        self.gate.term_at(now) == Some(self.token)
    }

    pub(super) fn primary(&self) -> Option<Primary> {
        self.gate.primary()
    }

    /// Ends when its term has: by news, by its time passing without any, or because the gate is closed.
    pub(super) fn over(&self) -> impl Future<Output = ()> + Send + 'static {
        let (mut role, mut shut, token) =
            (self.gate.source.role.clone(), self.gate.shut.subscribe(), self.token);
        async move {
            loop {
                // A renewal moves the time on and wakes nobody: looked at when the time is there.
                let until = match *role.borrow_and_update() {
                    Role::Primary { token: now, until } if now == token => until,
                    _ => return,
                };
                if *shut.borrow_and_update() >= Some(token) || until <= Instant::now() {
                    return;
                }
                tokio::select! {
                    // Without its sender the role is the last one told, and its time passes too.
                    Ok(()) = role.changed() => {}
                    Ok(()) = shut.changed() => {}
                    () = sleep_until(until) => {}
                }
            }
        }
    }
}
