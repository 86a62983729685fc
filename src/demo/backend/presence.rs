//! Being there: found in Consul, or by those who know the address.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::server::NamedService;
use tonic_health::{ServingStatus, server::HealthReporter};

use super::{primary::Candidate, service::Service};
use crate::{demo::pb::counter_server::CounterServer, server::Registration};

/// How long calls in flight may take to end at shutdown: as the registration's.
const DRAIN: Duration = Duration::from_secs(5);

/// How an instance is there, and how it leaves. Cheap to clone.
#[derive(Clone)]
pub(super) enum Presence {
    InConsul(Registration),
    Alone(Alone),
}

/// Of an instance that is registered nowhere.
#[derive(Clone)]
pub(super) struct Alone {
    health: HealthReporter,
    candidate: Arc<Mutex<Option<Candidate>>>,
    stopping: CancellationToken,
}

/// Calls were in flight still when their time was over.
#[derive(Debug, thiserror::Error)]
#[error("some calls had not ended {DRAIN:?} after the server was told to stop")]
pub(super) struct NotDrained;

// === impl Presence ===

impl Presence {
    /// Cancelled when the server is told to stop.
    pub(super) fn stopping(&self) -> CancellationToken {
        match self {
            Self::InConsul(registration) => registration.stopping(),
            Self::Alone(alone) => alone.stopping.child_token(),
        }
    }

    /// Waits for `signal`, then leaves in order, up to the moment at which the server is to stop.
    pub(super) async fn left(self, signal: impl Future<Output = ()>) {
        match self {
            Self::InConsul(registration) => registration.left(signal).await,
            Self::Alone(alone) => {
                signal.await;
                alone.leave().await;
            }
        }
    }

    /// What `server` gives when it ends in time.
    pub(super) async fn drained<T>(&self, server: impl Future<Output = T>) -> Result<T, super::Failure> {
        match self {
            Self::InConsul(registration) => registration.drained(server).await.map_err(Into::into),
            Self::Alone(alone) => alone.drained(server).await.map_err(Into::into),
        }
    }
}

// === impl Alone ===

impl Alone {
    pub(super) async fn new(health: HealthReporter, candidate: Option<Candidate>) -> Self {
        health.set_service_status(CounterServer::<Service>::NAME, ServingStatus::Serving).await;
        Self { health, candidate: Arc::new(Mutex::new(candidate)), stopping: CancellationToken::new() }
    }

    async fn leave(&self) {
        let candidate = self.candidate.lock().take();
        if let Some(candidate) = candidate {
            candidate.leave().await;
        }
        for name in ["", CounterServer::<Service>::NAME] {
            self.health.set_service_status(name, ServingStatus::NotServing).await;
        }
        self.stopping.cancel();
    }

    async fn drained<T>(&self, server: impl Future<Output = T>) -> Result<T, NotDrained> {
        let late = async {
            self.stopping.cancelled().await;
            sleep(DRAIN).await;
        };
        tokio::select! {
            biased;
            done = server => Ok(done),
            () = late => Err(NotDrained),
        }
    }
}
