//! ACLs: what a client and a backend need, and what becomes of calls when a token
//! loses its rights, is exchanged or is deleted.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{fs, path::Path, time::Duration};

use common::{
    Backend, Callers, Method, Tally,
    acl::{Guarded, in_readme},
    get,
    record::Record,
    register, steady, until, until_bound_to,
};
use tonic_failover::{
    client::{ConsulService, DatacenterStatus, FailoverEvent, GrpcClient},
    consul::{ConsulClient, ConsulConfig, Denied, HealthQuery, RegistryError, ServiceRegistration},
    testkit::Agent,
};

fn config(url: &str) -> ConsulConfig {
    ConsulConfig::new(url).unwrap()
}

/// Asks again each second, because a right that is given or taken wakes no query.
fn client(config: ConsulConfig) -> GrpcClient {
    let builder = ConsulService::builder(config).wait(Duration::from_secs(1));
    let builder = builder.service(
        steady().fail_fast_after(Duration::from_millis(500)).connect_timeout(Duration::from_secs(2)),
    );
    builder.build().unwrap().grpc_client("counter").unwrap()
}

fn dc1(client: &GrpcClient) -> DatacenterStatus {
    client.status().datacenters.first().cloned().unwrap_or_default()
}

fn served(what: &str, tally: &Tally) {
    println!("{what}: {} calls, {} resent, slowest {:?}", tally.calls, tally.resent, tally.slowest);
    assert!(tally.failed.is_empty(), "{what}: {:?}", tally.failed);
}

/// How often something was denied, and how often nothing was any more.
fn denials(record: &Record) -> (usize, usize) {
    let denied = record.count(|event| matches!(event, FailoverEvent::AccessDenied { .. }));
    (denied, record.count(|event| matches!(event, FailoverEvent::AccessGranted { .. })))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_policies_in_the_readme_are_enough() {
    let Some(guarded) = Guarded::start().await else { return };
    let backend = guarded.token_for("backend", &in_readme("a backend")).await;
    let reader = guarded.token_for("client", &in_readme("a client")).await;
    let mut a = Backend::start_as("a", "127.0.0.1:0", &guarded.url(), &[], Some(&backend.secret)).await;
    let client = client(config(&guarded.url()).token(&reader.secret));
    until_bound_to(&client, "a").await;
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "a");
    assert_eq!(dc1(&client).denied, None);
    a.terminate().await;
    let passing = guarded.root.passing("counter").await.unwrap();
    assert!(passing.is_empty(), "it took itself out: {passing:?}");
}

#[tokio::test]
async fn no_line_of_the_policies_can_go_and_the_one_that_is_missing_is_named() {
    let Some(guarded) = Guarded::start().await else { return };
    register(&guarded.root, "counter", "a", 1).await;
    let query = HealthQuery::new("counter").unwrap();
    let policy = in_readme("a client");
    let lines: Vec<_> = policy.lines().filter(|it| !it.starts_with('#') && !it.is_empty()).collect();
    let [service, nodes] = lines[..] else { panic!("{lines:?}") };
    for (name, rules, denied) in [
        ("both", policy.as_str(), None),
        ("service", service, Some(Denied::Nodes)),
        ("nodes", nodes, Some(Denied::Service)),
        ("nothing", "", Some(Denied::Both)),
    ] {
        let token = guarded.token_for(name, rules).await;
        let client = ConsulClient::new(config(&guarded.url()).token(&token.secret)).unwrap();
        let listed = client.healthy_instances(&query).await.unwrap().snapshot.instances.len();
        assert_eq!(listed, usize::from(denied.is_none()), "{name}");
        assert_eq!(client.denied(&query).await.unwrap(), denied, "{name}");
        let own = query.clone().datacenter("dc1");
        assert_eq!(client.denied(&own).await.unwrap(), denied, "{name}");
    }
    let policy = in_readme("a backend").replace("write", "read");
    let token = guarded.token_for("backend", &policy).await;
    let client = ConsulClient::new(config(&guarded.url()).token(&token.secret)).unwrap();
    let entry = ServiceRegistration::new("counter", "b", "127.0.0.1", 2).unwrap();
    let error = client.register(&entry).await.unwrap_err();
    assert!(matches!(error, RegistryError::Forbidden { .. }), "{error}");
    let unknown = ConsulClient::new(config(&guarded.url()).token("unknown")).unwrap();
    let error = unknown.denied(&query).await.unwrap_err();
    assert!(matches!(&error, RegistryError::Forbidden { message } if message == "ACL not found"), "{error}");
}

