//! Policies under real faults: real processes are killed and frozen, and Consul
//! goes on calling them passing.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{
    Backend, Callers, Method, SOON, Tally, bound, builder, consul, register, steady, until, until_bound_to,
};
use rustix::process::Signal;
use tonic_failover::{
    client::{GrpcClient, HedgingPolicy, MethodOptions, RetryPolicy, ServiceConfig, ServiceOptions},
    testkit::ConsulProcess,
};

/// Two instances, and a client that suspects nobody: what a policy does not
/// find out, nobody does.
struct Stage {
    _consul: ConsulProcess,
    client: GrpcClient,
    bound: Backend,
    other: Backend,
}

impl Stage {
    async fn set(options: ServiceOptions) -> Option<Self> {
        let consul = consul().await?;
        let more = ["--work", "5ms"];
        let mut backends = Vec::new();
        for name in ["a", "b"] {
            let backend = Backend::start_with(name, 0, common::NOWHERE, &more).await;
            register(consul.registry(), "counter", name, backend.port).await;
            backends.push(backend);
        }
        let client = builder(&consul.url()).service(options).build().unwrap().grpc_client("counter").unwrap();
        client.ready().await.unwrap();
        until(&client, "a spare is ready", |c| c.status().datacenters[0].ready == 2).await;
        if bound(&client).as_deref() == Some("a") {
            backends.reverse();
        }
        let (bound, other) = (backends.pop().unwrap(), backends.pop().unwrap());
        Some(Self { _consul: consul, client, bound, other })
    }

    async fn callers(&self, method: Method) -> Callers {
        let callers = Callers::start(&self.client, 16, method);
        callers.go_on_for(100).await;
        callers
    }
}

fn print(what: &str, tally: &Tally) {
    let Tally { calls, resent, slowest, .. } = tally;
    println!("{what}: {calls} calls, {resent} resent, {} failed, slowest {slowest:?}", tally.failed.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hedged_calls_outlive_a_frozen_instance_that_nobody_suspects() {
    let hedging = HedgingPolicy::new(Duration::from_millis(50));
    // Every call must be hedged while the bound one is frozen.
    let options = steady().method("/", MethodOptions::new().hedging(hedging)).retry_budget(2.0, 1000);
    let Some(stage) = Stage::set(options).await else { return };
    let callers = stage.callers(Method::Get).await;
    stage.bound.signal(Signal::STOP);
    callers.go_on_for(200).await;
    assert_eq!(bound(&stage.client), Some(stage.bound.name.clone()), "nobody is to blame");
    stage.bound.signal(Signal::CONT);
    callers.go_on_for(100).await;
    let tally = callers.stop().await;
    print("SIGSTOP, hedged", &tally);
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
    assert!(tally.resent >= 100, "{tally:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_that_take_too_long_eject_a_frozen_instance() {
    let policy = RetryPolicy::new().attempt_timeout(Duration::from_millis(200));
    let options = steady().method("/", MethodOptions::new().retry(policy));
    let Some(stage) = Stage::set(options).await else { return };
    let callers = stage.callers(Method::Get).await;
    stage.bound.signal(Signal::STOP);
    until_bound_to(&stage.client, &stage.other.name).await;
    callers.go_on_for(200).await;
    stage.bound.signal(Signal::CONT);
    let tally = callers.stop().await;
    print("SIGSTOP, attempts of 200 ms", &tally);
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_method_that_a_service_config_declares_survives_kill_9() {
    let json = r#"{"methodConfig": [{
        "name": [{"service": "counter.v1.Counter", "method": "Increment"}],
        "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.01s", "maxBackoff": "0.1s", "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"]}
    }]}"#;
    let config = ServiceConfig::from_json(json).unwrap();
    let Some(mut stage) = Stage::set(steady().service_config(config)).await else { return };
    let callers = stage.callers(Method::Increment).await;
    stage.bound.kill().await;
    until_bound_to(&stage.client, &stage.other.name).await;
    callers.go_on_for(200).await;
    let tally = callers.stop().await;
    print("kill -9, declared", &tally);
    // A response that had begun is committed, whatever is declared (gRFC A6): one may die between
    // its headers and its trailers.
    assert!(
        tally.failed.iter().all(|(_, words)| words.contains("CallError(ResponseCut")),
        "{:?}",
        tally.failed
    );
    assert!(tally.slowest < SOON, "{tally:?}");
}
