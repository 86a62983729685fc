//! Handles: who shares what, what they tell, and what is left when they are gone.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use common::{
    Backend, Method,
    alone::Alone,
    builder, call, consul, get, options, register,
    scripted::{Act, End, Scripted},
    until, until_bound_to,
};
use tokio::{net::TcpListener, sync::oneshot, time::timeout};
use tokio_stream::StreamExt;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Request};
use tonic_failover::{
    Instance,
    client::{
        Binding, CallError, CallErrorKind, CallOptions, ConsulService, FailoverEvent, Fallback, GrpcClient,
        ServiceOptions, Services, UpdateError, registry::StaticList,
    },
    demo::pb::{GetRequest, IncrementRequest, WatchRequest, counter_client::CounterClient},
    testkit::{Agent, Registry},
};
use tower::ServiceExt;

/// Connections from anybody here to a port of this host that are open now.
fn connections_to(port: u16) -> usize {
    let established = |table: String| {
        let is = |line: &&str| {
            let columns: Vec<_> = line.split_whitespace().collect();
            let remote = columns.get(2).and_then(|it| it.rsplit(':').next());
            columns.get(3) == Some(&"01") && remote == Some(format!("{port:04X}").as_str())
        };
        table.lines().filter(is).count()
    };
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .filter_map(|table| std::fs::read_to_string(table).ok())
        .map(established)
        .sum()
}