#[tokio::test]
async fn a_token_that_may_read_nothing_is_the_reason_why_nothing_is_usable() {
    let Some(guarded) = Guarded::start().await else { return };
    let a = Backend::start("a").await;
    register(&guarded.root, "counter", "a", a.port).await;
    let policy = guarded.policy("client", "node_prefix \"\" { policy = \"read\" }").await;
    let token = guarded.token("client").await;
    let client = client(config(&guarded.url()).token(&token.secret));
    until(&client, "it is named", |c| dc1(c).denied == Some(Denied::Service)).await;
    let words = "the token may not read the service";
    let error = client.ready_within(Duration::from_millis(100)).await.unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
    let error = client.consul_service().update_grpc_client("counter").await.unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
    let error = get(client.channel()).await.unwrap_err();
    assert!(error.message().contains(words), "{error}");
    guarded.change_policy(&policy, "client", &in_readme("a client")).await;
    client.ready().await.unwrap();
    assert_eq!(dc1(&client).denied, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_that_are_taken_away_under_running_calls_take_nothing_from_them() {
    let Some(guarded) = Guarded::start().await else { return };
    let (a, b) = (Backend::start("a").await, Backend::start("b").await);
    for backend in [&a, &b] {
        register(&guarded.root, "counter", &backend.name, backend.port).await;
    }
    let rules = in_readme("a client");
    let policy = guarded.policy("client", &rules).await;
    let token = guarded.token("client").await;
    let quick = ConsulService::builder(config(&guarded.url()).token(&token.secret))
        .wait(Duration::from_secs(1))
        .demote_after(Duration::from_millis(100))
        .service(steady());
    let client = quick.build().unwrap().grpc_client("counter").unwrap();
    let record = Record::of(&client);
    until(&client, "both are ready", |c| dc1(c).ready == 2).await;
    let callers = Callers::start(&client, 32, Method::Increment);
    for (round, (rules, denied)) in [
        ("", Denied::Both),
        ("service \"counter\" { policy = \"read\" }", Denied::Nodes),
        ("node_prefix \"\" { policy = \"read\" }", Denied::Service),
    ]
    .into_iter()
    .enumerate()
    {
        guarded.change_policy(&policy, "client", rules).await;
        until(&client, "it is named", |c| dc1(c).denied == Some(denied)).await;
        let line = client.status().to_string();
        assert!(line.contains("dc1 stale for") && line.contains(&format!("({denied})")), "{line}");
        callers.go_on_for(500).await;
        let status = dc1(&client);
        assert_eq!((status.known, status.ready), (2, 2), "the last known good stays");
        assert!(!status.demoted && status.empty_since.is_none(), "unknown is not empty: {status:?}");
        guarded.change_policy(&policy, "client", &in_readme("a client")).await;
        until(&client, "it may read again", |c| dc1(c).denied.is_none()).await;
        assert!(dc1(&client).stale_since.is_none(), "{}", client.status());
        record.until("each is one event", |r| denials(r) == (round + 1, round + 1)).await;
    }
    let c = Backend::start("c").await;
    register(&guarded.root, "counter", "c", c.port).await;
    until(&client, "news comes again", |c| dc1(c).known == 3).await;
    served("rights taken and given", &callers.stop().await);
    assert_eq!(record.episodes(), (0, 0), "{:#?}", record.words());
    assert_eq!(record.bound().len(), 1, "no reason to move: {:#?}", record.words());
}

/// As careful programs do it: readers see the old file or the new one.
fn put(file: &Path, token: &str) {
    let new = file.with_extension("new");
    fs::write(&new, format!("{token}\n")).unwrap();
    fs::rename(new, file).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_in_a_file_is_exchanged_under_running_calls() {
    let Some(guarded) = Guarded::start().await else { return };
    let a = Backend::start("a").await;
    register(&guarded.root, "counter", "a", a.port).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    let mut token = guarded.token_for("client", &in_readme("a client")).await;
    put(&file, &token.secret);
    // A query that waits long has the old token for long.
    let builder = ConsulService::builder(config(&guarded.url()).token_file(&file)).service(steady());
    let client = builder.build().unwrap().grpc_client("counter").unwrap();
    let record = Record::of(&client);
    until(&client, "it is ready", |c| dc1(c).ready == 1).await;
    let callers = Callers::start(&client, 32, Method::Increment);
    for round in 1..=5_u16 {
        let new = guarded.token("client").await;
        put(&file, &new.secret);
        guarded.delete(&token).await;
        token = new;
        // The query that waits ends by this, refused; the new token is asked with at once.
        register(&guarded.root, "counter", &format!("other-{round}"), round).await;
        until(&client, "the news came", |c| dc1(c).known == usize::from(round) + 1).await;
        assert_eq!(record.episodes(), (0, 0), "{:#?}", record.words());
    }

    // Deleted too early: refused until the file has the new one.
    guarded.delete(&token).await;
    register(&guarded.root, "counter", "late", 6).await;
    until(&client, "it is refused", |c| c.status().to_string().contains("refuses the token: ACL not found"))
        .await;
    callers.go_on_for(100).await;
    let new = guarded.token("client").await;
    put(&file, &new.secret);
    until(&client, "it is back", |c| dc1(c).stale_since.is_none() && dc1(c).known == 7).await;
    record.until("one episode", |r| r.episodes() == (1, 1)).await;

    // A file that cannot be used leaves the token as it is.
    for broken in 0..2 {
        if broken == 0 {
            fs::write(&file, "").unwrap()
        } else {
            fs::remove_file(&file).unwrap()
        }
        client.consul_service().update_grpc_client("counter").await.unwrap();
    }
    served("tokens exchanged", &callers.stop().await);
    assert_eq!(record.episodes(), (1, 1), "{:#?}", record.words());
    assert_eq!(record.bound().len(), 1, "{:#?}", record.words());
}

#[tokio::test]
async fn an_exchange_of_tokens_leaves_the_query_that_waits_alone() {
    let agent = Agent::start("dc1").await.unwrap();
    let a = Backend::start("a").await;
    register(agent.registry(), "counter", "a", a.port).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    put(&file, "one");
    let builder = ConsulService::builder(config(&agent.url()).token_file(&file)).service(steady());
    let client = builder.build().unwrap().grpc_client("counter").unwrap();
    client.ready().await.unwrap();
    let before = agent.wait_for(|it| it.blocked == 1).await.unwrap().requests_to("/v1/health");
    put(&file, "two");
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "a");
    let now = agent.counters();
    assert_eq!((now.blocked, now.requests_to("/v1/health")), (1, before));
}

/// Where rights are asked about.
const RIGHTS: &str = "/v1/internal";

#[tokio::test]
async fn an_empty_list_is_asked_about_once_and_not_at_all_where_acls_are_off() {
    let agent = Agent::start("dc1").await.unwrap();
    let a = Backend::start("a").await;
    register(agent.registry(), "counter", "a", a.port).await;
    let client = client(config(&agent.url()));
    let record = Record::of(&client);
    client.ready().await.unwrap();
    for _ in 0..2 {
        let fault = agent.faults().empty("counter");
        until(&client, "it is empty", |c| dc1(c).empty_since.is_some()).await;
        let asked = agent.counters().requests_to("/v1/health");
        agent.wait_for(|it| it.requests_to("/v1/health") > asked + 2).await.unwrap();
        fault.off();
        until(&client, "it is listed again", |c| dc1(c).empty_since.is_none()).await;
        assert_eq!(agent.counters().requests_to(RIGHTS), 1);
    }
    assert_eq!(denials(&record), (0, 0), "{:#?}", record.words());

    // After an outage the agent may be another one.
    let fault = agent.faults().drop_connections();
    until(&client, "it is lost", |c| dc1(c).stale_since.is_some()).await;
    let hidden = agent.faults().filtered("counter");
    fault.off();
    until(&client, "it is named", |c| dc1(c).denied == Some(Denied::Service)).await;
    let asked = agent.counters().requests_to("/v1/health");
    agent.wait_for(|it| it.requests_to("/v1/health") > asked + 2).await.unwrap();
    assert_eq!(agent.counters().requests_to(RIGHTS), 2);
    assert_eq!(get(client.channel()).await.unwrap().instance.name, "a");
    hidden.off();
    until(&client, "it may read again", |c| dc1(c).denied.is_none()).await;
    record.until("one event each", |r| denials(r) == (1, 1)).await;
}
