//! Instances that fall silent and keep their sockets: a stopped process, a
//! network that forwards nothing.

use std::time::Duration;

use rustix::process::Signal;
use tokio::task::JoinSet;
use tonic_failover::client::{CallError, CallErrorKind};

use crate::{
    common::{
        Backend, Callers, DEADLINE, Method, SOON, deregister, get as get_served, options,
        proxy::Proxy,
        register,
        scripted::{Act, End, Scripted},
        until, until_bound_to,
    },
    stage::{Stage, get, increment, kind, served, timed, wait_for},
};

/// `a`, bound, behind a proxy; `b` beside it.
async fn behind_a_proxy() -> Option<(Stage, Backend, Proxy, Backend)> {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let proxy = Proxy::before(a.port).await;
    let stage = Stage::set(&[("a", proxy.port)]).await?.ready(1).await;
    register(stage.consul.registry(), "counter", "b", b.port).await;
    stage.until_ready(2).await;
    Some((stage, a, proxy, b))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_was_stopped_before_is_never_published() {
    let (frozen, good) = (Backend::start("frozen").await, Scripted::good().await);
    frozen.signal(Signal::STOP);
    let Some(stage) = Stage::set(&[("frozen", frozen.port), ("good", good.port)]).await else { return };
    assert_eq!(get_served(stage.channel()).await.unwrap().instance.name, "good");
    until(&stage.client, "the frozen one was tried", |c| c.status().datacenters[0].ejected == 1).await;
    assert_eq!(stage.client.binding().instances().count(), 1);
    assert_eq!(stage.client.binding().generation(), 1);
    frozen.signal(Signal::CONT);
    stage.until_ready(2).await;
    assert_eq!(stage.bound(), "good", "what works is not left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn safe_calls_survive_a_network_that_stops_forwarding_under_them() {
    let Some((stage, _a, proxy, _b)) = behind_a_proxy().await else { return };
    let callers = Callers::start(&stage.client, 32, Method::Get);
    callers.go_on_for(200).await;
    proxy.stop();
    until_bound_to(&stage.client, "b").await;
    callers.go_on_for(200).await;
    let tally = callers.stop().await;
    println!("{} calls, {} resent, slowest {:?}", tally.calls, tally.resent, tally.slowest);
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
    wait_for("no connection to the frozen one", || proxy.open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_calls_are_told_that_it_fell_silent_long_before_their_deadline() {
    let Some((stage, _a, proxy, _b)) = behind_a_proxy().await else { return };
    proxy.stop();
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        calls.spawn(timed(increment(stage.channel(), SOON)));
    }
    while let Some(call) = calls.join_next().await {
        let (result, took) = call.unwrap();
        let status = result.unwrap_err();
        assert_eq!(kind(&status), CallErrorKind::Unresponsive);
        assert!(CallError::of(&status).unwrap().may_have_run());
        assert!(took < Duration::from_secs(3), "{took:?}");
    }
    assert_eq!(stage.bound(), "b");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_call_after_an_idle_time_survives_a_dead_network() {
    let Some((stage, _a, proxy, _b)) = behind_a_proxy().await else { return };
    proxy.stop();
    let (reply, took) = timed(get(stage.channel(), SOON)).await;
    assert_eq!(served(&reply.unwrap()), ("b".to_owned(), 2));
    assert!(took < Duration::from_secs(3), "{took:?}");
    let (reply, took) = timed(get(stage.channel(), DEADLINE)).await;
    assert_eq!(served(&reply.unwrap()), ("b".to_owned(), 1));
    assert!(took < Duration::from_millis(500), "the next calls do not wait: {took:?}");
}

/// Its peer is frozen as well: what is spare is no better for being unused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_that_died_unnoticed_costs_a_safe_call_time_and_no_more() {
    let Some((stage, _a, proxy, b)) = behind_a_proxy().await else { return };
    let c = Backend::start("c").await;
    register(stage.consul.registry(), "counter", "c", c.port).await;
    until(&stage.client, "three are known", |c| c.status().datacenters[0].known == 3).await;
    proxy.stop();
    b.signal(Signal::STOP);
    let (reply, took) = timed(get(stage.channel(), SOON)).await;
    let (name, attempts) = served(&reply.unwrap());
    println!("{name} after {attempts} attempts in {took:?}");
    assert_eq!(name, "c");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alone_it_fails_calls_in_time_and_serves_again_when_it_thaws() {
    let a = Backend::start("a").await;
    let proxy = Proxy::before(a.port).await;
    let fail_fast = Duration::from_millis(1000);
    let Some(stage) = Stage::with(options().fail_fast_after(fail_fast), &[("a", proxy.port)]).await else {
        return;
    };
    let stage = stage.ready(1).await;
    proxy.stop();
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        calls.spawn(timed(get(stage.channel(), DEADLINE)));
        calls.spawn(timed(get(stage.channel(), Duration::from_secs(8))));
    }
    while let Some(call) = calls.join_next().await {
        let (result, took) = call.unwrap();
        let status = result.unwrap_err();
        let kind = kind(&status);
        assert!(
            matches!(kind, CallErrorKind::NothingUsable { .. } | CallErrorKind::DeadlineExceeded),
            "{kind:?}"
        );
        assert!(took < Duration::from_secs(6), "{took:?}");
        assert!(CallError::of(&status).unwrap().may_have_run(), "the first attempt may have run");
    }
    proxy.go_on();
    until(&stage.client, "bound again", |c| c.status().is_ready()).await;
    get(stage.channel(), DEADLINE).await.unwrap();
}

/// Consul notices the death while calls are out: they must not wait for an
/// answer of an instance that nobody asks after any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_a_frozen_instance_that_leaves_the_registry_are_not_forgotten() {
    let Some((stage, _a, proxy, _b)) = behind_a_proxy().await else { return };
    proxy.stop();
    let call = tokio::spawn(timed(get(stage.channel(), SOON)));
    let unsafe_call = tokio::spawn(timed(increment(stage.channel(), SOON)));
    tokio::time::sleep(Duration::from_millis(100)).await;
    deregister(stage.consul.registry(), "a").await;
    until_bound_to(&stage.client, "b").await;
    let (reply, took) = call.await.unwrap();
    assert_eq!(served(&reply.unwrap()), ("b".to_owned(), 2));
    assert!(took < Duration::from_secs(4), "{took:?}");
    let (result, took) = unsafe_call.await.unwrap();
    assert_eq!(kind(&result.unwrap_err()), CallErrorKind::Unresponsive);
    assert!(took < Duration::from_secs(4), "{took:?}");
    wait_for("no connection to the frozen one", || proxy.open() == 0).await;
}

/// What it answers to others shows that it lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_takes_long_makes_nobody_suspect_while_others_are_answered() {
    for (others, suspected) in [(true, false), (false, true)] {
        let server = Scripted::start(|ask| match ask.number {
            1 => Act::Answer.after(Duration::from_millis(2500)),
            _ => Act::Answer,
        })
        .await;
        let options = options().suspect_after(Duration::from_millis(800));
        let Some(stage) = Stage::with(options, &[("a", server.port)]).await else { return };
        let stage = stage.ready(1).await;
        let checks = server.checks();
        let long = tokio::spawn(increment(stage.channel(), SOON));
        wait_for("it is out", || server.asks().len() == 1).await;
        while !long.is_finished() {
            if others {
                get(stage.channel(), SOON).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(served(&long.await.unwrap().unwrap()).1, 1);
        assert_eq!(server.checks() > checks, suspected, "others: {others}");
    }
}

/// Its probe may wait behind thousands of calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_answers_others_and_not_its_probe_is_busy_and_not_given_up() {
    let server = Scripted::start(|ask| match ask.number {
        1 => Act::Answer.after(Duration::from_secs(3)),
        _ => Act::Answer,
    })
    .await;
    let quick = Duration::from_millis(200);
    let options = options().suspect_after(quick).probe_timeout(quick);
    let Some(stage) = Stage::with(options, &[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let checks = server.checks();
    server.health(Act::Hang);
    let long = tokio::spawn(increment(stage.channel(), SOON));
    wait_for("it is probed", || server.checks() > checks).await;
    while !long.is_finished() {
        get(stage.channel(), SOON).await.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(served(&long.await.unwrap().unwrap()), ("a".to_owned(), 1));
}

/// It lives, so what it has it keeps; but it is the wrong one to ask.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspect_that_says_it_is_not_serving_is_left_for_another_and_finishes_its_calls() {
    let slow = Scripted::start(|_| Act::Answer.after(Duration::from_millis(2500))).await;
    let good = Scripted::good().await;
    let options = options().suspect_after(Duration::from_millis(200)).ejection(SOON, SOON);
    let Some(stage) = Stage::with(options, &[("slow", slow.port)]).await else { return };
    let stage = stage.ready(1).await;
    register(stage.consul.registry(), "counter", "good", good.port).await;
    stage.until_ready(2).await;
    assert_eq!(stage.bound(), "slow");
    slow.health(Act::Begin(0, End::NotServing));
    let long = tokio::spawn(increment(stage.channel(), SOON));
    until_bound_to(&stage.client, "good").await;
    assert!(!long.is_finished(), "it is over");
    assert_eq!(served(&long.await.unwrap().unwrap()), ("slow".to_owned(), 1));
}
