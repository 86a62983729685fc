//! What the hook sees and the typed error says, attempt by attempt.

use std::time::Duration;

use tonic::Code;
use tonic_failover::client::{CallError, CallErrorKind};

use crate::{
    common::{
        DEADLINE, SOON, options, register,
        scripted::{Act, Scripted},
    },
    stage::{Failure, Stage, get, increment, kind, observed, served, wait_for},
};

fn failure(method: &str, instance: Option<&str>, attempt: u32, code: Code, resent: bool) -> Failure {
    Failure { method: method.to_owned(), instance: instance.map(str::to_owned), attempt, code, resent }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hook_sees_a_lost_connection_and_that_the_call_goes_on() {
    let (a, b) = (Scripted::start(|_| Act::Close).await, Scripted::good().await);
    let (options, failures) = observed(options());
    let Some(stage) = Stage::with(options, &[("a", a.port)]).await else { return };
    let stage = stage.ready(1).await;
    register(stage.consul.registry(), "counter", "b", b.port).await;
    stage.until_ready(2).await;
    let reply = get(stage.channel(), DEADLINE).await.unwrap();
    assert_eq!(served(&reply), ("b".to_owned(), 2));
    assert_eq!(*failures.lock(), [failure("Get", Some("a"), 1, Code::Unavailable, true)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hook_sees_what_its_caller_sees_last() {
    let server = Scripted::start(|ask| match ask.number {
        1 => Act::Close,
        2 => Act::Hang,
        _ => Act::Status(9, "no", vec![]),
    })
    .await;
    let (options, failures) = observed(options());
    let Some(stage) = Stage::with(options, &[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let mut expected = Vec::new();

    let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::ConnectionLost);
    assert!(std::error::Error::source(CallError::of(&status).unwrap().status()).is_some(), "the cause");
    expected.push(failure("Increment", Some("a"), 1, Code::Unavailable, false));
    wait_for("connected again", || server.connections() == 2).await;

    let status = increment(stage.channel(), Duration::from_millis(300)).await.unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::DeadlineExceeded);
    expected.push(failure("Increment", Some("a"), 1, Code::DeadlineExceeded, false));

    let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    expected.push(failure("Increment", Some("a"), 1, Code::FailedPrecondition, false));
    assert_eq!(*failures.lock(), expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_never_got_anywhere_is_attempt_0_of_nobody() {
    let (options, failures) = observed(options().fail_fast_after(Duration::from_millis(200)));
    let Some(stage) = Stage::with(options, &[]).await else { return };
    let status = get(stage.channel(), SOON).await.unwrap_err();
    let error = CallError::of(&status).unwrap();
    assert!(matches!(error.kind(), CallErrorKind::NothingUsable { .. }));
    assert!(!error.may_have_run());
    assert_eq!((error.attempts(), error.instance()), (0, None));
    assert_eq!(*failures.lock(), [failure("Get", None, 0, Code::Unavailable, false)]);
}
