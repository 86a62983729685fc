//! What becomes of calls, events and status when the registry fails.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::{
    Backend, Callers, Method, SOON, bound, builder, consul, deregister, flag, get,
    record::Record,
    register,
    stage::{Stage, first, impatient, print},
    steady, until, until_bound_to,
};
use tokio::{
    io::AsyncReadExt,
    net::TcpStream,
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_util::task::AbortOnDropHandle;
use tonic_failover::{
    client::{FailoverEvent, Policy},
    consul::{Consistency, HealthQuery, RegistryError},
    testkit::{Agent, Check, ConsulCluster, ConsulProcess, Faults, Registration, Switch},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_on_while_consul_is_killed_and_comes_back_having_forgotten_everything() {
    let Some(mut consul) = consul().await else { return };
    // A higher index than a fresh agent's, so that it falls.
    for port in 1..30 {
        register(consul.registry(), "other", &format!("other-{port}"), port).await;
    }
    let stage = Stage::set(consul.registry(), builder(&consul.url()), Method::Increment).await;

    consul.kill().await.unwrap();
    stage.lost("cannot connect").await;
    consul.restart().await.unwrap();
    stage.back().await;
    until(&stage.client, "the list is empty", |c| first(c).empty_since.is_some()).await;
    assert!(stage.client.status().to_string().contains("dc1 lists none for"), "{}", stage.client.status());
    assert_eq!(first(&stage.client).known, 2, "the last list that was good stays");
    stage.callers.go_on_for(50).await;

    // The bound one first: another would take its calls over until it is back.
    let mut backends = [&stage.a, &stage.b];
    backends.sort_by_key(|backend| Some(&backend.name) != bound(&stage.client).as_ref());
    for backend in backends {
        register(consul.registry(), "counter", &backend.name, backend.port).await;
    }
    until(&stage.client, "both are listed", |c| first(c).empty_since.is_none() && first(c).known == 2).await;
    // The index has fallen, and yet news comes at once.
    let c = Backend::start("c").await;
    register(consul.registry(), "counter", "c", c.port).await;
    until(&stage.client, "the new one is known", |c| first(c).known == 3).await;
    let record = stage.end("Consul killed and empty").await;
    assert_eq!(record.episodes(), (1, 1), "{:#?}", record.words());
    assert_eq!(record.bound().len(), 1, "no reason to move: {:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_register_again_by_themselves_are_followed_without_a_failed_call() {
    let Some(mut consul) = consul().await else { return };
    let mut backends = Vec::new();
    for name in ["a", "b", "c", "d"] {
        backends.push(Backend::start_with(name, 0, &consul.url(), &[]).await);
    }
    let client = common::steady_client(&consul.url());
    let record = Record::of(&client);
    until(&client, "all are known", |c| first(c).known == 4 && first(c).ready == 2).await;
    let callers = Callers::at_a_fixed_rate(&client, Method::Increment);
    for round in 1..=2 {
        consul.kill().await.unwrap();
        until(&client, "it is stale", |c| first(c).stale_since.is_some()).await;
        callers.go_on_for(100).await;
        consul.restart().await.unwrap();
        until(&client, "all are known again", |c| {
            first(c).stale_since.is_none() && first(c).empty_since.is_none() && first(c).known == 4
        })
        .await;
        callers.go_on_for(100).await;
        assert_eq!(record.episodes(), (round, round), "{:#?}", record.words());
    }
    print("registered again by themselves", &callers.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_hides_its_instances_after_a_restart_ends_nothing() {
    let Some(bin) = common::consul_bin() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut consul = ConsulProcess::builder(bin).server(folder.path()).start().await.unwrap();
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    for backend in [&a, &b] {
        let at = format!("127.0.0.1:{}", backend.port);
        let entry =
            Registration::new("counter", &backend.name, "127.0.0.1", backend.port).check(Check::grpc(at));
        consul.registry().register(&entry).await.unwrap();
    }
    let client = common::steady_client(&consul.url());
    let record = Record::of(&client);
    until(&client, "both are ready", |c| first(c).ready == 2).await;
    let callers = Callers::at_a_fixed_rate(&client, Method::Increment);
    consul.restart().await.unwrap();
    // It may be back before anybody has missed it: it is asked by us in any case.
    client.consul_service().update_grpc_client("counter").await.unwrap();
    until(&client, "both are listed", |c| {
        let here = first(c);
        here.known == 2 && here.empty_since.is_none() && here.stale_since.is_none()
    })
    .await;
    record.until("what began has ended", Record::takes_turns).await;
    callers.go_on_for(100).await;
    print("hidden by a restart", &callers.stop().await);
    println!("{:#?}", record.words());
}

/// One fault of an agent: how it is told, that what is known stays in use, that
/// no call fails, and that it ends and hides no change.
async fn is_one_episode(
    what: &str,
    words: &str,
    kind: fn(&RegistryError) -> bool,
    fault: fn(&Faults<'_>) -> Switch,
) {
    let agent = Agent::start("dc1").await.unwrap();
    let stage = Stage::set(agent.registry(), impatient(&agent.url()), Method::Increment).await;
    let fault = fault(&agent.faults());
    stage.lost(words).await;
    let status = first(&stage.client);
    assert_eq!((status.known, status.ready), (2, 2), "the last list that was good stays");
    assert_eq!((status.doubt, status.empty_since), (None, None), "nothing was learned");
    assert!(status.registry_error.as_ref().is_some_and(|it| it.contains(words)), "{status:?}");
    let query = HealthQuery::new("counter").unwrap();
    let told = async {
        loop {
            match stage.client.consul_client().healthy_instances(&query).await.unwrap_err() {
                error if kind(&error) => return,
                // A busy machine, which says nothing about the fault.
                RegistryError::TimedOut { .. } => {}
                error => panic!("{error:?}"),
            }
        }
    };
    timeout(SOON, told).await.expect("it is told");
    // Who asks now has what is known.
    let generation = stage.client.binding().generation();
    let binding = stage.client.consul_service().update_grpc_client("counter").await.unwrap();
    assert_eq!(binding.generation(), generation);
    // Several failures are still the same episode.
    stage.callers.go_on_for(320).await;
    stage.episodes_so_far(1, 0);
    fault.off();
    stage.back().await;
    stage.episodes(1).await;
    stage.a_change_is_seen(agent.registry()).await;
    let record = stage.end(what).await;
    let lost = record.count(|event| matches!(event, FailoverEvent::RegistryLost { .. }));
    assert_eq!(lost, 1, "{:#?}", record.words());
    assert_eq!(record.bound().len(), 1, "no reason to move: {:#?}", record.words());
}

/// Makes a test of each fault that is told as an error.
macro_rules! faults {
    ($($name:ident: $what:literal, $words:literal, $kind:pat, $fault:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            is_one_episode($what, $words, |error| matches!(error, $kind), $fault).await;
        }
    )*};
}

faults! {
    an_agent_that_refuses_connections_fails_no_call:
        "connection refused", "cannot connect", RegistryError::Unreachable { .. }, |f| f.refuse();
    an_agent_that_resets_connections_fails_no_call:
        "connection reset", "http_max_conns_per_client", RegistryError::Reset { .. },
        |f| f.limit_connections(0);
    an_agent_that_closes_connections_fails_no_call:
        "connection closed", "http_max_conns_per_client", RegistryError::Reset { .. },
        |f| f.drop_connections();
    an_agent_that_hangs_fails_no_call:
        "time-out", "did not answer within", RegistryError::TimedOut { .. }, |f| f.hang();
    an_agent_that_is_too_slow_fails_no_call:
        "slow", "did not answer within", RegistryError::TimedOut { .. },
        |f| f.slow(Duration::from_secs(10));
    an_agent_without_a_leader_fails_no_call:
        "500 without a leader", "the registry has no leader", RegistryError::NoLeader,
        |f| f.status(500, "No cluster leader");
    an_agent_without_servers_fails_no_call:
        "500 without servers", "no server to ask", RegistryError::NoServers,
        |f| f.status(500, "No known Consul servers");
    an_agent_without_a_path_to_the_datacenter_fails_no_call:
        "500 without a path", "knows no way to datacenter", RegistryError::NoPath { .. },
        |f| f.status(500, "No path to datacenter");
    an_agent_with_another_trouble_fails_no_call:
        "500", "status 500: rpc error", RegistryError::Status { code: 500, .. },
        |f| f.status(500, "rpc error making call: EOF");
    an_agent_that_refuses_the_token_fails_no_call:
        "403", "refuses the token: ACL not found", RegistryError::Forbidden { .. },
        |f| f.status(403, "ACL not found");
    an_agent_that_finds_nothing_fails_no_call:
        "404", "does not have what was asked for", RegistryError::NotFound, |f| f.status(404, "");
    an_agent_that_asks_for_fewer_requests_fails_no_call:
        "429", "asks for fewer requests", RegistryError::RateLimited { retry_after: Some(_) },
        |f| f.rate_limit(Duration::from_secs(1));
    an_answer_that_is_no_json_fails_no_call:
        "no JSON", "not understood", RegistryError::NotUnderstood { .. }, |f| f.garbage();
    an_answer_of_another_shape_fails_no_call:
        "another shape", "not understood", RegistryError::NotUnderstood { .. },
        |f| f.status(200, r#"{"Nodes":[]}"#);
    an_answer_that_is_too_large_fails_no_call:
        "too large", "larger than 16777216 bytes", RegistryError::TooLarge { .. },
        |f| f.oversized(17 << 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_agent_whose_requests_somebody_else_uses_up_fails_no_call() {
    let Some(bin) = common::consul_bin() else { return };
    let folder = tempfile::tempdir().unwrap();
    let server = ConsulProcess::builder(&bin).start().await.unwrap();
    let agent = ConsulProcess::builder(&bin)
        .node("c1")
        .client(folder.path())
        .retry_join([server.ports().serf_lan])
        // Of what an agent asks the servers: 10 a second, after a burst.
        .hcl("limits { rpc_rate = 10 rpc_max_burst = 300 }")
        .start()
        .await
        .unwrap();
    let stage = Stage::set(agent.registry(), impatient(&agent.url()), Method::Increment).await;
    let registry = agent.registry().clone();
    let other = AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            // Answered or refused.
            registry.get("/v1/health/service/other?stale").await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }));
    stage.lost("asks for fewer requests").await;
    assert_eq!((first(&stage.client).known, first(&stage.client).ready), (2, 2));
    stage.callers.go_on_for(320).await;
    drop(other);
    stage.back().await;
    stage.record.until("what began has ended", |r| r.episodes().0 == r.episodes().1).await;
    let record = stage.end("429 of a real agent").await;
    assert_eq!(record.bound().len(), 1, "{:#?}", record.words());
}

/// A program that takes every connection which the agent gives.
struct Hog {
    /// It has been refused one: no other is left.
    full: Arc<AtomicBool>,
    _task: AbortOnDropHandle<()>,
}

impl Hog {
    fn at(address: SocketAddr) -> Self {
        let full = flag();
        let told = full.clone();
        let task = tokio::spawn(async move {
            let mut held = JoinSet::new();
            loop {
                if let Ok(mut stream) = TcpStream::connect(address).await {
                    // Nothing is asked, so only a refusal ends it.
                    held.spawn(async move { drop(stream.read(&mut [0]).await) });
                }
                while held.try_join_next().is_some() {
                    told.store(true, Ordering::Relaxed);
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        Self { full, _task: AbortOnDropHandle::new(task) }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_somebody_else_holds_fail_no_call() {
    let Some(consul) = consul().await else { return };
    let stage = Stage::set(consul.registry(), impatient(&consul.url()), Method::Increment).await;
    let hog = Hog::at(consul.http_addr());
    until(&stage.client, "all are held", |_| hog.full.load(Ordering::Relaxed)).await;
    // One is ours while we keep it. Who asks afresh needs another, and loses both;
    // but may be faster than the hog at the one that was given up, and have it again soon after.
    let ask = async {
        while !stage.is_lost("http_max_conns_per_client") {
            stage.client.consul_service().update_grpc_client("counter").await.unwrap();
            stage.callers.go_on_for(64).await;
        }
    };
    timeout(SOON, ask).await.expect("no connection is left");
    assert_eq!((first(&stage.client).known, first(&stage.client).ready), (2, 2));
    stage.callers.go_on_for(320).await;
    drop(hog);
    stage.back().await;
    stage.record.until("what began has ended", |r| r.episodes().0 == r.episodes().1).await;
    stage.a_change_is_seen(consul.registry()).await;
    let record = stage.end("200 connections held by somebody else").await;
    assert_eq!(record.bound().len(), 1, "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_registry_is_waited_for() {
    let agent = Agent::start("dc1").await.unwrap();
    agent.faults().slow(Duration::from_secs(1));
    let stage = Stage::set(agent.registry(), builder(&agent.url()), Method::Increment).await;
    let c = Backend::start("c").await;
    register(agent.registry(), "counter", "c", c.port).await;
    until(&stage.client, "the new one is known", |c| first(c).known == 3).await;
    let binding = stage.client.consul_service().update_grpc_client("counter").await.unwrap();
    assert_eq!(binding.generation(), stage.client.binding().generation());
    let record = stage.end("slow").await;
    assert_eq!(record.episodes(), (0, 0), "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sudden_empty_list_ends_nothing() {
    let agent = Agent::start("dc1").await.unwrap();
    let quick = builder(&agent.url()).demote_after(Duration::from_millis(300));
    let stage = Stage::set(agent.registry(), quick, Method::Increment).await;
    let fault = agent.faults().empty("counter");
    // Nothing is better than what is demoted, so it stays in use.
    until(&stage.client, "it is demoted", |c| first(c).demoted).await;
    assert_eq!((first(&stage.client).known, first(&stage.client).ready), (2, 2));
    stage.callers.go_on_for(50).await;
    fault.off();
    until(&stage.client, "it is listed again", |c| first(c).empty_since.is_none()).await;
    assert!(!first(&stage.client).demoted);
    let told = |record: &Record| {
        let begun = record.count(|it| matches!(it, FailoverEvent::ListEmpty { .. }));
        (begun, record.count(|it| matches!(it, FailoverEvent::ListFilled { .. })))
    };
    stage.record.until("it is told, and told again when it ends", |r| told(r) == (1, 1)).await;
    let record = stage.end("empty list").await;
    assert_eq!(told(&record), (1, 1), "{:#?}", record.words());
    assert_eq!(record.episodes(), (0, 0), "{:#?}", record.words());
    assert_eq!(record.bound().len(), 1, "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_are_deregistered_all_at_once_stay_the_last_known_good() {
    let Some(consul) = consul().await else { return };
    let stage = Stage::set(consul.registry(), builder(&consul.url()), Method::Increment).await;
    // The one that is not bound first: then the list is never partly right.
    let mut names = ["a", "b"];
    names.sort_by_key(|name| Some(*name) == bound(&stage.client).as_deref());
    deregister(consul.registry(), names[0]).await;
    deregister(consul.registry(), names[1]).await;
    until(&stage.client, "the list is empty", |c| first(c).empty_since.is_some()).await;
    stage.callers.go_on_for(50).await;
    stage.end("all deregistered").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_there_before_consul_is_bound_soon_after_it() {
    let Some(mut consul) = consul().await else { return };
    consul.kill().await.unwrap();
    let client = common::steady_client(&consul.url());
    let record = Record::of(&client);
    until(&client, "it is stale", |c| first(c).stale_since.is_some()).await;
    let error = client.ready_within(Duration::from_millis(300)).await.unwrap_err().to_string();
    assert!(error.contains("local has not answered yet") && error.contains("cannot connect"), "{error}");

    consul.restart().await.unwrap();
    let started = Instant::now();
    let a = Backend::start("a").await;
    register(consul.registry(), "counter", "a", a.port).await;
    client.ready().await.unwrap();
    println!("bound {:?} after Consul was there", started.elapsed());
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "a");
    record.until("one episode", |r| r.episodes() == (1, 1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_dies_while_consul_is_away_is_left_for_the_spare() {
    let Some(mut consul) = consul().await else { return };
    let mut stage = Stage::set(consul.registry(), builder(&consul.url()), Method::Get).await;
    consul.kill().await.unwrap();
    stage.lost("cannot connect").await;
    let (dies, lives) = if bound(&stage.client).as_deref() == Some("a") {
        (&mut stage.a, &stage.b)
    } else {
        (&mut stage.b, &stage.a)
    };
    dies.kill().await;
    until_bound_to(&stage.client, &lives.name).await;
    stage.callers.go_on_for(100).await;
    // And back, when the other one dies after the first has come up again.
    let again = Backend::start_with(&dies.name, dies.port, common::NOWHERE, &[]).await;
    until(&stage.client, "it is readmitted", |c| first(c).ready == 2).await;
    if lives.name == "a" {
        stage.a.kill().await
    } else {
        stage.b.kill().await
    }
    until_bound_to(&stage.client, &again.name).await;
    stage.callers.go_on_for(100).await;
    stage.end("instance dies without Consul").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_spare_another_known_instance_is_dialled_without_consul() {
    let Some(mut consul) = consul().await else { return };
    let mut backends = Vec::new();
    for name in ["a", "b", "c"] {
        backends.push(Backend::start(name).await);
        register(consul.registry(), "counter", name, backends.last().unwrap().port).await;
    }
    let service = builder(&consul.url()).service(steady().spares(0)).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    client.ready().await.unwrap();
    until(&client, "one is ready", |c| first(c).known == 3 && first(c).ready == 1).await;
    let callers = Callers::at_a_fixed_rate(&client, Method::Get);
    consul.kill().await.unwrap();
    for _ in 0..2 {
        let name = bound(&client).unwrap();
        backends.iter_mut().find(|b| b.name == name).unwrap().kill().await;
        until(&client, "another is bound", |c| bound(c).is_some_and(|b| b != name)).await;
        callers.go_on_for(50).await;
    }
    print("no spare, no Consul", &callers.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn round_robin_goes_on_without_consul_too() {
    let Some(mut consul) = consul().await else { return };
    let mut backends = Vec::new();
    for name in ["a", "b", "c"] {
        backends.push(Backend::start(name).await);
        register(consul.registry(), "counter", name, backends.last().unwrap().port).await;
    }
    let service = builder(&consul.url()).service(steady().policy(Policy::RoundRobin)).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    until(&client, "all are ready", |c| first(c).ready == 3).await;
    let callers = Callers::at_a_fixed_rate(&client, Method::Get);
    consul.kill().await.unwrap();
    callers.go_on_for(50).await;
    backends.remove(1).kill().await;
    until(&client, "it is ejected", |c| first(c).ejected == 1).await;
    callers.go_on_for(100).await;
    print("round robin, no Consul", &callers.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_leader_stale_answers_serve_and_default_ones_are_an_episode() {
    let Some(bin) = common::consul_bin() else { return };
    let mut cluster = ConsulCluster::start(bin, 3, 0).await.unwrap();
    let url = cluster.servers()[0].url();
    let impatient = builder(&url).wait(Duration::from_secs(1));
    let stage = Stage::set(cluster.servers()[0].registry(), impatient, Method::Increment).await;
    let strict = builder(&url)
        .wait(Duration::from_secs(1))
        .service(steady().consistency(Consistency::Default))
        .build()
        .unwrap()
        .grpc_client("counter")
        .unwrap();
    strict.ready().await.unwrap();
    let (record, callers) = (Record::of(&strict), Callers::at_a_fixed_rate(&strict, Method::Increment));

    cluster.kill(&[1, 2]).await.unwrap();
    until(&strict, "the default reader is stale", |c| first(c).stale_since.is_some()).await;
    callers.go_on_for(50).await;
    stage.callers.go_on_for(50).await;
    // A client that starts now is bound at once: the servers answer without a leader.
    let late = common::steady_client(&url);
    let started = Instant::now();
    late.ready().await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "it hung: {:?}", started.elapsed());
    // Default reads hang for 7 s; neither an update nor a call waits that long.
    let binding = strict.consul_service().update_grpc_client("counter").await.unwrap();
    assert_eq!(binding.generation(), strict.binding().generation());
    assert!(get(strict.channel()).await.is_ok());

    print("no leader, default", &callers.stop().await);
    assert_eq!(record.episodes(), (1, 0), "{:#?}", record.words());
    // Stale answers come, and are known to be old.
    stage.lost("cut off from the leader").await;
    let record = stage.end("no leader, stale").await;
    assert_eq!(record.episodes(), (1, 0), "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_consul_is_an_episode_and_the_calls_go_on() {
    let Some(consul) = consul().await else { return };
    let stage = Stage::set(consul.registry(), impatient(&consul.url()), Method::Increment).await;
    consul.pause().await.unwrap();
    stage.lost("did not answer within").await;
    consul.resume().unwrap();
    stage.back().await;
    let record = stage.end("Consul paused").await;
    assert_eq!(record.episodes(), (1, 1), "{:#?}", record.words());
}
