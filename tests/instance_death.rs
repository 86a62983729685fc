//! The bound instance dies, drains or freezes under running calls.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{Backend, Callers, Method, Tally, client, consul, register, until_bound_to};
use rustix::process::Signal;
use tonic_failover::{client::GrpcClient, testkit::ConsulProcess};

/// Two instances that Consul will call passing for ever, and a client bound to
/// the first in `backends`.
struct Stage {
    consul: ConsulProcess,
    client: GrpcClient,
    bound: Backend,
    other: Backend,
}

impl Stage {
    async fn set() -> Option<Self> {
        let consul = consul().await?;
        let (a, b) = (Backend::start("a").await, Backend::start("b").await);
        register(consul.registry(), "counter", "a", a.port).await;
        register(consul.registry(), "counter", "b", b.port).await;
        let client = client(&consul.url());
        client.ready().await.unwrap();
        common::until(&client, "a spare is ready", |c| c.status().datacenters[0].ready == 2).await;
        let (bound, other) = if common::bound(&client).as_deref() == Some("a") { (a, b) } else { (b, a) };
        Some(Self { consul, client, bound, other })
    }

    async fn callers(&self, method: Method) -> Callers {
        let callers = Callers::start(&self.client, 32, method);
        callers.go_on_for(100).await;
        callers
    }
}

fn print(what: &str, tally: &Tally) {
    println!(
        "{what}: {} calls, {} resent, {} failed, slowest {:?}",
        tally.calls,
        tally.resent,
        tally.failed.len(),
        tally.slowest
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn safe_calls_survive_kill_9_of_the_bound_instance() {
    for method in [Method::Get, Method::Add] {
        let Some(mut stage) = Stage::set().await else { return };
        let callers = stage.callers(method).await;
        stage.bound.kill().await;
        until_bound_to(&stage.client, &stage.other.name).await;
        callers.go_on_for(200).await;
        let tally = callers.stop().await;
        print("kill -9", &tally);
        assert!(tally.failed.is_empty(), "{method:?}: {:?}", tally.failed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_calls_fail_on_kill_9_only_if_they_may_have_run_and_none_runs_twice() {
    let Some(mut stage) = Stage::set().await else { return };
    let callers = stage.callers(Method::Increment).await;
    stage.bound.kill().await;
    until_bound_to(&stage.client, &stage.other.name).await;
    callers.go_on_for(200).await;
    let tally = callers.stop().await;
    print("kill -9, increment", &tally);
    println!("{:?}", stage.bound.journal().iter().rev().take(4).collect::<Vec<_>>());
    assert!(tally.failed.len() <= 32, "at most those in flight: {:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_fails_when_the_bound_instance_is_terminated() {
    let Some(mut stage) = Stage::set().await else { return };
    let callers = stage.callers(Method::Increment).await;
    stage.bound.terminate().await;
    until_bound_to(&stage.client, &stage.other.name).await;
    callers.go_on_for(200).await;
    let tally = callers.stop().await;
    print("SIGTERM", &tally);
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn safe_calls_survive_a_frozen_instance() {
    let Some(stage) = Stage::set().await else { return };
    let callers = stage.callers(Method::Get).await;
    stage.bound.signal(Signal::STOP);
    until_bound_to(&stage.client, &stage.other.name).await;
    callers.go_on_for(200).await;
    stage.bound.signal(Signal::CONT);
    let tally = callers.stop().await;
    print("SIGSTOP", &tally);
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_left_on_a_frozen_instance_move_on_although_it_has_left_the_registry() {
    let Some(stage) = Stage::set().await else { return };
    stage.bound.signal(Signal::STOP);
    let mut call = std::pin::pin!(common::get(stage.client.channel()));
    // Polled once, it has chosen its connection.
    tokio::select! {
        biased;
        _ = &mut call => panic!("a frozen instance has answered"),
        () = std::future::ready(()) => {}
    }
    common::deregister(stage.consul.registry(), &stage.bound.name).await;
    until_bound_to(&stage.client, &stage.other.name).await;
    let served = call.await.expect("sent again, within its deadline");
    assert_eq!((served.instance.name.as_str(), served.attempts), (stage.other.name.as_str(), 2));
}
