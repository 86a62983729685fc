//! Keeps the instance in Consul's catalog as long as it serves.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{address::advertised, options::CheckKind, say};
use crate::{
    InstanceId,
    consul::{Check, ConsulClient, InvalidRegistration, RegistryError, ServiceRegistration},
    demo::{
        screen::{Screen, Tone},
        text::chain,
    },
};

/// Between two heartbeats: three fit in the check's TTL, so that one lost is no matter.
const BEAT: Duration = Duration::from_millis(300);
/// Silence after which Consul calls the instance critical.
const TTL: Duration = Duration::from_secs(1);
/// Consul runs its own checks no more often than this.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often an instance that Consul checks makes sure it is still registered.
/// Registering again changes nothing where it is.
const AFFIRM: Duration = Duration::from_secs(2);
/// The first and the longest wait before Consul is tried again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long the end waits for Consul: an instance must be able to stop without it.
const FAREWELL: Duration = Duration::from_secs(2);

/// What is registered.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) service: String,
    pub(super) advertise: Option<String>,
    pub(super) listening: SocketAddr,
    pub(super) check: CheckKind,
}

/// The running registration; dropping it stops the heartbeat at once.
pub(super) struct Registration {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// Why the instance is not registered, for the time being.
#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Invalid(#[from] InvalidRegistration),
    #[error("there is no address to advertise; --advertise would give one")]
    Address(#[source] std::io::Error),
}

struct Keeper {
    consul: ConsulClient,
    entry: Entry,
    datacenter: Arc<OnceLock<String>>,
    screen: Screen,
    /// An outage is told once, and its end.
    away: bool,
}

// === impl Registration ===

impl Registration {
    /// Registers `entry`, however long Consul is away, and keeps it alive.
    /// `datacenter` is filled in when Consul tells it.
    pub(super) fn start(
        consul: ConsulClient,
        entry: Entry,
        datacenter: Arc<OnceLock<String>>,
        screen: Screen,
    ) -> Self {
        let stop = CancellationToken::new();
        let keeper = Keeper { consul, entry, datacenter, screen, away: false };
        let task = tokio::spawn(keeper.run(stop.clone()));
        Self { stop, task }
    }

    /// Takes the instance out of the catalog; waits 2 s at most.
    pub(super) async fn end(mut self) {
        self.stop.cancel();
        if tokio::time::timeout(FAREWELL, &mut self.task).await.is_err() {
            tracing::warn!("Consul did not take the deregistration in time");
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl Keeper ===

impl Keeper {
    async fn run(mut self, stop: CancellationToken) {
        // Cut off wherever it is: a request for registration that was on its way
        // is undone by the deregistration, which comes after it.
        if stop.run_until_cancelled(self.keep()).await.is_none() {
            match self.consul.deregister(&self.entry.name).await {
                Ok(()) | Err(RegistryError::NotFound) => self.say(Tone::Quiet, "taken out of Consul"),
                Err(error) => self.say(Tone::Notice, &format!("not taken out of Consul: {}", chain(&error))),
            }
        }
    }

    async fn keep(&mut self) {
        loop {
            self.register().await;
            self.say(Tone::Good, &format!("registered with Consul at {}", self.consul.address()));
            self.stay().await;
            self.say(Tone::Notice, "Consul has forgotten this instance; registering again");
        }
    }

    async fn register(&mut self) {
        let (mut wait, longest) = BACKOFF;
        loop {
            match self.try_register().await {
                Ok(()) => return self.back(),
                Err(error) => self.lost(&error),
            }
            sleep(wait).await;
            wait = (wait * 2).min(longest);
        }
    }

    async fn try_register(&self) -> Result<(), KeepError> {
        if self.datacenter.get().is_none()
            && let Some(own) = self.consul.datacenters().await?.into_iter().next()
        {
            let _ = self.datacenter.set(own);
        }
        let entry = &self.entry;
        let host = advertised(entry.advertise.as_deref(), entry.listening, self.consul.address())
            .await
            .map_err(KeepError::Address)?;
        self.consul.register(&definition(entry, &host)?).await?;
        self.beat().await?;
        Ok(())
    }

    /// Returns when Consul has forgotten the instance.
    async fn stay(&mut self) {
        let ttl = self.entry.check == CheckKind::Ttl;
        loop {
            sleep(if ttl { BEAT } else { AFFIRM }).await;
            let alive =
                if ttl { self.beat().await.map_err(KeepError::from) } else { self.try_register().await };
            match alive {
                Ok(()) => self.back(),
                Err(KeepError::Registry(error)) if ttl && is_unknown_check(&error) => return,
                Err(error) => self.lost(&error),
            }
        }
    }

    async fn beat(&self) -> Result<(), RegistryError> {
        match self.entry.check {
            CheckKind::Ttl => self.consul.pass_check(&format!("service:{}", self.entry.name)).await,
            _ => Ok(()),
        }
    }

    fn lost(&mut self, error: &KeepError) {
        if !self.away {
            self.away = true;
            self.say(Tone::Notice, &format!("not in Consul, trying on: {}", chain(error)));
        }
    }

    fn back(&mut self) {
        if self.away {
            self.away = false;
            self.say(Tone::Good, "Consul answers again");
        }
    }

    fn say(&self, tone: Tone, text: &str) {
        say(&self.screen, tone, &self.entry.name, text);
    }
}

fn definition(entry: &Entry, host: &str) -> Result<ServiceRegistration, InvalidRegistration> {
    let port = entry.listening.port();
    let at = InstanceId::new(host, port);
    let check = match entry.check {
        CheckKind::Ttl => Check::ttl(TTL),
        CheckKind::Tcp => Check::tcp(at.authority(), INTERVAL).timeout(INTERVAL),
        CheckKind::Grpc => Check::grpc(at.authority(), INTERVAL).timeout(INTERVAL),
    };
    Ok(ServiceRegistration::new(&entry.service, &entry.name, host, port)?.check(check))
}

/// Consul answers a heartbeat for a check that it does not know with 404, before
/// 1.11 with 500. Registering once too often does no harm.
fn is_unknown_check(error: &RegistryError) -> bool {
    matches!(error, RegistryError::NotFound | RegistryError::Status { code: 500, .. })
}
