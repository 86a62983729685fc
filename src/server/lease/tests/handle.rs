//! On real threads: what a busy runtime, a drop and an end do.

use std::{
    hint::spin_loop,
    sync::{Arc as Shared, Barrier},
};

use tokio::runtime;

use super::*;
use crate::server::Probe;

fn lease(memory: &Memory, instance: &str) -> Lease {
    Lease::builder(memory.store(), instance, InstanceId::new("127.0.0.1", 1)).campaign().unwrap()
}

/// Serves the health service on a runtime.
fn serve(runtime: &runtime::Runtime, listener: std::net::TcpListener) {
    runtime.spawn(async move {
        let (_, health) = tonic_health::server::health_reporter();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        tonic::transport::Server::builder().add_service(health).serve_with_incoming(incoming).await.unwrap();
    });
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let soon = async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), soon).await.unwrap_or_else(|_| panic!("{what}"));
}

#[tokio::test]
async fn a_runtime_without_a_worker_to_spare_does_not_lose_the_lease() {
    let memory = Memory::released();
    let busy = runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    // Its own server runs on the busy runtime, too; the grace is longer than the trouble.
    let (listener, address) = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    };
    serve(&busy, listener);
    let probe = Probe::of(address).grace(Duration::from_secs(60));
    let id = InstanceId::new("127.0.0.1", address.port());
    let mine = Lease::builder(memory.store(), "busy", id).alive(&probe).campaign().unwrap();
    until("it is primary", || mine.token().is_some()).await;
    let token = mine.token().unwrap();
    let rival = lease(&memory, "rival");
    let workers = Shared::new(Barrier::new(3));
    for _ in 0..2 {
        let workers = workers.clone();
        busy.spawn(async move {
            workers.wait();
            let end = Instant::now() + Duration::from_millis(3_500);
            while Instant::now() < end {
                spin_loop();
            }
            workers.wait();
        });
    }
    tokio::task::spawn_blocking(move || {
        workers.wait();
        workers.wait();
    })
    .await
    .unwrap();
    assert_eq!(mine.token(), Some(token), "longer than the lease nothing of the application ran");
    assert_eq!(rival.token(), None);
    assert_eq!(memory.record().holder.unwrap().primary.token, token);
    drop(mine);
    busy.shutdown_background();
}

#[tokio::test]
async fn a_primary_that_serves_nothing_is_taken_over_within_five_seconds() {
    let memory = Memory::released();
    // Its server has one worker, which will stand still: the process lives, its port is open, and
    // connections are taken by the kernel.
    let server = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    serve(&server, listener);
    let id = InstanceId::new("127.0.0.1", address.port());
    let mine = Lease::builder(memory.store(), "hangs", id).alive(&Probe::of(address)).campaign().unwrap();
    until("it is primary", || mine.token().is_some()).await;
    let other = lease(&memory, "other");
    until("the other knows", || other.primary().is_some()).await;
    let (go_on, stands_still) = std::sync::mpsc::channel::<()>();
    server.spawn(async move {
        let _ = stands_still.recv();
    });
    let at = Instant::now();
    until("the other is primary", || other.token().is_some()).await;
    assert!(at.elapsed() <= Duration::from_secs(5), "{:?}", at.elapsed());
    assert_eq!(mine.token(), None);
    // It serves again, and may be primary again.
    drop(go_on);
    other.shutdown().await;
    until("it is primary again", || mine.token().is_some()).await;
    server.shutdown_background();
}

#[tokio::test]
async fn who_drops_the_last_handle_is_primary_no_more_and_releases() {
    let memory = Memory::released();
    let mine = lease(&memory, "a");
    let mut role = mine.role();
    until("it is primary", || mine.token().is_some()).await;
    let other = mine.clone();
    drop(mine);
    assert!(other.token().is_some());
    drop(other);
    assert_eq!(*role.borrow_and_update(), Role::Unknown);
    until("it is released", || memory.holder().is_none()).await;
    // Nothing is left that could tell of a role.
    until("it has ended", || role.has_changed().is_err()).await;
}

#[tokio::test]
async fn an_end_releases_and_is_told_to_those_who_come_late() {
    let memory = Memory::released();
    let mine = lease(&memory, "a");
    until("it is primary", || mine.token().is_some()).await;
    assert_eq!(mine.primary().unwrap().instance, "a");
    mine.shutdown().await;
    assert_eq!(memory.holder(), None);
    assert_eq!((mine.token(), mine.primary()), (None, None));
    assert!(matches!(mine.release().await, Err(HandOverError::Ended)));
    assert!(matches!(mine.hand_over(None).await, Err(HandOverError::Ended)));
    mine.shutdown().await;
}

#[tokio::test]
async fn a_hand_over_tells_who_took_over() {
    let memory = Memory::released();
    let mine = lease(&memory, "a");
    until("it is primary", || mine.token().is_some()).await;
    assert!(mine.store().read().await.unwrap().holder.is_some());
    let other = lease(&memory, "b");
    until("the other knows", || other.primary().is_some()).await;
    let handed = mine.hand_over(Some("b")).await.unwrap();
    assert_eq!((handed.to.unwrap().instance.as_str(), handed.calls_left), ("b", 0));
    until("the other is primary", || other.token().is_some()).await;
}

#[tokio::test]
async fn a_hand_over_to_whom_nobody_can_be_is_refused_and_costs_nothing() {
    let memory = Memory::released();
    let mine = lease(&memory, "a");
    until("it is primary", || mine.token().is_some()).await;
    let token = mine.token();
    for name in ["", "a", "b\n", &"b".repeat(256)] {
        let error = mine.hand_over(Some(name)).await.unwrap_err();
        assert!(matches!(error, HandOverError::Successor { .. }), "{name:?}: {error}");
        assert_eq!(mine.token(), token);
    }
}

#[tokio::test]
async fn settings_that_cannot_be_are_refused_by_name() {
    let memory = Memory::released();
    let build = |instance: &str, port| Lease::builder(memory.store(), instance, InstanceId::new("h", port));
    let at = |host: &str| Lease::builder(memory.store(), "a", InstanceId::new(host, 1));
    let ms = Duration::from_millis;
    let probe = Probe::of("127.0.0.1:1".parse().unwrap());
    let cases = [
        (build("", 1), "lease: instance = \"\" is not usable"),
        (build("a\nb", 1), "lease: instance = \"a\\nb\""),
        (build("a", 0), "lease: address = \"h:0\""),
        (at("0.0.0.0"), "lease: address = \"0.0.0.0:1\" is not usable: the host by which others reach it"),
        (at("::"), "lease: address = \"[::]:1\""),
        (at("[::1]"), "lease: address = \"[[::1]]:1\""),
        (at("a b"), "lease: address = \"a b:1\""),
        (at(&"h".repeat(256)), "lease: address = \"hhh"),
        (build("a", 1).renewal(ms(900)), "lease: renewal = 900ms is not usable: less than 850ms"),
        (build("a", 1).length(ms(10)), "lease: length = 10ms"),
        (build("a", 1).drain(ms(3_600_001)), "lease: drain = 3600.001s"),
        (build("a", 1).alive(&probe.grace(ms(600))), "every = 500ms is not usable: 10 ms to 300ms"),
    ];
    for (builder, expected) in cases {
        let error = builder.campaign().expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}: {expected}");
    }
}
