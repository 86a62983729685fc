//! What becomes of a request's body when its call is sent again.

use std::time::Duration;

use h2::Reason;
use http::uri::PathAndQuery;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Code, Request, Response, Status};
use tonic_failover::{
    client::{CallErrorKind, FailoverChannel},
    demo::pb::{CounterReply, GetRequest, IncrementRequest, counter_client::CounterClient},
};
use tonic_prost::ProstCodec;

use crate::{
    common::{
        DEADLINE, SOON, options,
        scripted::{Act, End, Scripted},
    },
    stage::{Stage, get, increment, kind, served, wait_for, watch},
};

/// A message with so many bytes on the wire, its head included.
fn message(size: usize) -> IncrementRequest {
    let text = size - 5 - if size > 16_384 { 4 } else { 3 };
    IncrementRequest { by: 0, request_id: "x".repeat(text) }
}

/// A client stream of `count` messages that come one by one.
pub(crate) async fn collect(
    channel: FailoverChannel,
    count: usize,
    size: usize,
) -> Result<Response<CounterReply>, Status> {
    let mut request = Request::new(messages(count, size));
    request.set_timeout(DEADLINE);
    upload(channel, request).await
}

/// Not there at once: so the body cannot be kept.
fn messages(count: usize, size: usize) -> ReceiverStream<IncrementRequest> {
    let (send, receive) = mpsc::channel(1);
    tokio::spawn(async move {
        for _ in 0..count {
            tokio::time::sleep(Duration::from_millis(1)).await;
            if send.send(message(size)).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(receive)
}

async fn upload(
    channel: FailoverChannel,
    request: Request<impl tokio_stream::Stream<Item = IncrementRequest> + Send + 'static>,
) -> Result<Response<CounterReply>, Status> {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let codec = ProstCodec::<IncrementRequest, CounterReply>::default();
    client.client_streaming(request, PathAndQuery::from_static("/uploads.v1.Uploads/Collect"), codec).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_stream_that_never_left_moves_whole_to_another_connection() {
    let script = |ask: &crate::common::scripted::Ask| {
        if ask.path.ends_with("/Watch") { Act::Begin(1, End::Hang) } else { Act::Answer }
    };
    let server = Scripted::start(script).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let (mut moved, mut refused, mut expected) = (0, 0, 0);
    let mut streams = Vec::new();
    for _ in 0..40 {
        // Keeps the connection open while it takes no more calls.
        streams.push(watch(stage.channel()).await.unwrap());
        let before = expected + 5;
        wait_for("the stream's request was read", || server.received() == before).await;
        server.go_away();
        // Time for the news to be read, or not: both must be well.
        tokio::time::sleep(Duration::from_millis(u64::from(moved % 2 == 0))).await;
        match collect(stage.channel(), 3, 1000).await {
            Ok(reply) => {
                moved += u32::from(served(&reply).1 > 1);
                expected = before + 3000;
                assert_eq!(server.received(), expected, "whole, and once");
            }
            // It had left before the news came, and part of the body was gone.
            Err(status) => {
                refused += 1;
                expected = before;
                assert_eq!(kind(&status), CallErrorKind::Refused);
                assert_eq!(server.received(), before, "and no server has seen it");
            }
        }
    }
    println!("{moved} of 40 moved, {refused} were refused when part of them had left");
    assert!(moved > 0, "no call met the connection that takes none");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_stream_that_was_consumed_is_not_replayed() {
    let server = Scripted::start(|ask| match ask.number {
        1 => Act::ReadThenReset(Reason::REFUSED_STREAM),
        _ => Act::Answer,
    })
    .await;
    let path = "/uploads.v1.Uploads/Collect";
    let Some(stage) = Stage::with(options().safe_method(path), &[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let status = collect(stage.channel(), 3, 1000).await.unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::Refused);
    assert_eq!(server.asks().len(), 1, "what is left of it is no request");
    collect(stage.channel(), 3, 1000).await.unwrap();
}

/// All calls of a connection have a task in common, and a caller's stream has none of that.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stream_whose_messages_take_their_time_keeps_no_other_call_waiting() {
    let server = Scripted::good().await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let (later, receive) = mpsc::channel(1);
    let (blocks, blocked) = oneshot::channel();
    let (go, gone) = std::sync::mpsc::channel();
    let mut blocks = Some(blocks);
    let messages = messages(2, 1000).chain(ReceiverStream::new(receive).map(move |message| {
        blocks.take().unwrap().send(()).unwrap();
        gone.recv_timeout(SOON).unwrap();
        message
    }));
    let uploading = tokio::spawn(upload(stage.channel(), Request::new(messages)));
    wait_for("part of it has come", || server.received() == 2000).await;
    later.send(message(1000)).await.unwrap();
    drop(later);
    blocked.await.unwrap();
    for _ in 0..10 {
        let reply = get(stage.channel(), DEADLINE).await;
        assert_eq!(served(&reply.unwrap()).1, 1);
    }
    go.send(()).unwrap();
    uploading.await.unwrap().unwrap();
    assert_eq!(server.received(), 3000 + 10 * 5);
    assert_eq!(server.connections(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_panics_ends_no_other_call() {
    let server = Scripted::start(|ask| match ask.number {
        1 => Act::Hang,
        2 => Act::Answer.after(Duration::from_millis(500)),
        _ => Act::Answer,
    })
    .await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let (panics, panicked) = oneshot::channel::<()>();
    let (go, mut gone) = mpsc::channel::<()>(1);
    let (mut made, mut panics) = (0, Some(panics));
    let messages = messages(2, 1000).chain(futures_util::stream::poll_fn(move |cx| {
        // When another call is under way.
        std::task::ready!(gone.poll_recv(cx));
        made += 1;
        drop(panics.take());
        assert_eq!(made, 0, "as it should");
        std::task::Poll::Ready(None)
    }));
    let mut request = Request::new(messages);
    request.set_timeout(DEADLINE);
    let uploading = tokio::spawn(upload(stage.channel(), request));
    wait_for("part of it has come", || server.received() == 2000).await;
    let other = tokio::spawn(increment(stage.channel(), SOON));
    wait_for("both have come", || server.asks().len() == 2).await;
    go.send(()).await.unwrap();
    panicked.await.unwrap_err();
    assert_eq!(served(&other.await.unwrap().unwrap()).1, 1);
    increment(stage.channel(), SOON).await.unwrap();
    uploading.await.unwrap().unwrap_err();
    assert_eq!(server.connections(), 1);
}

/// What polls a request's body first is the task that sends all requests of the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stream_is_not_polled_where_the_connections_other_requests_are_sent() {
    let server = Scripted::good().await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    for panics in [false, true] {
        let (begins, begun) = oneshot::channel();
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let (mut polls, mut begins) = (0, Some(begins));
        // Not there when the call is made, and there at once when it is sent.
        let messages = futures_util::stream::poll_fn(move |cx| {
            polls += 1;
            match begins.take() {
                Some(begins) if polls > 1 => begins.send(()).unwrap(),
                kept => begins = kept,
            }
            if polls == 1 {
                cx.waker().wake_by_ref();
                return std::task::Poll::Pending;
            }
            let _ = gone.recv_timeout(SOON);
            assert!(!panics, "as it should");
            std::task::Poll::Ready(None)
        });
        let uploading = tokio::spawn(upload(stage.channel(), Request::new(messages)));
        begun.await.unwrap();
        for _ in 0..10 {
            assert_eq!(served(&increment(stage.channel(), DEADLINE).await.unwrap()).1, 1);
        }
        go.send(()).unwrap();
        match uploading.await.unwrap() {
            Ok(_) => assert!(!panics),
            Err(status) => {
                assert!(panics, "{status:?}");
                assert_eq!(status.code(), Code::Internal);
                assert_eq!(status.message(), "the request's stream panicked");
            }
        }
        increment(stage.channel(), DEADLINE).await.unwrap();
    }
    assert_eq!(server.connections(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_fails_by_itself_is_told_as_it_is_and_blames_no_instance() {
    let server = Scripted::start(|ask| match ask.path.as_str() {
        "/uploads.v1.Uploads/Answers" => Act::Begin(1, End::Hang),
        _ => Act::Hang,
    })
    .await;
    let (a, b) = (server.port, Scripted::good().await);
    let Some(stage) = Stage::with(options().failures_to_eject(1), &[("a", a), ("b", b.port)]).await else {
        return;
    };
    let stage = stage.ready(2).await;
    let codec = ProstCodec::<IncrementRequest, CounterReply>::default;
    let told = |status: Status, code: Code, ran: bool| {
        assert_eq!(status.code(), code, "{status:?}");
        let error = tonic_failover::client::CallError::of(&status).expect("typed");
        assert_eq!((error.kind(), error.may_have_run()), (&CallErrorKind::RequestFailed, ran));
    };
    let to_a = |request: &mut tonic::Extensions| {
        let id = tonic_failover::InstanceId::new("127.0.0.1", a);
        request.insert(tonic_failover::client::CallOptions::new().instance(id));
    };
    for _ in 0..3 {
        // All of it is there, and too large.
        let mut client = CounterClient::new(stage.channel()).max_encoding_message_size(1000);
        told(client.increment(message(2000)).await.unwrap_err(), Code::OutOfRange, false);
        let request_id = message(2000).request_id;
        told(client.get(GetRequest { request_id }).await.unwrap_err(), Code::OutOfRange, false);
        for path in ["/uploads.v1.Uploads/Collect", "/uploads.v1.Uploads/Answers"] {
            let path = PathAndQuery::from_static(path);
            // One message of many.
            let sizes = tokio_stream::iter([100, 2000]).then(async |size| {
                tokio::time::sleep(Duration::from_millis(5)).await;
                message(size)
            });
            let mut client = tonic::client::Grpc::new(stage.channel()).max_encoding_message_size(1000);
            client.ready().await.unwrap();
            let mut request = Request::new(sizes);
            to_a(request.extensions_mut());
            let answer = async {
                client.streaming(request, path.clone(), codec()).await?.into_inner().trailers().await
            };
            told(answer.await.unwrap_err(), Code::OutOfRange, true);
            // Cancelled when the server has it.
            let before = server.asks().len();
            let mut request = Request::new(tokio_stream::pending());
            to_a(request.extensions_mut());
            let handle = request.cancellation_handle();
            let mut client = tonic::client::Grpc::new(stage.channel());
            client.ready().await.unwrap();
            let answer =
                async { client.streaming(request, path, codec()).await?.into_inner().trailers().await };
            let cancels = async {
                wait_for("it has come", || server.asks().len() > before).await;
                handle.cancel();
            };
            let (answer, ()) = tokio::join!(answer, cancels);
            told(answer.unwrap_err(), Code::Cancelled, true);
        }
    }
    assert!(server.asks().iter().all(|ask| ask.path.starts_with("/uploads")), "the others were never sent");
    assert!(b.asks().is_empty());
    let there = &stage.client.status().datacenters[0];
    assert_eq!((there.ready, there.ejected), (2, 0), "nobody is to blame");
    assert_eq!((server.connections(), b.connections()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_beyond_the_replay_limit_is_sent_whole_and_once() {
    const SIZE: usize = 1024 * 1024;
    for (limit, sent) in [(64 * 1024, 1), (2 * SIZE, 5)] {
        let server = Scripted::start(|ask| match ask.number {
            1 => Act::Answer,
            _ => Act::ReadThenStatus(14, "busy"),
        })
        .await;
        let Some(stage) = Stage::with(options().replay_limit(limit), &[("a", server.port)]).await else {
            return;
        };
        let stage = stage.ready(1).await;
        let mut client = CounterClient::new(stage.channel());
        client.increment(message(SIZE)).await.unwrap();
        assert_eq!(server.received(), SIZE);
        let request_id = message(SIZE).request_id;
        let status = client.get(GetRequest { request_id }).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "busy"));
        assert_eq!(server.asks().len(), 1 + sent, "limit {limit}");
        assert_eq!(server.received(), SIZE + sent * SIZE);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_ready_messages_is_kept_and_resent_like_a_single_one() {
    let server = Scripted::start(|ask| match ask.number {
        1 => Act::ReadThenReset(Reason::REFUSED_STREAM),
        _ => Act::Answer,
    })
    .await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let mut client = tonic::client::Grpc::new(stage.channel());
    client.ready().await.unwrap();
    let codec = ProstCodec::<IncrementRequest, CounterReply>::default();
    let path = PathAndQuery::from_static("/uploads.v1.Uploads/Collect");
    let messages = tokio_stream::iter([message(1000), message(1000)]);
    let reply = client.client_streaming(Request::new(messages), path, codec).await.unwrap();
    assert_eq!(served(&reply).1, 2);
    assert_eq!(server.received(), 4000);
}
