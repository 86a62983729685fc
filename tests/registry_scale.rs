//! Many services and one Consul: its connections are shared out, whatever the number.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{fs, time::Duration};

use common::{SOON, deregister, register};
use futures_util::{StreamExt as _, future::join_all, stream};
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tonic_failover::{
    client::{BuildError, ConsulService, FailoverEvent, GrpcClient, ServiceOptions},
    consul::ConsulConfig,
    testkit::{Agent, Registry},
};

const EVERY: Duration = Duration::from_secs(2);

fn name(at: usize) -> String {
    format!("s-{at}")
}

/// One after another takes most of the time of these tests.
async fn some_at_once(all: std::ops::Range<usize>, act: impl AsyncFn(usize)) {
    stream::iter(all).for_each_concurrent(8, |at| act(at)).await;
}

/// An instance of each of so many services.
async fn register_all(registry: &Registry, services: usize, instance: &str, port: u16) {
    let register = async |at| register(registry, &name(at), &format!("{instance}-{at}"), port).await;
    some_at_once(0..services, register).await;
}

fn service(url: &str, services: usize) -> ConsulService {
    // Nobody listens where these instances are said to be, and that is not the matter here.
    // How long an answer takes is not either.
    let patient = ConsulConfig::new(url).unwrap().request_timeout(SOON);
    let options = |at| ServiceOptions::new(name(at)).ejection(SOON, SOON);
    (0..services)
        .fold(ConsulService::builder(patient).read_at_least_every(EVERY), |all, at| all.service(options(at)))
        .build()
        .unwrap()
}

/// Waits until each knows `instances` of its service.
async fn until_known(clients: &[GrpcClient], instances: usize) {
    let known = async {
        while !clients
            .iter()
            .all(|it| it.status().datacenters.first().is_some_and(|it| it.known == instances))
        {
            sleep(Duration::from_millis(10)).await;
        }
    };
    if timeout(3 * SOON, known).await.is_err() {
        let unknown = clients.iter().flat_map(|it| it.status().datacenters);
        let unknown: Vec<_> = unknown.filter(|it| it.known != instances).collect();
        panic!("{} are not known, such as {:#?}", unknown.len(), unknown.first());
    }
}

