//! The whole call path without Consul: fixed lists, and a registry of one's own.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{sync::Arc, time::Duration};

use common::{Backend, Callers, Method, builder, call, get, steady, until, until_bound_to};
use parking_lot::Mutex;
use tonic_failover::{
    Instance,
    client::{
        BuildError, Fallback, GrpcClient, ServiceOptions, Services, ServicesBuilder,
        registry::{Asking, Listing, Question, Registry, RegistryError, StaticList},
    },
};

fn at(backend: &Backend) -> Instance {
    Instance::new(&backend.name, "127.0.0.1", backend.port, "here")
}

fn counter(services: ServicesBuilder) -> GrpcClient<Services> {
    services.service(steady()).build().unwrap().grpc_client("counter").unwrap()
}

fn listing(backends: &[&Backend]) -> StaticList {
    let list = StaticList::new();
    list.set("counter", backends.iter().copied().map(at));
    list
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_is_replaced_rebinds_and_fails_no_call() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let list = StaticList::new();
    let client = counter(Services::builder(list.clone()).name("by hand"));
    list.set("counter", [at(&a)]);
    until_bound_to(&client, "a").await;
    assert_eq!((client.service_name(), client.services().name()), ("counter", "by hand"));
    assert_eq!(client.status().to_string(), "a@here ready, 1 known");
    let callers = Callers::start(&client, 32, Method::Increment);
    callers.go_on_for(100).await;
    list.set("counter", [at(&b)]);
    until_bound_to(&client, "b").await;
    callers.go_on_for(100).await;
    let tally = callers.stop().await;
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "b");
    let updated = client.services().update_grpc_client("counter").await.unwrap();
    assert_eq!(updated.generation(), client.binding().generation(), "nothing has changed");
    client.services().shutdown().await;
    assert!(client.status().closed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_list_leaves_the_old_instances_as_the_last_resort() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let list = listing(&[&a]);
    let (here, there) = (list.clone(), StaticList::new());
    let demote = Duration::from_millis(300);
    let client = counter(Services::builder(here).demote_after(demote).fallback("there", there.clone()));
    until_bound_to(&client, "a").await;
    list.set("counter", []);
    until(&client, "demoted", |c| c.status().datacenters[0].demoted).await;
    call(client.channel(), Method::Increment, "1".to_owned()).await.unwrap();
    there.set("counter", [at(&b)]);
    until_bound_to(&client, "b").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_move_to_the_next_registry_and_back() {
    let (mut a, b) = (Backend::start("a").await, Backend::start("b").await);
    let port = a.port;
    let client = counter(
        Services::builder(listing(&[&a]))
            .fallback("spare", listing(&[&b]))
            .failback_after(Duration::from_millis(100)),
    );
    until_bound_to(&client, "a").await;
    let callers = Callers::start(&client, 32, Method::Get);
    callers.go_on_for(100).await;
    a.kill().await;
    until_bound_to(&client, "b").await;
    assert_eq!(client.status().datacenters[1].name, "spare");
    let _a = Backend::start_with("a", port, common::NOWHERE, &[]).await;
    until_bound_to(&client, "a").await;
    let tally = callers.stop().await;
    assert!(tally.failed.is_empty(), "{:?}", tally.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_consul_was_never_reached_a_list_serves() {
    let a = Backend::start("a").await;
    let list: Arc<dyn Registry> = Arc::new(listing(&[&a]));
    let consul = builder(common::NOWHERE).service(steady()).fallback(Fallback::registries([("list", list)]));
    let client = consul.build().unwrap().grpc_client("counter").unwrap();
    client.ready().await.unwrap();
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "a");
    assert_eq!(client.consul_name(), "http://127.0.0.1:1");
}

/// Answers as it is told, to every question at once.
#[derive(Clone)]
struct Told(Arc<Mutex<Word>>);

#[derive(Clone)]
enum Word {
    Lists(Vec<Instance>),
    Fails,
    Panics,
}

impl Registry for Told {
    fn ask(&self, _: Question) -> Asking {
        let word = self.0.lock().clone();
        Box::pin(async move {
            match word {
                Word::Lists(list) => Ok(Listing::new(list).again_in(Duration::from_millis(50))),
                Word::Fails => Err(RegistryError::other("it has burnt down")),
                Word::Panics => panic!("a fault in a registry of one's own; expected here"),
            }
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_of_ones_own_that_fails_takes_no_instance_away() {
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    let told = Told(Arc::new(Mutex::new(Word::Lists(vec![at(&a)]))));
    let client = counter(Services::builder(told.clone()));
    until_bound_to(&client, "a").await;
    for (word, why) in [(Word::Fails, "it has burnt down"), (Word::Panics, "panicked")] {
        *told.0.lock() = word;
        until(&client, why, |c| {
            let status = &c.status().datacenters[0];
            status.stale_since.is_some() && status.registry_error.as_ref().is_some_and(|e| e.contains(why))
        })
        .await;
        let status = client.status();
        assert_eq!((status.datacenters[0].known, common::bound(&client).as_deref()), (1, Some("a")));
        call(client.channel(), Method::Increment, why.to_owned()).await.unwrap();
    }
    *told.0.lock() = Word::Lists(vec![at(&b)]);
    until_bound_to(&client, "b").await;
    assert!(client.status().datacenters[0].stale_since.is_none());
}

#[tokio::test]
async fn what_only_consul_can_do_is_refused() {
    let plain = || ServiceOptions::new("counter");
    for (options, words) in [
        (plain().tag("v2"), "tag = v2"),
        (plain().meta("zone", "a"), "meta = zone"),
        (plain().filter("x == y"), "filter = x == y"),
        (plain().near("_agent"), "near = _agent"),
        (plain().include_warning(true), "include_warning = true"),
    ] {
        let error = Services::builder(StaticList::new()).service(options).build().unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    let error = Services::builder(StaticList::new()).build().unwrap_err();
    assert!(matches!(error, BuildError::NoService));
    let wait = Services::builder(StaticList::new()).service(plain()).wait(Duration::ZERO);
    assert!(matches!(wait.build().unwrap_err(), BuildError::Wait { .. }));
    let services = Services::builder(StaticList::new()).service(plain()).build().unwrap();
    let error = services.grpc_client("conter").unwrap_err();
    assert_eq!(error.to_string(), "unknown service \"conter\": the known ones are counter");
}
