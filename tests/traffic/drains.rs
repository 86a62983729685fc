//! Streams on instances that have left.

use std::time::Duration;

use http::uri::PathAndQuery;
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_failover::{
    Instance,
    client::{
        CallError, CallErrorKind, CallOptions, FailoverChannel, FailoverEvent, Served, ServiceOptions,
        Services, registry::StaticList,
    },
    demo::pb::{CounterReply, IncrementRequest},
};
use tonic_prost::ProstCodec;

use crate::{
    common::{
        Backend, SOON, event,
        scripted::{Act, Ask, End, Scripted},
        steady, until, until_bound_to,
    },
    stage::{Stage, at, at_port, get, kind, watch},
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
    let (told, mut hears) = mpsc::unbounded_channel();
    let options = options().drain_after(AFTER).on_drain(move |drain| {
        let _ = told.send((drain.service.to_owned(), drain.instance.name.clone(), drain.ends_in));
        panic!("harms nobody else");
    });
    let stage = Stage::ready(options, vec![at(&a)]).await;
    let mut events = stage.client.events();
    let mut old = stream(&stage).await;
    stage.list.set("counter", [at(&b)]);
    let ends_in = event(&mut events, "it drains", |event| match event {
        FailoverEvent::Draining { instance, ends_in, .. } if instance.name == "a" => Some(*ends_in),
        _ => None,
    })
    .await;
    assert_eq!(ends_in, AFTER);
    assert_eq!(hears.recv().await, Some(("counter".to_owned(), "a".to_owned(), AFTER)));
    // Time to open it anew.
    until_bound_to(&stage.client, "b").await;
    let mut new = watch(stage.channel()).await.unwrap().into_inner();
    new.next().await.unwrap().unwrap();
    let status = timeout(SOON, old.next()).await.expect("it ends").unwrap().unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::Unavailable, CallErrorKind::Drained));
    assert!(CallError::of(&status).unwrap().may_have_run());
    assert!(status.message().contains("a@here"), "{status:?}");
    goes_on(&mut new).await;
    assert!(hears.try_recv().is_err(), "once for an instance");
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

/// The server takes no more calls on the stream's connection, which is replaced long before it leaves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_on_a_connection_that_was_told_to_go_away_ends_in_time_too() {
    let script =
        |ask: &Ask| if ask.path.ends_with("/Watch") { Act::Begin(1, End::Hang) } else { Act::Answer };
    let (a, b) = (Scripted::start(script).await, Scripted::good().await);
    let stage = Stage::ready(options().drain_after(AFTER), vec![at_port("a", a.port)]).await;
    let mut old = stream(&stage).await;
    a.go_away();
    while a.connections() < 2 {
        get(stage.channel(), CallOptions::new()).await.unwrap();
    }
    goes_on(&mut old).await;
    stage.list.set("counter", [at_port("b", b.port)]);
    let status = timeout(SOON, old.next()).await.expect("it ends").unwrap().unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::Drained);
}

/// Where calls need another datacenter no more, nobody asks whether its instances have left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_to_a_datacenter_that_is_asked_no_more_goes_on() {
    let (near, far) = (Backend::start("near").await, Backend::start("a").await);
    let (here, there) = (StaticList::new(), StaticList::new());
    here.set("counter", [at_port("nobody", 1)]);
    there.set("counter", [Instance::new("a", "127.0.0.1", far.port, "there")]);
    let services = Services::builder(here.clone()).fallback("there", there.clone());
    let services = services.failback_after(Duration::ZERO).service(options().drain_after(AFTER));
    let client = services.build().unwrap().grpc_client("counter").unwrap();
    until_bound_to(&client, "a").await;
    let stage = Stage { list: here, client };
    let mut old = stream(&stage).await;
    stage.list.set("counter", [at(&near)]);
    until_bound_to(&stage.client, "near").await;
    until(&stage.client, "it is asked no more", |c| !c.status().datacenters[1].asked).await;
    stage.list.set("counter", [at(&near), at_port("nobody", 1)]);
    until(&stage.client, "there is other news", |c| c.status().datacenters[0].known == 2).await;
    goes_on(&mut old).await;
}

/// A stream of requests has no response before it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_ends_in_time_too_and_a_single_request_goes_on() {
    let answers_late = |ask: &Ask| match ask.path == UPLOAD {
        true => Act::Hang,
        false => Act::Answer.after(AFTER * 3),
    };
    let (a, b) = (Scripted::start(answers_late).await, Scripted::good().await);
    let stage = Stage::ready(options().drain_after(AFTER), vec![at_port("a", a.port)]).await;
    let (_more, requests) = mpsc::channel::<IncrementRequest>(1);
    let upload = tokio::spawn(upload(stage.channel(), ReceiverStream::new(requests)));
    let single = tokio::spawn(get(stage.channel(), CallOptions::new()));
    until(&stage.client, "both are out", |_| a.asks().len() == 2).await;
    stage.list.set("counter", [at_port("b", b.port)]);
    let status = timeout(SOON, upload).await.expect("it ends").unwrap().unwrap_err();
    assert_eq!((status.code(), kind(&status)), (Code::Unavailable, CallErrorKind::Drained));
    assert!(CallError::of(&status).unwrap().may_have_run());
    until(&stage.client, "the server is told", |_| a.cancelled() == 1).await;
    assert!(!single.is_finished(), "it is over");
    assert_eq!(single.await.unwrap().unwrap(), "a");
}

const UPLOAD: &str = "/uploads.v1.Uploads/Collect";

async fn upload(
    channel: FailoverChannel,
    requests: ReceiverStream<IncrementRequest>,
) -> Result<Response<CounterReply>, Status> {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let codec = ProstCodec::<IncrementRequest, CounterReply>::default();
    client.client_streaming(Request::new(requests), PathAndQuery::from_static(UPLOAD), codec).await
}
