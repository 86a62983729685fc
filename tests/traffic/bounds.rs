//! How many calls there may be.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tonic::Code;
use tonic_failover::client::{CallError, CallErrorKind, CallOptions, ServiceOptions};

use crate::{
    common::{self, Backend, SOON, steady, until},
    stage::{Stage, at, at_port, get, kind, watch},
};

fn refused(status: &tonic::Status, setting: &'static str, limit: usize) {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert_eq!(kind(status), CallErrorKind::TooMany { setting, limit });
    assert!(!CallError::of(status).unwrap().may_have_run());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_max_in_flight_a_call_is_refused_and_a_place_is_free_when_one_has_ended() {
    let a = Backend::start("a").await;
    let stage = Stage::ready(steady().max_in_flight(2), vec![at(&a)]).await;
    let call = || get(stage.channel(), CallOptions::new());
    let first = watch(stage.channel()).await.unwrap();
    let mut second = watch(stage.channel()).await.unwrap().into_inner();
    assert!(second.next().await.unwrap().is_ok(), "the response has begun: the call is not over");
    refused(&call().await.unwrap_err(), "max_in_flight", 2);
    drop(first);
    assert_eq!(call().await.unwrap(), "a");
    // The reader keeps what is left of a stream that has ended; it counts no more.
    let third = watch(stage.channel()).await.unwrap();
    refused(&call().await.unwrap_err(), "max_in_flight", 2);
    a.signal(rustix::process::Signal::TERM);
    while let Some(item) = second.next().await {
        if item.is_err() {
            break;
        }
    }
    until(&stage.client, "it is gone", |c| c.status().datacenters[0].ready == 0).await;
    let _a = Backend::start_with("a", a.port, common::NOWHERE, &[]).await;
    until(&stage.client, "it is back", |c| c.status().datacenters[0].ready == 1).await;
    assert_eq!(call().await.unwrap(), "a");
    drop((second, third));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_dropped_gives_its_place_back() {
    let slow = Backend::start_with("a", 0, common::NOWHERE, &["--work", "20s"]).await;
    let stage = Stage::ready(steady().max_in_flight(1), vec![at(&slow)]).await;
    for _ in 0..3 {
        let mut call = Box::pin(get(stage.channel(), CallOptions::new()));
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut call).await.is_err());
        refused(&get(stage.channel(), CallOptions::new()).await.unwrap_err(), "max_in_flight", 1);
        drop(call);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_max_waiting_a_call_that_finds_nothing_is_refused_at_once() {
    let options = ServiceOptions::new("counter").max_waiting(3).fail_fast_after(SOON);
    let stage = Stage::set(options, vec![at_port("nobody", 1)]);
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        calls.spawn(get(stage.channel(), CallOptions::new()));
    }
    for _ in 0..5 {
        refused(&calls.join_next().await.unwrap().unwrap().unwrap_err(), "max_waiting", 3);
    }
    assert_eq!(calls.len(), 3, "the others wait");
    calls.abort_all();
    while calls.join_next().await.is_some() {}
    let a = Backend::start("a").await;
    stage.list.set("counter", [at(&a)]);
    stage.client.ready().await.unwrap();
    assert_eq!(get(stage.channel(), CallOptions::new()).await.unwrap(), "a");
}

#[tokio::test]
async fn bounds_that_let_nothing_through_are_refused() {
    for (options, words) in [
        (ServiceOptions::new("counter").max_in_flight(0), "max_in_flight = 0"),
        (ServiceOptions::new("counter").panic_threshold(101), "panic_threshold = 101"),
        (ServiceOptions::new("counter").on_drain(|_| ()), "on_drain = a hook is not usable: drain_after"),
    ] {
        let services =
            tonic_failover::client::Services::builder(tonic_failover::client::registry::StaticList::new());
        let error = services.service(options).build().unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}
