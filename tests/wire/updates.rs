//! Looking afresh: `update_grpc_client` and `report_failure`.

use std::time::Duration;

use tokio::task::JoinSet;
use tonic_failover::{
    client::{GrpcClient, UpdateError},
    testkit::ConsulProcess,
};

use crate::{
    common::{
        self, Backend, consul, hostile,
        proxy::Proxy,
        register,
        scripted::{Act, Scripted},
        until,
    },
    stage::timed,
};

/// A client that asks Consul through a proxy that counts.
async fn counted(instances: &[(&str, u16)]) -> Option<(ConsulProcess, Proxy, GrpcClient)> {
    let consul = consul().await?;
    for (name, port) in instances {
        register(consul.registry(), "counter", name, *port).await;
    }
    let proxy = Proxy::before(consul.http_addr().port()).await;
    let client = common::client(&proxy.url());
    client.ready().await.unwrap();
    let count = instances.len();
    until(&client, "all are ready", |c| c.status().datacenters[0].ready == count).await;
    Some((consul, proxy, client))
}

async fn update(client: &GrpcClient) -> Result<tonic_failover::client::Binding, UpdateError> {
    tokio::time::timeout(common::SOON, client.consul_service().update_grpc_client("counter"))
        .await
        .expect("it answers")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nothing_has_changed_nothing_is_published() {
    let a = Scripted::good().await;
    let Some((_consul, proxy, client)) = counted(&[("a", a.port)]).await else { return };
    let (before, checks) = (proxy.look_ups(), a.checks());
    let mut bindings = client.subscribe();
    bindings.mark_unchanged();
    let generation = client.binding().generation();
    let binding = update(&client).await.unwrap();
    assert_eq!(binding.generation(), generation);
    assert!(!bindings.has_changed().unwrap(), "nothing is published");
    assert_eq!(proxy.look_ups(), before + 1, "one question that does not wait");
    assert_eq!(a.checks(), checks + 1, "and the bound instance was asked whether it lives");
    assert_eq!(a.connections(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_updates_at_once_share_one_flight() {
    let a = Scripted::good().await;
    let Some((_consul, proxy, client)) = counted(&[("a", a.port)]).await else { return };
    let before = proxy.look_ups();
    let updates = (0..100).map(|_| update(&client));
    for binding in futures_util::future::join_all(updates).await {
        assert_eq!(binding.unwrap().generation(), client.binding().generation());
    }
    let look_ups = proxy.look_ups() - before;
    assert!(look_ups <= 2, "{look_ups} look-ups for 100 updates");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_bound_instance_is_dead_a_new_generation_comes_back() {
    // It keeps its socket, and answers no health check any more.
    let (a, b) = (Scripted::good().await, Scripted::good().await);
    let Some((_consul, _proxy, client)) = counted(&[("a", a.port), ("b", b.port)]).await else { return };
    let before = client.binding();
    let (dead, other) = if before.instance().unwrap().name == "a" { (&a, "b") } else { (&b, "a") };
    dead.health(Act::Hang);
    let (binding, took) = timed(update(&client)).await;
    let binding = binding.unwrap();
    assert!(binding.generation() > before.generation());
    assert_eq!(binding.instance().unwrap().name, other);
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nothing_answers_the_error_says_why() {
    let a = Scripted::good().await;
    let Some((_consul, proxy, client)) = counted(&[("a", a.port)]).await else { return };
    a.health(Act::Hang);
    a.cut();
    let (error, took) = timed(update(&client)).await;
    let error = error.unwrap_err();
    assert!(matches!(error, UpdateError::NothingUsable { .. }), "{error:?}");
    assert!(error.to_string().contains("dc1 lists 1"), "{error}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    // With Consul gone as well, that is what the error says.
    drop(proxy);
    let error = update(&client).await.unwrap_err();
    assert!(matches!(error, UpdateError::Registry(_)), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_name_lists_the_known_ones() {
    let client = common::client(common::NOWHERE);
    let error = client.consul_service().update_grpc_client("conter").await.unwrap_err();
    assert_eq!(error.to_string(), "unknown service \"conter\": the known ones are counter");
    assert!(matches!(error, UpdateError::Unknown(unknown) if unknown.known == ["counter"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reported_failure_probes_and_looks_up_and_an_old_one_does_nothing() {
    let (mut a, b) = (Backend::start("a").await, Scripted::good().await);
    let Some((consul, proxy, client)) = counted(&[("a", a.port)]).await else { return };
    let old = client.binding().generation();
    register(consul.registry(), "counter", "b", b.port).await;
    until(&client, "b is ready", |c| c.status().datacenters[0].ready == 2).await;
    a.kill().await;
    common::until_bound_to(&client, "b").await;
    // The look-up that the death of a causes.
    tokio::time::sleep(Duration::from_millis(700)).await;
    until(&client, "a is ejected", |c| c.status().datacenters[0].ready == 1).await;
    common::deregister(consul.registry(), "a").await;
    until(&client, "a is gone", |c| c.status().datacenters[0].known == 1).await;

    let (requests, checks, generation) = (proxy.look_ups(), b.checks(), client.binding().generation());
    assert!(generation > old);
    for _ in 0..1000 {
        client.report_failure(old);
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!((proxy.look_ups(), b.checks()), (requests, checks), "old news");

    for _ in 0..1000 {
        client.report_failure(generation);
    }
    until(&client, "the probe and the look-up", |_| proxy.look_ups() > requests && b.checks() > checks).await;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!(client.binding().generation(), generation, "it lives: nothing is published");
    let (asked, probed) = (proxy.look_ups() - requests, b.checks() - checks);
    println!("a thousand reports: {asked} look-ups, {probed} probes");
    assert!(asked <= 2 && probed <= 3, "a thousand reports: {asked} look-ups, {probed} probes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_that_come_later_put_nobody_off() {
    let consul = consul().await;
    let Some(consul) = consul else { return };
    let dead = hostile::refused();
    register(consul.registry(), "counter", "dead", dead.port).await;
    let client = common::client(&consul.url());
    let mut updates = JoinSet::new();
    let mut pace = tokio::time::interval(Duration::from_millis(300));
    for _ in 0..25 {
        pace.tick().await;
        let client = client.clone();
        updates.spawn(async move { timed(update(&client)).await });
    }
    while let Some(update) = updates.join_next().await {
        let (binding, took) = update.unwrap();
        assert!(binding.is_err(), "there is nothing usable");
        assert!(took < Duration::from_secs(6), "one waited for {took:?}");
    }
}
