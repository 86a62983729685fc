//! Settings at the end of their range: nothing panics, and calls are served.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{DEADLINE, builder, get, hostile, options, register, scripted::Scripted, until};
use tonic_failover::{
    client::{ConsulServiceBuilder, GrpcClient, ServiceOptions},
    consul::{ConsulClient, ConsulConfig, HealthQuery},
    testkit::Agent,
};

const EVER: Duration = Duration::MAX;

fn known(client: &GrpcClient) -> usize {
    client.status().datacenters.first().map_or(0, |d| d.known)
}

/// One instance answers and one refuses connections; the first is lost and comes back, and both leave.
async fn serves(what: &str, set: impl FnOnce(ConsulServiceBuilder, ServiceOptions) -> ConsulServiceBuilder) {
    let (a, agent) = (Scripted::good().await, Agent::start("dc1").await.unwrap());
    let dead = hostile::refused();
    register(agent.registry(), "counter", "dead", dead.port).await;
    let service = set(builder(&agent.url()), options()).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    let first = tokio::spawn(get(client.channel()));
    until(&client, &format!("{what}: the dead one is known"), |c| known(c) == 1).await;
    register(agent.registry(), "counter", "a", a.port).await;
    assert!(first.await.unwrap().is_ok(), "{what}");
    a.cut();
    let updated = tokio::time::timeout(DEADLINE, service.update_grpc_client("counter")).await;
    assert!(updated.is_ok_and(|it| it.is_ok()), "{what}");
    common::deregister(agent.registry(), "dead").await;
    until(&client, &format!("{what}: the dead one is gone"), |c| known(c) == 1).await;
    common::deregister(agent.registry(), "a").await;
    let is_empty = |c: &GrpcClient| c.status().datacenters.first().is_some_and(|d| d.empty_since.is_some());
    until(&client, &format!("{what}: the list is empty"), is_empty).await;
    assert!(get(client.channel()).await.is_ok(), "{what}");
    assert!(!client.status().closed, "{what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_times_and_the_largest_numbers_are_no_panic() {
    serves("times", |builder, options| {
        let options = options
            .connect_timeout(EVER)
            .default_timeout(EVER)
            .fail_fast_after(EVER)
            .suspect_after(EVER)
            .probe_timeout(EVER)
            .keep_alive(EVER, EVER);
        builder.service(options).failback_after(EVER).demote_after(EVER)
    })
    .await;
    let agent = Agent::start("dc1").await.unwrap();
    let patient = ConsulConfig::new(&agent.url()).unwrap().request_timeout(EVER).connect_timeout(EVER);
    let consul = ConsulClient::new(patient.max_answer_bytes(usize::MAX)).unwrap();
    for datacenter in ["", "dc1", "dc2"] {
        let query = HealthQuery::new("counter").unwrap().datacenter(datacenter);
        let answer = tokio::spawn({
            let consul = consul.clone();
            async move { consul.healthy_instances(&query).await }
        });
        assert_eq!(answer.await.expect("no panic").is_ok(), datacenter != "dc2");
    }
    serves("numbers", |builder, options| {
        let most = usize::MAX;
        let options =
            options.spares(most).replay_limit(most).max_attempts(u32::MAX).failures_to_eject(u32::MAX);
        builder.service(options.ejection(Duration::from_millis(1), EVER))
    })
    .await;
    serves("the dead one is never tried again", |builder, options| {
        builder.service(options.ejection(EVER, EVER))
    })
    .await;
}