/// Connections of ours to a port of this host that are open now.
fn connections(port: u16) -> usize {
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    // Remote address, which is 127.0.0.1, and state; 01 is ESTABLISHED.
    let address = format!("0100007F:{port:04X}");
    fields.filter(|it| it[2] == address && it[3] == "01").count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_services_hold_sixty_four_long_polls_and_see_every_change() {
    let agent = Agent::start("dc1").await.unwrap();
    let consul = service(&agent.url(), 300);
    let clients: Vec<_> = (0..300).map(|at| consul.grpc_client(&name(at)).unwrap()).collect();
    agent.wait_for(|it| it.blocked == 64 && it.requests_to("/v1/health") >= 300).await.unwrap();
    register_all(agent.registry(), 300, "i", 1).await;
    let begun = Instant::now();
    until_known(&clients, 1).await;
    // Everybody also asks afresh, at the same moment.
    join_all((0..300).map(|at| {
        let (consul, name) = (consul.clone(), name(at));
        async move { consul.update_grpc_client(&name).await }
    }))
    .await;
    let seen = agent.counters();
    println!(
        "most long polls {}, most connections {}, last change seen after {:.1} s",
        seen.most_blocked,
        seen.most_connections,
        begun.elapsed().as_secs_f64()
    );
    assert_eq!(seen.most_blocked, 64);
    // With the test's own, one by one: 64 that wait, 16 that read, 32 kept for later.
    assert!(seen.most_connections <= 64 + 16 + 32 + 1, "{seen:?}");
    consul.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_consul_never_sees_its_limit_of_connections() {
    let Some(agent) = common::consul().await else { return };
    let port = agent.http_addr().port();
    register_all(agent.registry(), 250, "i", 1).await;
    let consul = service(&agent.url(), 250);
    let clients: Vec<_> = (0..250).map(|at| consul.grpc_client(&name(at)).unwrap()).collect();
    let mut lost: Vec<_> = clients.iter().map(GrpcClient::events).collect();
    let watcher = tokio::spawn(async move {
        let mut most = 0;
        loop {
            most = most.max(connections(port));
            assert!(most < 200, "Consul resets what goes beyond");
            if most > 0 && connections(port) == 0 {
                return most;
            }
            sleep(Duration::from_millis(5)).await;
        }
    });
    until_known(&clients, 1).await;
    for _ in 0..3 {
        let all = (0..250).map(|at| {
            let (consul, name) = (consul.clone(), name(at));
            async move { consul.update_grpc_client(&name).await }
        });
        join_all(all).await;
    }
    register_all(agent.registry(), 250, "j", 2).await;
    until_known(&clients, 2).await;
    some_at_once(0..250, async |at| deregister(agent.registry(), &format!("i-{at}")).await).await;
    until_known(&clients, 1).await;
    consul.shutdown().await;
    drop((consul, clients));
    for events in &mut lost {
        while let Some(event) = events.next().await {
            assert!(!matches!(event, FailoverEvent::RegistryLost { .. }), "{event:?}");
        }
    }
    drop(agent);
    println!("most connections {}", timeout(SOON, watcher).await.unwrap().unwrap());
}

/// Waits until each has been seen fresh once.
async fn until_each_was_fresh(clients: &[GrpcClient]) {
    let mut left: Vec<_> = clients.iter().collect();
    let fresh = async {
        while !left.is_empty() {
            left.retain(|it| it.status().datacenters.first().is_none_or(|it| it.stale_since.is_some()));
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(3 * SOON, fresh).await.expect("none is stale for ever");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_few_connections_are_left_long_polls_make_room_for_reads() {
    let agent = Agent::start("dc1").await.unwrap();
    register_all(agent.registry(), 300, "i", 1).await;
    let _few = agent.faults().limit_connections(40);
    let consul = service(&agent.url(), 300);
    let clients: Vec<_> = (0..300).map(|at| consul.grpc_client(&name(at)).unwrap()).collect();
    until_known(&clients, 1).await;
    until_each_was_fresh(&clients).await;
    let waiting = agent.counters().blocked;
    println!("{waiting} wait for news");
    assert!((1..=40).contains(&waiting));
    consul.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_others_hold_most_of_the_connections_to_a_real_consul_no_service_stays_stale() {
    let Some(agent) = common::consul().await else { return };
    register_all(agent.registry(), 300, "i", 1).await;
    let mut held = Vec::new();
    for _ in 0..160 {
        let mut other = TcpStream::connect(agent.http_addr()).await.unwrap();
        let question = b"GET /v1/health/service/none?index=1000000&wait=600s HTTP/1.1\r\nHost: x\r\n\r\n";
        other.write_all(question).await.unwrap();
        held.push(other);
    }
    let consul = service(&agent.url(), 300);
    let clients: Vec<_> = (0..300).map(|at| consul.grpc_client(&name(at)).unwrap()).collect();
    until_known(&clients, 1).await;
    until_each_was_fresh(&clients).await;
    consul.shutdown().await;
    drop(held);
}

#[tokio::test]
async fn bounds_that_cannot_be_kept_are_refused_by_name() {
    let builder = || {
        ConsulService::builder(ConsulConfig::new("127.0.0.1:1").unwrap()).service(ServiceOptions::new("a"))
    };
    for polls in [0, 129] {
        let error = builder().max_long_polls(polls).build().unwrap_err();
        assert!(matches!(error, BuildError::MaxLongPolls { value } if value == polls));
        assert!(error.to_string().starts_with(&format!("max_long_polls = {polls} is not usable: 1 to 128")));
    }
    for time in [Duration::ZERO, Duration::from_secs(601)] {
        let error = builder().read_at_least_every(time).build().unwrap_err();
        assert!(error.to_string().starts_with(&format!("read_at_least_every = {time:?} is not usable")));
    }
    assert!(builder().max_long_polls(128).read_at_least_every(Duration::from_secs(1)).build().is_ok());
}
