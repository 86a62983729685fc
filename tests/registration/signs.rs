//! What Consul is told of the instance's life, and when it is not.

use std::{sync::mpsc, time::Duration};

use serde_json::json;
use tokio::{net::TcpListener, sync::watch, time::Instant};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic_failover::{
    InstanceId,
    server::{Registration, RegistrationStatus},
};

use super::world::{World, until, until_registered, until_status};

pub(crate) async fn what_serves_nothing_is_not_registered_and_gets_no_heartbeat(world: World) {
    let (probe, alive) = watch::channel(false);
    let registration = world.a().heartbeat(Duration::from_millis(300)).alive_while(alive).start().unwrap();
    // For longer than it would have taken.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(world.listed("").await.is_empty(), "nothing is registered before it serves");
    assert!(matches!(registration.status(), RegistrationStatus::Pending));
    let silent = |it: &RegistrationStatus| matches!(it, RegistrationStatus::Silent);
    for _ in 0..2 {
        probe.send_replace(true);
        world.until_passing(&["a"]).await;
        until_registered(&registration).await;
        probe.send_replace(false);
        until_status(&registration, "silent", silent).await;
        world.until_passing(&[]).await;
        assert_eq!(world.listed("").await.len(), 1, "it is critical, not gone");
    }
    // Taken out meanwhile, it is not registered anew.
    world.registry().deregister("a").await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(world.listed("").await.is_empty());
    probe.send_replace(true);
    world.until_passing(&["a"]).await;
    // Nobody looks any more.
    drop(probe);
    world.until_passing(&[]).await;
    until_status(&registration, "silent", silent).await;
    registration.leave().await;
    assert!(world.listed("").await.is_empty());
}

pub(crate) async fn a_tcp_check_and_a_grpc_check_follow_the_server(world: World) {
    let config = || tonic_failover::consul::ConsulConfig::new(world.registry().url()).unwrap();
    let second = Duration::from_secs(1);
    for kind in ["tcp", "grpc"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = InstanceId::from(listener.local_addr().unwrap());
        let id = Registration::default_id("s", &address);
        let it = Registration::builder(config(), "s", &id, address);
        let it = if kind == "tcp" { it.tcp_check(second) } else { it.grpc_check(second) };
        let registration = it.settle(Duration::ZERO).start().unwrap();
        let server =
            Server::builder().add_service(registration.health_service()).serve_with_incoming_shutdown(
                TcpListenerStream::new(listener),
                registration.left(std::future::pending()),
            );
        let server = tokio::spawn(server);
        world.until_passing(&[&id]).await;
        until_registered(&registration).await;
        let index = async || world.registry().get("/v1/health/service/s").await.unwrap().index();
        let before = index().await;
        // Longer than it takes to look after the entry.
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert_eq!(index().await, before, "an entry that is as it should be is left alone");
        server.abort();
        world.until_passing(&[]).await;
        registration.leave().await;
        assert!(world.listed("").await.is_empty());
    }
}

pub(crate) async fn heartbeats_come_from_a_runtime_of_their_own(world: World) {
    let ttl = Duration::from_millis(600);
    let builder = world.a().heartbeat(ttl);
    let (release, blocked) = mpsc::channel::<()>();
    // A runtime of the application's, whose only worker is busy with something else.
    let busy = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let registration = builder.start().unwrap();
            until_registered(&registration).await;
            let _ = blocked.recv();
            registration.leave().await;
        });
    });
    world.until_passing(&["a"]).await;
    let begun = Instant::now();
    while begun.elapsed() < 4 * ttl {
        assert_eq!(world.registry().passing("s").await.unwrap(), ["a"]);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(release);
    tokio::task::spawn_blocking(|| busy.join().unwrap()).await.unwrap();
    assert!(world.listed("").await.is_empty());
}

pub(crate) async fn it_is_registered_when_consul_comes_and_an_outage_is_told_once(mut world: World) {
    world.stop().await;
    let registration = world.a().start().unwrap();
    let lost = |it: &RegistrationStatus| matches!(it, RegistrationStatus::Lost { .. });
    for round in 0..2 {
        let mut status = registration.subscribe();
        until_status(&registration, "lost", lost).await;
        status.mark_unchanged();
        // Several tries.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!status.has_changed().unwrap(), "round {round}: told once: {}", registration.status());
        world.start_empty().await;
        world.until_passing(&["a"]).await;
        until_registered(&registration).await;
        if round == 0 {
            world.hang().await;
        }
        if let (World::Real(consul), 0) = (&mut world, round) {
            until_status(&registration, "lost", lost).await;
            consul.kill().await.unwrap();
        }
    }
    assert_eq!(world.service().await["Tags"], json!([]));
}

pub(crate) async fn dropped_it_says_nothing_and_turns_critical(world: World) {
    let registration = world.a().heartbeat(Duration::from_millis(300)).start().unwrap();
    let mut status = registration.subscribe();
    until_registered(&registration).await;
    let other = registration.clone();
    drop(registration);
    world.until_passing(&["a"]).await;
    drop(other);
    world.until_passing(&[]).await;
    assert_eq!(world.listed("").await.len(), 1);
    until("its task has ended", async || status.clone().has_changed().is_err()).await;
    assert!(status.borrow_and_update().is_registered(), "nothing more was told");
}
