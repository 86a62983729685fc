//! Streams on instances that have left.

use std::time::Duration;

use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::{Code, Streaming};
use tonic_failover::{
    client::{CallError, CallErrorKind, FailoverEvent, Served, ServiceOptions},
    demo::pb::CounterReply,
};

use crate::{
    common::{Backend, SOON, event, steady, until_bound_to},
    stage::{Stage, at, kind, watch},
};

const AFTER: Duration = Duration::from_millis(500);

fn options() -> ServiceOptions {
    steady().spares(0)
}

/// A stream from `a`, which has begun.
async fn stream(stage: &Stage) -> Streaming<CounterReply> {
    let response = watch(stage.channel()).await.unwrap();
    assert_eq!(response.extensions().get::<Served>().unwrap().instance.name, "a");
    let mut stream = response.into_inner();
    stream.next().await.unwrap().unwrap();
    stream
}

/// Nothing comes of it, for now.
async fn goes_on(stream: &mut Streaming<CounterReply>) {
    let next = timeout(AFTER * 3, stream.next()).await;
    assert!(next.is_err(), "it has ended: {next:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_end_in_time_after_their_instance_has_left_and_those_who_listen_know_before() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let stage = Stage::ready(options().drain_after(AFTER), vec![at(&a)]).await;
    let mut events = stage.client.events();
    let mut old = stream(&stage).await;
    stage.list.set("counter", [at(&b)]);
    let ends_in = event(&mut events, "it drains", |event| match event {
        FailoverEvent::Draining { instance, ends_in, .. } if instance.name == "a" => Some(*ends_in),
        _ => None,
    })
    .await;
    assert_eq!(ends_in, AFTER);
    // Time to open it anew.
    until_bound_to(&stage.client, "b").await;
    let mut new = watch(stage.channel()).await.unwrap().into_inner();
    new.next().await.unwrap().unwrap();
    let status = timeout(SOON, old.next()).await.expect("it ends").unwrap().unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::Unavailable, CallErrorKind::Drained));
    assert!(CallError::of(&status).unwrap().may_have_run());
    assert!(status.message().contains("a@here"), "{status:?}");
    goes_on(&mut new).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_whose_instance_is_listed_again_goes_on() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let stage = Stage::ready(options().drain_after(AFTER), vec![at(&a)]).await;
    let mut old = stream(&stage).await;
    stage.list.set("counter", [at(&b)]);
    until_bound_to(&stage.client, "b").await;
    stage.list.set("counter", [at(&a), at(&b)]);
    crate::common::until(&stage.client, "both are known", |c| c.status().datacenters[0].known == 2).await;
    goes_on(&mut old).await;
    // And ends once it has left for good.
    stage.list.set("counter", [at(&b)]);
    let status = timeout(SOON, old.next()).await.expect("it ends").unwrap().unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::Drained);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_setting_streams_are_left_alone() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let stage = Stage::ready(options(), vec![at(&a)]).await;
    let mut old = stream(&stage).await;
    stage.list.set("counter", [at(&b)]);
    until_bound_to(&stage.client, "b").await;
    goes_on(&mut old).await;
}
