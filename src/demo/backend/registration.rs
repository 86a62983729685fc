//! Keeps the instance in Consul as long as it serves: the demo's words for what the
//! library's registration does.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tonic::server::NamedService;

use super::{
    address::advertised,
    options::{CheckKind, Options},
    primary::Candidate,
    say,
    service::Service,
};
use crate::{
    InstanceId,
    consul::{ConsulClient, ConsulConfig},
    demo::{
        pb::counter_server::CounterServer,
        screen::{Screen, Tone},
        text::chain,
    },
    server::{Registration, RegistrationError, RegistrationStatus},
};

/// Consul runs its own checks no more often than this.
const INTERVAL: Duration = Duration::from_secs(1);
/// Between two tries to find out what Consul, or the network, does not tell yet.
const AGAIN: Duration = Duration::from_millis(200);

/// The address to register. Waits for one, however long there is none.
pub(super) async fn address(
    options: &Options,
    listening: SocketAddr,
    consul: &ConsulClient,
    log: &Log,
) -> InstanceId {
    let mut told = false;
    loop {
        match advertised(options.advertise.as_deref(), listening, consul.address()).await {
            Ok(host) => return InstanceId::new(&host, listening.port()),
            Err(error) if !told => {
                told = true;
                let cause = chain(&error);
                log.say(
                    Tone::Notice,
                    &format!("no address to advertise, trying on (--advertise gives one): {cause}"),
                );
            }
            Err(_) => {}
        }
        sleep(AGAIN).await;
    }
}

/// Registers the instance called `name`.
pub(super) fn start(
    options: &Options,
    name: &str,
    consul: ConsulConfig,
    address: InstanceId,
    candidate: Option<&Candidate>,
) -> Result<Registration, RegistrationError> {
    let mut it =
        Registration::builder(consul, &options.service, name, address).serves(CounterServer::<Service>::NAME);
    if let Some(candidate) = candidate.cloned() {
        it = it.follow(&candidate.lease).alive(&candidate.probe).before_leaving(candidate.leave());
    }
    match options.check {
        CheckKind::Ttl => it,
        CheckKind::Tcp => it.tcp_check(INTERVAL),
        CheckKind::Grpc => it.grpc_check(INTERVAL),
    }
    .start()
}

/// Fills `datacenter` in when Consul tells it.
pub(super) async fn learn(datacenter: Arc<OnceLock<String>>, consul: ConsulClient) {
    loop {
        if let Ok(all) = consul.datacenters().await
            && let Some(own) = all.into_iter().next()
        {
            let _ = datacenter.set(own);
            return;
        }
        sleep(AGAIN).await;
    }
}

/// A backend's log.
#[derive(Clone)]
pub(super) struct Log {
    pub(super) screen: Screen,
    pub(super) name: String,
}

// === impl Log ===

impl Log {
    pub(super) fn say(&self, tone: Tone, words: &str) {
        say(&self.screen, tone, &self.name, words);
    }

    /// Says how the registration stands, until it has ended.
    pub(super) async fn follow(self, mut status: watch::Receiver<RegistrationStatus>, consul: ConsulClient) {
        let mut lost = false;
        while status.changed().await.is_ok() {
            let now = status.borrow_and_update().clone();
            match &now {
                RegistrationStatus::Registered if lost => self.say(Tone::Good, "Consul answers again"),
                RegistrationStatus::Registered => {
                    self.say(Tone::Good, &format!("registered with Consul at {}", consul.address()));
                }
                RegistrationStatus::Lost { error } => {
                    self.say(Tone::Notice, &format!("not in Consul, trying on: {}", chain(error)));
                }
                RegistrationStatus::Left { instead: None } => self.say(Tone::Quiet, "taken out of Consul"),
                RegistrationStatus::LeftBehind { error } => {
                    self.say(Tone::Notice, &format!("not taken out of Consul: {}", chain(error)));
                }
                other => self.say(Tone::Notice, &other.to_string()),
            }
            lost = matches!(now, RegistrationStatus::Lost { .. });
            if now.has_ended() {
                return;
            }
        }
    }
}
