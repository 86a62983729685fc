//! What a real Consul answers about instances.

use serde_json::json;
use tonic_failover::{
    consul::{Check, Consistency, RegistryError, ServiceRegistration, SkipReason},
    testkit::ConsulProcess,
};

use super::*;

async fn agent() -> Option<(ConsulProcess, ConsulClient)> {
    let agent = super::agent().await?;
    let client = client(&agent.url());
    Some((agent, client))
}

#[tokio::test]
async fn an_instance_comes_with_all_that_it_was_registered_with() {
    let Some((agent, client)) = agent().await else { return };
    let registration = ServiceRegistration::new("counter", "counter-1", "10.0.0.7", 5000)
        .unwrap()
        .tag("v1")
        .tag("primary")
        .meta("zone", "a")
        .weights(7, 2)
        .check(Check::ttl(Duration::from_secs(600)).deregister_critical_after(Duration::from_secs(3600)));
    client.register(&registration).await.unwrap();
    assert_eq!(names(&client, &query("counter")).await, [""; 0], "critical until first passed");
    client.pass_check(&registration.check_id()).await.unwrap();
    let answer = client.healthy_instances(&query("counter")).await.unwrap();
    let [instance] = &answer.snapshot.instances[..] else { panic!("{answer:?}") };
    assert_eq!(instance.id.authority(), "10.0.0.7:5000");
    assert_eq!((&*instance.name, &*instance.datacenter), ("counter-1", "dc1"));
    assert_eq!((instance.weight, &*instance.meta["zone"]), (7, "a"));
    assert_eq!(instance.tags, ["v1", "primary"]);
    assert!(!instance.node.is_empty());
    assert!(answer.index.is_some_and(|it| it >= 1));
    assert_eq!((answer.known_leader, answer.filtered_by_acl), (Some(true), false));
    assert!(answer.last_contact.is_some());
    client.deregister("counter-1").await.unwrap();
    assert_eq!(names(&client, &query("counter")).await, [""; 0]);
    let forgotten = client.pass_check(&registration.check_id()).await.unwrap_err();
    assert!(
        matches!(&forgotten, RegistryError::Status { code: 500, body } if body.contains("TTL")),
        "{forgotten}"
    );
    drop(agent);
}

#[tokio::test]
async fn checks_of_every_kind_are_taken() {
    let Some((agent, client)) = agent().await else { return };
    let second = Duration::from_secs(1);
    let address = agent.http_addr();
    let checks = [
        Check::ttl(Duration::from_millis(500)),
        Check::tcp(address.to_string(), second).timeout(second / 2),
        Check::grpc(format!("{address}/counter.v1.Counter"), second).timeout(second / 2),
    ];
    for (id, check) in ["ttl", "tcp", "grpc"].into_iter().zip(checks) {
        let one = ServiceRegistration::new("counter", id, "", 5000).unwrap().check(check);
        client.register(&one).await.unwrap();
    }
    let known = agent.registry().get("/v1/agent/checks").await.unwrap().json();
    for (id, kind) in [("ttl", "ttl"), ("tcp", "tcp"), ("grpc", "grpc")] {
        assert_eq!(known[format!("service:{id}")]["Type"], kind);
    }
    // The agent's own HTTP port accepts connections, so this one becomes healthy.
    eventually(|| async { names(&client, &query("counter")).await == ["tcp"] }).await;
}

#[tokio::test]
async fn names_with_any_letters_find_their_service() {
    let Some((agent, client)) = agent().await else { return };
    for name in ["a b", "é", "50%", "a?b", "a#b", "a/b", "a+b&c", "日本", "a%20b"] {
        register(agent.registry(), json!({"Name": name, "ID": name})).await;
        assert_eq!(names(&client, &query(name)).await, [name]);
        client.deregister(name).await.unwrap();
        assert_eq!(names(&client, &query(name)).await, [""; 0], "{name}");
    }
}

