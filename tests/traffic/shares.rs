//! Who gets how many of the calls.

use std::collections::BTreeMap;

use tokio::task::JoinSet;
use tonic_failover::client::{CallOptions, Policy};

use crate::{
    common::{self, Backend, Callers, Method, SOON, builder, consul, steady, until},
    stage::{Client, Stage, at, get, shares, weighted},
};

async fn three() -> [Backend; 3] {
    [Backend::start("a").await, Backend::start("b").await, Backend::start("c").await]
}

fn named(list: [u64; 3]) -> BTreeMap<String, u64> {
    ["a", "b", "c"].map(str::to_owned).into_iter().zip(list).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn equal_instances_get_equal_shares() {
    let backends = three().await;
    let stage = Stage::ready(steady().policy(Policy::RoundRobin), backends.iter().map(at).collect()).await;
    assert_eq!(shares(&stage.client, 300).await, named([100, 100, 100]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_follow_the_weights_that_consul_gives_while_passing_and_while_warning() {
    let Some(consul) = consul().await else { return };
    let backends = three().await;
    for (backend, (passing, warning)) in backends.iter().zip([(7, 1), (2, 6), (1, 1)]) {
        let body = format!(
            r#"{{"ID":"{0}","Name":"counter","Address":"127.0.0.1","Port":{1},
            "Check":{{"CheckID":"{0}","TTL":"600s","Status":"passing"}},
            "Weights":{{"Passing":{passing},"Warning":{warning}}}}}"#,
            backend.name, backend.port
        );
        let answer = consul.registry().put("/v1/agent/service/register", body).await.unwrap();
        assert!(answer.status.is_success(), "{answer:?}");
    }
    for policy in [Policy::RoundRobin, Policy::LeastRequest] {
        let options = steady().policy(policy).include_warning(true);
        let client = builder(&consul.url()).service(options).build().unwrap().grpc_client("counter").unwrap();
        until(&client, "all are ready", |c| c.status().datacenters[0].ready == 3).await;
        let due = |shares: &BTreeMap<String, u64>, due: [u64; 3]| {
            for (name, due) in named(due) {
                let share = shares.get(&name).copied().unwrap_or_default();
                assert!(share.abs_diff(due) <= 60, "{policy:?}: {shares:?}");
            }
        };
        let mut answers = BTreeMap::new();
        for _ in 0..1000 {
            let served = common::get(client.channel()).await.unwrap();
            *answers.entry(served.instance.name.clone()).or_insert(0) += 1;
        }
        println!("{policy:?}: {answers:?}");
        due(&answers, [700, 200, 100]);
    }
    // All warn: the other weights count.
    for backend in &backends {
        let answer = consul.registry().put(&format!("/v1/agent/check/warn/{}", backend.name), "").await;
        assert!(answer.unwrap().status.is_success());
    }
    let options = steady().policy(Policy::RoundRobin).include_warning(true);
    let client = builder(&consul.url()).service(options).build().unwrap().grpc_client("counter").unwrap();
    until(&client, "all are ready", |c| c.status().datacenters[0].ready == 3).await;
    let mut answers = BTreeMap::new();
    for _ in 0..400 {
        let served = common::get(client.channel()).await.unwrap();
        assert!(served.instance.warning);
        *answers.entry(served.instance.name.clone()).or_insert(0_u64) += 1;
    }
    for (name, due) in named([50, 300, 50]) {
        assert!(answers[&name].abs_diff(due) <= 20, "{answers:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_instance_gets_fewer_calls_by_least_request() {
    let slow = Backend::start_with("slow", 0, common::NOWHERE, &["--work", "200ms"]).await;
    let fast = Backend::start_with("fast", 0, common::NOWHERE, &["--work", "5ms"]).await;
    let instances = [&slow, &fast].map(at).to_vec();
    let mut of_slow = Vec::new();
    for policy in [Policy::RoundRobin, Policy::LeastRequest] {
        let stage = Stage::ready(steady().policy(policy), instances.clone()).await;
        let mut callers = JoinSet::new();
        for _ in 0..16 {
            let channel = stage.channel();
            callers.spawn(async move {
                let mut slow = 0_u64;
                for _ in 0..20 {
                    let name = get(channel.clone(), CallOptions::new()).await.unwrap();
                    slow += u64::from(name == "slow");
                }
                slow
            });
        }
        of_slow.push(callers.join_all().await.into_iter().sum::<u64>());
    }
    println!("to the slow one, of 320: {of_slow:?}");
    assert!(of_slow[0].abs_diff(160) <= 1, "each its turn: {of_slow:?}");
    assert!(of_slow[1] < 120, "{of_slow:?}");
}

/// Least request balances what is in flight, also what has been dropped and streams.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_and_dropped_calls_count_while_they_last_and_no_longer() {
    let backends = three().await;
    let options = steady().policy(Policy::LeastRequest);
    let stage = Stage::ready(options, backends.iter().map(at).collect()).await;
    let served = |response: &tonic::Response<_>| {
        let served = response.extensions().get::<tonic_failover::client::Served>().expect("said");
        served.instance.name.clone()
    };
    let mut streams: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for _ in 0..60 {
        let response = crate::stage::watch(stage.channel()).await.unwrap();
        streams.entry(served(&response)).or_default().push(response);
    }
    let counts: Vec<_> = streams.values().map(Vec::len).collect();
    assert!(counts.len() == 3 && counts.iter().all(|it| it.abs_diff(20) <= 2), "{counts:?}");
    // While `a` has all the streams, the others get the calls.
    streams.remove("b");
    streams.remove("c");
    assert_eq!(shares(&stage.client, 60).await.get("a"), None);
    streams.clear();
    let shares = shares(&stage.client, 600).await;
    assert!(shares.values().all(|it| it.abs_diff(200) < 80), "{shares:?}");
}

/// Stops each and starts it again on its port, one after the other.
async fn roll(client: &Client, backends: &mut [Backend; 3], kill: bool) {
    for backend in backends {
        if kill {
            backend.kill().await;
        } else {
            backend.terminate().await;
        }
        until(client, "its loss is known", |c| c.status().datacenters[0].ready == 2).await;
        let args = ["--work", "5ms"];
        *backend = Backend::start_with(&backend.name, backend.port, common::NOWHERE, &args).await;
        until(client, "all are ready", |c| c.status().datacenters[0].ready == 3).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_rolling_restart_shares_are_even_again_without_news_and_no_call_fails() {
    for (policy, kill) in [
        (Policy::RoundRobin, false),
        (Policy::LeastRequest, false),
        (Policy::RoundRobin, true),
        (Policy::LeastRequest, true),
    ] {
        let mut backends = three().await;
        let stage = Stage::ready(steady().policy(policy), backends.iter().map(at).collect()).await;
        // What was not safe may fail when it was killed under.
        let method = if kill { Method::Get } else { Method::Increment };
        let callers = Callers::start(&stage.client, 16, method);
        callers.go_on_for(100).await;
        let started = tokio::time::Instant::now();
        roll(&stage.client, &mut backends, kill).await;
        let took = started.elapsed();
        let tally = callers.stop().await;
        assert!(tally.failed.is_empty(), "{policy:?}: {:?}", tally.failed);
        // A process that has just started may be slower for a moment, and least request heeds it.
        let mut all = counted(&stage.client).await;
        while !even(&all) && policy == Policy::LeastRequest && started.elapsed() < SOON {
            println!("{policy:?}, killed: {kill}: {all:?} at first");
            all = counted(&stage.client).await;
        }
        let since = started.elapsed();
        println!("{policy:?}, killed: {kill}: {all:?}, restarted in {took:?}, even after {since:?}");
        assert!(even(&all), "{policy:?}: {all:?}");
        assert!(since < SOON, "{since:?}");
    }
}

/// The shares of sixteen callers at once.
async fn counted(client: &Client) -> BTreeMap<String, u64> {
    let mut counting = JoinSet::new();
    for _ in 0..16 {
        let client = client.clone();
        counting.spawn(async move { shares(&client, 90).await });
    }
    let mut all = BTreeMap::new();
    for (name, count) in counting.join_all().await.into_iter().flatten() {
        *all.entry(name).or_insert(0) += count;
    }
    all
}

/// Within a tenth.
fn even(shares: &BTreeMap<String, u64>) -> bool {
    shares.len() == 3 && shares.values().all(|share| share.abs_diff(480) <= 48)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_weight_is_heeded_without_a_new_connection() {
    let backends = three().await;
    let stage = Stage::ready(steady().policy(Policy::RoundRobin), backends.iter().map(at).collect()).await;
    let [a, b, c] = &backends;
    stage.list.set("counter", [weighted(a, 8), at(b), at(c)]);
    let weights = |c: &Client| c.binding().instances().map(|it| it.weight).sum::<u32>();
    until(&stage.client, "it is published", |c| weights(c) == 10).await;
    let shares = shares(&stage.client, 500).await;
    for (name, due) in named([400, 50, 50]) {
        assert!(shares[&name].abs_diff(due) <= 10, "{shares:?}");
    }
}
