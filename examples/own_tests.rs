//! A test of one's own code while the registry fails. It can be run as it is,
//! `cargo run --features demo --example own_tests`, and is a test besides:
//! `cargo test --features demo --example own_tests`.
//!
//! Nothing is mocked: the agent speaks Consul's HTTP on loopback, the instances are
//! gRPC servers. `grpc.health.v1` stands for the service, since it needs no proto;
//! with yours it is the same.

use std::{error::Error, time::Duration};

use tokio::net::TcpListener;
use tokio_stream::{Stream, StreamExt};
use tonic::{
    Request, Status,
    transport::{Server, server::TcpIncoming},
};
use tonic_failover::{
    client::{ConsulService, FailoverChannel, FailoverEvent, ServiceOptions},
    consul::ConsulConfig,
    testkit::{Agent, Registration},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

/// Your code: what is to go on whatever becomes of the registry.
async fn is_serving(channel: FailoverChannel) -> Result<bool, Status> {
    let mut request = Request::new(HealthCheckRequest::default());
    request.set_timeout(Duration::from_secs(2));
    let answer = HealthClient::new(channel).check(request).await?;
    Ok(answer.into_inner().status().as_str_name() == "SERVING")
}

/// Your server: the port it listens on. It ends with the runtime.
async fn server() -> Result<u16, Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder().add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    Ok(port)
}

/// Waits for what the client tells: better than for a time, which is too long or too short.
async fn told(
    events: &mut (impl Stream<Item = FailoverEvent> + Unpin),
    is_it: impl Fn(&FailoverEvent) -> bool,
) -> Result<(), Box<dyn Error>> {
    while let Some(event) = events.next().await {
        println!("{event}");
        if is_it(&event) {
            return Ok(());
        }
    }
    Err("the client has ended".into())
}

async fn calls_go_on_while_the_registry_is_away() -> Result<(), Box<dyn Error>> {
    let agent = Agent::start("dc1").await?;
    for name in ["counter-1", "counter-2"] {
        let instance = Registration::new("counter", name, "127.0.0.1", server().await?);
        agent.registry().register(&instance).await?;
    }
    let config = ConsulConfig::new(&agent.url())?;
    let consul = ConsulService::builder(config).service(ServiceOptions::new("counter")).build()?;
    let counter = consul.grpc_client("counter")?;
    let mut events = counter.events();
    counter.ready().await?;

    // As if the agent's process had died. Most other switches of `Faults` are met only when
    // a query that waits for news is answered: give the client `.wait(Duration::from_secs(1))`.
    // Some are told otherwise: an empty list in the status, a hidden one by `AccessDenied`.
    let fault = agent.faults().refuse();
    told(&mut events, |event| matches!(event, FailoverEvent::RegistryLost { .. })).await?;
    for _ in 0..100 {
        assert!(is_serving(counter.channel()).await?);
    }
    println!("{}", counter.status());

    fault.off();
    told(&mut events, |event| matches!(event, FailoverEvent::RegistryBack { .. })).await?;
    // It waits for news again, with one connection.
    agent.wait_for(|seen| seen.blocked == 1 && seen.connections == 1).await?;
    consul.shutdown().await;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    calls_go_on_while_the_registry_is_away().await
}

#[tokio::test]
async fn no_call_fails_while_the_registry_is_away() {
    calls_go_on_while_the_registry_is_away().await.expect("no call fails");
}
