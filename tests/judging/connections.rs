//! The connection ends, or says that it will, while calls are out.

use std::time::Duration;

use h2::Reason;
use http_body_util::BodyExt;
use tokio::task::JoinSet;
use tonic_failover::client::{CallError, CallErrorKind};

use crate::{
    backend::Backend,
    proxy::Proxy,
    scripted::{Act, Ask, End, Scripted},
    stage::{
        Failure, GET, INCREMENT, SOON, Stage, bare, call, endpoint, is_ours, options, proof, request, send,
        verdict, wait_for,
    },
    table::{
        outcome::{Proof, Verdict},
        report::LossCause,
    },
};

/// Hangs on the first connection, and answers on all others.
fn hangs_at_first(ask: &Ask) -> Act {
    if ask.connection == 1 { Act::Hang } else { Act::Answer }
}

async fn until_asked(server: &Scripted, count: usize) {
    wait_for(|| format!("{count} requests have come"), || server.asks().len() >= count).await;
}

/// One stream at a time: the first call is out, one may be in h2's own queue, and
/// the rest wait in hyper's when the connection ends.
#[tokio::test]
async fn a_call_still_in_hypers_queue_was_never_sent() {
    let script = |ask: &Ask| if ask.path == GET { Act::Answer } else { hangs_at_first(ask) };
    // Whether a call is in the queue yet cannot be seen from outside: until one was.
    let seen = async {
        loop {
            let server = Scripted::limited(1, script).await;
            let channel = bare(server.port).await;
            // The limit is known once something has been answered.
            let answered = send(channel.clone(), request(server.port, GET)).await.unwrap();
            answered.into_body().collect().await.unwrap();
            let mut calls = JoinSet::new();
            for _ in 0..6 {
                calls.spawn(send(channel.clone(), request(server.port, INCREMENT)));
            }
            until_asked(&server, 2).await;
            server.cut();
            let mut never_sent = 0;
            let results = calls.join_all().await;
            for error in results.into_iter().filter_map(Result::err) {
                never_sent += usize::from(verdict("queued", error).proof == Proof::NeverSent);
            }
            assert_eq!(server.asks().iter().filter(|ask| ask.connection == 1).count(), 2, "one was out");
            if never_sent > 0 {
                return;
            }
        }
    };
    tokio::time::timeout(SOON, seen).await.expect("one was in hyper's queue");
}

#[tokio::test]
async fn a_queued_call_is_resent_unseen_when_its_connection_dies() {
    let seen = async {
        loop {
            let server = Scripted::limited(1, hangs_at_first).await;
            let stage = Stage::of(server.port).await;
            let mut calls = JoinSet::new();
            for _ in 0..6 {
                calls.spawn(call(stage.client.channel(), INCREMENT));
            }
            until_asked(&server, 1).await;
            server.cut();
            let results = calls.join_all().await;
            let (answered, failed): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
            for status in failed.iter().filter_map(|result| result.as_ref().err()) {
                is_ours("cut", status, &CallErrorKind::ConnectionLost, 1);
            }
            assert!((1..=2).contains(&failed.len()), "the one that was out, and h2's: {failed:?}");
            assert_eq!(server.asks().len(), 1 + answered.len(), "none is sent twice");
            if answered.iter().any(|result| matches!(result, Ok(2..))) {
                return;
            }
        }
    };
    tokio::time::timeout(SOON, seen).await.expect("one was queued and resent");
}

/// Whatever the reason: above the last id nothing has been processed (RFC 9113, 6.8).
#[tokio::test]
async fn a_stream_above_the_last_id_of_a_goaway_was_refused() {
    for reason in [Reason::NO_ERROR, Reason::ENHANCE_YOUR_CALM, Reason::INTERNAL_ERROR] {
        let what = format!("GOAWAY {reason:?} above");
        let above = move |ask: &Ask| match ask.connection {
            1 => Act::GoAwayFor(ask.stream.saturating_sub(2), reason),
            _ => Act::Answer,
        };
        let server = Scripted::start(above).await;
        assert_eq!(proof(&what, bare(server.port).await, server.port).await, Proof::Refused, "{what}");

        let server = Scripted::start(above).await;
        let stage = Stage::of(server.port).await;
        assert_eq!(stage.call(INCREMENT).await.unwrap(), 2, "{what}: resent, though it is no safe call");
        let asks = server.asks();
        assert_eq!((asks.len(), asks[1].connection), (2, 2), "{what}");
        assert_eq!(asks[1].header("grpc-previous-rpc-attempts"), None, "{what}: it never ran before");
    }
}

