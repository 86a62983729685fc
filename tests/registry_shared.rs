//! What the services of one client share at a registry: no datacenter, and no list of
//! datacenters, holds the others up.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::{SOON, options, register, until};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_stream::StreamExt;
use tonic_failover::{
    client::{ConsulService, FailoverEvent, Fallback, GrpcClient, ServiceOptions},
    consul::ConsulConfig,
    testkit::Agent,
};

/// Stands before an agent, and answers for it where the list of datacenters is asked for.
struct Front {
    url: String,
    asked: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Front {
    /// `answer`: what it says. `None`: nothing.
    async fn start(agent: &Agent, answer: Option<&'static str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(AtomicUsize::new(0));
        let (mut tasks, count, to) = (JoinSet::new(), asked.clone(), agent.http_addr());
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            loop {
                let (mut from, _) = listener.accept().await.unwrap();
                let count = count.clone();
                open.spawn(async move {
                    let Some(head) = head(&mut from).await else { return };
                    if !head.contains("/v1/catalog/datacenters") {
                        let mut to = TcpStream::connect(to).await.unwrap();
                        let head = head.replacen("\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1);
                        to.write_all(head.as_bytes()).await.unwrap();
                        let _ = copy_bidirectional(&mut from, &mut to).await;
                        return;
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                    match answer {
                        Some(answer) => {
                            let answer = format!(
                                "HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                            );
                            let _ = from.write_all(answer.as_bytes()).await;
                        }
                        // Until whoever asks gives up.
                        None => while from.read(&mut [0]).await.is_ok_and(|it| it > 0) {},
                    }
                });
            }
        });
        Self { url, asked, _tasks: tasks }
    }
}

/// All up to the empty line, and what came with it.
async fn head(from: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.windows(4).any(|it| it == b"\r\n\r\n") {
        if from.read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    String::from_utf8(head).ok()
}

fn name(at: usize) -> String {
    format!("s-{at}")
}

fn services(url: &str, count: usize, fallback: Fallback, warm: bool) -> (ConsulService, Vec<GrpcClient>) {
    let builder = ConsulService::builder(ConsulConfig::new(url).unwrap()).fallback(fallback).keep_warm(warm);
    // Nobody listens at these instances' addresses; the list is the matter here.
    let options = |at| ServiceOptions::new(name(at)).ejection(SOON, SOON);
    let consul = (0..count).fold(builder, |all, at| all.service(options(at))).build().unwrap();
    let clients = (0..count).map(|at| consul.grpc_client(&name(at)).unwrap()).collect();
    (consul, clients)
}

fn known(client: &GrpcClient, datacenter: &str) -> usize {
    let status = client.status();
    status.datacenters.iter().find(|it| it.name == datacenter).map_or(0, |it| it.known)
}

async fn until_all_know_one(clients: &[GrpcClient], datacenter: &str) {
    let all = async {
        while !clients.iter().all(|it| known(it, datacenter) == 1) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, all).await.expect("all know it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_datacenter_that_hangs_holds_up_no_read_about_another() {
    let [one, two, three] = ["dc1", "dc2", "dc3"].map(Agent::start);
    let (one, two, three) = (one.await.unwrap(), two.await.unwrap(), three.await.unwrap());
    one.join(&two);
    one.join(&three);
    for at in 0..60 {
        register(three.registry(), &name(at), &format!("c-{at}"), 1).await;
    }
    let _hangs = one.faults().hang_datacenter("dc2");
    let (consul, clients) = services(&one.url(), 60, Fallback::datacenters(["dc2", "dc3"]), false);
    until_all_know_one(&clients, "dc3").await;
    consul.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warm_datacenter_that_hangs_is_told_lost_alone_and_delays_no_update_of_the_own_one() {
    let (one, two) = (Agent::start("dc1").await.unwrap(), Agent::start("dc2").await.unwrap());
    one.join(&two);
    for at in 0..60 {
        register(one.registry(), &name(at), &format!("a-{at}"), 1).await;
    }
    let _hangs = one.faults().hang_datacenter("dc2");
    let (consul, clients) = services(&one.url(), 60, Fallback::datacenters(["dc2"]), true);
    let mut told: Vec<_> = clients.iter().map(GrpcClient::events).collect();
    until_all_know_one(&clients, "dc1").await;
    for client in &clients {
        until(client, "dc2 is told lost", |it| {
            it.status().datacenters.get(1).is_some_and(|it| it.registry_error.is_some())
        })
        .await;
    }
    // All are read afresh, while dc2 holds what it may.
    for at in 0..60 {
        register(one.registry(), &name(at), &format!("b-{at}"), 2).await;
    }
    let all = async {
        while !clients.iter().all(|it| known(it, "dc1") == 2) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, all).await.expect("all see the change");
    consul.shutdown().await;
    drop(clients);
    for events in &mut told {
        while let Some(event) = timeout(SOON, events.next()).await.unwrap() {
            if let FailoverEvent::RegistryLost { datacenter, error, .. } = &event {
                assert_eq!(&**datacenter, "dc2", "{error}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_datacenter_that_was_named_is_asked_where_the_agent_does_not_tell_its_datacenters() {
    let (one, two) = (Agent::start("dc1").await.unwrap(), Agent::start("dc2").await.unwrap());
    one.join(&two);
    register(two.registry(), "counter", "c", 1).await;
    for answer in [Some("403 Forbidden"), Some("404 Not Found"), None] {
        let front = Front::start(&one, answer).await;
        let builder = ConsulService::builder(ConsulConfig::new(&front.url).unwrap());
        let builder =
            builder.fallback(Fallback::datacenters(["dc2"])).service(options().ejection(SOON, SOON));
        let client = builder.build().unwrap().grpc_client("counter").unwrap();
        until(&client, "dc2 is known", |it| known(it, "dc2") == 1).await;
        assert!(front.asked.load(Ordering::Relaxed) > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_wish_to_be_left_alone_holds_for_all_who_want_the_list_of_datacenters() {
    let one = Agent::start("dc1").await.unwrap();
    let front = Front::start(&one, Some("429 Too Many Requests\r\nRetry-After: 60")).await;
    let (consul, clients) = services(&front.url, 20, Fallback::nearest(), false);
    // Each asks every second while its list is empty, and wants other datacenters meanwhile.
    one.wait_for(|it| it.requests_to("/v1/health") >= 100).await.unwrap();
    assert_eq!(clients.len(), 20);
    assert_eq!(front.asked.load(Ordering::Relaxed), 1);
    consul.shutdown().await;
}
