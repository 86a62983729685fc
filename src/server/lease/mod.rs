//! The right to be primary: campaigned for, held, renewed, handed over.
//!
//! ```text
//!  Lease (handle) --Command--> Campaign --asks--> Election (pure: what next?)
//!    ^                          |    ^
//!    |                          v    | alive
//!    +--watch<Role>, Term-- Published Probe           on a thread of their own (Pulse)
//! ```

mod builder;
mod campaign;
mod election;
mod episode;
mod nonce;
mod published;
mod pulsed;
mod timing;

use std::{fmt, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::util::rng::HasherRng;

pub use self::builder::{CampaignError, LeaseBuilder};
use self::{
    builder::{LONGEST_NAME, is_name},
    campaign::{Campaign, Command, UnderWay},
    election::Election,
    published::Published,
    pulsed::Pulsed,
};
use super::{
    life,
    store::{Claim, LeaseStore, StoreError, Term},
};
use crate::{
    InstanceId,
    role::{FencingToken, Primary, Role},
};

/// An instance's part in who is primary: it campaigns from [`LeaseBuilder::campaign`] on, for ever,
/// and whatever it loses it can win again. Cheap to clone.
///
/// ```no_run
/// # use tonic_failover::{InstanceId, server::{Lease, Probe, store::LeaseStore}};
/// # async fn example(store: impl LeaseStore) -> Result<(), Box<dyn std::error::Error>> {
/// let listener = tokio::net::TcpListener::bind("10.0.0.7:50051").await?;
/// let probe = Probe::of(listener.local_addr()?);
/// let address = InstanceId::new("10.0.0.7", 50051);
/// let lease = Lease::builder(store, "counter-a", address).alive(&probe).campaign()?;
/// if let Some(token) = lease.token() {
///     println!("primary in term {token}");
/// }
/// # Ok(()) }
/// ```
///
/// A lease without a holder (never held, or its record deleted) is taken only after its length too: a
/// holder may live that does not know yet.
///
/// When the last clone is dropped the role is [`Role::Unknown`] at once, and the lease is released in
/// the background within a second; where the process ends before that, it is over when
/// its length has passed. [`shutdown`](Self::shutdown) waits for it.
///
/// Clocks: a holder goes by its process's monotonic clock. On Linux that stands still while a machine is
/// suspended, so one that wakes up may believe that it is primary for what was left of its lease;
/// its writes fail all the same.
#[derive(Clone)]
pub struct Lease(Arc<Shared>);

struct Shared {
    claim: Claim,
    drain: Duration,
    length: Duration,
    published: Arc<Published>,
    calls: TaskTracker,
    store: Arc<dyn LeaseStore>,
    commands: mpsc::UnboundedSender<Command>,
    ended: CancellationToken,
}

/// How a hand-over ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HandedOver {
    /// Who is primary now. `None`: nobody else took over in time, and this instance campaigns on, or is primary again.
    pub to: Option<Primary>,
    /// What was still in flight when its time was over; its writes are refused since.
    pub calls_left: usize,
}

/// Why a lease was not released.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandOverError {
    /// This instance does not hold it.
    #[error("this instance does not hold the lease")]
    NotHeld,
    /// Nobody else can be called so. Nothing was done: this instance holds what it held.
    #[error(
        "{successor:?} cannot be the successor: another instance's name is wanted, of 1 to 255 bytes without control characters"
    )]
    Successor {
        /// What was given, its beginning.
        successor: String,
    },
    /// The store took no release in the lease's length. This instance is not primary all the same,
    /// and others take over as they would after a crash.
    #[error("the store has not taken the release; the lease ends by itself")]
    Store {
        /// What it said last.
        source: StoreError,
    },
    /// The campaign is over.
    #[error("the lease has been shut down")]
    Ended,
}

// === impl Lease ===

impl Lease {
    /// A campaign for the lease in `store`, by the instance called `instance` (unlike any other's
    /// name, stable over restarts) that serves at `address` (as clients reach it: with a port, and not
    /// `0.0.0.0`).
    pub fn builder(
        store: impl LeaseStore,
        instance: impl Into<String>,
        address: impl Into<InstanceId>,
    ) -> LeaseBuilder {
        LeaseBuilder::new(store, instance.into(), address.into())
    }

    fn start(settings: LeaseBuilder) -> Result<Self, CampaignError> {
        let LeaseBuilder { store, instance, address, timing, drain, life } = settings;
        let (alive, pulse) = life::start(life, |source| CampaignError::Thread { source })?;
        let claim = Claim::new(instance, address, nonce::fresh()).with_length(timing.length);
        let (commands, orders) = mpsc::unbounded_channel();
        let calls = TaskTracker::new();
        calls.close();
        let shared = Shared {
            claim: claim.clone(),
            drain,
            length: timing.length,
            published: Arc::new(Published::new(claim.instance.clone(), claim.address.clone())),
            calls,
            store: Arc::new(Pulsed::new(store.clone(), pulse.clone())),
            commands,
            ended: CancellationToken::new(),
        };
        let campaign = Campaign {
            timing,
            election: Election::new(timing, &claim, HasherRng::new(), Instant::now()),
            store,
            claim,
            published: shared.published.clone(),
            calls: shared.calls.clone(),
            commands: orders,
            alive,
            under_way: UnderWay::default(),
        };
        let (ended, own) = (shared.ended.clone().drop_guard(), pulse.clone());
        // Owned by the handles: it ends by itself when their end of the commands is gone.
        drop(pulse.spawn(async move {
            campaign.run().await;
            // The thread must last until here.
            drop((ended, own));
        }));
        Ok(Self(Arc::new(shared)))
    }

