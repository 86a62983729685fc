//! Instances that cannot be called, beside a good one and alone.

use std::time::Duration;

use tokio::task::JoinSet;
use tonic::Code;
use tonic_failover::client::{CallErrorKind, FailoverChannel, Policy};

use crate::{
    common::{
        DEADLINE, SOON, client, get as get_served,
        hostile::{self, Listening},
        options, register,
        scripted::{Act, Scripted},
        until,
    },
    stage::{Stage, get, kind, timed},
};

/// The good one beside `bad` answers every call at once, under either policy, and
/// the bad one is never published.
async fn is_never_published(what: &str, bad: u16) {
    for policy in [Policy::PickFirst, Policy::RoundRobin] {
        // More than once, for which one comes first is a matter of chance.
        for _ in 0..2 {
            let good = Scripted::good().await;
            let instances = [("bad", bad), ("good", good.port)];
            let Some(stage) = Stage::with(options().policy(policy), &instances).await else { return };
            let mut bindings = stage.client.subscribe();
            // Before anything is bound, and on from there, until the bad one has been tried.
            let (first, took) = timed(get_served(stage.channel())).await;
            assert_eq!(first.unwrap().instance.name, "good", "{what}");
            println!("{what}, {policy:?}: first call after {took:?}");
            until(&stage.client, "the bad one was tried", |c| c.status().datacenters[0].ejected == 1).await;
            for _ in 0..50 {
                let (reply, took) = timed(get_served(stage.channel())).await;
                assert_eq!(reply.unwrap().instance.name, "good");
                assert!(took < Duration::from_millis(900), "{what}: a call waited for the bad one: {took:?}");
            }
            let binding = bindings.borrow_and_update().clone();
            assert_eq!(binding.instances().count(), 1, "{what}: {binding:?}");
            assert_eq!(stage.client.binding().generation(), 1, "{what}: published again");
        }
    }
}

/// Alone, it fails calls at the fail-fast bound with its reason, and at their own
/// deadlines where these are sooner; all of those that wait, at the same time.
async fn alone_fails_calls_in_time(what: &str, bad: u16, words: &str) {
    let fail_fast = Duration::from_millis(1500);
    let Some(stage) = Stage::with(options().fail_fast_after(fail_fast), &[("bad", bad)]).await else {
        return;
    };
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        calls.spawn(timed(get(stage.channel(), DEADLINE)));
    }
    while let Some(call) = calls.join_next().await {
        let (result, took) = call.unwrap();
        let status = result.unwrap_err();
        let kind = kind(&status);
        let CallErrorKind::NothingUsable { reason } = &kind else { panic!("{what}: {kind:?}") };
        assert!(reason.contains(words), "{what}: {reason}");
        assert!(status.message().contains(words), "{what}: {}", status.message());
        assert!(took >= fail_fast && took < fail_fast + Duration::from_millis(400), "{what}: {took:?}");
    }
    let (result, took) = timed(get(stage.channel(), Duration::from_millis(300))).await;
    let status = result.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{what}");
    assert_eq!(kind(&status), CallErrorKind::DeadlineExceeded, "{what}");
    assert!(took >= Duration::from_millis(290) && took < Duration::from_millis(700), "{what}: {took:?}");
    assert!(stage.client.binding().is_empty(), "{what}");
    let not_ready = stage.client.ready_within(Duration::from_millis(10)).await.unwrap_err();
    assert!(not_ready.to_string().contains(words), "{what}: {not_ready}");
}

async fn both(what: &str, bad: Listening, words: &str) {
    tokio::time::timeout(3 * SOON, async {
        is_never_published(what, bad.port).await;
        alone_fails_calls_in_time(what, bad.port, words).await;
    })
    .await
    .expect("it ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_refuses_connections_costs_nobody_anything() {
    let nobody = hostile::refused();
    is_never_published("refused", nobody.port).await;
    alone_fails_calls_in_time("refused", nobody.port, "Connection refused").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_behind_a_black_hole_costs_nobody_anything() {
    both("black hole", hostile::black_hole().await, "no answer within 1s").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_accepts_and_never_speaks_http2_costs_nobody_anything() {
    both("silent", hostile::silent().await, "no answer within 1s").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http1_server_on_the_port_costs_nobody_anything() {
    both("HTTP/1", hostile::http1().await, "no gRPC answer").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_says_it_is_not_serving_is_not_published() {
    let server = Scripted::good().await;
    server.health(Act::Begin(0, crate::common::scripted::End::NotServing));
    is_never_published("NOT_SERVING", server.port).await;
    alone_fails_calls_in_time("NOT_SERVING", server.port, "not serving").await;
    assert!(server.asks().is_empty(), "no call went there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_the_health_service_lives_all_the_same() {
    let server = Scripted::good().await;
    server.health(Act::Status(12, "unknown service grpc.health.v1.Health", vec![]));
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    assert_eq!(get_served(stage.channel()).await.unwrap().instance.name, "a");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_answers_the_check_and_dies_at_once_makes_no_dial_storm() {
    let server = Scripted::start(|_| Act::Close).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    stage.client.ready().await.unwrap();
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        let channel = stage.channel();
        calls.spawn(async move {
            let end = tokio::time::Instant::now() + Duration::from_secs(3);
            let mut failed = 0;
            while tokio::time::Instant::now() < end {
                let (result, took) = timed(get(channel.clone(), DEADLINE)).await;
                kind(&result.unwrap_err());
                assert!(took < DEADLINE + Duration::from_millis(500));
                failed += 1;
            }
            failed
        });
    }
    let failed: u32 = calls.join_all().await.into_iter().sum();
    println!("{failed} calls failed, {} connections, {} requests", server.connections(), server.asks().len());
    assert!(server.connections() < 30, "{} connections in 3 s", server.connections());
}

/// The good one and so many that accept connections and say nothing.
const SILENT: usize = 40;

/// Calls until one is answered.
async fn served_at_last(channel: FailoverChannel) {
    while get(channel.clone(), DEADLINE).await.is_err() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn among_dozens_that_say_nothing_the_good_one_is_found_and_found_again() {
    let good = Scripted::good().await;
    let Some(stage) = Stage::set(&[("good", good.port)]).await else { return };
    served_at_last(stage.channel()).await;
    let mut silent = Vec::new();
    for number in 0..SILENT {
        let listening = hostile::silent().await;
        register(stage.consul.registry(), "counter", &format!("silent{number}"), listening.port).await;
        silent.push(listening);
    }
    until(&stage.client, "all are known", |c| c.status().datacenters[0].known == SILENT + 1).await;
    // Each client has an order of its own.
    let clients: Vec<_> = (0..8).map(|_| client(&stage.consul.url())).collect();
    let all_served = async |what: &str| {
        let mut calls = JoinSet::new();
        for channel in clients.iter().map(|client| client.channel()).chain([stage.channel()]) {
            calls.spawn(timed(served_at_last(channel)));
        }
        while let Some(call) = calls.join_next().await {
            let ((), took) = call.unwrap();
            println!("{what}: served after {took:?}");
            assert!(took < Duration::from_secs(20), "{what}: {took:?}");
        }
    };
    all_served("new").await;
    for _ in 0..2 {
        good.cut();
        all_served("cut off").await;
    }
}
