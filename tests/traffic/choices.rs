//! Where a call goes that says itself where to.

use std::time::Duration;

use tokio::time::timeout;
use tonic::Code;
use tonic_failover::{
    Instance, InstanceId,
    client::{
        CallErrorKind, CallOptions, Fallback, HedgingPolicy, MethodOptions, Policy, ServiceOptions, Services,
        registry::StaticList,
    },
    testkit::Cluster,
};

use crate::{
    common::{
        self, Backend, SOON, builder, register,
        scripted::{Act, Scripted},
        steady, until, until_bound_to,
    },
    stage::{Stage, at, at_port, get, kind},
};

fn to(backend: &Backend) -> CallOptions {
    CallOptions::new().instance(id(backend.port))
}

fn id(port: u16) -> InstanceId {
    InstanceId::new("127.0.0.1", port)
}

fn not_as_chosen(status: &tonic::Status, words: &str) {
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let CallErrorKind::NotAsChosen { reason, .. } = kind(status) else { panic!("{status:?}") };
    assert!(reason.contains(words), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_goes_to_the_instance_that_it_names_whatever_the_policy() {
    let backends = [Backend::start("a").await, Backend::start("b").await, Backend::start("c").await];
    for policy in [Policy::PickFirst, Policy::RoundRobin, Policy::LeastRequest] {
        let options = steady().policy(policy).spares(0);
        let stage = Stage::set(options, backends.iter().map(at).collect());
        stage.client.ready().await.unwrap();
        for backend in &backends {
            for _ in 0..3 {
                assert_eq!(get(stage.channel(), to(backend)).await.unwrap(), backend.name, "{policy:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_cannot_be_had_is_a_typed_error_at_once() {
    let mut backends = [Backend::start("a").await, Backend::start("b").await];
    let options = || steady().policy(Policy::RoundRobin).ejection(SOON, SOON);
    let stage = Stage::ready(options(), backends.iter().map(at).collect()).await;
    let unknown = CallOptions::new().instance(id(1));
    not_as_chosen(&get(stage.channel(), unknown).await.unwrap_err(), "no such instance is known");
    backends[1].kill().await;
    until(&stage.client, "it is ejected", |c| c.status().datacenters[0].ejected == 1).await;
    not_as_chosen(&get(stage.channel(), to(&backends[1])).await.unwrap_err(), "b has failed");
    assert_eq!(get(stage.channel(), to(&backends[0])).await.unwrap(), "a");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waits_gets_its_instance_once_it_is_back() {
    let mut b = Backend::start("b").await;
    let a = Backend::start("a").await;
    let stage = Stage::ready(steady().policy(Policy::RoundRobin), [&a, &b].map(at).to_vec()).await;
    b.kill().await;
    until(&stage.client, "it is ejected", |c| c.status().datacenters[0].ejected == 1).await;
    let (channel, options) = (stage.channel(), to(&b).wait_for_ready(true));
    let call = tokio::spawn(async move { get(channel, options).await });
    let _b = Backend::start_with("b", b.port, common::NOWHERE, &[]).await;
    assert_eq!(timeout(SOON, call).await.expect("in time").unwrap().unwrap(), "b");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waits_outlives_the_fail_fast_bound_but_not_its_deadline() {
    let short = || {
        let options = ServiceOptions::new("counter").fail_fast_after(Duration::from_millis(50));
        options.default_timeout(Duration::from_secs(1))
    };
    // Nobody is there.
    let stage = Stage::set(short(), vec![at_port("nobody", 1)]);
    let fast = get(stage.channel(), CallOptions::new()).await.unwrap_err();
    assert!(matches!(kind(&fast), CallErrorKind::NothingUsable { .. }), "{fast:?}");
    let waits = CallOptions::new().wait_for_ready(true);
    let late = get(stage.channel(), waits.clone()).await.unwrap_err();
    assert_eq!((late.code(), kind(&late)), (Code::DeadlineExceeded, CallErrorKind::DeadlineExceeded));
    assert!(late.message().contains("none answers"), "{late:?}");
    // The setting says the same for all calls, and a call may say otherwise.
    let stage = Stage::set(short().wait_for_ready(true), vec![at_port("nobody", 1)]);
    let late = get(stage.channel(), CallOptions::new()).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    let fast = get(stage.channel(), CallOptions::new().wait_for_ready(false)).await.unwrap_err();
    assert!(matches!(kind(&fast), CallErrorKind::NothingUsable { .. }), "{fast:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_goes_to_the_datacenter_that_it_names_and_the_others_stay() {
    let [dc1, dc2] = Cluster::start(["dc1", "dc2"]).await.unwrap().into_agents().try_into().unwrap();
    let (near, far) = (Backend::start("near").await, Backend::start("far").await);
    register(dc1.registry(), "counter", "near", near.port).await;
    register(dc2.registry(), "counter", "far", far.port).await;
    let consul = builder(&dc1.url()).fallback(Fallback::nearest()).service(steady()).build().unwrap();
    let client = consul.grpc_client("counter").unwrap();
    until_bound_to(&client, "near").await;
    let generation = client.binding().generation();
    let to = |name: &str| CallOptions::new().datacenter(name);
    for _ in 0..3 {
        assert_eq!(get(client.channel(), to("dc2")).await.unwrap(), "far");
        assert_eq!(get(client.channel(), to("dc1")).await.unwrap(), "near");
        assert_eq!(get(client.channel(), CallOptions::new()).await.unwrap(), "near");
    }
    let exactly = to("dc2").instance(id(far.port));
    assert_eq!(get(client.channel(), exactly).await.unwrap(), "far");
    let elsewhere = to("dc1").instance(id(far.port));
    not_as_chosen(&get(client.channel(), elsewhere).await.unwrap_err(), "no such instance is known");
    not_as_chosen(&get(client.channel(), to("dc3")).await.unwrap_err(), "dc1, dc2");
    assert_eq!(client.binding().generation(), generation, "nothing was rebound");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_datacenter_where_nothing_answers_is_a_typed_error_and_not_a_wait() {
    let a = Backend::start("a").await;
    let (here, there) = (StaticList::new(), StaticList::new());
    here.set("counter", [at(&a)]);
    there.set("counter", [Instance::new("nobody", "127.0.0.1", 1, "there")]);
    let services =
        Services::builder(here).fallback("there", there.clone()).service(steady()).build().unwrap();
    let client = services.grpc_client("counter").unwrap();
    until_bound_to(&client, "a").await;
    let there_too = || CallOptions::new().datacenter("there");
    not_as_chosen(&get(client.channel(), there_too()).await.unwrap_err(), "nobody has failed");
    let b = Backend::start("b").await;
    there.set("counter", [Instance::new("b", "127.0.0.1", b.port, "there")]);
    until(&client, "it is connected", |c| c.status().datacenters[1].ready == 1).await;
    assert_eq!(get(client.channel(), there_too()).await.unwrap(), "b");
    until_bound_to(&client, "a").await;
}

/// Its hedge is due long before there is another instance to send it to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hedge_in_another_datacenter_goes_out_once_another_instance_is_there() {
    let (a, fast) = (Backend::start("a").await, Backend::start("fast").await);
    let slow = Scripted::start(|_| Act::Hang).await;
    let (here, there) = (StaticList::new(), StaticList::new());
    here.set("counter", [at(&a)]);
    let of_there = |name: &str, port| Instance::new(name, "127.0.0.1", port, "there");
    there.set("counter", [of_there("slow", slow.port)]);
    let hedged = MethodOptions::new().hedging(HedgingPolicy::new(Duration::from_millis(1)));
    let options = steady().policy(Policy::RoundRobin).suspect_after(3 * SOON).method("/", hedged);
    let services = Services::builder(here).fallback("there", there.clone()).service(options).build().unwrap();
    let client = services.grpc_client("counter").unwrap();
    until_bound_to(&client, "a").await;
    let call = tokio::spawn(get(client.channel(), CallOptions::new().datacenter("there")));
    until(&client, "the first attempt is out", |_| slow.asks().len() == 1).await;
    there.set("counter", [of_there("slow", slow.port), of_there("fast", fast.port)]);
    assert_eq!(timeout(SOON, call).await.expect("it is hedged").unwrap().unwrap(), "fast");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_calls_have_chosen_is_given_up_on_shutdown_though_handles_are_left() {
    let servers = [Scripted::good().await, Scripted::good().await];
    let instances = servers.iter().map(|it| at_port(&it.port.to_string(), it.port)).collect();
    let stage = Stage::set(steady().spares(0), instances);
    stage.client.ready().await.unwrap();
    for server in &servers {
        let to = CallOptions::new().instance(id(server.port));
        assert_eq!(get(stage.channel(), to).await.unwrap(), server.port.to_string());
    }
    assert_eq!(servers.each_ref().map(Scripted::open), [1, 1]);
    stage.client.services().shutdown().await;
    until(&stage.client, "no connection is left", |_| servers.iter().all(|it| it.open() == 0)).await;
}