    /// What this instance may do: at once, and then always the newest. While it stays primary only
    /// `until` moves, and wakes nobody: ask [`Role::primary_at`] with the time of use.
    pub fn role(&self) -> watch::Receiver<Role> {
        self.0.published.role()
    }

    /// The token, if this instance is primary at this moment.
    pub fn token(&self) -> Option<FencingToken> {
        self.role().borrow().primary_at(Instant::now())
    }

    /// Who is primary, as far as is known: this instance or another.
    pub fn primary(&self) -> Option<Primary> {
        match &*self.role().borrow() {
            role @ Role::Primary { .. } => {
                let token = role.primary_at(Instant::now())?;
                Some(Primary::new(&self.0.claim.instance, self.0.claim.address.clone(), token))
            }
            Role::Standby { primary } => primary.clone(),
            Role::Unknown => None,
        }
    }

    /// The name under which this instance campaigns.
    pub fn instance(&self) -> &str {
        &self.0.claim.instance
    }

    /// The term that this instance holds, as far as it knows: what [`LeaseStore::write`] and
    /// [`LeaseStore::load`] want to see. It lasts while the store cannot be asked, and while a
    /// hand-over waits for what is in flight; whether new work may begin says [`role`](Self::role).
    pub fn term(&self) -> watch::Receiver<Option<Arc<Term>>> {
        self.0.published.term()
    }

    /// The lease's store, to read and write the state beside it. What is asked of it is done on the
    /// lease's own thread.
    pub fn store(&self) -> Arc<dyn LeaseStore> {
        self.0.store.clone()
    }

    /// What a hand-over waits for. Take a [token](TaskTracker::token), *then* look at the
    /// [role](Self::role), and keep it until the work is done. It is always closed, which hinders no
    /// token, and so can be waited for.
    pub fn calls(&self) -> &TaskTracker {
        &self.0.calls
    }

    /// Gives the lease up at once, to whoever comes first, and campaigns on: for the lease's length
    /// the others have the first word. What is in flight cannot write any more.
    ///
    /// # Errors
    /// It is not held, or the store has not taken the release within the lease's length.
    ///
    /// # Cancel safety
    /// It is given up even so.
    pub async fn release(&self) -> Result<(), HandOverError> {
        self.give_up(None, Duration::ZERO).await.map(|_| ())
    }

    /// A planned hand-over: begins no new work (the role is a standby's), waits for what is in flight
    /// ([`drain`](LeaseBuilder::drain)), releases the lease, for `successor` first where one is named,
    /// and waits until another is primary. The successor has the first word for the lease's length, then
    /// everybody else for a renewal and a quarter of one, and then this instance takes it again: where the
    /// successor is dead, somebody is primary within the time of any takeover.
    ///
    /// # Errors
    /// It is not held, the successor's name can be nobody else's, or the store has not taken the release
    /// within the lease's length.
    ///
    /// # Cancel safety
    /// It goes on even so.
    pub async fn hand_over(&self, successor: Option<&str>) -> Result<HandedOver, HandOverError> {
        // For such a one nobody would be primary for the lease's length.
        if let Some(name) = successor.filter(|name| !is_name(name) || *name == self.0.claim.instance) {
            let successor = name.chars().take(LONGEST_NAME).collect();
            return Err(HandOverError::Successor { successor });
        }
        let calls_left = self.give_up(successor.map(str::to_owned), self.0.drain).await?;
        let mut role = self.role();
        let taken =
            role.wait_for(|role| matches!(role, Role::Standby { primary: Some(_) } | Role::Primary { .. }));
        let to = match timeout(2 * self.0.length, taken).await {
            Ok(Ok(role)) => match &*role {
                Role::Standby { primary } => primary.clone(),
                _ => None,
            },
            _ => None,
        };
        Ok(HandedOver { to, calls_left })
    }

    async fn give_up(&self, successor: Option<String>, drain: Duration) -> Result<usize, HandOverError> {
        let (reply, answer) = oneshot::channel();
        let command = Command::GiveUp { successor, drain, reply };
        self.0.commands.send(command).map_err(|_| HandOverError::Ended)?;
        answer.await.unwrap_or(Err(HandOverError::Ended))
    }

    /// Ends the campaign: releases the lease, where it is held, and waits for that, but for no longer
    /// than a second. The role is [`Role::Unknown`] from then on. To let calls in flight
    /// finish, [hand over](Self::hand_over) before.
    ///
    /// # Cancel safety
    /// It ends even so.
    pub async fn shutdown(&self) {
        // It has ended where nobody listens.
        let _ = self.0.commands.send(Command::Shutdown);
        self.0.ended.cancelled().await;
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The campaign follows, when it sees that nobody can order anything.
        self.published.end();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("instance", &self.0.claim.instance)
            .field("role", &*self.role().borrow())
            .finish_non_exhaustive()
    }
}

const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<Lease>();
    shareable::<LeaseBuilder>();
};

#[cfg(test)]
mod tests;
