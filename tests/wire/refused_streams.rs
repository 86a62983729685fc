//! RST_STREAM before any header: refused, and other reasons.

use std::time::Duration;

use h2::Reason;
use tonic_failover::client::{CallError, CallErrorKind};

use crate::{
    common::{
        DEADLINE,
        scripted::{Act, Scripted},
    },
    stage::{Stage, get, increment, kind, served, timed},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_refuses_for_ever_is_asked_a_few_times_and_no_more() {
    let server = Scripted::start(|_| Act::Reset(Reason::REFUSED_STREAM)).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;

    let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::Refused);
    assert!(!CallError::of(&status).unwrap().may_have_run());
    assert!(status.message().contains("refused unprocessed"), "{}", status.message());
    assert_eq!(server.asks().len(), 2, "once, and once more");

    let (result, took) = timed(get(stage.channel(), DEADLINE)).await;
    assert_eq!(kind(&result.unwrap_err()), CallErrorKind::Refused);
    assert_eq!(server.asks().len(), 2 + 5, "a safe call up to the cap");
    assert!(took > Duration::from_millis(50), "with pauses: {took:?}");
    assert_eq!(server.connections(), 1, "the connection is not to blame");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_once_and_then_served_is_not_seen_by_the_caller() {
    let server = Scripted::start(|ask| match ask.number {
        1 => Act::Reset(Reason::REFUSED_STREAM),
        _ => Act::Answer,
    })
    .await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let reply = increment(stage.channel(), DEADLINE).await.unwrap();
    assert_eq!(served(&reply), ("a".to_owned(), 2));
    assert_eq!(server.asks()[1].header("grpc-previous-rpc-attempts"), None, "it never ran before");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_call_may_have_run_and_only_a_safe_one_is_resent_elsewhere() {
    for reason in [Reason::INTERNAL_ERROR, Reason::CANCEL, Reason::ENHANCE_YOUR_CALM, Reason::NO_ERROR] {
        let script = move |_: &_| Act::Reset(reason);
        let (bad, good) = (Scripted::start(script).await, Scripted::good().await);
        // Bound to the bad one, for it alone is there at first.
        let Some(stage) = Stage::set(&[("bad", bad.port)]).await else { return };
        let stage = stage.ready(1).await;
        crate::common::register(stage.consul.registry(), "counter", "good", good.port).await;
        stage.until_ready(2).await;

        let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
        assert_eq!(kind(&status), CallErrorKind::StreamReset, "{reason:?}");
        assert!(CallError::of(&status).unwrap().may_have_run());
        assert_eq!((bad.asks().len(), good.asks().len()), (1, 0), "{reason:?}: not resent");

        let reply = get(stage.channel(), DEADLINE).await.unwrap();
        assert_eq!(served(&reply), ("good".to_owned(), 2), "{reason:?}");
        assert_eq!(good.asks()[0].header("grpc-previous-rpc-attempts"), Some("1"), "{reason:?}");
    }
}
