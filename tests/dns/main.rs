//! Instances found by DNS: real backends, and a real server on loopback.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "../common/mod.rs"]
mod common;
mod server;

use std::time::Duration;

use common::{Backend, Callers, Method, call, until, until_bound_to};
use server::{Mood, Server};
use tonic_failover::client::{
    DatacenterStatus, GrpcClient, Services,
    registry::{Dns, DnsBuilder},
};

const HOST: &str = "counter.example.";
const SRV: &str = "_grpc._tcp.counter.example.";

/// Soon enough for a test.
const MOMENT: Duration = Duration::from_millis(100);

/// A client of `name`, asking `server`.
fn client(dns: DnsBuilder, server: &Server, name: &str) -> GrpcClient<Services> {
    let dns = dns.server(server.address).timeout(Duration::from_secs(1)).build().unwrap();
    let options = tonic_failover::client::ServiceOptions::new(name)
        .descriptors(tonic_failover::demo::pb::FILE_DESCRIPTOR_SET)
        .suspect_after(common::SOON)
        .connect_timeout(common::SOON);
    Services::builder(dns).service(options).build().unwrap().grpc_client(name).unwrap()
}

fn often(dns: DnsBuilder) -> DnsBuilder {
    dns.floor(MOMENT).ceiling(MOMENT)
}

fn first<O>(client: &GrpcClient<O>) -> DatacenterStatus {
    client.status().datacenters[0].clone()
}

