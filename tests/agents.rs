//! Several agents of one datacenter: one dies, and the next is asked.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{SOON, deregister, options, register, until};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic_failover::{
    client::{ConsulService, FailoverEvent, GrpcClient},
    consul::{BlockingIndex, ConsulClient, ConsulConfig, HealthQuery, RegistryError},
    testkit::{Agent, ConsulProcess, Registry},
};

fn config(first: &str, second: &str) -> ConsulConfig {
    let config = ConsulConfig::new(first).unwrap().more_agents([second]).unwrap();
    config.request_timeout(Duration::from_secs(1)).max_answer_bytes(64 << 10)
}

fn counter(first: &str, second: &str) -> GrpcClient {
    // Nobody listens at these instances' addresses; the list is the matter here.
    let options = options().ejection(SOON, SOON);
    let builder = ConsulService::builder(config(first, second)).wait(Duration::from_secs(2));
    builder.service(options).build().unwrap().grpc_client("counter").unwrap()
}

fn agent(client: &GrpcClient) -> Option<String> {
    client.status().datacenters.first()?.agent.as_deref().map(str::to_owned)
}

async fn until_answered_by(client: &GrpcClient, url: &str) {
    until(client, &format!("answered by {url}"), |it| agent(it).as_deref() == Some(url)).await;
}

async fn until_known(client: &GrpcClient, instances: usize) {
    until(client, &format!("{instances} known"), |it| {
        it.status().datacenters.first().is_some_and(|it| it.known == instances)
    })
    .await;
}

/// Two agents that list the same, with indexes far apart.
async fn fill(first: &Registry, second: &Registry) {
    for port in 1..=30 {
        register(first, "other", "other", port).await;
    }
    for registry in [first, second] {
        register(registry, "counter", "a", 1).await;
    }
}

#[tokio::test]
async fn when_an_agent_refuses_hangs_or_is_cut_off_the_next_is_asked_and_nobody_notices() {
    let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
    fill(first.registry(), second.registry()).await;
    let client = counter(&first.url(), &second.url());
    let mut events = client.events();
    until_answered_by(&client, &first.url()).await;
    type Fault = fn(&Agent) -> tonic_failover::testkit::Switch;
    let faults: [Fault; 5] = [
        |it| it.faults().refuse(),
        |it| it.faults().drop_connections(),
        |it| it.faults().hang(),
        |it| it.faults().status(500, "No known Consul servers"),
        |it| it.faults().status(503, ""),
    ];
    for fault in faults {
        let fault = fault(&first);
        until_answered_by(&client, &second.url()).await;
        // What changes there is seen, although its index is far lower.
        register(second.registry(), "counter", "b", 2).await;
        until_known(&client, 2).await;
        fault.off();
        until_answered_by(&client, &first.url()).await;
        until_known(&client, 1).await;
        deregister(second.registry(), "b").await;
    }
    drop(client);
    while let Some(event) = timeout(SOON, events.next()).await.unwrap() {
        assert!(!matches!(event, FailoverEvent::RegistryLost { .. }), "{event:?}");
    }
}

#[tokio::test]
async fn when_an_agent_is_cut_off_from_its_leader_another_that_knows_better_is_asked() {
    let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
    fill(first.registry(), second.registry()).await;
    let client = counter(&first.url(), &second.url());
    let mut events = client.events();
    until_answered_by(&client, &first.url()).await;
    let cut_off = first.faults().no_leader();
    until_answered_by(&client, &second.url()).await;
    register(second.registry(), "counter", "b", 2).await;
    until_known(&client, 2).await;
    // It is tried again after its rest, which is told nobody and changes nothing.
    let tried = first.counters().requests_to("/v1/health");
    first.wait_for(|it| it.requests_to("/v1/health") > tried).await.unwrap();
    until_answered_by(&client, &second.url()).await;
    assert_eq!(client.status().datacenters[0].known, 2);
    cut_off.off();
    until_answered_by(&client, &first.url()).await;
    drop(client);
    while let Some(event) = timeout(SOON, events.next()).await.unwrap() {
        let told = matches!(event, FailoverEvent::RegistryBehind { .. } | FailoverEvent::RegistryLost { .. });
        assert!(!told, "{event:?}");
    }
}

