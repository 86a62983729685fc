//! Blocking queries on a real Consul, and what becomes of them when it dies.

use serde_json::json;
use tonic_failover::{
    consul::{BlockingIndex, RegistryError},
    testkit::ConsulProcess,
};

use super::*;

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_blocking_question_is_answered_when_something_has_changed() {
    let Some(agent) = agent().await else { return };
    let client = client(&agent.url());
    // Without an index it does not wait, and an unknown service has an index too.
    let first = client.watch_instances(&query("counter"), BlockingIndex::NONE, LONG).await.unwrap();
    let mut index = BlockingIndex::NONE;
    index.answered(first.index);
    assert!(index.get().is_some());
    let watching = tokio::spawn({
        let client = client.clone();
        async move { client.watch_instances(&query("counter"), index, LONG).await }
    });
    // Asked beside it, so that the blocking one is likely under way.
    names(&client, &query("counter")).await;
    assert!(!watching.is_finished());
    register(agent.registry(), json!({"ID": "a"})).await;
    let woken = tokio::time::timeout(PATIENCE, watching).await.unwrap().unwrap().unwrap();
    assert_eq!(woken.snapshot.instances[0].name, "a");
    assert!(woken.index > first.index);
}

#[tokio::test]
async fn a_blocking_question_without_news_is_answered_when_its_wait_ends() {
    let Some(agent) = agent().await else { return };
    let client = client(&agent.url());
    register(agent.registry(), json!({"ID": "a"})).await;
    let first = client.healthy_instances(&query("counter")).await.unwrap();
    let after = BlockingIndex::from(first.index.unwrap());
    for wait in [Duration::from_millis(300), Duration::ZERO] {
        let same = client.watch_instances(&query("counter"), after, wait).await.unwrap();
        assert_eq!((same.snapshot, same.index), (first.snapshot.clone(), first.index));
    }
}

#[tokio::test]
async fn an_agent_that_dies_breaks_the_question_and_comes_back_with_a_lower_index() {
    let Some(mut agent) = agent().await else { return };
    let client = client(&agent.url());
    for round in 0..20 {
        register(agent.registry(), json!({"ID": "a", "Meta": {"round": round.to_string()}})).await;
    }
    let before = client.healthy_instances(&query("counter")).await.unwrap().index.unwrap();
    let watching = tokio::spawn({
        let client = client.clone();
        async move { client.watch_instances(&query("counter"), before.into(), LONG).await }
    });
    // Asked beside it, so that the blocking one is likely under way.
    names(&client, &query("counter")).await;
    agent.kill().await.unwrap();
    let error = watching.await.unwrap().unwrap_err();
    assert!(
        matches!(
            error,
            RegistryError::Interrupted { .. }
                | RegistryError::Reset { .. }
                | RegistryError::Unreachable { .. }
        ),
        "{error:?}"
    );
    let error = client.healthy_instances(&query("counter")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }), "{error:?}");
    agent.restart().await.unwrap();
    let after = client.healthy_instances(&query("counter")).await.unwrap();
    assert!(after.index.unwrap() < before, "{after:?}");
    assert!(after.snapshot.instances.is_empty());
}

#[tokio::test]
async fn an_agent_that_stands_still_is_given_up_in_time_and_found_again() {
    let Some(agent) = agent().await else { return };
    let limit = Duration::from_millis(400);
    let config = ConsulConfig::new(&agent.url()).unwrap().request_timeout(limit);
    let client = ConsulClient::new(config).unwrap();
    register(agent.registry(), json!({"ID": "a"})).await;
    let index = client.healthy_instances(&query("counter")).await.unwrap().index.unwrap();
    agent.pause().await.unwrap();
    // The signal takes a moment to stop all of its threads.
    let error = loop {
        if let Err(error) = client.healthy_instances(&query("counter")).await {
            break error;
        }
    };
    assert!(matches!(error, RegistryError::TimedOut { after } if after == limit), "{error:?}");
    // A blocking one is given what Consul may add to its wait.
    let wait = Duration::from_millis(160);
    let error = client.watch_instances(&query("counter"), index.into(), wait).await.unwrap_err();
    let expected = limit + Duration::from_millis(170);
    assert!(matches!(error, RegistryError::TimedOut { after } if after == expected), "{error:?}");
    agent.resume().unwrap();
    eventually(|| async { client.healthy_instances(&query("counter")).await.is_ok() }).await;
}

#[tokio::test]
async fn a_datacenter_that_stands_still_costs_the_own_one_nothing() {
    let Some(bin) = consul() else { return };
    let dc1 = ConsulProcess::builder(&bin).start().await.unwrap();
    let dc2 = ConsulProcess::builder(&bin).datacenter("dc2").join_wan(&dc1).start().await.unwrap();
    let config = ConsulConfig::new(&dc1.url()).unwrap().request_timeout(Duration::from_millis(500));
    let client = ConsulClient::new(config).unwrap();
    register(dc1.registry(), json!({"ID": "near"})).await;
    register(dc2.registry(), json!({"ID": "far"})).await;
    let far = query("counter").datacenter("dc2");
    assert_eq!(names(&client, &far).await, ["far"]);
    dc2.pause().await.unwrap();
    let error = loop {
        if let Err(error) = client.healthy_instances(&far).await {
            break error;
        }
    };
    assert!(matches!(error, RegistryError::TimedOut { .. }), "{error:?}");
    let hanging = tokio::spawn({
        let client = client.clone();
        async move { client.watch_instances(&far, BlockingIndex::from(1), LONG).await }
    });
    assert_eq!(names(&client, &query("counter")).await, ["near"]);
    assert_eq!(client.datacenters().await.unwrap(), ["dc1", "dc2"]);
    assert!(!hanging.is_finished());
    hanging.abort();
}
