//! A thousand calls and more at the same moment.

use std::time::Duration;

use tokio::task::JoinSet;
use tonic_failover::client::CallErrorKind;

use crate::{
    common::{
        Backend, SOON, builder, consul, options,
        proxy::Proxy,
        register,
        scripted::{Act, Scripted},
    },
    stage::{Stage, get, increment, kind, served, wait_for},
};

const MANY: usize = 1000;

/// The safe ones are all answered; of the others each fails alone, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_calls_that_fail_at_once_make_one_look_up_and_one_connection() {
    for safe in [true, false] {
        let server = Scripted::start(|ask| if ask.connection == 1 { Act::Hang } else { Act::Answer }).await;
        let Some(consul) = consul().await else { return };
        let proxy = Proxy::before(consul.http_addr().port()).await;
        register(consul.registry(), "counter", "a", server.port).await;
        // The server is to hang, and not to be found hanging.
        let options = options().suspect_after(SOON);
        let client = builder(&proxy.url()).service(options).build().unwrap().grpc_client("counter").unwrap();
        client.ready().await.unwrap();
        let mut calls = JoinSet::new();
        for _ in 0..MANY {
            let channel = client.channel();
            calls.spawn(async move {
                if safe { get(channel, SOON).await } else { increment(channel, SOON).await }
            });
        }
        wait_for("all have come", || server.asks().len() == MANY).await;
        let (before, generation) = (proxy.look_ups(), client.binding().generation());
        server.cut();
        while let Some(call) = calls.join_next().await {
            match call.unwrap() {
                Ok(reply) => assert!(safe && served(&reply).1 == 2),
                Err(status) => {
                    assert!(!safe, "{status:?}");
                    assert_eq!(kind(&status), CallErrorKind::ConnectionLost);
                }
            }
        }
        get(client.channel(), SOON).await.unwrap();
        wait_for("the look-up", || proxy.look_ups() > before).await;
        // Late reports of the old generation, from those who use the channel themselves.
        for _ in 0..MANY {
            client.report_failure(generation);
        }
        tokio::time::sleep(Duration::from_millis(700)).await;
        assert_eq!(proxy.look_ups(), before + 1, "{:?}", proxy.requests());
        assert_eq!(server.connections(), 2);
        assert_eq!(client.binding().generation(), generation + 1);
        assert_eq!(server.asks().len(), if safe { 2 * MANY } else { MANY } + 1);
    }
}

/// h2 servers take a flood of small frames for an attack; ours are not so many.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_5000_calls_on_a_fresh_channel_fails_none() {
    let backend = Backend::start("a").await;
    let Some(stage) = Stage::set(&[("a", backend.port)]).await else { return };
    let mut calls = JoinSet::new();
    for n in 0..5000 {
        let channel = stage.channel();
        calls.spawn(async move {
            let timeout = 3 * SOON;
            if n % 2 == 0 { get(channel, timeout).await } else { increment(channel, timeout).await }
        });
    }
    let mut resent = 0;
    while let Some(call) = calls.join_next().await {
        resent += u32::from(served(&call.unwrap().unwrap()).1 > 1);
    }
    assert_eq!(resent, 0, "none needed a second attempt");
    assert_eq!(stage.client.binding().generation(), 1, "all on one connection");
}
