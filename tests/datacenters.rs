//! Over to another datacenter, and back.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{
    Backend, Callers, Method, Tally, bound, builder, consul_bin, deregister, get, record::Record, register,
    steady, until, until_bound_to,
};
use tokio::time::Instant;
use tonic_failover::{
    client::{ConsulService, ConsulServiceBuilder, FailoverEvent, Fallback, GrpcClient},
    testkit::{Agent, Cluster, ConsulProcess},
};

/// Several datacenters of real Consuls, joined.
async fn datacenters<const N: usize>() -> Option<[ConsulProcess; N]> {
    let bin = consul_bin()?;
    let mut all: Vec<ConsulProcess> = Vec::new();
    for n in 1..=N {
        let builder = ConsulProcess::builder(&bin).datacenter(format!("dc{n}"));
        let builder = match all.first() {
            Some(first) => builder.join_wan(first),
            None => builder,
        };
        all.push(builder.start().await.expect("consul starts"));
    }
    all.try_into().ok()
}

async fn backend(name: &str, consul: &ConsulProcess) -> Backend {
    let backend = Backend::start(name).await;
    register(consul.registry(), "counter", name, backend.port).await;
    backend
}

fn handle(builder: ConsulServiceBuilder) -> GrpcClient {
    builder.service(steady()).build().unwrap().grpc_client("counter").unwrap()
}

fn moved(record: &Record) -> (usize, usize) {
    let over = record.count(|event| matches!(event, FailoverEvent::FellBack { .. }));
    (over, record.count(|event| matches!(event, FailoverEvent::FailedBack { .. })))
}

