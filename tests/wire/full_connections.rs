//! A server that allows few streams at once, and streams that hold them.

use std::time::Duration;

use crate::{
    common::{
        DEADLINE, SOON, register,
        scripted::{Act, Ask, End, Scripted},
    },
    stage::{Stage, get, increment, served, timed, watch},
};

const SLOTS: u32 = 2;

fn script(ask: &Ask) -> Act {
    if ask.path.ends_with("/Watch") {
        Act::Begin(1, End::Hang)
    } else {
        Act::Answer.after(Duration::from_millis(50))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_beyond_the_servers_limit_wait_their_turn() {
    let server = Scripted::limited(SLOTS, script).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let calls = (0..40).map(|_| increment(stage.channel(), SOON));
    for reply in futures_util::future::join_all(calls).await {
        assert_eq!(served(&reply.unwrap()).1, 1);
    }
    assert_eq!(server.connections(), 1);
}

/// Nothing can be heard from it, and no probe gets through; and it lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_hold_all_slots_are_not_cut_by_a_call_that_gets_none() {
    for with_peer in [false, true] {
        let (server, peer) = (Scripted::limited(SLOTS, script).await, Scripted::good().await);
        let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
        let stage = stage.ready(1).await;
        if with_peer {
            register(stage.consul.registry(), "counter", "b", peer.port).await;
            stage.until_ready(2).await;
        }
        let mut streams = Vec::new();
        for _ in 0..SLOTS {
            let mut stream = watch(stage.channel()).await.unwrap().into_inner();
            stream.message().await.unwrap().expect("the first");
            streams.push(stream);
        }
        let (reply, took) = timed(get(stage.channel(), 3 * DEADLINE)).await;
        let (name, attempts) = served(&reply.unwrap());
        assert!(attempts == 2 && (with_peer || name == "a"), "resent: {name}, {attempts}");
        assert!(took < DEADLINE, "{took:?}");
        let (reply, took) = timed(increment(stage.channel(), DEADLINE)).await;
        assert_eq!(served(&reply.unwrap()).1, 1);
        assert!(took < Duration::from_millis(500), "the next calls do not wait: {took:?}");
        for stream in &mut streams {
            let silence = tokio::time::timeout(Duration::from_millis(500), stream.message()).await;
            assert!(silence.is_err(), "cut: {silence:?}");
        }
        assert_eq!(server.connections(), 2);
    }
}
