//! Asking a registry: a real Consul for what it really answers, a scripted
//! server for what it cannot be made to answer.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod faults;
mod instances;
mod outages;
mod requests;
mod scripted;

use std::{future::Future, path::PathBuf, time::Duration};

use serde_json::{Value, json};
use tonic_failover::{
    consul::{ConsulClient, ConsulConfig, HealthQuery},
    testkit::{ConsulProcess, Registry},
};

/// How long anything may take on a machine that is busy with much else.
const PATIENCE: Duration = Duration::from_secs(30);

/// The Consul to start, or a loud word and `None`.
fn consul() -> Option<PathBuf> {
    let found = ConsulProcess::find();
    if found.is_none() {
        eprintln!("SKIPPED: no consul found; install it or set CONSUL_BIN");
    }
    found
}

/// An agent in memory that has entered itself into its catalog, so that nothing
/// moves any more unless a test moves it.
async fn agent() -> Option<ConsulProcess> {
    let agent = ConsulProcess::builder(consul()?).start().await.unwrap();
    eventually(|| async {
        let passing = agent.registry().get("/v1/health/state/passing").await.unwrap().json();
        passing.as_array().is_some_and(|it| !it.is_empty())
    })
    .await;
    Some(agent)
}

fn client(url: &str) -> ConsulClient {
    ConsulClient::new(ConsulConfig::new(url).unwrap()).unwrap()
}

fn query(service: &str) -> HealthQuery {
    HealthQuery::new(service).unwrap()
}

/// Registers by plain HTTP, so that a misreading of ours cannot hide itself.
async fn register(registry: &Registry, mut service: Value) {
    let fields = service.as_object_mut().unwrap();
    fields.entry("Name").or_insert(json!("counter"));
    fields.entry("Port").or_insert(json!(5000));
    let answer = registry.put("/v1/agent/service/register", service.to_string()).await.unwrap();
    assert!(answer.status.is_success(), "{}", answer.text());
}

async fn put(registry: &Registry, path: &str) {
    let answer = registry.put(path, "").await.unwrap();
    assert!(answer.status.is_success(), "{path}: {}", answer.text());
}

async fn names(client: &ConsulClient, query: &HealthQuery) -> Vec<String> {
    let answer = client.healthy_instances(query).await.unwrap();
    let mut names: Vec<_> = answer.snapshot.instances.iter().map(|it| it.name.clone()).collect();
    names.sort();
    names
}

/// Asks until `met`, and fails after a long time.
async fn eventually<F: Future<Output = bool>>(mut met: impl FnMut() -> F) {
    let trying = async {
        while !met().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, trying).await.expect("it happens in time");
}
