//! Responses that end before their end.

use std::time::Duration;

use h2::Reason;
use tonic::Code;
use tonic_failover::{
    client::{CallError, CallErrorKind},
    demo::pb::{IncrementRequest, counter_client::CounterClient},
};

use crate::{
    common::{
        Backend, DEADLINE, SOON, deregister, options,
        proxy::Proxy,
        register,
        scripted::{Act, End, Scripted},
        until_bound_to,
    },
    stage::{Stage, get, increment, kind, timed, wait_for, watch},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_whose_connection_is_cut_is_reported_and_never_resent() {
    let script = |_: &_| Act::Begin(2, End::Hang);
    let (a, b) = (Scripted::start(script).await, Scripted::start(script).await);
    let Some(stage) = Stage::set(&[("a", a.port), ("b", b.port)]).await else { return };
    let stage = stage.ready(2).await;
    let mut stream = watch(stage.channel()).await.unwrap().into_inner();
    for _ in 0..2 {
        stream.message().await.unwrap().expect("a message");
    }
    a.cut();
    b.cut();
    let status = stream.message().await.unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::ResponseCut);
    assert!(CallError::of(&status).unwrap().may_have_run());
    stage.until_ready(2).await;
    assert_eq!(a.asks().len() + b.asks().len(), 1, "never resent");
}

/// Whatever ends it. A single message to a safe call reaches nobody before all of it
/// is there: that call alone is sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_has_begun_is_never_resent_and_says_that_it_was_cut() {
    let ends = [
        End::Reset(Reason::INTERNAL_ERROR),
        End::Reset(Reason::CANCEL),
        End::Reset(Reason::NO_ERROR),
        End::Reset(Reason::REFUSED_STREAM),
        End::NoTrailers,
    ];
    for end in ends {
        for messages in [0, 1] {
            let act = Act::Begin(messages, end.clone());
            let server = Scripted::start(move |_| act.clone()).await;
            let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
            let stage = stage.ready(1).await;
            let what = format!("{messages} messages, then {end:?}");

            let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
            assert_eq!(kind(&status), CallErrorKind::ResponseCut, "{what}: {status:?}");
            assert_eq!(server.asks().len(), 1, "{what}: resent");

            let mut stream = watch(stage.channel()).await.unwrap().into_inner();
            for _ in 0..messages {
                stream.message().await.unwrap().expect("a message");
            }
            let status = stream.message().await.unwrap_err();
            assert_eq!(kind(&status), CallErrorKind::ResponseCut, "{what}: {status:?}");
            assert_eq!(server.asks().len(), 2, "{what}: resent");

            let status = get(stage.channel(), DEADLINE).await.unwrap_err();
            assert_eq!(kind(&status), CallErrorKind::ResponseCut, "{what}: {status:?}");
            assert_eq!(server.asks().len(), 2 + 5, "{what}: up to the cap");
            assert_eq!(server.connections(), 1, "{what}: one stream's end is not the connection's");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_on_an_instance_that_is_deregistered_goes_on() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let Some(stage) = Stage::set(&[("a", a.port)]).await else { return };
    let stage = stage.ready(1).await;
    let mut stream = watch(stage.channel()).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().value, 0);
    register(stage.consul.registry(), "counter", "b", b.port).await;
    stage.until_ready(2).await;
    deregister(stage.consul.registry(), "a").await;
    until_bound_to(&stage.client, "b").await;
    stage.until_ready(1).await;
    let mut direct = CounterClient::connect(format!("http://127.0.0.1:{}", a.port)).await.unwrap();
    for n in 1..=3 {
        direct.increment(IncrementRequest { by: 1, ..Default::default() }).await.unwrap();
        let reply = tokio::time::timeout(SOON, stream.message()).await.expect("it goes on").unwrap().unwrap();
        assert_eq!((reply.value, reply.instance.as_str()), (n, "a"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_on_a_frozen_instance_ends_when_that_is_given_up() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let proxy = Proxy::before(a.port).await;
    let Some(stage) = Stage::set(&[("a", proxy.port)]).await else { return };
    let stage = stage.ready(1).await;
    register(stage.consul.registry(), "counter", "b", b.port).await;
    stage.until_ready(2).await;
    let mut stream = watch(stage.channel()).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("the first");
    proxy.stop();
    get(stage.channel(), DEADLINE).await.unwrap();
    let end = tokio::time::timeout(SOON, stream.message()).await.expect("it ends").unwrap_err();
    assert_eq!(kind(&end), CallErrorKind::ResponseCut);
    assert_eq!(end.code(), Code::Unavailable);
    wait_for("no connection to the frozen one", || proxy.open() == 0).await;
}

/// Nobody else calls: the stream itself must find out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lonely_stream_on_a_frozen_instance_ends_too() {
    let a = Backend::start("a").await;
    let proxy = Proxy::before(a.port).await;
    let options = options().suspect_after(Duration::from_millis(300));
    let Some(stage) = Stage::with(options, &[("a", proxy.port)]).await else { return };
    let stage = stage.ready(1).await;
    let mut stream = watch(stage.channel()).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("the first");
    // A silent stream on an instance that lives is left alone.
    let silence = tokio::time::timeout(Duration::from_secs(7), stream.message()).await;
    assert!(silence.is_err(), "{silence:?}");
    proxy.stop();
    let (end, took) = timed(tokio::time::timeout(SOON, stream.message())).await;
    let end = end.expect("it ends").unwrap_err();
    assert_eq!(kind(&end), CallErrorKind::ResponseCut);
    println!("found out after {took:?}");
}
