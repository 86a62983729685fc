//! Calls that end on our side: at their deadline, or with their caller.

use std::time::Duration;

use bytes::Bytes;
use tonic::Request;
use tonic_failover::client::{CallError, CallErrorKind, MethodOptions, RetryPolicy};

use crate::{
    hostile,
    scripted::{Act, Ask, Scripted},
    stage::{
        GET, INCREMENT, Stage, bare, call, call_with, is_ours, options, request, send, verdict, wait_for,
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
