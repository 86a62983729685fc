//! Keeps the instance in Consul's catalog as long as it serves.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    address::advertised,
    options::CheckKind,
    seam::{Agent, SeamError},
};
use crate::demo::{
    backend::say,
    screen::{Screen, Tone},
};

/// Between two heartbeats: three fit in the check's TTL, so that one lost is no matter.
const BEAT: Duration = Duration::from_millis(300);
/// Silence after which Consul calls the instance critical.
const TTL: &str = "1s";
/// Consul runs its own checks no more often than this.
const INTERVAL: &str = "1s";
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

struct Keeper {
    consul: Agent,
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
        consul: Agent,
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
                Ok(()) | Err(SeamError::Forgotten) => {
                    self.say(Tone::Quiet, "taken out of Consul");
                }
                Err(error) => self.say(Tone::Notice, &format!("could not be taken out of Consul: {error}")),
            }
        }
    }

    async fn keep(&mut self) {
        loop {
            self.register().await;
            self.say(Tone::Good, &format!("registered as {} in Consul", self.entry.name));
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

    async fn try_register(&self) -> Result<(), String> {
        if self.datacenter.get().is_none() {
            let datacenter = self.consul.datacenter().await.map_err(|error| error.to_string())?;
            let _ = self.datacenter.set(datacenter);
        }
        let entry = &self.entry;
        let host = advertised(entry.advertise.as_deref(), entry.listening, &self.consul.authority())
            .await
            .map_err(|error| format!("no address to advertise: {error}"))?;
        self.consul.register(definition(entry, &host)).await.map_err(|error| error.to_string())?;
        self.beat().await.map_err(|error| error.to_string())
    }

    /// Returns when Consul has forgotten the instance.
    async fn stay(&mut self) {
        let pause = if self.entry.check == CheckKind::Ttl { BEAT } else { AFFIRM };
        loop {
            sleep(pause).await;
            let alive = match self.entry.check {
                CheckKind::Ttl => self.beat().await,
                _ => match self.try_register().await {
                    Ok(()) => Ok(()),
                    Err(error) => Err(SeamError::Other(error)),
                },
            };
            match alive {
                Ok(()) => self.back(),
                Err(SeamError::Forgotten) => return,
                Err(error) => self.lost(&error.to_string()),
            }
        }
    }

    async fn beat(&self) -> Result<(), SeamError> {
        match self.entry.check {
            CheckKind::Ttl => self.consul.pass_check(&self.entry.name).await,
            _ => Ok(()),
        }
    }

    fn lost(&mut self, error: &str) {
        if !self.away {
            self.away = true;
            self.say(Tone::Notice, &format!("Consul does not answer, trying on: {error}"));
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

fn definition(entry: &Entry, host: &str) -> Value {
    let port = entry.listening.port();
    let at = crate::InstanceId::new(host, port);
    let check = match entry.check {
        CheckKind::Ttl => json!({ "TTL": TTL }),
        CheckKind::Tcp => json!({ "TCP": at.authority(), "Interval": INTERVAL, "Timeout": INTERVAL }),
        CheckKind::Grpc => json!({ "GRPC": at.authority(), "Interval": INTERVAL, "Timeout": INTERVAL }),
    };
    json!({ "ID": entry.name, "Name": entry.service, "Address": host, "Port": port, "Check": check })
}
