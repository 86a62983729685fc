//! Calls that end on our side: at their deadline, or with their caller.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{
    Stream,
    stream::{StreamExt, iter, once},
};
use http::uri::PathAndQuery;
use http_body_util::StreamBody;
use hyper::body::Frame;
use tokio::sync::oneshot;
use tonic::{Code, Request, Response, Status, body::Body};
use tonic_failover::client::{CallError, CallErrorKind, MethodOptions, RetryPolicy};

use crate::{
    hostile,
    scripted::{Act, Ask, Scripted},
    stage::{
        GET, INCREMENT, Raw, Stage, bare, call, call_with, is_ours, options, request, send, verdict, wait_for,
    },
    table::outcome::{Proof, Verdict},
};

fn within(limit: Duration) -> Request<Bytes> {
    let mut request = Request::new(Bytes::new());
    request.set_timeout(limit);
    request
}

#[tokio::test]
async fn a_call_at_its_deadline_may_have_run_once_it_was_sent() {
    let limit = Duration::from_millis(300);
    let server = Scripted::start(|_| Act::Hang).await;
    let mut timed = request(server.port, INCREMENT);
    timed.headers_mut().insert("grpc-timeout", "300m".parse().unwrap());
    let error = send(bare(server.port).await, timed).await.unwrap_err();
    let expected = Verdict { proof: Proof::MayHaveRun, lost: None, timed_out: true, own: false };
    assert_eq!(verdict("grpc-timeout", error), expected);

    for path in [INCREMENT, GET] {
        let server = Scripted::start(|_| Act::Hang).await;
        let stage = Stage::of(server.port).await;
        let status = call_with(stage.client.channel(), path, within(limit)).await.unwrap_err();
        is_ours(path, &status, &CallErrorKind::DeadlineExceeded, 1);
        assert!(CallError::of(&status).unwrap().may_have_run());
        wait_for(|| "the server is told", || server.cancelled() == 1).await;
        assert_eq!((server.asks().len(), server.connections()), (1, 1), "{path}");
    }

    let nobody = hostile::refused();
    let stage = Stage::set(options(), &[nobody.port]);
    let status = call_with(stage.client.channel(), INCREMENT, within(limit)).await.unwrap_err();
    is_ours("never sent", &status, &CallErrorKind::DeadlineExceeded, 0);
    assert!(!CallError::of(&status).unwrap().may_have_run());
}

#[tokio::test]
async fn an_attempt_that_takes_longer_than_it_may_has_perhaps_run() {
    let policy = RetryPolicy::new().attempt_timeout(Duration::from_millis(200));
    let timed = || options().method("/", MethodOptions::new().retry(policy.clone()));
    let script = |ask: &Ask| if ask.number == 1 { Act::Hang } else { Act::Answer };
    let server = Scripted::start(script).await;
    let stage = Stage::ready(timed(), &[server.port]).await;
    assert_eq!(stage.call(GET).await.unwrap(), 2, "a safe one is resent");
    wait_for(|| "the server is told", || server.cancelled() == 1).await;
    assert_eq!(server.asks()[1].header("grpc-previous-rpc-attempts"), Some("1"), "as one that may have run");

    let server = Scripted::start(script).await;
    let stage = Stage::ready(timed().retry_budget(0.0, 0), &[server.port]).await;
    let status = stage.call(GET).await.unwrap_err();
    is_ours("without a budget", &status, &CallErrorKind::AttemptTimedOut, 1);
    assert!(CallError::of(&status).unwrap().may_have_run());
    assert_eq!((server.asks().len(), server.connections()), (1, 1));

    let server = Scripted::start(|_| Act::Answer.after(Duration::from_millis(500))).await;
    let stage = Stage::ready(timed(), &[server.port]).await;
    assert_eq!(stage.call(INCREMENT).await.unwrap(), 1, "what may not be sent again is left alone");
}

#[tokio::test]
async fn a_call_that_its_caller_drops_is_cancelled_and_judged_by_nobody() {
    let server = Scripted::start(|ask: &Ask| if ask.number == 1 { Act::Hang } else { Act::Answer }).await;
    let stage = Stage::of(server.port).await;
    let dropped = tokio::spawn(call(stage.client.channel(), GET));
    wait_for(|| "it is out", || server.asks().len() == 1).await;
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    wait_for(|| "the server is told", || server.cancelled() == 1).await;
    assert!(stage.failures.lock().is_empty(), "nothing has failed");
    assert_eq!(stage.call(INCREMENT).await.unwrap(), 1);
    assert_eq!(
        (server.asks().len(), server.connections()),
        (2, 1),
        "neither resent nor held against anybody"
    );
}

