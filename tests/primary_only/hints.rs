//! Who says what of the primary, and who is believed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU64, Ordering},
    },
    time::Duration,
};

use http::HeaderMap;
use tokio::{
    net::TcpListener,
    time::{sleep, timeout},
};
use tonic::{Code, Status};
use tonic_failover::{
    FencingToken, Instance, InstanceId, NotPrimary, Primary,
    client::{Fallback, Policy},
    testkit::{Agent, Cluster, Registration, Registry},
};

use crate::{
    common::{
        SOON, builder, consul,
        scripted::{Act, Ask, Scripted},
        steady, until,
    },
    node::Node,
    stage::{Stage, increment, options, served},
};

async fn registers(registry: &Registry, node: &Node, token: Option<u64>) {
    let registration = Registration::new("counter", node.name, "127.0.0.1", node.port);
    let registration = match token {
        Some(token) => registration.tag("primary").meta("role", "primary").meta("token", token.to_string()),
        None => registration.tag("standby").meta("role", "standby"),
    };
    registry.register(&registration).await.unwrap();
}

/// Tags first, then a hint against them, then tags alone: standbys that say nothing.
async fn tags_and_hints(registry: &Registry, url: &str) {
    let (a, b, c) = (Node::start("a"), Node::start("b"), Node::start("c"));
    registers(registry, &a, Some(3)).await;
    registers(registry, &b, None).await;
    registers(registry, &c, None).await;
    let client = builder(url).service(options()).build().unwrap().grpc_client("counter").unwrap();
    until(&client, "all are ready", |c| c.status().datacenters.first().is_some_and(|it| it.ready == 3)).await;
    let call = async || served(&increment(client.channel(), "x".to_owned(), SOON).await.unwrap());
    a.leads(3);
    assert_eq!(call().await, ("a".to_owned(), 1), "the tag says so: nobody else is asked");

    a.stands_by(Some(b.as_primary(4)));
    b.leads(4);
    assert_eq!(call().await, ("b".to_owned(), 2), "the hint beats the tag");
    for _ in 0..3 {
        assert_eq!(call().await, ("b".to_owned(), 1), "and goes on to");
    }
    c.stands_by(Some(a.as_primary(3)));
    registers(registry, &a, None).await;
    registers(registry, &b, Some(4)).await;
    until(&client, "the status has it", |c| c.status().token.is_some_and(|it| it.get() == 4)).await;

    b.stands_by(None);
    registers(registry, &b, None).await;
    registers(registry, &c, Some(5)).await;
    c.leads(5);
    until(&client, "the tag has come", |_| {
        client.binding().instances().any(|it| it.tags == ["primary"] && it.name == "c")
    })
    .await;
    let asked = a.asked();
    assert_eq!(call().await, ("c".to_owned(), 1), "the tag of a greater token beats a primary that was");
    assert_eq!((a.asked(), c.ran()), (asked, 1));
    assert_eq!(client.status().datacenters[0].ejected, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hints_beat_tags_that_lag_and_tags_are_enough_on_a_real_consul() {
    let Some(consul) = consul().await else { return };
    tags_and_hints(consul.registry(), &consul.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hints_beat_tags_that_lag_and_tags_are_enough_on_the_embedded_agent() {
    let agent = Agent::start("dc1").await.unwrap();
    tags_and_hints(agent.registry(), &agent.url()).await;
}

/// A refusal's header as it goes over the wire.
fn details(refusal: NotPrimary) -> &'static str {
    let mut headers = HeaderMap::new();
    Status::from(refusal).add_header(&mut headers).unwrap();
    headers["grpc-status-details-bin"].to_str().unwrap().to_owned().leak()
}

fn says(details: &'static str) -> Act {
    Act::Status(14, "mine", vec![("grpc-status-details-bin", details)])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn details_that_are_rubbish_are_no_refusal_and_reach_the_caller() {
    for rubbish in ["!", "", "AAAA", "CA4SBG1pbmUa", "////////////////"] {
        let server = Scripted::start(move |_| says(rubbish)).await;
        let stage = Stage::ready(options(), vec![Instance::new("a", "127.0.0.1", server.port, "here")]).await;
        let status = stage.increment("x", SOON).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "mine"), "{rubbish:?}");
        assert_eq!(server.asks().len(), 1, "{rubbish:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_liar_is_heard_once_and_whom_it_names_is_called_only_if_it_is_listed() {
    let trap = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let outside = Primary::new(
        "x",
        InstanceId::new("127.0.0.1", trap.local_addr().unwrap().port()),
        FencingToken::new(u64::MAX),
    );
    let (a, b) = (Node::start("a"), Node::start("b"));
    b.leads(4);
    a.stands_by(Some(b.as_primary(4)));
    // It names a standby with the greatest token there is, or somebody whom nobody knows.
    for named in [a.as_primary(u64::MAX), outside] {
        let lie = details(NotPrimary::new(Some(named)));
        let liar = Scripted::start(move |_| says(lie)).await;
        let mut first = Instance::new("liar", "127.0.0.1", liar.port, "here");
        first.tags.push("primary".to_owned());
        let stage = Stage::ready(options(), vec![first, a.instance(), b.instance()]).await;
        for n in 0..20 {
            let (who, attempts) = stage.increment(&n.to_string(), SOON).await.unwrap();
            assert_eq!(who, "b");
            assert!(attempts <= if n == 0 { 4 } else { 1 }, "call {n} took {attempts}");
        }
        assert_eq!(liar.asks().len(), 1, "it is asked no more");
    }
    let called = tokio::time::timeout(Duration::from_millis(200), trap.accept()).await;
    assert!(called.is_err(), "nobody dials an address that a server has named");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_who_name_each_other_with_ever_greater_tokens_do_not_hide_the_primary() {
    let (token, ports) = (Arc::new(AtomicU64::new(2)), Arc::new([AtomicU16::new(0), AtomicU16::new(0)]));
    let mut liars = Vec::new();
    for other in [1, 0] {
        let (token, ports) = (token.clone(), ports.clone());
        let lie = move |_: &Ask| {
            let other = InstanceId::new("127.0.0.1", ports[other].load(Ordering::SeqCst));
            let token = FencingToken::new(token.fetch_add(1, Ordering::SeqCst));
            says(details(NotPrimary::new(Some(Primary::new("x", other, token)))))
        };
        liars.push(Scripted::start(lie).await);
    }
    for (port, liar) in ports.iter().zip(&liars) {
        port.store(liar.port, Ordering::SeqCst);
    }
    let primary = Node::start("primary");
    primary.leads(1);
    let mut listed = vec![primary.instance()];
    for (name, liar) in ["a", "b"].into_iter().zip(&liars) {
        listed.insert(0, Instance::new(name, "127.0.0.1", liar.port, "here"));
    }
    let stage = Stage::ready(options(), listed).await;
    let (who, attempts) = stage.increment("x", SOON).await.unwrap();
    assert_eq!(who, "primary");
    // On a busy machine rests run out while others are tried.
    assert!(attempts <= 20, "{attempts}");
}

/// A proxy before an instance that is away, say, or a server of another service.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_only_unavailable_is_not_taken_for_the_primary() {
    let (proxy, b) =
        (Scripted::start(|_| Act::Status(14, "no upstream", Vec::new())).await, Node::start("b"));
    b.leads(1);
    let proxied = Instance::new("a", "127.0.0.1", proxy.port, "here");
    let stage = Stage::ready(options(), vec![proxied, b.instance()]).await;
    let mut failed = 0;
    for n in 0..20 {
        match stage.increment(&n.to_string(), SOON).await {
            Ok((who, _)) => assert_eq!(who, "b"),
            Err(status) => {
                assert_eq!(status.message(), "no upstream");
                failed += 1;
            }
        }
    }
    assert!(failed <= 1, "{failed} calls failed, though there is a primary");
    assert_eq!(b.ran(), 20 - failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whom_a_hint_names_before_the_registry_does_is_called_once_it_is_listed() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    b.leads(2);
    a.stands_by(Some(b.as_primary(2)));
    let stage = Stage::ready(options(), vec![a.instance()]).await;
    let channel = stage.channel();
    let call = tokio::spawn(increment(channel, "x".to_owned(), SOON));
    // Often enough that it would have called whom the hint names.
    let hinted = async {
        while a.asked() < 5 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, hinted).await.expect("it goes on asking");
    assert_eq!((b.asked(), call.is_finished()), (0, false));
    stage.list.set("counter", [a.instance(), b.instance()]);
    assert_eq!(served(&call.await.unwrap().unwrap()).0, "b");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_in_another_datacenter_is_found_by_hint_and_by_falling_back() {
    let [dc1, dc2] = Cluster::start(["dc1", "dc2"]).await.unwrap().into_agents().try_into().unwrap();
    let (mut near, far) = (Node::start("near"), Node::start("far"));
    registers(dc1.registry(), &near, None).await;
    registers(dc2.registry(), &far, Some(2)).await;
    near.stands_by(Some(far.as_primary(2)));
    far.leads(2);
    let consul = builder(&dc1.url()).fallback(Fallback::nearest()).service(options()).build().unwrap();
    let client = consul.grpc_client("counter").unwrap();
    let call = async || served(&increment(client.channel(), "x".to_owned(), SOON).await.unwrap());
    assert_eq!(call().await.0, "far", "the standby here names it");
    assert_eq!(call().await, ("far".to_owned(), 1));
    near.kill();
    until(&client, "calls went over", |c| c.binding().datacenter() == Some("dc2")).await;
    assert_eq!(call().await.0, "far");
}

/// Nothing of this is asked for: a standby among others is no failing instance, and its refusal never ran.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_option_a_refusal_is_resent_once_and_ejects_nobody() {
    let (a, b) = (Node::start("a"), Node::start("b"));
    b.leads(1);
    let options = steady().policy(Policy::RoundRobin).failures_to_eject(1).panic_threshold(0);
    let stage = Stage::ready(options, vec![a.instance(), b.instance()]).await;
    for n in 0..20 {
        assert_eq!(stage.increment(&n.to_string(), SOON).await.unwrap().0, "b");
    }
    assert_eq!((b.ran(), a.ran()), (20, 0));
    assert!(a.asked() >= 10, "it goes on to be asked");
    assert_eq!(stage.client.status().datacenters[0].ejected, 0);
    b.stands_by(None);
    let status = stage.increment("x", SOON).await.unwrap_err();
    assert!(NotPrimary::of(&status).is_some(), "as it came: {status:?}");
}