#[tokio::test]
async fn when_all_agents_are_cut_off_from_the_leader_the_one_that_knows_most_is_followed() {
    let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
    fill(first.registry(), second.registry()).await;
    let asked = ConsulClient::new(config(&first.url(), &second.url())).unwrap();
    let query = HealthQuery::new("counter").unwrap();
    let one = first.faults().no_leader();
    let contact = async |client: &ConsulClient| {
        let answer = client.healthy_instances(&query).await.unwrap();
        (answer.agent.to_string(), answer.known_leader, answer.last_contact.unwrap())
    };
    assert_eq!(contact(&asked).await.0, second.url());
    // Some seconds later, the leader of the other one goes as well.
    let alone = ConsulClient::new(ConsulConfig::new(&first.url()).unwrap()).unwrap();
    while contact(&alone).await.2 < Duration::from_secs(3) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let _other = second.faults().no_leader();
    for _ in 0..50 {
        let (agent, known, _) = contact(&asked).await;
        assert_eq!((agent, known), (second.url(), Some(false)), "it is usable, and the freshest");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let client = counter(&first.url(), &second.url());
    until(&client, "it is behind, and known", |it| {
        it.status().datacenters[0].stale_since.is_some() && it.status().datacenters[0].known == 1
    })
    .await;
    one.off();
    until_answered_by(&client, &first.url()).await;
}

#[tokio::test]
async fn when_all_agents_fail_that_is_told_and_the_list_stays() {
    let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
    fill(first.registry(), second.registry()).await;
    let client = counter(&first.url(), &second.url());
    until_known(&client, 1).await;
    let (one, _other) = (first.faults().refuse(), second.faults().refuse());
    until(&client, "stale", |it| it.status().datacenters[0].registry_error.is_some()).await;
    assert_eq!(client.status().datacenters[0].known, 1);
    one.off();
    until(&client, "fresh", |it| it.status().datacenters[0].registry_error.is_none()).await;
    assert_eq!(agent(&client), Some(first.url()));
}

#[tokio::test]
async fn an_error_names_the_agent_that_was_asked() {
    let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
    fill(first.registry(), second.registry()).await;
    let client = counter(&first.url(), &second.url());
    let mut events = client.events();
    until_answered_by(&client, &first.url()).await;
    // The second one's word is final: it says nothing about the agent.
    let (_other, _one) = (second.faults().status(500, "out of order"), first.faults().refuse());
    let words = format!("out of order (asked at {})", second.url());
    until(&client, &words, |it| {
        it.status().datacenters[0].registry_error.as_ref().is_some_and(|it| it.contains(&words))
    })
    .await;
    let lost = |event: &FailoverEvent| match event {
        FailoverEvent::RegistryLost { error, .. } => Some(error.clone()),
        _ => None,
    };
    let told = common::event(&mut events, "it is lost", lost).await;
    assert!(told.contains(&words), "{told}");
}

#[tokio::test]
async fn a_real_agent_that_is_killed_is_replaced_and_taken_back_when_it_lives_again() {
    let Some(bin) = common::consul_bin() else { return };
    let mut first = ConsulProcess::builder(&bin).start().await.unwrap();
    let second = ConsulProcess::builder(&bin).start().await.unwrap();
    fill(first.registry(), second.registry()).await;
    let client = counter(&first.url(), &second.url());
    until_answered_by(&client, &first.url()).await;
    first.kill().await.unwrap();
    until_answered_by(&client, &second.url()).await;
    register(second.registry(), "counter", "b", 2).await;
    until_known(&client, 2).await;
    first.restart().await.unwrap();
    for (id, port) in [("a", 1), ("b", 2), ("c", 3)] {
        register(first.registry(), "counter", id, port).await;
    }
    until_answered_by(&client, &first.url()).await;
    until_known(&client, 3).await;
    // One that stands still is found by whoever asks first, and left by all.
    first.pause().await.unwrap();
    let _ = client.consul_service().update_grpc_client("counter").await;
    until_answered_by(&client, &second.url()).await;
    until_known(&client, 2).await;
    first.resume().unwrap();
    until_answered_by(&client, &first.url()).await;
}

#[tokio::test]
async fn an_index_is_never_used_with_another_agent() {
    let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
    fill(first.registry(), second.registry()).await;
    let client = ConsulClient::new(config(&first.url(), &second.url())).unwrap();
    assert_eq!(client.agents().collect::<Vec<_>>(), [first.url(), second.url()]);
    let query = HealthQuery::new("counter").unwrap();
    let answer = client.healthy_instances(&query).await.unwrap();
    assert_eq!(&*answer.agent, first.url());
    let (after, wait) = (BlockingIndex::from(answer.index.unwrap()), Duration::from_secs(600));
    let refused = first.faults().refuse();
    let asked = client.watch_instances(&query, after, wait);
    let answer = timeout(SOON, asked).await.expect("it does not wait").unwrap();
    assert_eq!(&*answer.agent, second.url());
    let after = BlockingIndex::from(answer.index.unwrap());
    let change = async {
        second.wait_for(|it| it.blocked == 1).await.unwrap();
        register(second.registry(), "counter", "b", 2).await;
    };
    let (answer, ()) = tokio::join!(client.watch_instances(&query, after, Duration::from_secs(10)), change);
    assert_eq!(answer.unwrap().snapshot.instances.len(), 2);
    refused.off();
}

#[tokio::test]
async fn an_agent_that_answers_badly_is_left_for_one_that_answers_well() {
    let query = HealthQuery::new("counter").unwrap();
    type Fault = fn(&Agent) -> tonic_failover::testkit::Switch;
    let faults: [(&str, Fault); 9] = [
        ("HTML", |it| it.faults().status(200, "<html>")),
        ("null", |it| it.faults().status(200, "null")),
        ("404", |it| it.faults().status(404, "")),
        ("403", |it| it.faults().status(403, "Permission denied")),
        ("429", |it| it.faults().status(429, "")),
        ("no leader", |it| it.faults().status(500, "No cluster leader")),
        ("500", |it| it.faults().status(500, "rpc error making call: panic")),
        ("301", |it| it.faults().status(301, "")),
        ("too large", |it| it.faults().oversized(1 << 20)),
    ];
    for (what, fault) in faults {
        let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
        fill(first.registry(), second.registry()).await;
        let client = ConsulClient::new(config(&first.url(), &second.url())).unwrap();
        let _bad = fault(&first);
        for _ in 0..5 {
            let answer = client.healthy_instances(&query).await.unwrap_or_else(|it| panic!("{what}: {it}"));
            assert_eq!((&*answer.agent, answer.snapshot.instances.len()), (&*second.url(), 1), "{what}");
        }
        let list = client.datacenters().await.unwrap_or_else(|it| panic!("{what}: {it}"));
        assert_eq!(list, ["dc1"], "{what}");
        // The same of all the while a service is served.
        let client = counter(&first.url(), &second.url());
        until_answered_by(&client, &second.url()).await;
        until_known(&client, 1).await;
    }
}

#[tokio::test]
async fn an_agent_that_asks_to_be_left_alone_is_not_asked_while_another_answers() {
    let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
    fill(first.registry(), second.registry()).await;
    let client = ConsulClient::new(config(&first.url(), &second.url())).unwrap();
    let _limited = first.faults().rate_limit(Duration::from_secs(60));
    for _ in 0..20 {
        let answer = client.healthy_instances(&HealthQuery::new("counter").unwrap()).await.unwrap();
        assert_eq!(&*answer.agent, second.url());
    }
    assert_eq!(first.counters().requests_to("/v1/health"), 1);
}

#[tokio::test]
async fn what_all_agents_refuse_is_told_and_held_against_none() {
    let (first, second) = (Agent::start("dc1").await.unwrap(), Agent::start("dc1").await.unwrap());
    fill(first.registry(), second.registry()).await;
    let client = ConsulClient::new(config(&first.url(), &second.url())).unwrap();
    let query = HealthQuery::new("counter").unwrap();
    for _ in 0..10 {
        let refusals = [&first, &second].map(|it| it.faults().status(403, "ACL not found"));
        let refused = client.healthy_instances(&query).await;
        assert!(matches!(refused, Err(RegistryError::Forbidden { .. })), "{refused:?}");
        refusals.iter().for_each(|it| it.off());
        let answer = client.healthy_instances(&query).await.unwrap();
        assert_eq!(&*answer.agent, first.url(), "it does not rest");
    }
    // A refusal says more than silence, whoever was asked last.
    let (_refused, _gone) = (first.faults().status(403, "ACL not found"), second.faults().refuse());
    let refused = client.healthy_instances(&query).await;
    assert!(matches!(refused, Err(RegistryError::Forbidden { .. })), "{refused:?}");
}

#[test]
fn agents_that_cannot_be_are_refused() {
    let config = || ConsulConfig::new("127.0.0.1:8500").unwrap();
    let error = config().more_agents(["localhost"]).unwrap_err();
    assert!(error.to_string().contains("more_agents"), "{error}");
    assert!(config().more_agents((1..=20).map(|port| format!("127.0.0.1:{port}"))).is_err());
    assert!(config().more_agents(["127.0.0.1:8500", "127.0.0.1:8501", "127.0.0.1:8501"]).is_ok());
}
