//! Servers that drain: GOAWAY must never be felt.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use tokio::task::JoinSet;

use crate::{
    common::{
        Backend, Callers, DEADLINE, Method, NOWHERE, SOON, options,
        scripted::{Act, Ask, End, Scripted},
        until_bound_to,
    },
    stage::{Stage, get, increment, served, wait_for, watch},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_lives_on_after_goaway_and_new_calls_go_elsewhere_at_once() {
    let script = |ask: &crate::common::scripted::Ask| {
        if ask.path.ends_with("/Watch") { Act::Begin(1, End::Hang) } else { Act::Answer }
    };
    let (a, b) = (Scripted::start(script).await, Scripted::start(script).await);
    let Some(stage) = Stage::set(&[("a", a.port), ("b", b.port)]).await else { return };
    let stage = stage.ready(2).await;
    let (bound, other) = if stage.bound() == "a" { (&a, "b") } else { (&b, "a") };
    let mut stream = watch(stage.channel()).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("the first");
    bound.go_away();
    for _ in 0..50 {
        increment(stage.channel(), DEADLINE).await.unwrap();
    }
    until_bound_to(&stage.client, other).await;
    // A new connection to the first, beside the old one with the stream.
    stage.until_ready(2).await;
    let still = tokio::time::timeout(Duration::from_millis(300), stream.message()).await;
    assert!(still.is_err(), "the stream is cut: {still:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_backend_that_drains_ends_its_streams_itself() {
    let (mut a, b) = (Backend::start("a").await, Backend::start("b").await);
    let Some(stage) = Stage::set(&[("a", a.port)]).await else { return };
    let stage = stage.ready(1).await;
    crate::common::register(stage.consul.registry(), "counter", "b", b.port).await;
    stage.until_ready(2).await;
    let mut stream = watch(stage.channel()).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().expect("the first").instance, "a");
    let callers = Callers::start(&stage.client, 8, Method::Increment);
    a.terminate().await;
    let end = loop {
        if let Err(status) = stream.message().await {
            break status;
        }
    };
    assert!(end.message().contains("watch again"), "as the server said it: {end:?}");
    callers.go_on_for(100).await;
    let tally = callers.stop().await;
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

/// The only instance, and yet nobody feels that its connections are recycled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_recycled_every_100_ms_fail_nobody() {
    let server = Scripted::start(|_| Act::Answer.after(Duration::from_millis(3))).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let callers = Callers::start(&stage.client, 16, Method::Increment);
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        server.go_away();
    }
    let tally = callers.stop().await;
    println!(
        "{} calls, {} resent, slowest {:?}, {} connections",
        tally.calls,
        tally.resent,
        tally.slowest,
        server.connections()
    );
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
    assert!(server.connections() > 10, "none rests: {} connections", server.connections());
    assert!(tally.slowest < DEADLINE, "{:?}", tally.slowest);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lies_above_the_last_id_of_a_goaway_is_resent() {
    let first = AtomicU32::new(0);
    let server = Scripted::start(move |ask| match ask.number {
        1 => {
            first.store(ask.stream, Ordering::SeqCst);
            Act::Answer.after(Duration::from_millis(200))
        }
        2 => Act::GoAway(first.load(Ordering::SeqCst)),
        _ => Act::Answer,
    })
    .await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let below = tokio::spawn(increment(stage.channel(), DEADLINE));
    wait_for("the first has come", || server.asks().len() == 1).await;
    let above = increment(stage.channel(), DEADLINE).await.unwrap();
    assert_eq!(served(&above).1, 2, "resent once, though it is no safe call");
    assert_eq!(served(&below.await.unwrap().unwrap()).1, 1, "at the last id: it goes on");
    let asks = server.asks();
    assert_eq!(asks.len(), 3);
    assert_eq!(asks[2].connection, asks[1].connection + 1, "on a new connection");
    get(stage.channel(), DEADLINE).await.unwrap();
}

/// On a connection that takes no more calls no probe can be sent: that one fails says nothing of the instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_take_long_are_finished_by_a_server_that_drains() {
    let wait = Duration::from_millis(1500);
    let script = move |ask: &Ask| match (ask.number, ask.path.ends_with("/Watch")) {
        (_, true) => Act::Begin(1, End::Hang),
        (1 | 2, false) => Act::Answer.after(wait),
        _ => Act::Answer,
    };
    let server = Scripted::start(script).await;
    let options = options().suspect_after(Duration::from_millis(200));
    let Some(stage) = Stage::with(options, &[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let long = tokio::spawn(increment(stage.channel(), SOON));
    wait_for("it is out", || server.asks().len() == 1).await;
    server.go_away();
    let reply = long.await.unwrap().unwrap();
    assert_eq!(served(&reply), ("a".to_owned(), 1), "sent once, and finished");

    // A process that ends in order does not listen any more.
    let mut a = Backend::start_with("a", 0, NOWHERE, &["--work", "1500ms"]).await;
    let b = Backend::start("b").await;
    let Some(stage) = Stage::set(&[("a", a.port)]).await else { return };
    let stage = stage.ready(1).await;
    let mut calls = JoinSet::new();
    for _ in 0..4 {
        calls.spawn(increment(stage.channel(), SOON));
    }
    wait_for("all are out", || a.journal().len() >= 4).await;
    crate::common::register(stage.consul.registry(), "counter", "b", b.port).await;
    stage.until_ready(2).await;
    a.terminate().await;
    for reply in calls.join_all().await {
        assert_eq!(served(&reply.unwrap()), ("a".to_owned(), 1), "sent once, and finished");
    }
}

/// Neither a silent stream is cut for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_stream_outlives_a_goaway_by_more_than_the_patience_with_it() {
    let script =
        |ask: &Ask| if ask.path.ends_with("/Watch") { Act::Begin(1, End::Hang) } else { Act::Answer };
    let server = Scripted::start(script).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let mut stream = watch(stage.channel()).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("the first");
    server.go_away();
    let still = tokio::time::timeout(Duration::from_secs(7), stream.message()).await;
    assert!(still.is_err(), "the stream is cut: {still:?}");
    increment(stage.channel(), DEADLINE).await.unwrap();
}