async fn until_connections(port: u16, count: usize, when: &str) {
    let wait = async {
        while connections_to(port) != count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let so = timeout(common::SOON, wait).await;
    so.unwrap_or_else(|_| panic!("{when}: {} connections, not {count}", connections_to(port)));
}

async fn one(registry: &Registry, service: &str, name: &str) -> Backend {
    let backend = Backend::start(name).await;
    register(registry, service, name, backend.port).await;
    backend
}

// === sharing ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_services_and_several_consuls_live_in_one_process() {
    let (here, there) = (Agent::start("dc1").await.unwrap(), Agent::start("dc7").await.unwrap());
    let _backends = [
        one(here.registry(), "alpha", "here-alpha").await,
        one(here.registry(), "beta", "here-beta").await,
        one(there.registry(), "alpha", "there-alpha").await,
    ];
    let both = builder(&here.url())
        .name("here")
        .service(ServiceOptions::new("alpha"))
        .service(ServiceOptions::new("beta"))
        .build()
        .unwrap();
    let other = builder(&there.url()).service(ServiceOptions::new("alpha")).build().unwrap();
    for (service, name, instance, consul, datacenter) in [
        (&both, "alpha", "here-alpha", "here", "dc1"),
        (&both, "beta", "here-beta", "here", "dc1"),
        (&other, "alpha", "there-alpha", there.url().as_str(), "dc7"),
    ] {
        let client = service.grpc_client(name).unwrap();
        let served = get(client.channel()).await.unwrap();
        assert_eq!((&*served.instance.name, &*served.instance.datacenter), (instance, datacenter));
        assert_eq!((client.consul_name(), client.service_name()), (consul, name));
        assert_eq!(client.consul_client().address(), client.consul_service().consul_client().address());
    }
    let error = other.grpc_client("beta").unwrap_err().to_string();
    assert_eq!(error, "unknown service \"beta\": the known ones are alpha");
    // One question for each service.
    let seen = here.wait_for(|it| it.blocked == 2).await.unwrap();
    assert_eq!(seen.most_blocked, 2);
    // What happens to one is nothing to the others.
    other.shutdown().await;
    assert!(get(both.grpc_client("alpha").unwrap().channel()).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_handles_and_subscribers_share_one_question_and_one_connection() {
    let agent = Agent::start("dc1").await.unwrap();
    let a = one(agent.registry(), "counter", "a").await;
    let service = builder(&agent.url()).service(options()).build().unwrap();
    let clients: Vec<_> = (0..100).map(|_| service.grpc_client("counter").unwrap()).collect();
    let mut subscribers: Vec<_> = clients.iter().map(GrpcClient::subscribe).collect();
    for subscriber in &mut subscribers {
        let found = timeout(common::SOON, subscriber.wait_for(|binding| !binding.is_empty())).await;
        assert_eq!(found.unwrap().unwrap().generation(), 1);
    }
    for client in &clients {
        assert!(get(client.channel()).await.is_ok());
    }
    agent.wait_for(|it| it.blocked == 1).await.unwrap();
    let seen = agent.counters();
    assert_eq!((seen.most_blocked, seen.requests_to("/v1/health")), (1, 2), "{seen:?}");
    assert_eq!(connections_to(a.port), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_consul_sees_one_connection_whatever_the_number_of_handles() {
    let Some(consul) = consul().await else { return };
    let a = one(consul.registry(), "counter", "a").await;
    let service = builder(&consul.url()).service(options()).build().unwrap();
    let clients: Vec<_> = (0..100).map(|_| service.grpc_client("counter").unwrap()).collect();
    for client in &clients {
        client.ready().await.unwrap();
    }
    until_connections(consul.http_addr().port(), 1, "one question").await;
    assert_eq!(connections_to(a.port), 1);
    drop((clients, service));
    until_connections(consul.http_addr().port(), 0, "all handles dropped").await;
    until_connections(a.port, 0, "all handles dropped").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bound_instance_is_described_as_the_registry_describes_it_now() {
    let agent = Agent::start("dc1").await.unwrap();
    let a = one(agent.registry(), "counter", "old").await;
    let client = builder(&agent.url()).service(options()).build().unwrap().grpc_client("counter").unwrap();
    let (before, mut events) = (client.ready().await.unwrap(), client.events());
    register(agent.registry(), "counter", "new", a.port).await;
    common::deregister(agent.registry(), "old").await;
    until_bound_to(&client, "new").await;
    assert!(client.binding().generation() > before.generation());
    assert_eq!(client.binding().instance().unwrap().name, "new");
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "new");
    assert_eq!(connections_to(a.port), 1, "on the same connection");
    client.consul_service().shutdown().await;
    assert!(events.next().await.is_none(), "it is the same instance: no event");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_subscriber_sees_the_present_binding_and_a_slow_one_the_newest() {
    let agent = Agent::start("dc1").await.unwrap();
    let service = builder(&agent.url()).service(options()).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    let mut slow = client.subscribe();
    assert!(slow.borrow_and_update().is_empty(), "it starts with an empty one");
    assert_eq!(slow.borrow().generation(), 0);

    let mut backends = vec![one(agent.registry(), "counter", "a").await];
    until_bound_to(&client, "a").await;
    for name in ["b", "c"] {
        backends.push(one(agent.registry(), "counter", name).await);
        until(&client, "the new one is known", |c| c.status().datacenters[0].known == 2).await;
        let old = backends.remove(0);
        common::deregister(agent.registry(), &old.name).await;
        until_bound_to(&client, name).await;
    }
    let mut late = client.subscribe();
    assert!(late.has_changed().unwrap(), "what is there is news to it");
    let name = |binding: &Binding| binding.instance().map(|i| i.name.clone());
    assert_eq!(name(&late.borrow_and_update()).as_deref(), Some("c"));
    assert!(slow.has_changed().unwrap());
    let newest = slow.borrow_and_update().clone();
    assert_eq!(name(&newest).as_deref(), Some("c"));
    assert_eq!(newest.generation(), client.binding().generation());
    assert!(!slow.has_changed().unwrap(), "the ones between are not seen");

    service.shutdown().await;
    let last = slow.borrow_and_update().clone();
    assert!(last.is_empty() && last.generation() > newest.generation(), "closing publishes an empty one");
    assert!(slow.changed().await.is_err(), "and then the end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_on_an_old_generation_cause_nothing_and_a_thousand_on_the_present_one_look_up() {
    let agent = Agent::start("dc1").await.unwrap();
    let _a = one(agent.registry(), "counter", "a").await;
    let client = common::client(&agent.url());
    let binding = client.ready().await.unwrap();
    agent.wait_for(|it| it.blocked == 1).await.unwrap();
    let before = agent.counters().requests_to("/v1/health");
    for _ in 0..1000 {
        client.report_failure(binding.generation() - 1);
    }
    // An update comes after them on the same way, so they have been dealt with.
    client.consul_service().update_grpc_client("counter").await.unwrap();
    assert_eq!(agent.counters().requests_to("/v1/health"), before + 1, "the update's own");
    for _ in 0..1000 {
        client.report_failure(binding.generation());
    }
    agent.wait_for(|it| it.requests_to("/v1/health") >= before + 2).await.unwrap();
    client.consul_service().update_grpc_client("counter").await.unwrap();
    assert!(agent.counters().requests_to("/v1/health") <= before + 4, "{:?}", agent.counters());
    assert_eq!(client.binding().generation(), binding.generation());
}

// === what they tell ===

/// Fills the queue of a listener that never accepts, so that connecting hangs.
async fn black_hole() -> (TcpListener, Vec<tokio::net::TcpStream>) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let mut inside = Vec::new();
    let connect = || tokio::net::TcpStream::connect(listener.local_addr().unwrap());
    while let Ok(stream) = timeout(Duration::from_millis(300), connect()).await {
        inside.push(stream.unwrap());
    }
    (listener, inside)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ready_says_why_it_is_not() {
    let (hole, _inside) = black_hole().await;
    let agent = Agent::start("dc1").await.unwrap();
    register(agent.registry(), "dead", "dead", 1).await;
    register(agent.registry(), "hole", "hole", hole.local_addr().unwrap().port()).await;
    let hung = Agent::start("dc1").await.unwrap();
    hung.faults().hang();
    let denied = Agent::start("dc1").await.unwrap();
    denied.faults().status(403, "ACL not found");
    let (url, hung, denied) = (agent.url(), hung.url(), denied.url());
    let refused = "dead is not ready after 1s: dc1 lists 1, none answers (no connection: Connection refused";
    let cases = [
        (
            common::NOWHERE,
            "counter",
            "counter is not ready after 1s: local has not answered yet, its registry: \
          cannot connect to the registry",
        ),
        (&hung, "counter", "counter is not ready after 1s: local has not answered yet"),
        (
            &denied,
            "counter",
            "local has not answered yet, its registry: the registry refuses the token: ACL not found",
        ),
        (&url, "counter", "counter is not ready after 1s: local lists no healthy instance"),
        (&url, "dead", refused),
        (&url, "hole", "hole is not ready after 1s: dc1 lists 1, none has answered yet"),
    ];
    for (url, service, reason) in cases {
        let options = ServiceOptions::new(service).connect_timeout(Duration::from_secs(5));
        let client = builder(url).service(options).build().unwrap().grpc_client(service).unwrap();
        let error = client.ready_within(Duration::from_secs(1)).await.unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        let line = client.status().to_string();
        assert!(line.starts_with(&format!("{service}: nothing usable: ")), "{line}");
        assert_eq!(client.status().reason(), error.status.reason());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_line_tells_each_state() {
    let agent = Agent::start("dc1").await.unwrap();
    let line = |client: &GrpcClient| client.status().to_string();
    let service = builder(&agent.url()).wait(Duration::from_secs(1)).service(options()).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    let says = async |words: &str| until(&client, words, |c| line(c).contains(words)).await;
    says("counter: nothing usable: local lists no healthy instance").await;
    let mut a = one(agent.registry(), "counter", "a").await;
    says("a@dc1 ready, 1 known").await;
    register(agent.registry(), "counter", "dead", 1).await;
    says("a@dc1 ready, 2 known, 1 ejected").await;
    let fault = agent.faults().status(500, "out of order");
    says("2 known, 1 ejected, dc1 stale for ").await;
    says("(the registry answered with status 500: out of order (asked at http://").await;
    fault.off();
    until(&client, "not stale", |c| !line(c).contains("stale")).await;
    let fault = agent.faults().empty("counter");
    says(", dc1 lists none for ").await;
    fault.off();
    until(&client, "listed", |c| !line(c).contains("lists none")).await;
    a.kill().await;
    says("counter: nothing usable: dc1 lists 2, none answers (no connection: Connection refused").await;
    service.shutdown().await;
    assert_eq!(line(&client), "counter: nothing usable: shut down");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_of_events_that_falls_behind_is_told_how_many_it_missed() {
    let agent = Agent::start("dc1").await.unwrap();
    // Nobody listens at any of them: an event each.
    for n in 0..300 {
        let body =
            format!(r#"{{"ID":"dead-{n}","Name":"counter","Address":"127.77.0.{}","Port":1}}"#, n % 200 + 1);
        let body = body.replace("\"Port\":1", &format!("\"Port\":{}", 1 + n / 200));
        agent.registry().put("/v1/agent/service/register", body).await.unwrap();
    }
    let hour = Duration::from_secs(3600);
    let service = builder(&agent.url()).service(options().spares(400).ejection(hour, hour)).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    let mut events = client.events();
    // Of 256 events a slow reader finds all.
    until(&client, "more are ejected", |c| {
        c.status().datacenters.first().is_some_and(|dc| dc.ejected == 300)
    })
    .await;
    let first = timeout(common::SOON, events.next()).await.unwrap().unwrap();
    let FailoverEvent::Missed { count } = first else { panic!("{first:?}") };
    assert!(count >= 300 - 256, "{count}");
    // What follows is current.
    let second = timeout(common::SOON, events.next()).await.unwrap().unwrap();
    assert!(matches!(second, FailoverEvent::Ejected { .. } | FailoverEvent::Unusable { .. }), "{second:?}");
}

// === the end ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_everything_in_order_and_refuses_what_comes_later() {
    let agent = Agent::start("dc1").await.unwrap();
    let backend = Backend::start_with("a", 0, common::NOWHERE, &["--work", "700ms"]).await;
    register(agent.registry(), "counter", "a", backend.port).await;
    let (alone, url) = (Alone::new(), agent.url());
    let service = alone
        .run(async move {
            builder(&url).service(options()).service(ServiceOptions::new("unused")).build().unwrap()
        })
        .await;
    let client = service.grpc_client("counter").unwrap();
    client.ready().await.unwrap();
    let running = alone.spawn(call(client.channel(), Method::Increment, "1".into()));
    let wait = async {
        while backend.journal().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(common::SOON, wait).await.unwrap();
    let mut events = client.events();

    let twice = tokio::join!(service.shutdown(), service.shutdown());
    assert_eq!(twice, ((), ()));
    assert!(client.binding().is_empty());
    assert!(timeout(common::SOON, events.next()).await.unwrap().is_none(), "the events end");
    assert!(client.events().next().await.is_none());
    // The call in flight is finished.
    assert_eq!(running.await.unwrap().unwrap(), 1);

    let status = get(client.channel()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let error = CallError::of(&status).expect("typed");
    assert_eq!((error.kind(), error.may_have_run()), (&CallErrorKind::Closed, false));
    let error = service.update_grpc_client("counter").await.unwrap_err();
    assert!(matches!(error, UpdateError::Closed), "{error:?}");
    let error = client.ready().await.unwrap_err();
    assert_eq!(error.to_string(), "counter is not ready: shut down");
    assert_eq!(client.status().reason().as_deref(), Some("shut down"));
    // A service that had not been used before is refused as well.
    let unused = service.grpc_client("unused").unwrap();
    let error = CallError::of(&get(unused.channel()).await.unwrap_err()).map(|e| e.kind().clone());
    assert_eq!(error, Some(CallErrorKind::Closed));
    assert_eq!(unused.ready().await.unwrap_err().to_string(), "unused is not ready: shut down");
    assert!(matches!(service.update_grpc_client("unused").await, Err(UpdateError::Closed)));

    // The handles that are left hold neither a task nor a connection to an instance.
    until_connections(backend.port, 0, "after shutdown").await;
    agent.wait_for(|it| it.blocked == 0).await.unwrap();
    drop((service, client, unused));
    alone.until_empty("after shutdown").await;
    agent.wait_for(|it| it.connections == 0).await.unwrap();
}

/// Runs a client by `prepare` until it is where it is to be dropped, drops it
/// there, and sees that nothing is left. `prepare` gets the client, and what it
/// returns is dropped with it.
async fn drop_in_the_middle<T, F>(
    what: &str,
    agents: &[&Agent],
    ports: &[u16],
    make: impl FnOnce() -> ConsulService + Send + 'static,
    prepare: impl FnOnce(GrpcClient) -> F + Send + 'static,
) where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let alone = Alone::new();
    let (there, is_there) = oneshot::channel();
    let (go, gone) = oneshot::channel::<()>();
    let task = alone.spawn(async move {
        let service = make();
        let client = service.grpc_client("counter").unwrap();
        let held = prepare(client.clone()).await;
        there.send(()).unwrap();
        gone.await.unwrap();
        drop((held, client, service));
    });
    timeout(common::SOON, is_there).await.unwrap_or_else(|_| panic!("{what}: not there")).unwrap();
    assert!(alone.tasks() > 1, "{what}: it works");
    go.send(()).unwrap();
    task.await.unwrap();
    alone.until_empty(what).await;
    for agent in agents {
        agent.wait_for(|it| it.connections == 0 && it.blocked == 0).await.unwrap();
    }
    for &port in ports {
        until_connections(port, 0, what).await;
    }
}

fn service_at(url: String) -> impl FnOnce() -> ConsulService + Send + 'static {
    move || builder(&url).service(options()).build().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_while_consul_is_silent_it_leaves_nothing() {
    let agent = Arc::new(Agent::start("dc1").await.unwrap());
    agent.faults().hang();
    let seen = Arc::clone(&agent);
    drop_in_the_middle(
        "Consul silent",
        &[&agent],
        &[],
        service_at(agent.url()),
        async move |client: GrpcClient| {
            let channel = client.channel();
            let waiting = tokio::spawn(async move { get(channel).await });
            seen.wait_for(|it| it.requests_to("/v1/health") >= 1).await.unwrap();
            aborting(waiting)
        },
    )
    .await;
}

/// A running task, ended when it is dropped.
struct Held<T> {
    _task: AbortOnDropHandle<T>,
}

fn aborting<T>(task: tokio::task::JoinHandle<T>) -> Held<T> {
    Held { _task: AbortOnDropHandle::new(task) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_while_consul_is_away_it_leaves_nothing() {
    drop_in_the_middle(
        "Consul away",
        &[],
        &[1],
        service_at(common::NOWHERE.into()),
        async |client: GrpcClient| {
            until(&client, "lost", |c| c.status().to_string().contains("cannot connect")).await;
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_in_a_blocking_query_it_leaves_nothing() {
    let agent = Arc::new(Agent::start("dc1").await.unwrap());
    let (a, b) = (one(agent.registry(), "counter", "a").await, one(agent.registry(), "counter", "b").await);
    let seen = Arc::clone(&agent);
    let ports = [a.port, b.port];
    drop_in_the_middle(
        "blocking query",
        &[&agent],
        &ports,
        service_at(agent.url()),
        async move |client: GrpcClient| {
            until(&client, "a spare is ready", |c| {
                c.status().datacenters.first().is_some_and(|dc| dc.ready == 2)
            })
            .await;
            get(client.channel()).await.unwrap();
            seen.wait_for(|it| it.blocked == 1).await.unwrap();
            (client.subscribe(), client.events())
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_while_dialling_a_black_hole_it_leaves_nothing() {
    let (hole, _inside) = black_hole().await;
    // Accepted by the kernel, and never answered.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let inside = connections_to(hole.local_addr().unwrap().port());
    for listener in [&hole, &silent] {
        let port = listener.local_addr().unwrap().port();
        let agent = Agent::start("dc1").await.unwrap();
        register(agent.registry(), "counter", "hole", port).await;
        let url = agent.url();
        let make = move || {
            let patient = options().connect_timeout(Duration::from_secs(60));
            builder(&url).service(patient).build().unwrap()
        };
        drop_in_the_middle("black hole", &[&agent], &[], make, async |client: GrpcClient| {
            until(&client, "it dials", |c| c.status().datacenters.first().is_some_and(|dc| dc.known == 1))
                .await;
        })
        .await;
    }
    until_connections(silent.local_addr().unwrap().port(), 0, "silent").await;
    until_connections(hole.local_addr().unwrap().port(), inside, "full").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_under_a_running_call_and_an_open_stream_it_leaves_nothing() {
    let agent = Agent::start("dc1").await.unwrap();
    let backend = Arc::new(Backend::start_with("a", 0, common::NOWHERE, &["--work", "10s"]).await);
    register(agent.registry(), "counter", "a", backend.port).await;
    let (ports, url, serves) = ([backend.port], agent.url(), Arc::clone(&backend));
    drop_in_the_middle(
        "running call",
        &[&agent],
        &ports,
        service_at(url),
        async move |client: GrpcClient| {
            client.ready().await.unwrap();
            let (channel, streaming) = (client.channel(), client.channel());
            let running = tokio::spawn(call(channel, Method::Increment, "1".into()));
            let stream = tokio::spawn(async move {
                let answer = CounterClient::new(streaming).watch(WatchRequest::default()).await;
                let mut stream = answer.unwrap().into_inner();
                while stream.message().await.is_ok_and(|it| it.is_some()) {}
            });
            let arrived = async {
                while serves.journal().len() < 2 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(common::SOON, arrived).await.expect("both are at the server");
            (aborting(running), aborting(stream))
        },
    )
    .await;
}

/// A `Get` whose future alone is left: the channel goes into it.
async fn headers_of_a_get(channel: tonic_failover::client::FailoverChannel) -> Result<(), CallError> {
    let request = http::Request::post("http://counter/counter.v1.Counter/Get")
        .header("content-type", "application/grpc")
        .body(tonic::body::Body::new(http_body_util::Full::from(vec![0_u8; 5])))
        .unwrap();
    let response = channel.oneshot(request).await?;
    assert!(response.headers().get("grpc-status").is_none(), "{response:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_outlives_every_handle_is_finished() {
    let agent = Agent::start("dc1").await.unwrap();
    let backend = Backend::start_with("a", 0, common::NOWHERE, &["--work", "500ms"]).await;
    // The first is made before there is an instance, the second when it is connected.
    for made_before in [true, false] {
        let (alone, url) = (Alone::new(), agent.url());
        let running = alone.spawn(async move {
            let client = service_at(url)().grpc_client("counter").unwrap();
            if !made_before {
                client.ready().await.unwrap();
            }
            let channel = client.channel();
            drop(client);
            headers_of_a_get(channel).await
        });
        agent.wait_for(|it| it.blocked == 1).await.unwrap();
        register(agent.registry(), "counter", "a", backend.port).await;
        running.await.unwrap().unwrap();
        alone.until_empty("the call is over").await;
        until_connections(backend.port, 0, "the call is over").await;
        agent.wait_for(|it| it.connections == 0).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_while_falling_back_it_leaves_nothing() {
    let agent = Arc::new(Agent::start("dc1").await.unwrap());
    let far = Agent::start("dc2").await.unwrap();
    agent.join(&far);
    register(agent.registry(), "counter", "dead", 1).await;
    agent.faults().hang_datacenter("dc2");
    let (url, seen) = (agent.url(), Arc::clone(&agent));
    let make = move || builder(&url).fallback(Fallback::nearest()).service(options()).build().unwrap();
    drop_in_the_middle("falling back", &[&agent, &far], &[], make, async move |client: GrpcClient| {
        until(&client, "the other one is asked", |c| {
            c.status().datacenters.get(1).is_some_and(|dc| dc.asked)
        })
        .await;
        seen.wait_for(|it| it.requests_to("/v1/health") >= 2).await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_when_bound_elsewhere_it_leaves_nothing_of_the_other_services_either() {
    let (here, there) = (Agent::start("dc1").await.unwrap(), Agent::start("dc2").await.unwrap());
    let c = one(there.registry(), "counter", "c").await;
    let (url, other) = (here.url(), there.url());
    let make = move || {
        let other = builder(&other).service(options()).build().unwrap();
        builder(&url).fallback(Fallback::services([other])).service(options()).build().unwrap()
    };
    drop_in_the_middle("elsewhere", &[&here, &there], &[c.port], make, async |client: GrpcClient| {
        until_bound_to(&client, "c").await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_during_an_update_it_leaves_nothing() {
    let agent = Arc::new(Agent::start("dc1").await.unwrap());
    let a = one(agent.registry(), "counter", "a").await;
    let seen = Arc::clone(&agent);
    drop_in_the_middle(
        "update",
        &[&agent],
        &[a.port],
        service_at(agent.url()),
        async move |client: GrpcClient| {
            client.ready().await.unwrap();
            seen.wait_for(|it| it.blocked == 1).await.unwrap();
            let before = seen.counters().requests_to("/v1/health");
            seen.faults().hang();
            let service = client.consul_service().clone();
            let update = tokio::spawn(async move { service.update_grpc_client("counter").await });
            seen.wait_for(|it| it.requests_to("/v1/health") > before).await.unwrap();
            aborting(update)
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_channel_alone_keeps_the_service_running() {
    let agent = Agent::start("dc1").await.unwrap();
    let mut a = one(agent.registry(), "counter", "a").await;
    let (alone, url) = (Alone::new(), agent.url());
    let channel = alone
        .run(async move {
            let client = service_at(url)().grpc_client("counter").unwrap();
            client.ready().await.unwrap();
            client.channel()
        })
        .await;
    let _b = one(agent.registry(), "counter", "b").await;
    a.kill().await;
    let follows =
        async { while get(channel.clone()).await.is_ok_and(|served| served.instance.name != "b") {} };
    timeout(common::SOON, follows).await.unwrap();
    assert_eq!(get(channel.clone()).await.unwrap().instance.name, "b");
    drop(channel);
    alone.until_empty("the last channel is dropped").await;
    agent.wait_for(|it| it.connections == 0).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handles_are_made_and_dropped_on_threads_without_a_runtime() {
    let agent = Agent::start("dc1").await.unwrap();
    let _a = one(agent.registry(), "counter", "a").await;
    let service = builder(&agent.url()).service(options()).build().unwrap();
    let made = tokio::task::spawn_blocking(move || {
        let elsewhere = std::thread::spawn(move || {
            let client = service.grpc_client("counter").unwrap();
            (client.channel(), client.status(), client.events(), client.subscribe())
        });
        elsewhere.join().expect("it does not panic")
    });
    let (channel, ..) = made.await.unwrap();
    assert_eq!(get(channel.clone()).await.unwrap().instance.name, "a");
    let dropped = tokio::task::spawn_blocking(move || std::thread::spawn(move || drop(channel)).join());
    dropped.await.unwrap().expect("it does not panic");
    agent.wait_for(|it| it.connections == 0).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_after_the_end_of_their_runtime_are_refused_and_do_not_hang() {
    let agent = Agent::start("dc1").await.unwrap();
    let _a = one(agent.registry(), "counter", "a").await;
    let (alone, url) = (Alone::new(), agent.url());
    let client = alone
        .run(async move {
            let client = service_at(url)().grpc_client("counter").unwrap();
            client.ready().await.unwrap();
            client
        })
        .await;
    drop(alone);
    agent.wait_for(|it| it.connections == 0).await.unwrap();
    let refused = async {
        loop {
            // The runtime ends in the background: a last call may get through.
            if let Err(status) = get(client.channel()).await {
                return status;
            }
        }
    };
    let status = timeout(common::SOON, refused).await.expect("it ends");
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    until(&client, "the status says so", |c| c.status().closed && c.binding().is_empty()).await;
    let error = client.consul_service().update_grpc_client("counter").await.unwrap_err();
    assert!(matches!(error, UpdateError::Closed), "{error:?}");
    timeout(common::SOON, client.consul_service().shutdown()).await.expect("nothing is left to end");
}

/// What polls on this thread, and knows nothing of tokio.
fn drive<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let (mut cx, mut future) = (Context::from_waker(&waker), pin!(future));
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn calls_may_be_polled_by_any_executor() {
    let world = Alone::new();
    let (server, client) = drive(world.run(async {
        let server = Scripted::start(|ask| match ask.number % 6 {
            1 => Act::ReadThenStatus(14, "once more"),
            2 | 3 => Act::Answer,
            // Long enough for a call to be late, and for a stream to be waited for.
            4 => Act::Answer.after(Duration::from_millis(150)),
            _ => Act::Begin(1, End::Hang),
        })
        .await;
        let list = StaticList::new();
        list.set("counter", [Instance::new("a", "127.0.0.1", server.port, "here")]);
        let services = Services::builder(list).service(options()).build().unwrap();
        let client = services.grpc_client("counter").unwrap();
        client.ready().await.unwrap();
        (server, client)
    }));
    let mut counter = CounterClient::new(client.channel());
    drive(counter.get(GetRequest::default())).unwrap();
    drive(counter.increment(IncrementRequest::default())).unwrap();
    drive(counter.increment(IncrementRequest::default())).unwrap();
    let mut short = Request::new(WatchRequest::default());
    short.set_timeout(Duration::from_millis(200));
    let mut stream = drive(counter.watch(short)).unwrap().into_inner();
    assert!(drive(stream.next()).unwrap().is_ok());
    assert_eq!(drive(stream.next()).unwrap().unwrap_err().code(), Code::DeadlineExceeded);
    // Nothing is usable: it waits for that too.
    let nobody = CallOptions::new().datacenter("nowhere").wait_for_ready(true);
    let mut waits = Request::new(GetRequest::default());
    waits.extensions_mut().insert(nobody);
    waits.set_timeout(Duration::from_millis(100));
    assert_eq!(drive(counter.get(waits)).unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(server.asks().len(), 5);
}
