//! For a while there is no primary.

use std::{error::Error, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tonic::{Code, Status};
use tonic_failover::{
    NotPrimary,
    client::{CallError, CallErrorKind},
};

use crate::{
    common::{Method, SOON},
    node::{Node, runs},
    stage::{Calls, Stage, increment, kind, options},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_calls_wait_for_a_primary_and_ask_the_standbys_seldom() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options(), vec![a.instance(), b.instance()]).await;
    let began = Instant::now();
    let mut calls = JoinSet::new();
    for n in 0..1000 {
        calls.spawn(increment(stage.channel(), n.to_string(), 3 * SOON));
    }
    sleep(Duration::from_millis(1500)).await;
    // A busy machine takes a while for so many.
    while a.asked().min(b.asked()) < 10 {
        sleep(Duration::from_millis(5)).await;
        assert!(began.elapsed() < SOON, "they are tried: {} and {} times", a.asked(), b.asked());
    }
    let (asked, waited) = ([a.asked(), b.asked()], began.elapsed());
    b.leads(1);
    while let Some(reply) = calls.join_next().await {
        let reply = reply.unwrap().unwrap().into_inner();
        assert_eq!((reply.instance, reply.value), ("b".to_owned(), 1));
    }
    println!("asked {asked:?} times in {waited:?}");
    // At most once in 50 ms each.
    let most = usize::try_from(waited.as_millis() / 50).unwrap() + 1;
    for (node, asked) in [&a, &b].into_iter().zip(asked) {
        assert!(asked <= most, "{} was asked {asked} times in {waited:?}", node.name);
    }
    assert!(a.asked() <= most + 2, "{} when there was one", a.asked());
    assert_eq!((runs(&[&a, &b]).len(), b.ran(), a.ran()), (1000, 1000, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_primary_dies_and_safe_calls_wait_for_its_successor() {
    let (mut a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options(), vec![a.tagged(1), b.instance()]).await;
    a.leads(1);
    b.stands_by(Some(a.as_primary(1)));
    let callers = Calls::start(&stage, 32, Method::Get);
    callers.go_on_for(64).await;
    a.kill();
    sleep(Duration::from_millis(700)).await;
    b.leads(2);
    callers.go_on_for(64).await;
    callers.stop("a death").await;
    stage.until_primary("b").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_primary_a_call_ends_at_its_deadline_and_says_what_it_was_told() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    a.stands_by(Some(b.as_primary(7)));
    let stage = Stage::ready(options(), vec![a.instance(), b.instance()]).await;
    // On a busy machine an attempt may be out just then, which is another ending.
    let mut endings = Vec::new();
    let status = loop {
        let began = Instant::now();
        let status = stage.increment("x", Duration::from_millis(400)).await.unwrap_err();
        assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        match kind(&status) {
            CallErrorKind::NoPrimary { .. } => break status,
            other => endings.push(other),
        }
        assert!(endings.len() < 20, "{endings:?}");
    };
    let error = CallError::of(&status).unwrap();
    assert!(!error.may_have_run() && error.attempts() >= 1, "{error:?}");
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    let mut refusal = None;
    while let Some(it) = next {
        refusal = it.downcast_ref::<Status>().and_then(NotPrimary::of).or(refusal);
        next = it.source();
    }
    assert!(refusal.is_some(), "the last refusal is its cause: {status:?}");
    assert_eq!(a.ran() + b.ran(), 0);
}

/// The first call to a primary that no one names must not be waited for by all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_is_slow_to_answer_is_found_by_its_tag() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    *a.work.lock() = Duration::from_secs(2);
    a.leads(1);
    let stage = Stage::ready(options(), vec![a.tagged(1), b.instance()]).await;
    let mut calls = JoinSet::new();
    for n in 0..50 {
        calls.spawn(increment(stage.channel(), n.to_string(), SOON));
    }
    let began = Instant::now();
    while a.ran() < 50 {
        sleep(Duration::from_millis(5)).await;
        assert!(began.elapsed() < SOON);
    }
    assert!(calls.try_join_next().is_none(), "all run before the first is answered");
    while let Some(reply) = calls.join_next().await {
        assert_eq!(reply.unwrap().unwrap().into_inner().instance, "a");
    }
    assert_eq!(b.asked(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_dropped_while_they_try_leave_the_turn_to_others() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    let stage = Stage::ready(options(), vec![a.instance(), b.instance()]).await;
    for n in 0..20_u64 {
        let call = increment(stage.channel(), n.to_string(), SOON);
        let _ = tokio::time::timeout(Duration::from_millis(5 * n), call).await;
    }
    a.leads(1);
    assert_eq!(stage.increment("x", SOON).await.unwrap().0, "a");
}
