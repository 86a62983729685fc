//! Statuses that come over the wire.

use std::time::Duration;

use tonic::{Code, metadata::MetadataMap};
use tonic_failover::client::{CallError, Fallback};

use crate::{
    common::{
        DEADLINE, NOWHERE, bound, builder, options,
        proxy::Proxy,
        register,
        scripted::{Act, End, Scripted},
        until, until_bound_to,
    },
    stage::{Stage, get, increment, observed, served, timed, watch},
};

/// `details` is the base64 of "a message", without padding as grpc wants it.
fn unavailable() -> Act {
    Act::Status(14, "too%20busy", vec![("grpc-status-details-bin", "YSBtZXNzYWdl"), ("x-mine", "kept")])
}

fn is_untouched(status: &tonic::Status) {
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "too busy"));
    assert_eq!(status.details(), b"a message");
    let metadata: &MetadataMap = status.metadata();
    assert_eq!(metadata.get("x-mine").unwrap(), "kept");
    assert!(CallError::of(status).is_none(), "it is the server's word, not ours");
    assert!(std::error::Error::source(status).is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unavailable_from_the_server_reaches_an_unsafe_caller_as_it_came() {
    let server = Scripted::start(|_| unavailable()).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    is_untouched(&increment(stage.channel(), DEADLINE).await.unwrap_err());
    assert_eq!(server.asks().len(), 1, "not resent");
    is_untouched(&watch(stage.channel()).await.unwrap_err());
    assert_eq!(server.asks().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_safe_call_answered_unavailable_is_resent_up_to_the_cap_and_then_gets_the_servers_word() {
    let server = Scripted::start(|_| unavailable()).await;
    let (options, failures) = observed(options().max_attempts(3));
    let Some(stage) = Stage::with(options, &[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    is_untouched(&get(stage.channel(), DEADLINE).await.unwrap_err());
    let previous: Vec<_> =
        server.asks().iter().map(|a| a.header("grpc-previous-rpc-attempts").map(str::to_owned)).collect();
    assert_eq!(previous, [None, Some("1".to_owned()), Some("2".to_owned())]);
    let seen: Vec<_> = failures.lock().iter().map(|f| (f.attempt, f.resent, f.code)).collect();
    let code = Code::Unavailable;
    assert_eq!(seen, [(1, true, code), (2, true, code), (3, false, code)], "the hook sees each attempt");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_budget_bounds_the_resending_of_many_calls() {
    let server = Scripted::start(|_| unavailable()).await;
    let Some(stage) = Stage::with(options().retry_budget(0.2, 0), &[("a", server.port)]).await else {
        return;
    };
    let stage = stage.ready(1).await;
    for _ in 0..100 {
        is_untouched(&get(stage.channel(), DEADLINE).await.unwrap_err());
    }
    let asks = server.asks().len();
    assert!((115..=121).contains(&asks), "a fifth more than the 100 calls: {asks}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_unavailable_in_a_row_eject_an_instance_that_has_a_peer() {
    let (bad, good) = (Scripted::start(|_| unavailable()).await, Scripted::good().await);
    let Some(stage) = Stage::set(&[("bad", bad.port)]).await else { return };
    let stage = stage.ready(1).await;
    register(stage.consul.registry(), "counter", "good", good.port).await;
    stage.until_ready(2).await;
    assert_eq!(stage.bound(), "bad");
    for _ in 0..5 {
        is_untouched(&increment(stage.channel(), DEADLINE).await.unwrap_err());
    }
    until_bound_to(&stage.client, "good").await;
    assert_eq!(bad.asks().len(), 5);
    for _ in 0..20 {
        increment(stage.channel(), DEADLINE).await.unwrap();
    }
    assert_eq!(bad.asks().len(), 5, "no user's call tries it again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_instance_is_never_ejected_for_what_it_answers() {
    let server = Scripted::start(|_| unavailable()).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    for n in 1..=30 {
        is_untouched(&increment(stage.channel(), DEADLINE).await.unwrap_err());
        assert_eq!(server.asks().len(), n);
    }
    assert_eq!(server.connections(), 1);
    assert_eq!(stage.client.binding().generation(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_applications_own_answers_count_against_nobody_and_ask_consul_nothing() {
    for code in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16] {
        let act = move |_: &_| Act::Status(code, "no", vec![]);
        let (bad, other) = (Scripted::start(act).await, Scripted::good().await);
        let Some(consul) = crate::common::consul().await else { return };
        let proxy = Proxy::before(consul.http_addr().port()).await;
        register(consul.registry(), "counter", "bad", bad.port).await;
        let client = crate::common::client(&proxy.url());
        client.ready().await.unwrap();
        register(consul.registry(), "counter", "other", other.port).await;
        until(&client, "two ready", |c| c.status().datacenters[0].ready == 2).await;
        let before = proxy.look_ups();
        for _ in 0..10 {
            let status = get(client.channel(), DEADLINE).await.unwrap_err();
            assert_eq!(i32::from(status.code()), code, "as it came");
            assert!(CallError::of(&status).is_none());
        }
        assert_eq!((bad.asks().len(), other.asks().len()), (10, 0), "{code}: neither resent nor ejected");
        assert_eq!(proxy.look_ups(), before, "{code}: {:?}", proxy.requests());
        assert_eq!(client.status().datacenters[0].ejected, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unavailable_in_the_trailers_counts_too_and_reaches_the_caller_as_it_came() {
    let bad = Scripted::start(|_| Act::Begin(0, End::Status(14))).await;
    let good = Scripted::good().await;
    let Some(stage) = Stage::set(&[("bad", bad.port)]).await else { return };
    let stage = stage.ready(1).await;
    register(stage.consul.registry(), "counter", "good", good.port).await;
    stage.until_ready(2).await;
    for _ in 0..5 {
        let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "as told"));
        assert!(CallError::of(&status).is_none());
    }
    until_bound_to(&stage.client, "good").await;
}

/// gRPC's table for HTTP statuses makes 502, 503, 504 and 429 UNAVAILABLE.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxys_503_is_unavailable_and_a_safe_call_is_resent() {
    let (bad, good) = (Scripted::start(|_| Act::Http(503)).await, Scripted::good().await);
    let Some(stage) = Stage::set(&[("bad", bad.port)]).await else { return };
    let stage = stage.ready(1).await;
    register(stage.consul.registry(), "counter", "good", good.port).await;
    stage.until_ready(2).await;
    let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("503"), "{}", status.message());
    let reply = get(stage.channel(), DEADLINE).await.unwrap();
    assert_eq!(served(&reply), ("good".to_owned(), 2));
    for _ in 0..3 {
        increment(stage.channel(), DEADLINE).await.unwrap_err();
    }
    until_bound_to(&stage.client, "good").await;
}

/// tonic panics on such a header.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn details_that_are_no_base64_are_dropped_and_harm_nobody() {
    let details = vec![("grpc-status-details-bin", "!no base64!"), ("x-mine", "kept")];
    let server = Scripted::start(move |ask| match ask.number {
        1 | 2 => Act::Status(3, "mine", details.clone()),
        _ => Act::Begin(0, End::BadDetails),
    })
    .await;
    // The health check's answer is read by a task of ours.
    server.health(Act::Begin(0, End::BadDetails));
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    for n in 1..=4 {
        let status = if n % 2 == 0 {
            increment(stage.channel(), DEADLINE).await.unwrap_err()
        } else {
            watch_to_its_end(stage.channel()).await
        };
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, "mine"), "{n}");
        assert!(status.details().is_empty());
        assert_eq!(status.metadata().get("x-mine").unwrap(), "kept");
    }
}

async fn watch_to_its_end(channel: tonic_failover::client::FailoverChannel) -> tonic::Status {
    match watch(channel).await {
        Ok(response) => response.into_inner().message().await.unwrap_err(),
        Err(status) => status,
    }
}

/// Another datacenter is no peer before something there has answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_instance_is_not_ejected_in_favour_of_a_datacenter_that_does_not_answer() {
    let server = Scripted::start(|_| unavailable()).await;
    let Some(consul) = crate::common::consul().await else { return };
    register(consul.registry(), "counter", "a", server.port).await;
    let elsewhere = builder(NOWHERE).name("elsewhere").service(options()).build().unwrap();
    let fallback = Fallback::services([elsewhere]);
    let client = builder(&consul.url()).service(options()).fallback(fallback).build().unwrap();
    let client = client.grpc_client("counter").unwrap();
    client.ready().await.unwrap();
    for _ in 0..30 {
        let (result, took) = timed(increment(client.channel(), DEADLINE)).await;
        is_untouched(&result.unwrap_err());
        assert!(took < Duration::from_millis(300), "held up for {took:?}");
    }
    assert_eq!(server.connections(), 1);
    assert_eq!(client.binding().generation(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_only_instance_that_keeps_failing_gives_way_to_another_datacenter() {
    let (bad, good) = (Scripted::start(|_| unavailable()).await, Scripted::good().await);
    let (Some(here), Some(there)) = (crate::common::consul().await, crate::common::consul().await) else {
        return;
    };
    register(here.registry(), "counter", "bad", bad.port).await;
    register(there.registry(), "counter", "good", good.port).await;
    let elsewhere = builder(&there.url()).name("elsewhere").service(options()).build().unwrap();
    let fallback = Fallback::services([elsewhere]);
    let client = builder(&here.url()).service(options()).fallback(fallback).build().unwrap();
    let client = client.grpc_client("counter").unwrap();
    client.ready().await.unwrap();
    assert_eq!(bound(&client).as_deref(), Some("bad"));
    for _ in 0..5 {
        is_untouched(&increment(client.channel(), DEADLINE).await.unwrap_err());
    }
    until_bound_to(&client, "good").await;
    increment(client.channel(), DEADLINE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_probe_that_is_answered_unavailable_ends_no_call() {
    // Longer than it takes to be suspected and probed.
    let server = Scripted::start(|_| Act::Answer.after(Duration::from_millis(1500))).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    server.health(Act::Status(14, "too%20busy", vec![]));
    let checks = server.checks();
    assert!(increment(stage.channel(), DEADLINE * 2).await.is_ok());
    assert!(server.checks() > checks, "it was probed");
    assert_eq!(stage.bound(), "a", "it answers, if not well, and is the only one");
    assert_eq!(server.connections(), 1);
}
