//! What the first design asked for and no other test file is about.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{Backend, builder, consul, options, register};
use tonic_failover::consul::HealthQuery;

#[tokio::test]
async fn the_five_properties_of_a_handle_are_reachable() {
    let Some(consul) = consul().await else { return };
    let backend = Backend::start("a").await;
    register(consul.registry(), "counter", "a", backend.port).await;
    let service = builder(&consul.url()).name("home").service(options()).build().unwrap();
    let handle = service.grpc_client("counter").unwrap();
    handle.ready().await.unwrap();

    // client, consulName, consulClient, serviceName, consulService
    let bindings = handle.subscribe();
    assert_eq!(bindings.borrow().instance().unwrap().name, "a");
    assert!(bindings.borrow().channel().is_some());
    assert_eq!(handle.consul_name(), "home");
    let query = HealthQuery::new(handle.service_name()).unwrap();
    let answer = handle.consul_client().healthy_instances(&query).await.unwrap();
    assert_eq!(answer.snapshot.instances[0].name, "a");
    assert_eq!(handle.service_name(), "counter");
    let binding = handle.consul_service().update_grpc_client(handle.service_name()).await.unwrap();
    assert_eq!(binding.generation(), bindings.borrow().generation());
}