#[tokio::test]
async fn tags_metadata_and_filters_choose() {
    let Some((agent, client)) = agent().await else { return };
    for (id, port, tags, zone) in [
        ("a", 1, json!(["v1", "x y"]), "é"),
        ("b", 2, json!(["v1", "", "v1"]), "b"),
        ("c", 3, json!([]), "b"),
    ] {
        let service = json!({"ID": id, "Port": port, "Tags": tags, "Meta": {"zone": zone}});
        register(agent.registry(), service).await;
    }
    for (query, expected) in [
        (query("counter"), &["a", "b", "c"][..]),
        (query("counter").tag("v1"), &["a", "b"]),
        (query("counter").tag("v1").tag("x y"), &["a"]),
        (query("counter").meta("zone", "b"), &["b", "c"]),
        (query("counter").meta("zone", "b").tag("v1"), &["b"]),
        (query("counter").meta("zone", "é"), &["a"]),
        (query("counter").meta("colour", "red"), &[]),
        (query("counter").filter("Service.Meta.zone == \"é\" or \"x y\" in Service.Tags"), &["a"]),
        (query("counter").filter("not Service.Meta.zone == \"b\""), &["a"]),
        (query("counter").near("_agent"), &["a", "b", "c"]),
        (query("counter").consistency(Consistency::Default), &["a", "b", "c"]),
        (query("counter").consistency(Consistency::Consistent), &["a", "b", "c"]),
        (query("counter").datacenter("dc1"), &["a", "b", "c"]),
        (query("nobody"), &[]),
    ] {
        assert_eq!(names(&client, &query).await, expected, "{query:?}");
    }
    let faulty = client.healthy_instances(&query("counter").filter("zone is b")).await.unwrap_err();
    assert!(matches!(faulty, RegistryError::Status { code: 400 | 500, .. }), "{faulty}");
}

#[tokio::test]
async fn critical_and_maintenance_never_and_warning_only_when_asked_for() {
    let Some((agent, client)) = agent().await else { return };
    for (port, id) in ["passing", "warn", "fail"].into_iter().enumerate() {
        let check = json!({"TTL": "600s", "Status": "passing"});
        register(agent.registry(), json!({"ID": id, "Port": port + 1, "Check": check})).await;
    }
    put(agent.registry(), "/v1/agent/check/warn/service:warn").await;
    put(agent.registry(), "/v1/agent/check/fail/service:fail").await;
    let warning = query("counter").include_warning(true);
    assert_eq!(names(&client, &query("counter")).await, ["passing"]);
    assert_eq!(names(&client, &warning).await, ["passing", "warn"]);
    let answer = client.healthy_instances(&warning).await.unwrap();
    let warned: Vec<_> = answer.snapshot.instances.iter().filter(|it| it.warning).collect();
    assert_eq!((warned.len(), &*warned[0].name), (1, "warn"));
    put(agent.registry(), "/v1/agent/service/maintenance/passing?enable=true").await;
    assert_eq!(names(&client, &warning).await, ["warn"]);
    put(agent.registry(), "/v1/agent/service/maintenance/passing?enable=false").await;
    put(agent.registry(), "/v1/agent/maintenance?enable=true").await;
    assert_eq!(names(&client, &warning).await, [""; 0]);
    put(agent.registry(), "/v1/agent/maintenance?enable=false").await;
    // A check of the node counts for all that runs on it.
    let check = json!({"Name": "disk", "TTL": "600s", "Status": "critical"}).to_string();
    agent.registry().put("/v1/agent/check/register", check).await.unwrap();
    assert_eq!(names(&client, &warning).await, [""; 0]);
}

#[tokio::test]
async fn odd_addresses_and_ports_are_sorted_out() {
    let Some((agent, client)) = agent().await else { return };
    for (id, address, port) in [
        ("v6", "fe80::1", 5000),
        ("host", "backend-a.example", 5000),
        ("node", "", 5000),
        ("same", "", 5000),
        ("minus", "10.0.0.1", -1),
        ("huge", "10.0.0.1", 70_000),
        ("none", "10.0.0.1", 0),
        ("url", "http://10.0.0.1", 5000),
    ] {
        register(agent.registry(), json!({"ID": id, "Address": address, "Port": port})).await;
    }
    let answer = client.healthy_instances(&query("counter")).await.unwrap();
    let mut usable: Vec<_> = answer.snapshot.instances.iter().map(|it| it.id.authority()).collect();
    usable.sort_unstable();
    assert_eq!(usable, ["127.0.0.1:5000", "[fe80::1]:5000", "backend-a.example:5000"]);
    let mut skipped: Vec<_> = answer.skipped.iter().map(|it| (&*it.id, &it.reason)).collect();
    skipped.sort();
    assert_eq!(
        skipped,
        [
            ("huge", &SkipReason::Port(70_000)),
            ("minus", &SkipReason::Port(-1)),
            ("none", &SkipReason::Port(0)),
            ("url", &SkipReason::Address("http://10.0.0.1".to_owned())),
        ]
    );
}