/// It is no method of the descriptors.
const UPLOAD: &str = "/counter.v1.Counter/Upload";

/// What a request comes to by itself.
const ITS_OWN: Verdict = Verdict { proof: Proof::MayHaveRun, lost: None, timed_out: false, own: true };

/// What the table says of a request on a bare channel whose body is `frames` and then fails, once the server has
/// its headers.
async fn fails_on_its_way(what: &str, frames: Vec<Frame<Bytes>>) -> Verdict {
    let server = Scripted::start(|_| Act::Hang).await;
    let (go, gone) = oneshot::channel::<()>();
    let failure = once(async move {
        let _ = gone.await;
        Err(Status::out_of_range("by itself"))
    });
    let body = StreamBody::new(iter(frames.into_iter().map(Ok)).chain(failure));
    let sent = send(bare(server.port).await, request(server.port, UPLOAD).map(|_| Body::new(body)));
    let arrived = async {
        wait_for(|| "the server has it", || server.asks().len() == 1).await;
        go.send(()).unwrap();
    };
    let (answer, ()) = tokio::join!(sent, arrived);
    verdict(what, answer.unwrap_err())
}

#[tokio::test]
async fn a_request_that_fails_when_it_is_read_first_is_never_sent() {
    let body = StreamBody::new(once(async { Err::<Frame<Bytes>, _>(Status::out_of_range("by itself")) }));
    let server = Scripted::start(|_| Act::Hang).await;
    let failing = request(server.port, INCREMENT).map(|_| Body::new(body));
    let error = send(bare(server.port).await, failing).await.unwrap_err();
    assert_eq!(verdict("tonic alone sends the headers of a request without a body", error), ITS_OWN);

    for path in [INCREMENT, GET] {
        let server = Scripted::start(|_| Act::Hang).await;
        let stage = Stage::of(server.port).await;
        let mut grpc = tonic::client::Grpc::new(stage.client.channel()).max_encoding_message_size(8);
        grpc.ready().await.unwrap();
        let request = Request::new(Bytes::from_static(&[7; 9]));
        let answer: Result<Response<Bytes>, _> =
            grpc.unary(request, PathAndQuery::from_static(path), Raw).await;
        fails_by_itself(&answer.unwrap_err(), Code::OutOfRange, 0);
        assert!(server.asks().is_empty(), "{path}");
        assert_eq!(stage.client.status().datacenters[0].ready, 1, "{path}");
    }
}

#[tokio::test]
async fn a_request_that_fails_on_its_way_may_have_run_and_is_not_held_against_the_instance() {
    assert_eq!(fails_on_its_way("before its first message", Vec::new()).await, ITS_OWN);
    let message = Frame::data(Bytes::from_static(&[0; 5]));
    assert_eq!(fails_on_its_way("after a message", vec![message]).await, ITS_OWN);

    for (panics, code) in [(false, Code::OutOfRange), (true, Code::Internal)] {
        let server = Scripted::start(|_| Act::Hang).await;
        let stage = Stage::ready(options().failures_to_eject(1), &[server.port]).await;
        let (go, gone) = oneshot::channel::<()>();
        let last = once(async move {
            let _ = gone.await;
            assert!(!panics, "as it should");
            Bytes::from_static(&[7; 9])
        });
        let messages = iter([Bytes::from_static(&[7])]).chain(last);
        let arrived = async {
            wait_for(|| "the server has it", || server.asks().len() == 1).await;
            go.send(()).unwrap();
        };
        let (status, ()) = tokio::join!(upload(&stage, messages), arrived);
        fails_by_itself(&status, code, 1);
        let here = &stage.client.status().datacenters[0];
        assert_eq!((here.ready, here.ejected, server.connections()), (1, 0, 1));
        assert_eq!(server.asks().len(), 1, "not resent");
    }
}

/// How a call with these messages fails, none of which may be larger than 8 bytes.
async fn upload(stage: &Stage, messages: impl Stream<Item = Bytes> + Send + 'static) -> Status {
    let mut grpc = tonic::client::Grpc::new(stage.client.channel()).max_encoding_message_size(8);
    grpc.ready().await.unwrap();
    let path = PathAndQuery::from_static(UPLOAD);
    let answer: Result<Response<Bytes>, _> = grpc.client_streaming(Request::new(messages), path, Raw).await;
    answer.unwrap_err()
}

fn fails_by_itself(status: &Status, code: Code, attempts: u32) {
    assert_eq!(status.code(), code, "{status:?}");
    let error = CallError::of(status).unwrap();
    assert_eq!((error.kind(), error.attempts()), (&CallErrorKind::RequestFailed, attempts), "{status:?}");
    assert_eq!(error.may_have_run(), attempts > 0);
}