/// As a server sends it that drains: it answers what it has.
#[tokio::test]
async fn a_stream_covered_by_a_goaway_goes_on_to_its_answer() {
    let slow = |_: &Ask| Act::Answer.after(Duration::from_millis(300));
    let server = Scripted::start(slow).await;
    let leaves = async {
        until_asked(&server, 1).await;
        server.go_away();
    };
    let sent = send(bare(server.port).await, request(server.port, INCREMENT));
    let (answered, ()) = tokio::join!(sent, leaves);
    assert_eq!(answered.unwrap().status(), http::StatusCode::OK);

    let server = Scripted::start(slow).await;
    let stage = Stage::of(server.port).await;
    let leaves = async {
        until_asked(&server, 1).await;
        server.go_away();
    };
    let (attempts, ()) = tokio::join!(stage.call(INCREMENT), leaves);
    assert_eq!((attempts.unwrap(), server.asks().len()), (1, 1), "neither failed nor resent");
    assert!(stage.failures.lock().is_empty(), "nothing has failed");
    assert_eq!(stage.call(INCREMENT).await.unwrap(), 1, "the next one is sent on another connection");
    assert_eq!(server.asks()[1].connection, 2);
}

#[tokio::test]
async fn a_stream_covered_by_a_goaway_may_have_run_when_the_connection_then_ends() {
    for reason in [Reason::NO_ERROR, Reason::ENHANCE_YOUR_CALM, Reason::INTERNAL_ERROR] {
        let what = format!("GOAWAY {reason:?} covering");
        let covering = move |ask: &Ask| Act::GoAwayFor(ask.stream, reason);
        let server = Scripted::start(covering).await;
        let cut = async {
            until_asked(&server, 1).await;
            server.cut();
        };
        let (judged, ()) = tokio::join!(proof(&what, bare(server.port).await, server.port), cut);
        assert_eq!(judged, Proof::MayHaveRun, "{what}");

        let server = Scripted::start(covering).await;
        let stage = Stage::of(server.port).await;
        let cut = async {
            until_asked(&server, 1).await;
            server.cut();
        };
        tokio::join!(stage.fails_once(&what, INCREMENT, CallErrorKind::ConnectionLost), cut);
        assert_eq!(server.asks().len(), 1, "{what}: not resent");
    }
}

/// As a router or a kernel resets it, and as a process closes it that ends.
#[tokio::test]
async fn a_connection_that_ends_before_the_headers_proves_nothing() {
    type Ends = fn(&Scripted);
    let ways: [(&str, Ends); 2] = [("TCP RST", Scripted::reset), ("TCP FIN", Scripted::cut)];
    for (what, ends) in ways {
        let server = Scripted::start(hangs_at_first).await;
        let end = async {
            until_asked(&server, 1).await;
            ends(&server);
        };
        let sent = send(bare(server.port).await, request(server.port, INCREMENT));
        let (result, ()) = tokio::join!(sent, end);
        let expected =
            Verdict { proof: Proof::MayHaveRun, lost: Some(LossCause::Closed), timed_out: false, own: false };
        assert_eq!(verdict(what, result.unwrap_err()), expected, "{what}");

        let server = Scripted::start(hangs_at_first).await;
        let stage = Stage::of(server.port).await;
        let end = async {
            until_asked(&server, 1).await;
            ends(&server);
        };
        tokio::join!(stage.fails_once(what, INCREMENT, CallErrorKind::ConnectionLost), end);
        assert_eq!(server.asks().len(), 1, "{what}: not resent");

        let server = Scripted::start(hangs_at_first).await;
        let stage = Stage::of(server.port).await;
        let end = async {
            until_asked(&server, 1).await;
            ends(&server);
        };
        let (answered, ()) = tokio::join!(stage.call(GET), end);
        assert_eq!(answered.unwrap(), 2, "{what}: a safe one is resent");
        assert_eq!(server.asks()[1].header("grpc-previous-rpc-attempts"), Some("1"), "{what}");
        assert_eq!(*stage.failures.lock(), [Failure { attempt: 1, resent: true }], "{what}");
    }
}

