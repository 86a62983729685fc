//! Which of the listed instances are used, and how they are reached.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::collections::BTreeSet;

use common::{Backend, Callers, Method, builder, consul, get, until, until_bound_to};
use tonic_failover::{
    client::{FailoverEvent, GrpcClient, Policy, RebindCause, ServiceOptions},
    testkit::{Check, ConsulProcess, Registration},
};

fn at(backend: &Backend) -> Registration {
    Registration::new("counter", &backend.name, "127.0.0.1", backend.port)
}

fn client(consul: &ConsulProcess, options: ServiceOptions) -> GrpcClient {
    let all = options.policy(Policy::RoundRobin);
    builder(&consul.url()).service(all).build().unwrap().grpc_client("counter").unwrap()
}

/// The names of all instances that are bound.
fn names(client: &GrpcClient) -> BTreeSet<String> {
    client.binding().instances().map(|i| i.name.clone()).collect()
}

async fn until_names(client: &GrpcClient, wanted: &[&str]) {
    let wanted: BTreeSet<_> = wanted.iter().map(|name| (*name).to_owned()).collect();
    until(client, &format!("bound to {wanted:?}"), |c| names(c) == wanted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tags_meta_and_filter_choose_among_the_instances_and_changes_are_followed() {
    let Some(consul) = consul().await else { return };
    let (a, b, c) = (Backend::start("a").await, Backend::start("b").await, Backend::start("c").await);
    let registry = consul.registry();
    registry.register(&at(&a).tag("v1").tag("blue").meta("rack", "1")).await.unwrap();
    registry.register(&at(&b).tag("v2").tag("blue").meta("rack", "2")).await.unwrap();
    registry.register(&at(&c).tag("v2").tag("green").meta("rack", "2")).await.unwrap();
    let options = || ServiceOptions::new("counter");
    let cases: [(ServiceOptions, &[&str]); 7] = [
        (options(), &["a", "b", "c"]),
        (options().tag("v2"), &["b", "c"]),
        (options().tag("V2").tag("blue"), &["b"]),
        (options().meta("rack", "2"), &["b", "c"]),
        (options().meta("rack", "2").tag("green"), &["c"]),
        (options().filter(r#"Service.Meta.rack == "1" or "green" in Service.Tags"#), &["a", "c"]),
        (options().filter(r#""blue" in Service.Tags"#).tag("v1").meta("rack", "1"), &["a"]),
    ];
    let mut clients = Vec::new();
    for (options, wanted) in cases {
        let client = client(&consul, options);
        until_names(&client, wanted).await;
        clients.push(client);
    }
    // Tags that change are followed.
    registry.register(&at(&a).tag("v2").tag("blue").meta("rack", "2")).await.unwrap();
    until_names(&clients[1], &["a", "b", "c"]).await;
    until_names(&clients[2], &["a", "b"]).await;
    until_names(&clients[3], &["a", "b", "c"]).await;
    // None is left: what was known stays, as an empty list proves nothing.
    until_names(&clients[6], &["a"]).await;
    until(&clients[6], "none is listed", |c| c.status().datacenters[0].empty_since.is_some()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filter_that_consul_does_not_understand_is_told_in_its_words() {
    let Some(consul) = consul().await else { return };
    let client = client(&consul, ServiceOptions::new("counter").filter("this is no filter"));
    until(&client, "it is told", |c| {
        let line = c.status().to_string();
        line.contains("local has not answered yet, its registry: ") && line.contains("boolean expression")
    })
    .await;
}

/// `a` and `b`, with checks that a test sets.
async fn two_that_pass(consul: &ConsulProcess) -> [Backend; 2] {
    let both = [Backend::start("a").await, Backend::start("b").await];
    for backend in &both {
        let check = Check::ttl(std::time::Duration::from_secs(600)).passing();
        consul.registry().register(&at(backend).check(check)).await.unwrap();
    }
    both
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warning_instances_are_used_where_wanted_and_after_all_others() {
    let Some(consul) = consul().await else { return };
    let registry = consul.registry();
    let _backends = two_that_pass(&consul).await;
    let plain = common::steady_client(&consul.url());
    let tolerant = builder(&consul.url())
        .service(common::steady().include_warning(true))
        .build()
        .unwrap()
        .grpc_client("counter")
        .unwrap();
    for client in [&plain, &tolerant] {
        until(client, "both are ready", |c| c.status().datacenters.first().is_some_and(|dc| dc.ready == 2))
            .await;
    }
    let callers = Callers::start(&tolerant, 8, Method::Increment);

    registry.warn("a").await.unwrap();
    until(&plain, "one is known", |c| c.status().datacenters[0].known == 1).await;
    until_bound_to(&plain, "b").await;
    until_bound_to(&tolerant, "b").await;
    assert_eq!(tolerant.status().datacenters[0].known, 2);
    // A new one prefers what passes; with nothing else it takes what warns.
    let fresh = builder(&consul.url())
        .service(common::steady().include_warning(true))
        .build()
        .unwrap()
        .grpc_client("counter")
        .unwrap();
    until_bound_to(&fresh, "b").await;
    registry.fail("b").await.unwrap();
    until_bound_to(&fresh, "a").await;
    until_bound_to(&tolerant, "a").await;
    assert!(get(fresh.channel()).await.unwrap().instance.warning);
    // The one that wants none keeps the last that it knew.
    until(&plain, "none is listed", |c| c.status().datacenters[0].empty_since.is_some()).await;
    until_bound_to(&plain, "b").await;
    assert!(get(plain.channel()).await.is_ok());
    let tally = callers.stop().await;
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_warns_gives_way_to_one_that_passes_and_is_not_said_to_have_left() {
    let Some(consul) = consul().await else { return };
    let registry = consul.registry();
    let _backends = two_that_pass(&consul).await;
    let options = common::steady().include_warning(true);
    let client = builder(&consul.url()).service(options).build().unwrap().grpc_client("counter").unwrap();
    until(&client, "both are ready", |c| c.status().datacenters.first().is_some_and(|dc| dc.ready == 2))
        .await;
    let mut events = client.events();
    let bound = common::bound(&client).unwrap();
    registry.warn(&bound).await.unwrap();
    let cause = common::event(&mut events, "another is bound", |event| match event {
        FailoverEvent::Rebound { from: Some(from), cause, .. } if from.name == bound => Some(*cause),
        _ => None,
    });
    assert_eq!(cause.await, RebindCause::Outranked);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_are_reached_by_ipv6_address_and_by_host_name() {
    let Some(consul) = consul().await else { return };
    let six = Backend::start_at("six", "[::1]:0", common::NOWHERE, &[]).await;
    let name = Backend::start("name").await;
    let registry = consul.registry();
    registry.register(&Registration::new("counter", "six", "::1", six.port)).await.unwrap();
    registry.register(&Registration::new("counter", "name", "localhost", name.port)).await.unwrap();
    let client = client(&consul, ServiceOptions::new("counter"));
    until_names(&client, &["name", "six"]).await;
    let mut served = BTreeSet::new();
    for _ in 0..4 {
        served.insert(get(client.channel()).await.unwrap().instance.id.authority().to_owned());
    }
    let wanted = [format!("[::1]:{}", six.port), format!("localhost:{}", name.port)];
    assert_eq!(served, wanted.into_iter().collect());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_that_nobody_can_connect_to_cost_only_themselves() {
    let Some(consul) = consul().await else { return };
    let a = Backend::start("a").await;
    let registry = consul.registry();
    registry.register(&Registration::new("counter", "high", "127.0.0.1", 70_000)).await.unwrap();
    registry.register(&Registration::new("counter", "low", "127.0.0.1", -1)).await.unwrap();
    registry.register(&Registration::new("counter", "none", "127.0.0.1", 0)).await.unwrap();
    registry.register(&Registration::new("counter", "odd", "no such host!", 80)).await.unwrap();
    registry.register(&Registration::new("counter", "unknown", "nowhere.invalid", 80)).await.unwrap();
    // The node's address counts where the service has none: 127.0.0.1 here.
    registry.register(&Registration::new("counter", "a", "", a.port)).await.unwrap();
    let client = client(&consul, common::steady());
    until_names(&client, &["a"]).await;
    until(&client, "those that could be are known", |c| c.status().datacenters[0].known == 2).await;
    let callers = Callers::start(&client, 4, Method::Increment);
    callers.go_on_for(50).await;
    let tally = callers.stop().await;
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}
