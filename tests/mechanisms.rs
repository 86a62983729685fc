//! Each mechanism carries its fault test: what that holds to be true is not true
//! when the mechanism is switched off. The fault tests themselves are in
//! `registry_faults.rs`, `registry_doubts.rs`, `datacenters.rs` and `instance_death.rs`.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{
    Backend, bound, builder, get, register,
    stage::{first, impatient},
    steady, until, until_bound_to,
};
use tokio::{net::TcpListener, task::JoinSet, time::timeout};
use tonic_failover::{
    client::{ConsulServiceBuilder, Fallback, GrpcClient, Mechanism},
    testkit::{Agent, Cluster},
};

/// Long enough to see that something does not come about.
const NEVER: Duration = Duration::from_millis(1500);

/// Two instances and a client that has both ready.
struct Bench {
    agent: Agent,
    client: GrpcClient,
    backends: [Backend; 2],
}

impl Bench {
    async fn set(without: Option<Mechanism>) -> Self {
        let agent = Agent::start("dc1").await.unwrap();
        let backends = [Backend::start("a").await, Backend::start("b").await];
        for backend in &backends {
            register(agent.registry(), "counter", &backend.name, backend.port).await;
        }
        let client = client(impatient(&agent.url()).wait(common::SOON), without);
        until(&client, "both are ready", |c| first(c).ready == 2).await;
        Self { agent, client, backends }
    }

    /// Whether a call is answered, in a while.
    async fn serves(&self) -> bool {
        timeout(NEVER, get(self.client.channel())).await.is_ok_and(|it| it.is_ok())
    }
}

fn client(builder: ConsulServiceBuilder, without: Option<Mechanism>) -> GrpcClient {
    let builder = match without {
        Some(mechanism) => builder.without(mechanism),
        None => builder,
    };
    builder.service(steady()).build().unwrap().grpc_client("counter").unwrap()
}

async fn within(wait: Duration, client: &GrpcClient, is_so: impl Fn(&GrpcClient) -> bool) -> bool {
    let met = async {
        while !is_so(client) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(wait, met).await.is_ok()
}

#[tokio::test]
async fn the_last_known_good_list_is_what_serves_when_the_registry_fails() {
    for (without, holds) in [(None, true), (Some(Mechanism::KeepOnError), false)] {
        let bench = Bench::set(without).await;
        bench.agent.faults().status(500, "rpc error");
        bench.agent.faults().drop_connections();
        until(&bench.client, "it is stale", |c| first(c).stale_since.is_some()).await;
        assert_eq!((first(&bench.client).known == 2, bench.serves().await), (holds, holds), "{without:?}");
    }
}

#[tokio::test]
async fn the_last_known_good_list_is_what_serves_when_the_list_is_empty() {
    for (without, holds) in [(None, true), (Some(Mechanism::KeepOnEmpty), false)] {
        let bench = Bench::set(without).await;
        bench.agent.faults().empty("counter");
        until(&bench.client, "it was heard", |c| first(c).known == 0 || first(c).empty_since.is_some()).await;
        assert_eq!((first(&bench.client).known == 2, bench.serves().await), (holds, holds), "{without:?}");
    }
}

#[tokio::test]
async fn demotion_is_what_moves_calls_to_another_datacenter_when_a_list_stays_empty() {
    for (without, holds) in [(None, true), (Some(Mechanism::Demotion), false)] {
        let [dc1, dc2] = Cluster::start(["dc1", "dc2"]).await.unwrap().into_agents().try_into().unwrap();
        let (near, far) = (Backend::start("near").await, Backend::start("far").await);
        register(dc1.registry(), "counter", "near", near.port).await;
        register(dc2.registry(), "counter", "far", far.port).await;
        let quick = builder(&dc1.url()).fallback(Fallback::nearest());
        let client = client(quick.demote_after(Duration::from_millis(200)), without);
        until_bound_to(&client, "near").await;
        dc1.faults().empty("counter");
        until(&client, "it was heard", |c| first(c).empty_since.is_some()).await;
        let wait = if holds { common::SOON } else { NEVER };
        let moved = within(wait, &client, |c| bound(c).as_deref() == Some("far")).await;
        assert_eq!(moved, holds, "{without:?}");
    }
}

#[tokio::test]
async fn the_reset_of_the_index_is_what_shows_changes_after_a_fall() {
    for (without, holds) in [(None, true), (Some(Mechanism::IndexReset), false)] {
        let bench = Bench::set(without).await;
        bench.agent.wait_for(|it| it.blocked == 1).await.unwrap();
        bench.agent.faults().reset_index();
        register(bench.agent.registry(), "counter", "c", bench.backends[0].port + 1).await;
        let wait = if holds { common::SOON } else { NEVER };
        let seen = within(wait, &bench.client, |c| first(c).known == 3).await;
        assert_eq!(seen, holds, "{without:?}");
    }
}

#[tokio::test]
async fn ejection_is_what_leaves_an_instance_alone_that_the_registry_still_lists() {
    for (without, holds) in [(None, true), (Some(Mechanism::Ejection), false)] {
        // Accepts, and hangs up: passing, as far as the registry can tell.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let dialled = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        let count = Arc::clone(&dialled);
        tasks.spawn(async move {
            while listener.accept().await.is_ok() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (agent, good) = (Agent::start("dc1").await.unwrap(), Backend::start("good").await);
        register(agent.registry(), "counter", "good", good.port).await;
        register(agent.registry(), "counter", "bad", port).await;
        let client = client(builder(&agent.url()), without);
        until_bound_to(&client, "good").await;
        until(&client, "the bad one is known", |c| first(c).known == 2).await;
        tokio::time::sleep(NEVER).await;
        let dialled = dialled.load(Ordering::Relaxed);
        println!("{without:?}: dialled {dialled} times");
        assert_eq!(dialled <= 6, holds, "{without:?}: {dialled}");
    }
}