/// After the headers, and between the last message and the trailers.
#[tokio::test]
async fn a_connection_that_ends_in_the_response_proves_nothing_and_cuts_it() {
    for messages in [0, 1] {
        let what = format!("reset after headers and {messages} messages");
        let begins = move |ask: &Ask| match ask.connection {
            1 => Act::Begin(messages, End::Hang),
            _ => Act::Answer,
        };
        let server = Scripted::start(begins).await;
        let response = send(bare(server.port).await, request(server.port, INCREMENT)).await.unwrap();
        let mut body = response.into_body();
        for _ in 0..messages {
            body.frame().await.unwrap().unwrap();
        }
        server.reset();
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(verdict(&what, error).lost, Some(LossCause::Closed), "{what}");

        let server = Scripted::start(begins).await;
        let stage = Stage::of(server.port).await;
        let mut stream = stage.watch().await.unwrap();
        for _ in 0..messages {
            stream.message().await.unwrap().expect("a message");
        }
        server.reset();
        let status = stream.message().await.unwrap_err();
        is_ours(&what, &status, &CallErrorKind::ResponseCut, 1);
        assert_eq!(server.asks().len(), 1, "{what}: never resent");

        // How far a single answer has come cannot be seen from outside: it may be either.
        let server = Scripted::start(begins).await;
        let stage = Stage::of(server.port).await;
        let reset = async {
            until_asked(&server, 1).await;
            server.reset();
        };
        let (result, ()) = tokio::join!(stage.call(INCREMENT), reset);
        let status = result.unwrap_err();
        let error = CallError::of(&status).expect("ours");
        assert!(error.may_have_run() && error.attempts() == 1, "{what}: {status:?}");
        assert_eq!(server.asks().len(), 1, "{what}: never resent");

        let server = Scripted::start(begins).await;
        let stage = Stage::of(server.port).await;
        let reset = async {
            until_asked(&server, 1).await;
            server.reset();
        };
        let (answered, ()) = tokio::join!(stage.call(GET), reset);
        assert_eq!(answered.unwrap(), 2, "{what}: nobody has seen a part of a safe call's answer");
    }
}

#[tokio::test]
async fn calls_out_when_their_server_is_killed_may_have_run() {
    const CALLS: usize = 8;
    let mut backend = Backend::start("60s").await;
    let channel = bare(backend.port).await;
    let mut calls = JoinSet::new();
    for _ in 0..CALLS {
        calls.spawn(send(channel.clone(), request(backend.port, INCREMENT)));
    }
    wait_for(|| "all are with their handlers", || backend.received() == CALLS).await;
    backend.kill().await;
    for result in calls.join_all().await {
        assert_eq!(verdict("kill -9", result.unwrap_err()).proof, Proof::MayHaveRun);
    }
    // Nobody is there any more: what comes now finds that out before it is sent.
    assert_eq!(proof("after it", channel, backend.port).await, Proof::NeverSent);

    let mut backend = Backend::start("60s").await;
    let stage = Stage::of(backend.port).await;
    let mut calls = JoinSet::new();
    for _ in 0..CALLS {
        calls.spawn(call(stage.client.channel(), INCREMENT));
    }
    wait_for(|| "all are with their handlers", || backend.received() == CALLS).await;
    backend.kill().await;
    for result in calls.join_all().await {
        is_ours("kill -9", &result.unwrap_err(), &CallErrorKind::ConnectionLost, 1);
    }
    assert_eq!(backend.received(), CALLS);
}

/// The server goes on without hearing of it: it may well run what it was sent.
#[tokio::test]
async fn calls_out_when_a_keepalive_ping_is_not_answered_may_have_run() {
    let limit = Duration::from_millis(500);
    let server = Scripted::start(|_| Act::Hang).await;
    let proxy = Proxy::before(server.port).await;
    let patient = endpoint(proxy.port).http2_keep_alive_interval(limit).keep_alive_timeout(limit);
    let channel = patient.connect().await.unwrap();
    let stop = async {
        until_asked(&server, 1).await;
        proxy.stop();
    };
    let (judged, ()) = tokio::join!(proof("keepalive", channel, proxy.port), stop);
    assert_eq!(judged, Proof::MayHaveRun);

    let server = Scripted::start(|_| Act::Hang).await;
    let proxy = Proxy::before(server.port).await;
    let stage = Stage::ready(options().keep_alive(limit, limit), &[proxy.port]).await;
    let stop = async {
        until_asked(&server, 1).await;
        proxy.stop();
    };
    tokio::join!(stage.fails_once("keepalive", INCREMENT, CallErrorKind::ConnectionLost), stop);
    assert_eq!(server.asks().len(), 1, "not resent");
}

/// Nothing is reported at all: that it answers no probe is what tells.
#[tokio::test]
async fn calls_out_when_their_instance_falls_silent_may_have_run() {
    let limit = Duration::from_millis(100);
    for path in [INCREMENT, GET] {
        let server = Scripted::start(hangs_at_first).await;
        let quick = options().suspect_after(limit).probe_timeout(limit).ejection(limit, limit);
        let stage = Stage::ready(quick, &[server.port]).await;
        server.health(Act::Hang);
        let out = tokio::spawn(call(stage.client.channel(), path));
        stage.until("it is given up", |c| c.status().datacenters[0].ready == 0).await;
        server.health(Act::Answer);
        match out.await.unwrap() {
            Ok(attempts) => assert_eq!((path, attempts), (GET, 2), "a safe one is resent"),
            Err(status) => {
                assert_eq!(path, INCREMENT, "{status:?}");
                is_ours(path, &status, &CallErrorKind::Unresponsive, 1);
                assert!(CallError::of(&status).unwrap().may_have_run());
            }
        }
        assert_eq!(server.asks().len(), if path == GET { 2 } else { 1 }, "{path}");
    }
}