#[tokio::test]
async fn another_datacenter_is_asked_through_the_own_agent() {
    let Some(bin) = consul() else { return };
    let dc1 = ConsulProcess::builder(&bin).start().await.unwrap();
    let mut dc2 = ConsulProcess::builder(&bin).datacenter("dc2").join_wan(&dc1).start().await.unwrap();
    let wan = json!({"wan": {"Address": "192.0.2.7", "Port": 9000}});
    register(dc2.registry(), json!({"ID": "far", "Address": "10.0.0.7"})).await;
    register(dc2.registry(), json!({"ID": "wan", "Address": "10.0.0.8", "TaggedAddresses": wan})).await;
    register(dc1.registry(), json!({"ID": "near", "Address": "10.0.0.8", "TaggedAddresses": wan})).await;
    let client = client(&dc1.url());
    assert_eq!(client.datacenters().await.unwrap(), ["dc1", "dc2"]);
    let authorities = async |query| {
        let answer = client.healthy_instances(&query).await.unwrap();
        let mut all: Vec<_> = answer.snapshot.instances.iter().map(|it| format!("{it} {}", it.id)).collect();
        all.sort();
        all
    };
    assert_eq!(
        authorities(query("counter").datacenter("dc2")).await,
        ["far@dc2 10.0.0.7:5000", "wan@dc2 192.0.2.7:9000"]
    );
    for own in [query("counter"), query("counter").datacenter("dc1")] {
        assert_eq!(authorities(own).await, ["near@dc1 10.0.0.8:5000"]);
    }
    for unknown in ["dc9", "DC2"] {
        let error = client.healthy_instances(&query("counter").datacenter(unknown)).await.unwrap_err();
        assert!(matches!(&error, RegistryError::NoPath { datacenter } if datacenter == unknown), "{error}");
    }
    dc2.kill().await.unwrap();
    let error = client.healthy_instances(&query("counter").datacenter("dc2")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Status { code: 500, .. }), "{error}");
    assert_eq!(names(&client, &query("counter")).await, ["near"]);
    assert_eq!(client.datacenters().await.unwrap(), ["dc1", "dc2"], "a dead one stays listed");
}

#[tokio::test]
async fn a_refused_token_is_told_from_one_that_sees_nothing() {
    let Some(bin) = consul() else { return };
    let acl = "acl { enabled = true default_policy = \"deny\" tokens { master = \"root\" } }";
    let agent = ConsulProcess::builder(&bin).hcl(acl).start().await.unwrap();
    let root = agent.registry().clone().token("root");
    // The first leader may still be setting the tokens up.
    eventually(|| async { root.get("/v1/acl/tokens").await.unwrap().status.is_success() }).await;
    register(&root, json!({"ID": "a"})).await;
    let with =
        |token: &str| ConsulClient::new(ConsulConfig::new(&agent.url()).unwrap().token(token)).unwrap();
    assert_eq!(names(&with("root"), &query("counter")).await, ["a"]);
    let error = with("nobody").healthy_instances(&query("counter")).await.unwrap_err();
    assert!(matches!(&error, RegistryError::Forbidden { message } if message == "ACL not found"), "{error}");
    // Without a token Consul 1.8 says that there are none, and nothing tells it from the truth.
    assert_eq!(names(&client(&agent.url()), &query("counter")).await, [""; 0]);
    let registration = ServiceRegistration::new("counter", "b", "", 1).unwrap();
    let error = client(&agent.url()).register(&registration).await.unwrap_err();
    assert!(matches!(error, RegistryError::Forbidden { .. }), "{error}");
}
