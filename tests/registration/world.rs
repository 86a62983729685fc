//! What a case runs on.

use std::{future::Future, time::Duration};

use serde_json::Value;
use tokio::time::timeout;
use tonic_failover::{
    InstanceId,
    consul::ConsulConfig,
    server::{Registration, RegistrationBuilder, RegistrationStatus},
    testkit::{Agent, ConsulProcess, Registry},
};

use crate::common::{SOON, consul};

/// One agent, real or the testkit's.
pub(crate) enum World {
    Embedded(Box<Agent>),
    Real(Box<ConsulProcess>),
}

impl World {
    pub(crate) async fn embedded() -> Self {
        Self::Embedded(Box::new(Agent::start("dc1").await.unwrap()))
    }

    /// `None`, loudly, where no Consul is installed.
    pub(crate) async fn real() -> Option<Self> {
        consul().await.map(|it| Self::Real(Box::new(it)))
    }

    pub(crate) fn registry(&self) -> &Registry {
        match self {
            Self::Embedded(agent) => agent.registry(),
            Self::Real(consul) => consul.registry(),
        }
    }

    /// Nobody answers any more.
    pub(crate) async fn stop(&mut self) {
        match self {
            Self::Embedded(agent) => drop(agent.faults().refuse()),
            Self::Real(consul) => consul.kill().await.unwrap(),
        }
    }

    /// It takes requests and answers none.
    pub(crate) async fn hang(&mut self) {
        match self {
            Self::Embedded(agent) => drop(agent.faults().hang()),
            Self::Real(consul) => consul.pause().await.unwrap(),
        }
    }

    /// It is there, and has forgotten everything.
    pub(crate) async fn start_empty(&mut self) {
        match self {
            Self::Embedded(agent) => {
                agent.restart_empty().await;
                agent.faults().clear();
            }
            Self::Real(consul) => consul.restart().await.unwrap(),
        }
    }

    /// The instance `a` of the service `s` at 127.0.0.1:4000.
    pub(crate) fn a(&self) -> RegistrationBuilder {
        self.at(4000)
    }

    pub(crate) fn at(&self, port: u16) -> RegistrationBuilder {
        let config = ConsulConfig::new(self.registry().url()).unwrap();
        Registration::builder(config, "s", "a", InstanceId::new("127.0.0.1", port))
    }

    /// What the catalog has of the service `s`; with `?passing` only what passes.
    pub(crate) async fn listed(&self, query: &str) -> Vec<Value> {
        let answer = self.registry().get(&format!("/v1/health/service/s{query}")).await.unwrap();
        answer.json().as_array().unwrap().clone()
    }

    pub(crate) async fn until_passing(&self, ids: &[&str]) {
        until(&format!("passing are {ids:?}"), async || {
            self.registry().passing("s").await.is_ok_and(|it| it == ids)
        })
        .await;
    }

    /// The one entry of the service `s`, as it was registered.
    pub(crate) async fn service(&self) -> Value {
        self.listed("").await[0]["Service"].clone()
    }
}

pub(crate) async fn until<F: Future<Output = bool>>(words: &str, is_so: impl Fn() -> F) {
    let wait = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, wait).await.unwrap_or_else(|_| panic!("not so: {words}"));
}

/// Waits for a status.
pub(crate) async fn until_status(
    registration: &Registration,
    words: &str,
    is_so: impl FnMut(&RegistrationStatus) -> bool,
) -> RegistrationStatus {
    let mut status = registration.subscribe();
    let found = timeout(SOON, status.wait_for(is_so)).await;
    let found = found.unwrap_or_else(|_| panic!("not so: {words}; {}", registration.status()));
    found.unwrap().clone()
}

pub(crate) async fn until_registered(registration: &Registration) {
    until_status(registration, "registered", RegistrationStatus::is_registered).await;
}
