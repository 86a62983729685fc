//! Many instances that answer, but badly.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tonic::Code;
use tonic_failover::{
    Instance,
    client::{CallOptions, Policy, ServiceOptions},
};

use crate::{
    common::{
        SOON, options,
        scripted::{Act, Scripted},
        until,
    },
    stage::{Stage, at_port, get},
};

/// Answers UNAVAILABLE while `bad`.
struct Moody {
    server: Scripted,
    bad: Arc<AtomicBool>,
}

impl Moody {
    async fn start() -> Self {
        let bad = Arc::new(AtomicBool::new(false));
        let mood = bad.clone();
        let server = Scripted::start(move |_| {
            if mood.load(Ordering::Relaxed) { Act::ReadThenStatus(14, "bad mood") } else { Act::Answer }
        })
        .await;
        Self { server, bad }
    }

    fn turn(&self, bad: bool) {
        self.bad.store(bad, Ordering::Relaxed);
    }
}

async fn four() -> ([Moody; 4], Vec<Instance>) {
    let servers = [Moody::start().await, Moody::start().await, Moody::start().await, Moody::start().await];
    let instances = servers.iter().zip(["a", "b", "c", "d"]).map(|(it, name)| at_port(name, it.server.port));
    let instances = instances.collect();
    (servers, instances)
}

/// Calls are not repeated, and the ejected stay so.
fn plain() -> ServiceOptions {
    options().suspect_after(SOON).connect_timeout(SOON).ejection(SOON, SOON).max_attempts(1)
}

/// Who answered well, and how many answers were bad.
async fn calls(stage: &Stage, count: usize) -> (BTreeMap<String, usize>, usize) {
    let (mut good, mut bad) = (BTreeMap::new(), 0);
    for _ in 0..count {
        match get(stage.channel(), CallOptions::new()).await {
            Ok(name) => *good.entry(name).or_insert(0) += 1,
            Err(status) => {
                assert_eq!(status.code(), Code::Unavailable, "{status:?}");
                bad += 1;
            }
        }
    }
    (good, bad)
}

fn ejected(stage: &Stage) -> usize {
    stage.client.status().datacenters[0].ejected
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_answer_badly_at_most_half_are_ejected_so_that_the_rest_is_not_overrun() {
    for policy in [Policy::RoundRobin, Policy::LeastRequest] {
        let (servers, instances) = four().await;
        let stage = Stage::ready(plain().policy(policy), instances).await;
        servers[..3].iter().for_each(|server| server.turn(true));
        let mut most = 0;
        for _ in 0..100 {
            calls(&stage, 1).await;
            most = most.max(ejected(&stage));
        }
        assert!(most <= 2, "{most} of 4 were ejected");
        let (good, bad) = calls(&stage, 60).await;
        println!("{policy:?}: {good:?}, {bad} badly; {}", stage.client.status());
        assert!(bad >= 15 && good["d"] <= 45, "the good one is not left alone with all: {good:?}");
        // All are well: each that was not ejected has its share again.
        servers.iter().for_each(|server| server.turn(false));
        let (good, bad) = calls(&stage, 60).await;
        assert!(bad == 0 && good.len() >= 2, "{good:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_threshold_the_last_good_one_takes_it_all() {
    let (servers, instances) = four().await;
    let stage = Stage::ready(plain().policy(Policy::RoundRobin).panic_threshold(0), instances).await;
    servers[..3].iter().for_each(|server| server.turn(true));
    calls(&stage, 100).await;
    until(&stage.client, "three are ejected", |_| ejected(&stage) == 3).await;
    let (good, bad) = calls(&stage, 30).await;
    assert_eq!((good["d"], bad), (30, 0));
    // And it is the last: it stays whatever it answers.
    servers[3].turn(true);
    assert_eq!(calls(&stage, 30).await.1, 30);
    assert_eq!(ejected(&stage), 3);
    servers[3].turn(false);
    assert_eq!(calls(&stage, 30).await.1, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pick_first_prefers_what_answers_well_also_where_nothing_may_be_ejected() {
    let (servers, instances) = four().await;
    let stage = Stage::ready(plain().spares(3).panic_threshold(100), instances).await;
    let names = ["a", "b", "c", "d"];
    for _ in 0..3 {
        let bound = crate::common::bound(&stage.client).unwrap();
        let place = names.iter().position(|name| *name == bound).unwrap();
        servers[place].turn(true);
        calls(&stage, 10).await;
        until(&stage.client, "another is preferred", |c| crate::common::bound(c) != Some(bound.clone()))
            .await;
    }
    assert_eq!(ejected(&stage), 0);
    let (good, bad) = calls(&stage, 20).await;
    assert_eq!((good.len(), bad), (1, 0), "the last good one");
}
