//! What instances say of themselves moves calls, before any registry knows.

use tonic_failover::{
    Instance,
    client::{CallOptions, FailoverEvent, Policy, RebindCause, ServiceOptions},
};

use crate::{
    common::{self, event, steady, until},
    healthy::{Healthy, SERVICE},
    stage::{Stage, at_port, get, shares},
};

fn watched(policy: Policy) -> ServiceOptions {
    steady().policy(policy).health_watch(SERVICE)
}

fn instances(servers: &[(&str, &Healthy)]) -> Vec<Instance> {
    servers.iter().map(|(name, server)| at_port(name, server.port)).collect()
}

async fn until_not_serving(stage: &Stage, count: usize) {
    let words = format!("{count} are not serving");
    until(&stage.client, &words, |c| c.status().datacenters[0].not_serving == count).await;
}

async fn until_bound(stage: &Stage, count: usize) {
    let words = format!("{count} get calls");
    until(&stage.client, &words, |c| c.binding().instances().count() == count).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_serving_gets_no_new_calls_until_it_is() {
    for policy in [Policy::RoundRobin, Policy::LeastRequest] {
        let (a, b) = (Healthy::start(true).await, Healthy::start(true).await);
        let stage = Stage::ready(watched(policy), instances(&[("a", &a), ("b", &b)])).await;
        until_bound(&stage, 2).await;
        let mut events = stage.client.events();
        assert_eq!(shares(&stage.client, 20).await.len(), 2);
        b.says(false).await;
        event(&mut events, "it says so", |event| {
            matches!(event, FailoverEvent::NotServing { instance, .. } if instance.name == "b").then_some(())
        })
        .await;
        until_bound(&stage, 1).await;
        let before = b.calls();
        assert_eq!(shares(&stage.client, 20).await.len(), 1);
        assert_eq!(b.calls(), before);
        assert!(stage.client.status().to_string().contains("1 not serving"), "{}", stage.client.status());
        b.says(true).await;
        until_bound(&stage, 2).await;
        assert_eq!(shares(&stage.client, 20).await.len(), 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pick_first_leaves_an_instance_that_is_not_serving_and_keeps_a_spare_that_is() {
    let servers = [Healthy::start(false).await, Healthy::start(false).await, Healthy::start(false).await];
    let named: Vec<_> = ["a", "b", "c"].into_iter().zip(&servers).collect();
    let stage = Stage::set(watched(Policy::PickFirst), instances(&named));
    // All have said something before any is serving: none gives way to one that has said so earlier.
    until_not_serving(&stage, 3).await;
    for server in &servers {
        server.says(true).await;
    }
    until_not_serving(&stage, 0).await;
    until_bound(&stage, 2).await;
    let mut events = stage.client.events();
    let first = common::bound(&stage.client).unwrap();
    let server = named.iter().find(|(name, _)| *name == first).unwrap().1;
    server.says(false).await;
    let (to, cause) = event(&mut events, "it is left", |event| match event {
        FailoverEvent::Rebound { to, cause, .. } => Some((to.name.clone(), *cause)),
        _ => None,
    })
    .await;
    assert_eq!(cause, RebindCause::NotServing);
    assert_eq!(get(stage.channel(), CallOptions::new()).await.unwrap(), to);
    until(&stage.client, "both others are ready", |c| {
        let names: Vec<_> = c.binding().instances().map(|i| i.name.clone()).collect();
        names.len() == 2 && !names.contains(&first)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_none_is_serving_all_stay_in_use() {
    for policy in [Policy::PickFirst, Policy::RoundRobin] {
        let (a, b) = (Healthy::start(false).await, Healthy::start(false).await);
        let stage = Stage::ready(watched(policy), instances(&[("a", &a), ("b", &b)])).await;
        until_not_serving(&stage, 2).await;
        until_bound(&stage, 2).await;
        get(stage.channel(), CallOptions::new()).await.unwrap();
        b.says(true).await;
        until_not_serving(&stage, 1).await;
        for _ in 0..5 {
            assert_eq!(get(stage.channel(), CallOptions::new()).await.unwrap(), "b");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_the_health_service_counts_as_serving() {
    let plain = common::scripted::Scripted::good().await;
    // UNIMPLEMENTED, as of a method that is not there.
    plain.health(common::scripted::Act::Status(12, "no such service", Vec::new()));
    let known = Healthy::start(true).await;
    let instances = vec![at_port("plain", plain.port), at_port("known", known.port)];
    let stage = Stage::ready(watched(Policy::RoundRobin), instances).await;
    until_bound(&stage, 2).await;
    assert_eq!(shares(&stage.client, 20).await.len(), 2);
    let checks = plain.checks();
    tokio::time::sleep(std::time::Duration::from_millis(1300)).await;
    assert_eq!(plain.checks(), checks, "it is not asked again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_is_begun_again_and_the_last_word_holds_until_then() {
    let (a, b) = (Healthy::start(true).await, Healthy::start(true).await);
    let stage = Stage::ready(watched(Policy::RoundRobin), instances(&[("a", &a), ("b", &b)])).await;
    until_bound(&stage, 2).await;
    b.forget().await;
    assert_eq!(shares(&stage.client, 20).await.len(), 2, "nothing was said against it");
    b.says(false).await;
    until_not_serving(&stage, 1).await;
    assert_eq!(shares(&stage.client, 10).await.len(), 1);
}
