//! The client's own process stands still: a thread that blocks, a runtime without
//! a thread to spare, SIGSTOP. Nothing that waited meanwhile may be taken for dead.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{
    DEADLINE,
    alone::Alone,
    builder, options, register,
    scripted::{Act, Scripted},
    until,
};
use tokio::task::JoinSet;
use tonic::Request;
use tonic_failover::{
    client::{FailoverEvent, Policy},
    demo::pb::{IncrementRequest, counter_client::CounterClient},
    testkit::Agent,
};

#[expect(clippy::disallowed_methods, reason = "that the thread stands still is what is tried")]
fn stand_still(time: Duration) {
    std::thread::sleep(time);
}

#[tokio::test(flavor = "current_thread")]
async fn a_client_that_stood_still_while_it_probed_gives_nobody_up() {
    // Servers and Consul run on a thread of their own.
    let world = Alone::new();
    let (url, _agent, servers) = world
        .run(async {
            let (mut servers, agent) = (Vec::new(), Agent::start("dc1").await.unwrap());
            for name in ["a", "b"] {
                let server = Scripted::start(|_| Act::Answer.after(Duration::from_secs(3))).await;
                register(agent.registry(), "counter", name, server.port).await;
                server.health(Act::Answer.after(Duration::from_millis(100)));
                servers.push(server);
            }
            (agent.url(), agent, servers)
        })
        .await;
    let service = builder(&url).service(options().policy(Policy::RoundRobin)).build().unwrap();
    let client = service.grpc_client("counter").unwrap();
    client.ready().await.unwrap();
    until(&client, "both are ready", |c| c.status().datacenters[0].ready == 2).await;
    let checks = || servers.iter().map(Scripted::checks).sum::<usize>();
    let (before, mut events) = (checks(), client.events());
    let mut calls = JoinSet::new();
    for _ in 0..4 {
        let channel = client.channel();
        calls.spawn(async move {
            let mut request = Request::new(IncrementRequest::default());
            request.set_timeout(5 * DEADLINE);
            CounterClient::new(channel).increment(request).await
        });
    }
    until(&client, "both are probed", |_| checks() == before + 2).await;
    stand_still(Duration::from_millis(1500)); // Longer than any probe may take.
    while let Some(call) = calls.join_next().await {
        call.unwrap().unwrap();
    }
    service.shutdown().await;
    while let Some(event) = tokio_stream::StreamExt::next(&mut events).await {
        assert!(!matches!(event, FailoverEvent::Ejected { .. }), "{event}");
    }
}
