//! Being found: an instance in Consul as long as it serves, and leaving in order.
//!
//! ```text
//!            +--------------- a thread of its own -----------+
//!  probe --->| Keeper: look at the agent, register, heartbeat |---> local agent
//!  role ---->|                                                |
//!            +----------------------+-------------------------+
//!                                   | RegistrationStatus
//!  signal -> before_leaving -> out of Consul -> callers move -> NOT_SERVING, streams end,
//!            GOAWAY -> calls in flight end -> stop
//! ```
//!
//! # What a heartbeat says
//! An instance that serves nothing must not look alive, and one that serves must not look
//! dead because its runtime is busy. So heartbeats come from a thread with a runtime of its
//! own, and only while the probe ([`alive`](RegistrationBuilder::alive)) succeeds.
//!
//! # Whose entry it is
//! Each process writes a nonce into the metadata of its entry, and reads the entry back
//! before each heartbeat and before taking it out. One that finds another process's nonce
//! under its id leaves that entry alone, until it is gone: the later one has the id.
//! Consul knows no conditions for these steps, so a process that registers itself in the
//! milliseconds between look and step may get one heartbeat too many, or be taken out; then it
//! registers itself again with its next heartbeat.
//!
//! # Which agent
//! Registering is with the local agent, the first of the configuration: it runs the
//! check, and its own death takes the instance out of the catalog. Others in the configuration are not asked.
//! Where ACLs are on, the token needs `service:write` for the service's name, and nothing else.
//!
//! ```no_run
//! use tonic_failover::{InstanceId, consul::ConsulConfig, server::Registration};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! # let (server, signal) = (async |_: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>| {}, async {});
//! let address = InstanceId::new("10.0.0.7", 50051);
//! let registration =
//!     Registration::builder(ConsulConfig::from_env()?, "counter", "counter-a", address).start()?;
//! // Server::builder().add_service(registration.health_service()).add_service(...)
//! //     .serve_with_incoming_shutdown(incoming, registration.left(signal))
//! let serving = server(Box::pin(registration.left(signal)));
//! registration.drained(serving).await?;
//! # Ok(()) }
//! ```

mod builder;
mod entry;
mod error;
mod health;
mod keeper;
mod leaving;
mod status;

use std::{fmt, sync::Arc};

use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic_health::pb::health_server::HealthServer;

use self::leaving::Leaving;
use super::{Probe, RoleSource, pulse::Pulse};
use crate::{consul::ConsulConfig, instance::InstanceId};

pub use self::{
    builder::RegistrationBuilder, error::RegistrationError, health::RegistrationHealth, leaving::NotDrained,
    status::RegistrationStatus,
};

/// An instance that is kept in Consul until it leaves.
///
/// Clones are one registration. When the last one is dropped, and no future of
/// [`left`](Self::left) or [`leave`](Self::leave) is left, the heartbeat ends and nothing is said to
/// Consul, as after a crash: leave in order instead.
#[derive(Clone)]
pub struct Registration {
    inner: Arc<Inner>,
}

struct Inner {
    id: String,
    status: watch::Receiver<RegistrationStatus>,
    health: RegistrationHealth,
    leaving: Leaving,
    _keeper: AbortOnDropHandle<()>,
    /// What the keeper listens to, and the thread that it runs on.
    _kept: (Option<Probe>, Option<RoleSource>, Pulse),
}

// === impl Registration ===

impl Registration {
    /// The instance `id` of the service `service`, which others reach at `address`, to be
    /// registered with the first agent of `consul`.
    ///
    /// The id is to be the same after a restart, and no other instance's, of whatever service: an agent
    /// has one entry for each id. [`default_id`](Self::default_id) makes one. What calls an instance by name, as the client's
    /// events do, calls it by this.
    ///
    /// It takes a configuration and no client, because connections of a client live on the runtime
    /// on which they were made, and the heartbeats have one of their own.
    pub fn builder(
        consul: ConsulConfig,
        service: impl Into<String>,
        id: impl Into<String>,
        address: impl Into<InstanceId>,
    ) -> RegistrationBuilder {
        RegistrationBuilder::new(consul, service.into(), id.into(), address.into())
    }

    /// `counter-10.0.0.7-50051`: service, host and port. What is neither a letter, a digit nor one
    /// of `-_.` becomes `-`.
    pub fn default_id(service: &str, address: &InstanceId) -> String {
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        format!("{service}-{}-{}", address.host(), address.port())
            .chars()
            .map(|c| if fits(c) { c } else { '-' })
            .collect()
    }

    /// The id under which it is registered.
    pub fn id(&self) -> &str {
        &self.inner.id
    }

    /// How it stands.
    pub fn status(&self) -> RegistrationStatus {
        self.inner.status.borrow().clone()
    }

    /// How it stands, and each change of it; who reads slowly sees the newest.
    pub fn subscribe(&self) -> watch::Receiver<RegistrationStatus> {
        self.inner.status.clone()
    }

    /// `grpc.health.v1` for the server: SERVING, as a standby too, until it leaves; then
    /// NOT_SERVING, and its streams end.
    pub fn health_service(&self) -> HealthServer<RegistrationHealth> {
        HealthServer::new(self.inner.health.clone())
    }

    /// Cancelled when the server is told to stop: the end for the application's own
    /// streams, which would hold it up. Cancelling it yourself does nothing else.
    pub fn stopping(&self) -> CancellationToken {
        self.inner.leaving.stopping.child_token()
    }

    /// Waits for `signal`, then leaves as [`leave`](Self::leave) does. What it is made for is
    /// the shutdown future that tonic's `serve_with_incoming_shutdown` takes, or hyper's and axum's
    /// graceful shutdowns.
    ///
    /// # Cancel safety
    /// As of [`leave`](Self::leave).
    pub fn left<S>(&self, signal: S) -> impl Future<Output = ()> + use<S>
    where
        S: Future<Output = ()>,
    {
        let this = self.clone();
        async move {
            signal.await;
            this.leave().await;
        }
    }

    /// Leaves in order, up to the moment at which the server is to stop:
    ///
    /// 1. [`before_leaving`](RegistrationBuilder::before_leaving) is run, for 2 s at the most,
    /// 2. Consul is told, for 2 s at the most: what another process has registered is let be,
    /// 3. if it took that, callers get [`settle`](RegistrationBuilder::settle) to move, and
    ///    are answered meanwhile,
    /// 4. health says NOT_SERVING, and [`stopping`](Self::stopping) is cancelled.
    ///
    /// Whoever calls it again waits for the same.
    ///
    /// # Cancel safety
    /// Dropped, it stays where it is, and goes on when called again. What Consul is being told
    /// goes on by itself.
    pub async fn leave(&self) {
        self.inner.leaving.leave(&mut self.inner.status.clone()).await;
    }

    /// What `server` gives when it ends, or an error when it has not ended
    /// [`drain`](RegistrationBuilder::drain) after it was told to stop. Calls that are still
    /// running then go on until the runtime ends; let the process end.
    ///
    /// # Errors
    /// [`NotDrained`].
    ///
    /// # Cancel safety
    /// Dropping it drops the server.
    pub async fn drained<T>(&self, server: impl Future<Output = T>) -> Result<T, NotDrained> {
        self.inner.leaving.drained(server).await
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = &*self.inner.status.borrow();
        f.debug_struct("Registration")
            .field("id", &self.inner.id)
            .field("status", status)
            .finish_non_exhaustive()
    }
}

const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<Registration>();
    shareable::<RegistrationStatus>();
};
