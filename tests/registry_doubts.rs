//! A registry that answers, and not as it should.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{
    Method, builder, options,
    record::Record,
    register,
    stage::{Stage, first, impatient},
    until,
};
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;
use tonic_failover::{
    client::{FailoverEvent, RegistryDoubt},
    consul::Denied,
    testkit::Agent,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_cut_off_from_its_leader_is_stale_and_stays_in_use() {
    let agent = Agent::start("dc1").await.unwrap();
    let stage = Stage::set(agent.registry(), impatient(&agent.url()), Method::Increment).await;
    let fault = agent.faults().no_leader();
    stage.lost("cut off from the leader").await;
    let status = first(&stage.client);
    assert!(matches!(status.doubt, Some(RegistryDoubt::Behind { .. })), "{status:?}");
    assert_eq!((status.registry_error, status.known, status.ready), (None, 2, 2));
    // Its contact grows older, and the age with it; that is the same episode.
    let age = async |least: Duration| {
        until(&stage.client, "it grows older", |c| {
            matches!(first(c).doubt, Some(RegistryDoubt::Behind { last_contact }) if last_contact >= least)
        })
        .await;
    };
    age(Duration::from_secs(1)).await;
    age(Duration::from_secs(2)).await;
    assert!(first(&stage.client).stale_since.unwrap().elapsed() >= Duration::from_secs(2));
    // Old news is better than none: what it says is followed.
    stage.a_change_is_seen(agent.registry()).await;
    fault.off();
    stage.back().await;
    assert_eq!(first(&stage.client).doubt, None);
    stage.episodes(1).await;
    let record = stage.end("cut off from the leader").await;
    assert!(record.words().iter().any(|it| it.contains("has been cut off from its leader for")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_that_is_lost_and_comes_back_cut_off_is_one_episode() {
    let agent = Agent::start("dc1").await.unwrap();
    let stage = Stage::set(agent.registry(), impatient(&agent.url()), Method::Increment).await;
    let fault = agent.faults().status(500, "rpc error making call: EOF");
    stage.lost("status 500").await;
    let leaderless = agent.faults().no_leader();
    fault.off();
    stage.lost("cut off from the leader").await;
    leaderless.off();
    stage.back().await;
    stage.episodes(1).await;
    stage.end("lost, then cut off").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_pour_in_while_the_index_stays_are_held_back_and_named() {
    let agent = Agent::start("dc1").await.unwrap();
    let stage = Stage::set(agent.registry(), builder(&agent.url()), Method::Increment).await;
    let fault = agent.faults().answer_at_once();
    until(&stage.client, "it is named", |c| first(c).doubt == Some(RegistryDoubt::NotBlocking)).await;
    let line = stage.client.status().to_string();
    assert!(line.contains("answers blocking queries at once") && !line.contains("stale"), "{line}");
    let (asked, since) = (agent.counters().requests_to("/v1/health"), Instant::now());
    stage.callers.go_on_for(320).await;
    stage.a_change_is_seen(agent.registry()).await;
    let asked = agent.counters().requests_to("/v1/health") - asked;
    assert!(asked <= 3 + since.elapsed().as_secs(), "{asked} questions in {:?}", since.elapsed());
    fault.off();
    until(&stage.client, "a query has waited", |c| agent.counters().blocked == 1 && first(c).doubt.is_some())
        .await;
    register(agent.registry(), "other", "other", 1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    stage.a_change_is_seen(agent.registry()).await;
    until(&stage.client, "it is well again", |c| first(c).doubt.is_none()).await;
    let told = |record: &Record| {
        let begun = record.count(|it| matches!(it, FailoverEvent::NotBlocking { .. }));
        (begun, record.count(|it| matches!(it, FailoverEvent::BlockingAgain { .. })))
    };
    stage.record.until("it is told, and told again when it ends", |r| told(r) == (1, 1)).await;
    let record = stage.end("answers at once").await;
    assert_eq!(told(&record), (1, 1), "{:#?}", record.words());
    assert_eq!(record.episodes(), (0, 0), "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_query_that_never_ends_is_given_up_and_the_news_it_missed_is_fetched() {
    let agent = Agent::start("dc1").await.unwrap();
    let stage = Stage::set(agent.registry(), impatient(&agent.url()), Method::Increment).await;
    let fault = agent.faults().never_end();
    let record = &stage.record;
    // 1 s of waiting, a sixteenth, and 0.7 s for the answer.
    record.until("it is given up", |r| r.words().iter().any(|it| it.contains("within 1.7625s"))).await;
    stage.a_change_is_seen(agent.registry()).await;
    assert_eq!(first(&stage.client).ready, 2);
    stage.callers.go_on_for(320).await;
    fault.off();
    stage.back().await;
    // Each query that is given up is one, since a read in between brings an answer.
    record.until("what began has ended", |r| r.episodes().0 == r.episodes().1).await;
    stage.end("never ends").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_that_wants_to_be_left_alone_is() {
    let agent = Agent::start("dc1").await.unwrap();
    let stage = Stage::set(agent.registry(), impatient(&agent.url()), Method::Increment).await;
    let fault = agent.faults().rate_limit(Duration::from_secs(30));
    stage.lost("asks for fewer requests").await;
    let asked = agent.counters().requests_to("/v1/health");
    let service = stage.client.consul_service();
    service.update_grpc_client("counter").await.unwrap();
    stage.callers.go_on_for(640).await;
    assert_eq!(agent.counters().requests_to("/v1/health"), asked, "not even for an update");
    fault.off();
    stage.end("asked for fewer requests").await;
}

#[tokio::test]
async fn connections_cut_under_waiting_questions_are_no_loss_where_the_registry_answers() {
    let agent = Agent::start("dc1").await.unwrap();
    register(agent.registry(), "counter", "a", 1).await;
    let options = options().ejection(common::SOON, common::SOON);
    let client = builder(&agent.url()).service(options).build().unwrap().grpc_client("counter").unwrap();
    let mut events = client.events();
    for _ in 0..5 {
        agent.wait_for(|it| it.blocked == 1).await.unwrap();
        let asked = agent.counters().requests_to("/v1/health");
        agent.faults().drop_connections().off();
        agent.wait_for(|it| it.requests_to("/v1/health") > asked).await.unwrap();
        until(&client, "it is fresh", |c| first(c).stale_since.is_none() && first(c).known == 1).await;
    }
    drop(client);
    while let Some(event) = timeout(common::SOON, events.next()).await.unwrap() {
        assert!(!matches!(event, FailoverEvent::RegistryLost { .. }), "{event:?}");
    }
}

#[tokio::test]
async fn a_list_of_what_cannot_be_connected_to_is_not_said_to_hold_nothing() {
    let agent = Agent::start("dc1").await.unwrap();
    register(agent.registry(), "counter", "portless", 0).await;
    let client = builder(&agent.url()).service(options()).build().unwrap().grpc_client("counter").unwrap();
    let words = "local lists 1, none of which can be connected to (\"portless\" on node ";
    until(&client, words, |c| c.status().to_string().contains(words)).await;
    assert!(client.status().to_string().contains("0 is no port"), "{}", client.status());
    assert_eq!((first(&client).skipped, first(&client).known), (1, 0));
    register(agent.registry(), "counter", "portless", 1).await;
    until(&client, "it has a port", |c| first(c).skipped == 0 && first(c).known == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_that_falls_hides_no_change() {
    let agent = Agent::start("dc1").await.unwrap();
    let stage = Stage::set(agent.registry(), builder(&agent.url()), Method::Increment).await;
    for round in 0..3 {
        // A query that begins only after the fall waits beyond an index to come.
        agent.wait_for(|it| it.blocked == 1).await.unwrap();
        agent.faults().reset_index();
        stage.a_change_is_seen(agent.registry()).await;
        assert_eq!(first(&stage.client).known, 3 + round);
    }
    let record = stage.end("falling index").await;
    assert_eq!(record.episodes(), (0, 0), "{:#?}", record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_is_hidden_from_the_token_is_unknown_and_not_empty() {
    let agent = Agent::start("dc1").await.unwrap();
    let quick = impatient(&agent.url()).demote_after(Duration::from_millis(100));
    let stage = Stage::set(agent.registry(), quick, Method::Increment).await;
    let fault = agent.faults().filtered("counter");
    stage.lost("the token may not read the service").await;
    stage.callers.go_on_for(320).await;
    let status = first(&stage.client);
    assert_eq!((status.denied, &status.registry_error), (Some(Denied::Service), &None));
    assert_eq!((status.known, status.ready), (2, 2));
    assert!(!status.demoted && status.empty_since.is_none(), "{status:?}");
    fault.off();
    stage.back().await;
    assert_eq!(first(&stage.client).denied, None);
    let told = |r: &Record, denied: bool| {
        r.count(|event| match event {
            FailoverEvent::AccessDenied { .. } => denied,
            FailoverEvent::AccessGranted { .. } => !denied,
            _ => false,
        })
    };
    stage.record.until("one event each", |r| (told(r, true), told(r, false)) == (1, 1)).await;
    let record = stage.end("hidden from the token").await;
    assert_eq!(record.episodes(), (0, 0), "{:#?}", record.words());
    assert_eq!(record.bound().len(), 1, "{:#?}", record.words());
}
