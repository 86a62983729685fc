//! Instances come, go, drain and return.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{
    Backend, Callers, Method, Tally, bound, builder, call, consul, deregister, get, record::Record, register,
    steady, until, until_bound_to,
};
use rustix::process::Signal;
use tokio::time::Instant;
use tonic_failover::{
    client::{CallError, CallErrorKind, DatacenterStatus, FailoverEvent, GrpcClient, RebindCause},
    demo::pb::{GetRequest, counter_client::CounterClient},
    testkit::{Agent, ConsulProcess},
};

fn first(client: &GrpcClient) -> DatacenterStatus {
    client.status().datacenters.first().cloned().unwrap_or_default()
}

fn faultless(what: &str, tally: &Tally) {
    println!("{what}: {} calls, {} resent, slowest {:?}", tally.calls, tally.resent, tally.slowest);
    assert!(tally.failed.is_empty(), "{what}: {:?}", tally.failed);
}

/// Starts one that registers itself, with a TTL check, and waits until it is listed.
async fn registered(name: &str, port: u16, consul: &ConsulProcess) -> Backend {
    let backend = Backend::start_with(name, port, &consul.url(), &[]).await;
    listed(consul, name, true).await;
    backend
}

async fn listed(consul: &ConsulProcess, name: &str, is: bool) {
    let wait = async {
        while consul.registry().passing("counter").await.unwrap().iter().any(|id| id == name) != is {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(common::SOON, wait).await.unwrap_or_else(|_| panic!("{name} listed: {is}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_made_before_the_first_instance_waits_for_it() {
    let Some(consul) = consul().await else { return };
    let client = common::steady_client(&consul.url());
    let backend = Backend::start("a").await;
    let first_call = tokio::spawn(call(client.channel(), Method::Increment, "1".into()));
    until(&client, "Consul has answered", |c| first(c).answered).await;
    assert_eq!(client.status().to_string(), "counter: nothing usable: local lists no healthy instance");
    assert!(!first_call.is_finished());
    register(consul.registry(), "counter", "a", backend.port).await;
    assert_eq!(first_call.await.unwrap().unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_instances_go_and_come_back_on_the_same_ports_and_on_others() {
    let Some(consul) = consul().await else { return };
    let mut a = registered("a", 0, &consul).await;
    let mut b = registered("b", 0, &consul).await;
    let service =
        builder(&consul.url()).service(steady().fail_fast_after(Duration::from_millis(300))).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    let record = Record::of(&client);
    until(&client, "both are ready", |c| first(c).ready == 2).await;
    for (round, kill) in [(1, true), (2, false), (3, true)] {
        for backend in [&mut a, &mut b] {
            if kill { backend.kill().await } else { backend.terminate().await }
        }
        until(&client, "nothing is bound", |c| bound(c).is_none()).await;
        let status = get(client.channel()).await.unwrap_err();
        let error = CallError::of(&status).expect("typed");
        assert!(matches!(error.kind(), CallErrorKind::NothingUsable { .. }), "{error:?}");
        assert!(!error.may_have_run());
        let unusable = |event: &FailoverEvent| matches!(event, FailoverEvent::Unusable { .. });
        record.until("told once", |r| r.count(unusable) == round).await;

        // On the same ports, and then on others.
        let port = |old: u16| if round < 3 { old } else { 0 };
        let waiting = tokio::spawn({
            let channel = client.channel();
            async move {
                loop {
                    if let Ok(served) = get(channel.clone()).await {
                        return served;
                    }
                }
            }
        });
        a = registered("a", port(a.port), &consul).await;
        b = registered("b", port(b.port), &consul).await;
        tokio::time::timeout(common::SOON, waiting).await.expect("calls succeed again").unwrap();
        until(&client, "both are ready again", |c| first(c).ready == 2).await;
        assert_eq!(get(client.channel()).await.unwrap().attempts, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deregistered_instance_gets_no_new_calls_and_finishes_those_it_has() {
    let Some(consul) = consul().await else { return };
    let mut backends = Vec::new();
    for name in ["a", "b"] {
        backends.push(Backend::start_with(name, 0, common::NOWHERE, &["--work", "400ms"]).await);
        register(consul.registry(), "counter", name, backends.last().unwrap().port).await;
    }
    let client = common::steady_client(&consul.url());
    let record = Record::of(&client);
    until(&client, "a spare is ready", |c| first(c).ready == 2).await;
    let drained = bound(&client).unwrap();
    let callers = Callers::start(&client, 16, Method::Increment);
    callers.go_on_for(32).await;

    deregister(consul.registry(), &drained).await;
    let moved = record.until("rebound", |r| r.bound().len() == 2);
    moved.await;
    let of = |name: &str| backends.iter().find(|b| b.name == name).unwrap();
    let received = of(&drained).journal().iter().filter(|line| line.contains("received")).count();
    callers.go_on_for(64).await;
    let journal = of(&drained).journal();
    // A call that was picked in the very moment of the move may still arrive.
    let later = journal.iter().filter(|line| line.contains("received")).count();
    assert!(later <= received + 16, "new calls moved: {received}, then {later}");
    faultless("drained", &callers.stop().await);
    let (got, answered) = (
        of(&drained).journal().iter().filter(|line| line.contains("received")).count(),
        of(&drained).journal().iter().filter(|line| line.contains("answered")).count(),
    );
    assert_eq!(got, answered, "all that it got were finished");
    let left = |event: &FailoverEvent| {
        matches!(event, FailoverEvent::Rebound { cause: RebindCause::LeftRegistry, .. })
    };
    assert_eq!(record.count(left), 1, "{:#?}", record.words());
}

/// Restarts four instances one after another; each is listed before the next goes.
async fn roll(method: Method, end: impl AsyncFn(&mut Backend)) {
    let Some(consul) = consul().await else { return };
    let mut backends = Vec::new();
    for name in ["a", "b", "c", "d"] {
        backends.push(registered(name, 0, &consul).await);
    }
    let client = common::steady_client(&consul.url());
    let record = Record::of(&client);
    until(&client, "a spare is ready", |c| first(c).known == 4 && first(c).ready == 2).await;
    let callers = Callers::start(&client, 16, method);
    callers.go_on_for(50).await;
    for backend in &mut backends {
        end(backend).await;
        *backend = registered(&backend.name.clone(), backend.port, &consul).await;
        until(&client, "all are known, one and a spare ready", |c| {
            first(c).known == 4 && first(c).ready == 2 && first(c).ejected == 0
        })
        .await;
        callers.go_on_for(50).await;
    }
    faultless("rolling restart", &callers.stop().await);
    println!("{:#?}", record.words());
    let unusable = |event: &FailoverEvent| matches!(event, FailoverEvent::Unusable { .. });
    assert_eq!(record.count(unusable), 0, "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_by_sigterm_fails_no_call_at_all() {
    roll(Method::Increment, async |backend| backend.terminate().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_by_kill_9_fails_no_safe_call() {
    roll(Method::Get, async |backend| backend.kill().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_instance_that_is_still_listed_is_not_returned_to() {
    let Some(consul) = consul().await else { return };
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    register(consul.registry(), "counter", "a", a.port).await;
    register(consul.registry(), "counter", "b", b.port).await;
    // Tried again soon and often, so that a wrong return would show.
    let often = Duration::from_millis(50);
    let service = builder(&consul.url()).service(steady().ejection(often, often)).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    let record = Record::of(&client);
    until(&client, "a spare is ready", |c| first(c).ready == 2).await;
    let (mut dead, alive) = if bound(&client).as_deref() == Some("a") { (a, b) } else { (b, a) };
    let callers = Callers::start(&client, 8, Method::Get);
    dead.kill().await;
    until_bound_to(&client, &alive.name).await;
    let generation = client.binding().generation();
    for _ in 0..5 {
        // A fresh look changes nothing about it: Consul still calls it passing.
        let binding = client.consul_service().update_grpc_client("counter").await.unwrap();
        assert_eq!(binding.instance().unwrap().name, alive.name);
        callers.go_on_for(100).await;
    }
    assert_eq!(first(&client).known, 2);
    assert_eq!(client.binding().generation(), generation, "{:#?}", record.words());
    let ejected = |event: &FailoverEvent| matches!(event, FailoverEvent::Ejected { .. });
    assert_eq!(record.count(ejected), 1, "once an episode: {:#?}", record.words());

    // It comes back by a probe, as the spare: no call moves.
    let _again = Backend::start_with(&dead.name, dead.port, common::NOWHERE, &[]).await;
    until(&client, "it is ready again", |c| first(c).ready == 2).await;
    callers.go_on_for(50).await;
    assert_eq!(bound(&client), Some(alive.name.clone()));
    faultless("dead but listed", &callers.stop().await);
    assert_eq!(record.bound().len(), 2, "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_in_maintenance_is_left_and_known_again_after_it() {
    let Some(consul) = consul().await else { return };
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    register(consul.registry(), "counter", "a", a.port).await;
    register(consul.registry(), "counter", "b", b.port).await;
    let client = common::steady_client(&consul.url());
    until(&client, "a spare is ready", |c| first(c).ready == 2).await;
    let callers = Callers::start(&client, 8, Method::Increment);
    for _ in 0..2 {
        let ill = bound(&client).unwrap();
        consul.registry().maintenance(&ill, true).await.unwrap();
        until(&client, "the other one is bound", |c| bound(c).is_some_and(|name| name != ill)).await;
        assert_eq!(first(&client).known, 1);
        callers.go_on_for(30).await;
        consul.registry().maintenance(&ill, false).await.unwrap();
        until(&client, "it is the spare", |c| first(c).ready == 2).await;
        assert_ne!(bound(&client), Some(ill));
    }
    faultless("maintenance", &callers.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn news_that_an_instance_is_back_ends_its_rest() {
    let Some(consul) = consul().await else { return };
    let mut a = registered("a", 0, &consul).await;
    let b = registered("b", 0, &consul).await;
    let hour = Duration::from_secs(3600);
    let service = builder(&consul.url()).service(steady().ejection(hour, hour)).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    until(&client, "both are ready", |c| first(c).ready == 2).await;
    a.kill().await;
    until(&client, "it rests, or has left already", |c| first(c).ejected == 1 || first(c).known == 1).await;
    until(&client, "it has left", |c| first(c).known == 1).await;
    let _a = registered("a", a.port, &consul).await;
    until(&client, "it is dialled at once", |c| first(c).ready == 2).await;
    drop(b);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resting_instance_is_tried_soon_when_it_is_the_last_one() {
    let agent = Agent::start("dc1").await.unwrap();
    let (mut a, mut b) = (Backend::start("a").await, Backend::start("b").await);
    register(agent.registry(), "counter", "a", a.port).await;
    register(agent.registry(), "counter", "b", b.port).await;
    let hour = Duration::from_secs(3600);
    let client = builder(&agent.url()).service(steady().ejection(hour, hour)).build().unwrap();
    let client = client.grpc_client("counter").unwrap();
    until(&client, "both are ready", |c| first(c).ready == 2).await;
    a.kill().await;
    until(&client, "it rests", |c| first(c).ejected == 1).await;
    let _a = Backend::start_with("a", a.port, common::NOWHERE, &[]).await;
    b.kill().await;
    let mut request = tonic::Request::new(GetRequest::default());
    request.set_timeout(Duration::from_secs(1));
    let answer = CounterClient::new(client.channel()).get(request).await;
    assert!(answer.is_ok(), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn news_after_an_empty_list_ends_every_rest() {
    let agent = Agent::start("dc1").await.unwrap();
    let mut a = Backend::start("a").await;
    register(agent.registry(), "counter", "a", a.port).await;
    let _b = Backend::start("b").await;
    register(agent.registry(), "counter", "b", _b.port).await;
    let hour = Duration::from_secs(3600);
    let service = builder(&agent.url()).service(steady().ejection(hour, hour)).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    until(&client, "both are ready", |c| first(c).ready == 2).await;
    a.kill().await;
    until(&client, "it rests", |c| first(c).ejected == 1).await;
    let empty = agent.faults().empty("counter");
    until(&client, "the list is empty", |c| first(c).empty_since.is_some()).await;
    let _a = Backend::start_with("a", a.port, common::NOWHERE, &[]).await;
    empty.off();
    until(&client, "it is dialled at once", |c| first(c).ready == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_nothing_but_a_dead_newcomer_fails_no_call() {
    let agent = Agent::start("dc1").await.unwrap();
    let (a, b, mut c) = (Backend::start("a").await, Backend::start("b").await, Backend::start("c").await);
    register(agent.registry(), "counter", "a", a.port).await;
    register(agent.registry(), "counter", "b", b.port).await;
    let client = common::steady_client(&agent.url());
    until(&client, "a spare is ready", |c| first(c).ready == 2).await;
    let callers = Callers::start(&client, 8, Method::Increment);
    callers.go_on_for(50).await;
    c.kill().await;
    // It has lost its data, and the first to be known again is one that is not there.
    agent.restart_empty().await;
    register(agent.registry(), "counter", "c", c.port).await;
    until(&client, "it alone is listed, and cannot be reached", |c| {
        let status = first(c);
        (status.known, status.ejected, status.unlisted) == (1, 1, 2)
    })
    .await;
    let line = client.status().to_string();
    assert!(
        line.contains("ready, 1 known, 1 ejected") && line.contains("2 no longer listed in dc1"),
        "{line}"
    );
    callers.go_on_for(400).await;
    assert_ne!(bound(&client).as_deref(), Some("c"));
    // The moment that it answers, it is what the registry says that counts.
    let _c = Backend::start_with("c", c.port, common::NOWHERE, &[]).await;
    until_bound_to(&client, "c").await;
    until(&client, "the others are left", |c| (first(c).ready, first(c).unlisted) == (1, 0)).await;
    callers.go_on_for(50).await;
    faultless("a dead newcomer", &callers.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_client_follows_and_its_next_call_succeeds_at_once() {
    let Some(consul) = consul().await else { return };
    let mut current = registered("i0", 0, &consul).await;
    let client = common::steady_client(&consul.url());
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "i0");
    for (n, gently) in (1..=4).zip([true, false, false, true]) {
        let next = registered(&format!("i{n}"), 0, &consul).await;
        if gently {
            current.terminate().await
        } else {
            current.kill().await
        }
        let gone = std::mem::replace(&mut current, next).name.clone();
        // The demo's TTL is 1 s; nobody calls meanwhile.
        listed(&consul, &gone, false).await;
        until(&client, "only the new one is known", |c| first(c).known == 1).await;
    }
    until(&client, "the new one is bound", |c| bound(c).as_deref() == Some("i4")).await;
    let started = Instant::now();
    let served = get(client.channel()).await.unwrap();
    println!("the next call took {:?}", started.elapsed());
    assert_eq!((served.instance.name.as_str(), served.attempts), ("i4", 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_moves_to_another_port_is_another_instance() {
    let Some(consul) = consul().await else { return };
    let mut old = Backend::start("a").await;
    register(consul.registry(), "counter", "a", old.port).await;
    let client = common::steady_client(&consul.url());
    until_bound_to(&client, "a").await;
    let callers = Callers::start(&client, 8, Method::Increment);
    for _ in 0..3 {
        let new = Backend::start("a").await;
        register(consul.registry(), "counter", "a", new.port).await;
        until(&client, "the new port is bound", |c| {
            c.status().bound.is_some_and(|i| i.id.authority().ends_with(&format!(":{}", new.port)))
        })
        .await;
        callers.go_on_for(30).await;
        // It has finished what it had.
        old.terminate().await;
        old = new;
    }
    faultless("from port to port", &callers.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_instance_that_consul_takes_out_and_lists_again_costs_no_safe_call() {
    let Some(consul) = consul().await else { return };
    let a = registered("a", 0, &consul).await;
    let b = registered("b", 0, &consul).await;
    let client = common::client(&consul.url());
    until(&client, "both are ready", |c| first(c).ready == 2).await;
    let callers = Callers::start(&client, 8, Method::Get);
    callers.go_on_for(20).await;
    let frozen = if bound(&client).as_deref() == Some("a") { &a } else { &b };
    frozen.signal(Signal::STOP);
    listed(&consul, &frozen.name, false).await;
    until(&client, "the other one is bound", |c| bound(c).is_some_and(|name| name != frozen.name)).await;
    callers.go_on_for(50).await;
    frozen.signal(Signal::CONT);
    listed(&consul, &frozen.name, true).await;
    until(&client, "it is the spare again", |c| first(c).ready == 2).await;
    callers.go_on_for(50).await;
    faultless("paused", &callers.stop().await);
}