async fn two_on_one_port() -> (Backend, Backend) {
    let a = Backend::start_at("a", "127.0.0.1:0", common::NOWHERE, &[]).await;
    let b = Backend::start_at("b", &format!("127.0.0.2:{}", a.port), common::NOWHERE, &[]).await;
    (a, b)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_that_change_are_followed_and_no_call_fails() {
    let (a, _b) = two_on_one_port().await;
    let server = Server::start(0).await;
    server.hosts(HOST, &["127.0.0.1"]);
    let client = client(often(Dns::hosts(a.port)), &server, HOST);
    until_bound_to(&client, "127.0.0.1").await;
    assert_eq!(client.status().to_string(), "127.0.0.1@dns ready, 1 known");
    let callers = Callers::start(&client, 32, Method::Increment);
    callers.go_on_for(100).await;
    server.hosts(HOST, &["127.0.0.2"]);
    until_bound_to(&client, "127.0.0.2").await;
    callers.go_on_for(100).await;
    let tally = callers.stop().await;
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ipv6_addresses_count_too() {
    let a = Backend::start_at("a", "[::1]:0", common::NOWHERE, &[]).await;
    let server = Server::start(0).await;
    server.hosts(HOST, &["::1"]);
    let client = client(often(Dns::hosts(a.port)), &server, HOST);
    until_bound_to(&client, "::1").await;
    call(client.channel(), Method::Increment, "1".to_owned()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_that_stand_for_a_blocked_name_are_nobodys() {
    let a = Backend::start("a").await;
    let server = Server::start(0).await;
    server.hosts(HOST, &["0.0.0.0", "::"]);
    let client = client(often(Dns::hosts(a.port)), &server, HOST);
    until(&client, "the answer was heard", |c| first(c).answered).await;
    assert_eq!(first(&client).known, 0, "whoever connects there reaches his own host");
    server.hosts(HOST, &["0.0.0.0", "127.0.0.1"]);
    until_bound_to(&client, "127.0.0.1").await;
    assert_eq!(first(&client).known, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn srv_records_name_the_ports_and_are_followed() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let server = Server::start(0).await;
    server.hosts("a.example.", &["127.0.0.1"]);
    server.hosts("b.example.", &["127.0.0.1"]);
    server.srv(SRV, &[(0, 3, a.port, "a.example."), (0, 1, 9, "gone.example.")]);
    let client = client(often(Dns::srv().datacenter("rack-1")), &server, SRV);
    until_bound_to(&client, "a.example").await;
    let bound = client.status().bound.unwrap();
    assert_eq!((bound.weight, &*bound.datacenter), (3, "rack-1"));
    assert_eq!(first(&client).known, 1, "a target that does not exist is left out");
    let callers = Callers::start(&client, 32, Method::Increment);
    callers.go_on_for(100).await;
    server.srv(SRV, &[(0, 1, b.port, "b.example.")]);
    until_bound_to(&client, "b.example").await;
    let tally = callers.stop().await;
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn srv_targets_of_a_later_priority_are_used_last() {
    let (mut a, b) = (Backend::start("a").await, Backend::start("b").await);
    let server = Server::start(0).await;
    server.hosts("a.example.", &["127.0.0.1"]);
    server.hosts("b.example.", &["127.0.0.1"]);
    server.srv(SRV, &[(20, 0, b.port, "b.example."), (10, 0, a.port, "a.example.")]);
    let client = client(often(Dns::srv()), &server, SRV);
    until_bound_to(&client, "a.example").await;
    a.kill().await;
    until_bound_to(&client, "b.example").await;
    call(client.channel(), Method::Increment, "1".to_owned()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_dns_fails_with_takes_no_instance_away() {
    let a = Backend::start("a").await;
    let server = Server::start(0).await;
    server.hosts(HOST, &["127.0.0.1"]);
    let client = client(often(Dns::hosts(a.port)), &server, HOST);
    until_bound_to(&client, "127.0.0.1").await;
    let cases = [
        (Mood::KnowsNoName, "does not have what was asked for"),
        (Mood::Silent, "did not answer within 1s"),
        (Mood::Fails, "Server Failure"),
        (Mood::FailsForIpv6, "Server Failure"),
    ];
    for (mood, why) in cases {
        server.mood(mood);
        until(&client, why, |c| first(c).registry_error.is_some_and(|it| it.contains(why))).await;
        let status = first(&client);
        assert!(status.stale_since.is_some() && status.empty_since.is_none(), "{mood:?}: {status:?}");
        assert_eq!(status.known, 1, "{mood:?}");
        call(client.channel(), Method::Increment, why.to_owned()).await.unwrap();
        server.mood(Mood::Answers);
        until(&client, "fresh again", |c| first(c).stale_since.is_none()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_without_addresses_is_an_empty_list() {
    let a = Backend::start("a").await;
    let server = Server::start(0).await;
    server.hosts(HOST, &["127.0.0.1"]);
    let client = client(often(Dns::hosts(a.port)), &server, HOST);
    until_bound_to(&client, "127.0.0.1").await;
    server.hosts(HOST, &[]);
    until(&client, "empty", |c| first(c).empty_since.is_some()).await;
    let status = first(&client);
    assert!(status.stale_since.is_none() && status.registry_error.is_none(), "{status:?}");
    call(client.channel(), Method::Increment, "1".to_owned()).await.unwrap();
    server.hosts(HOST, &["127.0.0.1"]);
    until(&client, "filled", |c| first(c).empty_since.is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_ttl_lasts_only_a_failure_asks_again() {
    let (mut a, _b) = two_on_one_port().await;
    let server = Server::start(3600).await;
    server.hosts(HOST, &["127.0.0.1"]);
    let dns = Dns::hosts(a.port).floor(MOMENT).ceiling(Duration::from_secs(3600)).ipv4_only(true);
    let client = client(dns, &server, HOST);
    until_bound_to(&client, "127.0.0.1").await;
    assert_eq!(server.asked(), 1);
    server.hosts(HOST, &["127.0.0.2"]);
    tokio::time::sleep(5 * MOMENT).await;
    assert_eq!((server.asked(), common::bound(&client).as_deref()), (1, Some("127.0.0.1")));
    a.kill().await;
    until_bound_to(&client, "127.0.0.2").await;
    assert!(server.asked() > 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_dns_cannot_carry_is_said_to_be_wrong() {
    let server = Server::start(0).await;
    let name = format!("{}.example.", "x".repeat(64));
    let client = client(Dns::srv(), &server, &name);
    let refused =
        |it: &DatacenterStatus| it.registry_error.as_deref().is_some_and(|e| e.contains("cannot be sent"));
    until(&client, "refused", |c| c.status().datacenters.first().is_some_and(refused)).await;
    assert_eq!(server.asked(), 0);
}