fn faultless(what: &str, tally: &Tally) {
    println!("{what}: {} calls, {} resent, slowest {:?}", tally.calls, tally.resent, tally.slowest);
    assert!(tally.failed.is_empty(), "{what}: {:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_over_to_the_other_datacenter_and_return_and_none_fails() {
    let Some([dc1, dc2]) = datacenters().await else { return };
    let (mut a, mut b) = (backend("a", &dc1).await, backend("b", &dc1).await);
    let _c = backend("c", &dc2).await;
    let failback = Duration::from_millis(1500);
    let client = handle(builder(&dc1.url()).fallback(Fallback::nearest()).failback_after(failback));
    let record = Record::of(&client);
    client.ready().await.unwrap();
    assert_ne!(bound(&client).as_deref(), Some("c"));
    let callers = Callers::start(&client, 16, Method::Get);
    callers.go_on_for(50).await;
    assert!(client.status().datacenters.iter().skip(1).all(|dc| !dc.asked), "asked on need only");

    a.kill().await;
    callers.go_on_for(50).await;
    b.kill().await;
    until_bound_to(&client, "c").await;
    let answer = get(client.channel()).await.unwrap();
    assert_eq!((answer.instance.name.as_str(), answer.instance.datacenter.as_str()), ("c", "dc2"));
    record.until("fell back", |r| moved(r) == (1, 0)).await;
    callers.go_on_for(100).await;

    let back = Instant::now();
    let a = Backend::start_with("a", a.port, common::NOWHERE, &[]).await;
    until_bound_to(&client, "a").await;
    println!("failed back {:?} after the start of a local one", back.elapsed());
    assert!(back.elapsed() >= failback, "{:?}", back.elapsed());
    record.until("failed back", |r| moved(r) == (1, 1)).await;
    until(&client, "the other one is no longer asked", |c| !c.status().datacenters[1].asked).await;
    callers.go_on_for(100).await;
    faultless("to dc2 and back", &callers.stop().await);
    assert_eq!(record.episodes(), (0, 0), "{:#?}", record.words());
    drop(a);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_list_that_stays_empty_is_demoted_behind_the_others_and_is_the_last_resort() {
    let Some([dc1, dc2]) = datacenters().await else { return };
    let _a = backend("a", &dc1).await;
    let mut c = backend("c", &dc2).await;
    let client = handle(
        builder(&dc1.url())
            .fallback(Fallback::nearest())
            .demote_after(Duration::from_millis(500))
            .failback_after(Duration::from_millis(500)),
    );
    let record = Record::of(&client);
    until_bound_to(&client, "a").await;
    let callers = Callers::start(&client, 8, Method::Get);

    deregister(dc1.registry(), "a").await;
    until(&client, "the list is empty", |c| c.status().datacenters[0].empty_since.is_some()).await;
    until_bound_to(&client, "c").await;
    assert!(client.status().datacenters[0].demoted);
    // It still answers, and is better than nothing.
    c.kill().await;
    until_bound_to(&client, "a").await;
    callers.go_on_for(50).await;
    // The other one is preferred as long as the own list is empty.
    let c = Backend::start_with("c", c.port, common::NOWHERE, &[]).await;
    until_bound_to(&client, "c").await;
    // And the own one again, once it is listed.
    register(dc1.registry(), "counter", "a", _a.port).await;
    until_bound_to(&client, "a").await;
    faultless("demoted", &callers.stop().await);
    println!("{:#?}", record.words());
    drop(c);
}

/// With three datacenters, `ill` makes the second one ill. How long the way to
/// the third takes.
async fn to_the_third(ill: impl AsyncFnOnce(&mut ConsulProcess)) -> Option<Duration> {
    let [dc1, mut dc2, dc3] = datacenters().await?;
    let mut a = backend("a", &dc1).await;
    let _b = backend("b", &dc2).await;
    let _c = backend("c", &dc3).await;
    let client = handle(builder(&dc1.url()).fallback(Fallback::datacenters(["dc2", "dc1", "dc3"])));
    until_bound_to(&client, "a").await;
    let callers = Callers::start(&client, 8, Method::Get);
    callers.go_on_for(20).await;
    ill(&mut dc2).await;
    let started = Instant::now();
    a.kill().await;
    until_bound_to(&client, "c").await;
    let took = started.elapsed();
    let names: Vec<_> = client.status().datacenters.iter().map(|dc| dc.name.clone()).collect();
    assert_eq!(names, ["dc1", "dc2", "dc3"], "the own one is skipped in the list");
    callers.go_on_for(100).await;
    faultless("to the third datacenter", &callers.stop().await);
    Some(took)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_datacenter_costs_the_next_one_nothing() {
    let Some(took) = to_the_third(async |dc2| dc2.kill().await.unwrap()).await else { return };
    println!("dc2 dead: dc3 after {took:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_datacenter_costs_the_next_one_nothing() {
    let Some(took) = to_the_third(async |dc2| dc2.pause().await.unwrap()).await else { return };
    println!("dc2 hung: dc3 after {took:?}");
    assert!(took < Duration::from_secs(2), "it was waited for: {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_datacenter_that_is_lost_is_nothing_to_the_own_one() {
    let Some([dc1, mut dc2]) = datacenters().await else { return };
    let _a = backend("a", &dc1).await;
    let _c = backend("c", &dc2).await;
    let warm = builder(&dc1.url()).fallback(Fallback::nearest()).keep_warm(true);
    let client = handle(warm.wait(Duration::from_secs(1)));
    let record = Record::of(&client);
    let other = |c: &GrpcClient| c.status().datacenters.get(1).cloned().unwrap_or_default();
    until(&client, "both are ready", |c| bound(c).as_deref() == Some("a") && other(c).ready == 1).await;
    let callers = Callers::start(&client, 8, Method::Increment);
    // Hung, then dead: each is told of, and that is all.
    dc2.pause().await.unwrap();
    until(&client, "it is stale", |c| other(c).stale_since.is_some()).await;
    assert!(client.status().to_string().contains("dc2 stale for "), "{}", client.status());
    callers.go_on_for(50).await;
    dc2.kill().await.unwrap();
    callers.go_on_for(50).await;
    assert_eq!(other(&client).ready, 1, "its instance is kept warm all the same");
    let tally = callers.stop().await;
    faultless("dc2 lost", &tally);
    assert!(tally.slowest < Duration::from_secs(1), "{:?}", tally.slowest);
    assert_eq!((record.episodes(), moved(&record)), ((1, 0), (0, 0)), "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_stay_in_the_other_datacenter_when_its_registry_is_lost_too() {
    let Some([mut dc1, mut dc2]) = datacenters().await else { return };
    let mut a = backend("a", &dc1).await;
    let mut c = backend("c", &dc2).await;
    let _d = backend("d", &dc2).await;
    let client = handle(builder(&dc1.url()).fallback(Fallback::nearest()));
    until_bound_to(&client, "a").await;
    let callers = Callers::start(&client, 8, Method::Get);
    a.kill().await;
    until(&client, "bound in dc2, a spare ready", |c| {
        c.status().datacenters.get(1).is_some_and(|dc| dc.ready == 2)
    })
    .await;
    dc2.kill().await.unwrap();
    until(&client, "it is stale", |c| c.status().datacenters[1].stale_since.is_some()).await;
    callers.go_on_for(50).await;
    dc1.kill().await.unwrap();
    until(&client, "both are stale", |c| c.status().datacenters.iter().all(|dc| dc.stale_since.is_some()))
        .await;
    callers.go_on_for(50).await;
    // Without any registry the other known instance takes over.
    c.kill().await;
    until_bound_to(&client, "d").await;
    callers.go_on_for(50).await;
    faultless("no registry at all", &callers.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_given_is_kept_and_the_own_datacenter_is_skipped_in_it() {
    let cluster = Cluster::start(["dc1", "dc2", "dc3"]).await.unwrap();
    let mut backends = Vec::new();
    for (dc, name) in [("dc2", "b"), ("dc3", "c")] {
        let backend = Backend::start(name).await;
        register(cluster.agent(dc).unwrap().registry(), "counter", name, backend.port).await;
        backends.push(backend);
    }
    let url = cluster.agent("dc1").unwrap().url();
    for (order, winner) in [(["dc1", "dc2", "dc3"], "b"), (["dc3", "dc1", "dc2"], "c")] {
        let client = handle(builder(&url).fallback(Fallback::datacenters(order)));
        let record = Record::of(&client);
        until_bound_to(&client, winner).await;
        // The less preferred one may have answered first; it is left at once.
        let last = record.bound().last().cloned();
        assert_eq!(last.as_deref(), Some(winner), "{:#?}", record.words());
        let names: Vec<_> = client.status().datacenters.iter().map(|dc| dc.name.clone()).collect();
        let others: Vec<_> = order.into_iter().filter(|name| *name != "dc1").collect();
        assert_eq!(names[1..], others[..], "{order:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_agents_serve_when_the_own_one_is_gone_entirely() {
    let Some([mut dc1, dc2]) = datacenters().await else { return };
    let mut a = backend("a", &dc1).await;
    let _c = backend("c", &dc2).await;
    let other = |url: &str| builder(url).name("elsewhere").service(steady()).build().unwrap();
    let here = other(&dc1.url());
    let client = handle(builder(&dc1.url()).fallback(Fallback::services([here, other(&dc2.url())])));
    until_bound_to(&client, "a").await;
    assert_eq!(client.status().datacenters.len(), 2, "the own agent is skipped");
    let record = Record::of(&client);
    let callers = Callers::start(&client, 8, Method::Get);
    dc1.kill().await.unwrap();
    a.kill().await;
    until_bound_to(&client, "c").await;
    callers.go_on_for(50).await;
    faultless("other agents", &callers.stop().await);
    // The event names the datacenter, whatever the other agent is called.
    let over = |event: &FailoverEvent| matches!(event, FailoverEvent::FellBack { from, to, .. } if from == "dc1" && to == "dc2");
    record.until("it is told", |r| r.count(over) == 1).await;

    // One that starts without its own agent finds its way as well.
    let late = handle(builder(&dc1.url()).fallback(Fallback::services([other(&dc2.url())])));
    until_bound_to(&late, "c").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_datacenter_that_is_kept_warm_is_connected_before_it_is_needed() {
    let Some([dc1, dc2]) = datacenters().await else { return };
    let mut a = backend("a", &dc1).await;
    let _c = backend("c", &dc2).await;
    let client = handle(builder(&dc1.url()).fallback(Fallback::nearest()).keep_warm(true));
    until_bound_to(&client, "a").await;
    until(&client, "the other one is warm", |c| {
        c.status().datacenters.get(1).is_some_and(|dc| dc.asked && dc.ready == 1)
    })
    .await;
    assert_eq!(bound(&client).as_deref(), Some("a"));
    let mut events = client.events();
    let callers = Callers::start(&client, 8, Method::Get);
    callers.go_on_for(20).await;
    a.kill().await;
    let took = common::event(&mut events, "rebound to c", |event| match event {
        FailoverEvent::Rebound { to, took, .. } if to.name == "c" => Some(*took),
        _ => None,
    })
    .await;
    println!("warm: rebound in {took:?}");
    callers.go_on_for(50).await;
    faultless("warm", &callers.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_datacenter_is_waited_for_though_a_dead_local_instance_is_tried_again_and_again() {
    let (here, there) = (Agent::start("dc1").await.unwrap(), Agent::start("dc2").await.unwrap());
    // Consul calls it passing, and nobody is there: tried again at least every two seconds.
    register(here.registry(), "counter", "dead", 1).await;
    let c = Backend::start("c").await;
    register(there.registry(), "counter", "c", c.port).await;
    there.faults().slow(Duration::from_secs(3));
    let other = builder(&there.url()).service(steady()).build().unwrap();
    let client = handle(builder(&here.url()).fallback(Fallback::services([other])));
    until_bound_to(&client, "c").await;
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "c");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_usable_anywhere_names_every_datacenter_and_why() {
    let cluster = Cluster::start(["dc1", "dc2"]).await.unwrap();
    register(cluster.agent("dc2").unwrap().registry(), "counter", "dead", 1).await;
    let client = handle(builder(&cluster.agent("dc1").unwrap().url()).fallback(Fallback::nearest()));
    let record = Record::of(&client);
    let all = |line: &str| {
        line.contains("dc1 lists no healthy instance; dc2 lists 1, none answers (no connection: ")
    };
    until(&client, "both reasons", |c| all(&c.status().to_string())).await;
    let unusable = |event: &FailoverEvent| matches!(event, FailoverEvent::Unusable { .. });
    let error = get(client.channel()).await.unwrap_err();
    assert!(matches!(error.code(), tonic::Code::Unavailable | tonic::Code::DeadlineExceeded), "{error:?}");
    // A busy machine may have told it before anybody listened.
    assert!(record.count(unusable) <= 1, "once an episode: {:#?}", record.words());
    let _: &ConsulService = client.consul_service();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn safe_calls_on_a_lone_instance_that_freezes_are_served_by_the_other_datacenter_in_time() {
    let cluster = Cluster::start(["dc1", "dc2"]).await.unwrap();
    let (dc1, dc2) = (cluster.agent("dc1").unwrap(), cluster.agent("dc2").unwrap());
    let (a, c) = (Backend::start("a").await, Backend::start("c").await);
    register(dc1.registry(), "counter", "a", a.port).await;
    register(dc2.registry(), "counter", "c", c.port).await;
    let service = builder(&dc1.url()).fallback(Fallback::nearest()).service(common::options());
    let client = service.build().unwrap().grpc_client("counter").unwrap();
    until_bound_to(&client, "a").await;
    a.signal(rustix::process::Signal::STOP);
    // Within its deadline of two seconds: suspected, probed, given up, and dc2 asked.
    let served = get(client.channel()).await.expect("served in time");
    assert_eq!(served.instance.name, "c");
}

/// Lets this program's clock jump, and with it all of its waits: the agent's, the client's.
async fn jump(seconds: u64) {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(seconds)).await;
    tokio::time::resume();
}

/// Waits until the list of datacenters has been asked for once more.
async fn until_listed_again(agent: &Agent, before: u64) {
    agent.wait_for(|it| it.requests_to("/v1/catalog/datacenters") > before).await.unwrap();
}

#[tokio::test]
async fn a_datacenter_that_a_restarted_agent_does_not_list_yet_stays_warm_and_in_use() {
    let cluster = Cluster::start(["dc1", "dc2"]).await.unwrap();
    let (dc1, dc2) = (cluster.agent("dc1").unwrap(), cluster.agent("dc2").unwrap());
    let (mut a, c) = (Backend::start("a").await, Backend::start("c").await);
    register(dc1.registry(), "counter", "a", a.port).await;
    register(dc2.registry(), "counter", "c", c.port).await;
    let client = handle(builder(&dc1.url()).fallback(Fallback::nearest()).keep_warm(true));
    let warm = |c: &GrpcClient| c.status().datacenters.get(1).is_some_and(|dc| dc.ready == 1);
    until(&client, "the other one is warm", |c| bound(c).as_deref() == Some("a") && warm(c)).await;
    let lists = || dc1.counters().requests_to("/v1/catalog/datacenters");

    // The list is a minute old when it is asked for again, of an agent just restarted.
    let unjoined = dc1.faults().unjoined();
    let before = lists();
    jump(61).await;
    until_listed_again(dc1, before).await;
    // And once more, so that the first one has been taken by now.
    until_listed_again(dc1, lists()).await;
    assert!(warm(&client), "{}", client.status());
    a.kill().await;
    until_bound_to(&client, "c").await;
    // It is missing for longer than any other would be kept, and serves calls.
    for _ in 0..5 {
        let before = lists();
        jump(61).await;
        until_listed_again(dc1, before).await;
        assert_eq!(get(client.channel()).await.unwrap().instance.name, "c");
    }
    assert_eq!(client.status().datacenters.len(), 2);
    unjoined.off();
    let before = lists();
    jump(61).await;
    until_listed_again(dc1, before).await;
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "c");
}

#[tokio::test]
async fn a_datacenter_is_given_up_when_it_has_been_missing_for_a_minute() {
    let cluster = Cluster::start(["dc1", "dc2"]).await.unwrap();
    let (dc1, dc2) = (cluster.agent("dc1").unwrap(), cluster.agent("dc2").unwrap());
    let (a, c) = (Backend::start("a").await, Backend::start("c").await);
    register(dc1.registry(), "counter", "a", a.port).await;
    register(dc2.registry(), "counter", "c", c.port).await;
    let client = handle(builder(&dc1.url()).fallback(Fallback::nearest()).keep_warm(true));
    let known = |c: &GrpcClient| c.status().datacenters.len();
    until(&client, "both are known", |c| bound(c).as_deref() == Some("a") && known(c) == 2).await;
    dc1.faults().unjoined();
    let lists = || dc1.counters().requests_to("/v1/catalog/datacenters");
    let mut jumps = 0;
    while known(&client) == 2 {
        let before = lists();
        jump(30).await;
        jumps += 1;
        assert!(jumps < 20, "{}", client.status());
        if jumps > 1 {
            until(&client, "it is asked again or given up", |c| known(c) == 1 || lists() > before).await;
        }
    }
    assert!(jumps > 3, "given up after {jumps} jumps of 30 s, of which the list's own age takes two");
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "a");
}

#[tokio::test]
async fn a_client_that_starts_at_an_agent_just_restarted_finds_the_others_as_soon_as_that_has() {
    let cluster = Cluster::start(["dc1", "dc2"]).await.unwrap();
    let (dc1, dc2) = (cluster.agent("dc1").unwrap(), cluster.agent("dc2").unwrap());
    let c = Backend::start("c").await;
    register(dc2.registry(), "counter", "c", c.port).await;
    let unjoined = dc1.faults().unjoined();
    let client = handle(builder(&dc1.url()).fallback(Fallback::nearest()));
    // The answer to the first question is there when the second one is put.
    until_listed_again(dc1, 1).await;
    unjoined.off();
    until_bound_to(&client, "c").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_in_the_other_datacenter_go_on_while_the_own_agent_is_restarted() {
    let Some([mut dc1, dc2]) = datacenters().await else { return };
    let _c = backend("c", &dc2).await;
    let client = handle(builder(&dc1.url()).fallback(Fallback::nearest()).keep_warm(true));
    until_bound_to(&client, "c").await;
    let callers = Callers::start(&client, 8, Method::Get);
    callers.go_on_for(50).await;
    // In memory: it has forgotten everything, the other datacenter as well.
    dc1.restart().await.unwrap();
    callers.go_on_for(100).await;
    faultless("the agent restarted", &callers.stop().await);
    assert_eq!(bound(&client).as_deref(), Some("c"));
}
