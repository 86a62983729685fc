//! On real listeners.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    time::timeout,
};
use tonic::transport::{Server, server::TcpIncoming};
use tonic_health::{ServingStatus as Says, server::HealthReporter};

use super::*;

/// Short, so that the tests are; nothing here is timed but by generous bounds.
fn probe(address: SocketAddr) -> Probe {
    Probe::of(address).every(Duration::from_millis(20)).grace(Duration::from_millis(400))
}

async fn until(alive: &mut watch::Receiver<bool>, is: bool, why: &str) {
    let found = timeout(Duration::from_secs(20), alive.wait_for(|alive| *alive == is)).await;
    found.unwrap_or_else(|_| panic!("{why}")).unwrap();
}

/// A server with the health service, and the task that is it.
async fn serving() -> (SocketAddr, HealthReporter, AbortOnDropHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder().add_service(health).serve_with_incoming(TcpIncoming::from(listener));
    let task = AbortOnDropHandle::new(tokio::spawn(async move { server.await.unwrap() }));
    (address, reporter, task)
}

#[tokio::test]
async fn it_is_alive_from_the_first_answer_until_the_listener_is_gone() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let probe = probe(address);
    let mut alive = probe.watch().unwrap();
    assert!(!*alive.borrow());
    let listener = TcpListener::bind(address).await.unwrap();
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().add_service(health).serve_with_incoming(TcpIncoming::from(listener));
    let task = AbortOnDropHandle::new(tokio::spawn(async move { server.await.unwrap() }));
    until(&mut alive, true, "it serves").await;
    drop(task);
    until(&mut alive, false, "its port is nobody's").await;
}

#[tokio::test]
async fn a_listener_that_takes_no_more_is_noticed_although_old_connections_live() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (open, mut gate) = watch::channel(true);
    let incoming = connections(listener, move || *gate.borrow_and_update());
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().add_service(health).serve_with_incoming(incoming);
    let _task = AbortOnDropHandle::new(tokio::spawn(async move { server.await.unwrap() }));
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let mut old = HealthClient::new(channel);
    old.check(HealthCheckRequest::default()).await.unwrap();
    let probe = probe(address);
    let mut alive = probe.watch().unwrap();
    until(&mut alive, true, "it serves").await;
    open.send(false).unwrap();
    until(&mut alive, false, "the listener is blocked").await;
    old.check(HealthCheckRequest::default()).await.expect("the old connection answers all the same");
    open.send(true).unwrap();
    until(&mut alive, true, "it takes connections again").await;
}

/// Connections, as long as the gate is open: those that come meanwhile are left in the backlog.
fn connections(
    listener: TcpListener,
    mut is_open: impl FnMut() -> bool + Send + 'static,
) -> impl tokio_stream::Stream<Item = io::Result<tokio::net::TcpStream>> {
    let (take, taken) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            if !is_open() {
                tokio::time::sleep(Duration::from_millis(5)).await;
                continue;
            }
            let Ok(accepted) = timeout(Duration::from_millis(50), listener.accept()).await else { continue };
            if take.send(accepted.map(|(stream, _)| stream)).await.is_err() {
                return;
            }
        }
    });
    futures_util::stream::unfold(taken, |mut taken| async move { Some((taken.recv().await?, taken)) })
}

#[tokio::test]
async fn what_says_that_it_is_not_serving_is_not_alive() {
    let (address, reporter, _task) = serving().await;
    let probe = probe(address);
    let mut alive = probe.watch().unwrap();
    until(&mut alive, true, "it serves").await;
    reporter.set_service_status("", Says::NotServing).await;
    until(&mut alive, false, "it says that it cannot").await;
    reporter.set_service_status("", Says::Serving).await;
    until(&mut alive, true, "it can again").await;
}

#[tokio::test]
async fn a_server_without_the_health_service_is_alive() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::builder()
        .add_routes(tonic::service::Routes::default())
        .serve_with_incoming(TcpIncoming::from(listener));
    let _task = AbortOnDropHandle::new(tokio::spawn(async move { server.await.unwrap() }));
    let probe = probe(address);
    until(&mut probe.watch().unwrap(), true, "UNIMPLEMENTED is life").await;
}

#[tokio::test]
async fn what_is_no_grpc_server_is_not_alive() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (said, mut asked) = tokio::sync::mpsc::channel(100);
    let _task = AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 100]).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            let _ = said.send(()).await;
        }
    }));
    let probe = probe(address);
    let alive = probe.watch().unwrap();
    for _ in 0..5 {
        asked.recv().await.unwrap();
    }
    assert!(!*alive.borrow());
}

#[tokio::test]
async fn all_who_watch_one_probe_share_it_and_it_ends_with_its_last_clone() {
    let (address, _reporter, _task) = serving().await;
    let probe = probe(address);
    let mut alive = probe.watch().unwrap();
    let mut clone = probe.clone();
    until(&mut alive, true, "it serves").await;
    assert!(*clone.watch().unwrap().borrow(), "no other one has been started");
    // One with other settings is another one.
    clone = clone.grace(Duration::from_secs(1));
    assert!(!*clone.watch().unwrap().borrow());
    drop(probe);
    let ended = timeout(Duration::from_secs(20), async { while alive.changed().await.is_ok() {} });
    ended.await.expect("it ends");
}

#[tokio::test]
async fn an_unspecified_address_is_asked_on_loopback() {
    for (given, asked) in [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("10.0.0.7:1", "10.0.0.7:1")]
    {
        assert_eq!(reachable(given.parse().unwrap()), asked.parse().unwrap());
    }
}

#[test]
fn impossible_settings_are_refused() {
    let of = || Probe::of("127.0.0.1:7".parse().unwrap());
    let cases = [
        (of().every(Duration::ZERO), "every = 0ns is not usable: 10 ms to 750ms"),
        (of().every(Duration::from_millis(800)), "every = 800ms is not usable"),
        (of().grace(Duration::from_secs(301)), "grace = 301s is not usable: 5 min at the most"),
    ];
    for (probe, expected) in cases {
        let error = probe.watch().expect_err(expected).to_string();
        assert!(error.starts_with("probe of 127.0.0.1:7") && error.contains(expected), "{error}");
    }
}
