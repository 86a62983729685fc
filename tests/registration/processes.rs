//! Backends as processes, ended in every way under calls.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use super::world::until;
use crate::common::{Backend, Callers, Method, bound, consul, steady_client, until as until_client};

/// The demo's TTL, and a generous allowance for a busy machine.
const LAPSED: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_under_calls_fails_none_of_them() {
    let Some(consul) = consul().await else { return };
    let mut backends = [
        Backend::start_with("a", 0, &consul.url(), &[]).await,
        Backend::start_with("b", 0, &consul.url(), &[]).await,
    ];
    let client = steady_client(&consul.url());
    let ready = |count| {
        move |c: &tonic_failover::client::GrpcClient| {
            c.status().datacenters.first().is_some_and(|dc| dc.ready == count)
        }
    };
    until_client(&client, "a spare is ready", ready(2)).await;
    let callers = Callers::at_a_fixed_rate(&client, Method::Increment);
    callers.go_on_for(100).await;
    for round in 0..2 {
        let first = bound(&client).unwrap();
        let ends = backends.iter_mut().find(|it| it.name == first).unwrap();
        ends.terminate().await;
        let passing = consul.registry().passing("counter").await.unwrap();
        assert!(!passing.contains(&first), "it took itself out: {passing:?}");
        callers.go_on_for(100).await;
        let port = ends.port;
        *ends = Backend::start_with(&first, port, &consul.url(), &[]).await;
        until_client(&client, &format!("round {round}: a spare is ready"), ready(2)).await;
    }
    let tally = callers.stop().await;
    println!("{} calls, {} resent, slowest {:?}", tally.calls, tally.resent, tally.slowest);
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_or_stopped_process_leaves_the_list_when_its_heartbeat_lapses() {
    let Some(consul) = consul().await else { return };
    let passing = async || consul.registry().passing("counter").await.unwrap();
    for signal in [Signal::KILL, Signal::STOP] {
        let mut backend = Backend::start_with("a", 0, &consul.url(), &[]).await;
        until("it is found", async || passing().await == ["a"]).await;
        let begun = Instant::now();
        backend.signal(signal);
        until("it is out of the list", async || passing().await.is_empty()).await;
        assert!(begun.elapsed() < LAPSED, "{:?}", begun.elapsed());
        let entry = consul.registry().get("/v1/health/service/counter").await.unwrap().json();
        assert_eq!(entry.as_array().unwrap().len(), 1, "critical, and there");
        if signal == Signal::STOP {
            backend.signal(Signal::CONT);
            until("it is back", async || passing().await == ["a"]).await;
        }
        backend.kill().await;
    }
}
