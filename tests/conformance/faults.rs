//! Faults that a real Consul can be made to have, beside the switch for each: what
//! a client is shown must be the same. `testkit`'s documentation lists the others.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Write},
    time::Duration,
};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};
use tonic_failover::testkit::{
    Agent, Answer, Cluster, ConsulCluster, ConsulProcess, Registration, Registry, RequestError,
};

use super::world::{LONG, SHORT, answer, ids, is_waiting};

const HEALTH: &str = "/v1/health/service/s";

/// The program; a word on what is left out where there is none.
fn consul(case: &str) -> Option<std::path::PathBuf> {
    let found = ConsulProcess::find();
    if found.is_none() {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED faults::{case}: no Consul found. Install the package `consul`, or set CONSUL_BIN."
        );
    }
    found
}

fn instance(id: &str) -> Registration {
    Registration::new("s", id, "127.0.0.1", 1)
}

async fn embedded() -> Agent {
    let agent = Agent::start("dc1").await.unwrap();
    agent.registry().register(&instance("a")).await.unwrap();
    agent
}

fn ask(registry: &Registry, path: &str) -> tokio::task::JoinHandle<Answer> {
    let (registry, path) = (registry.clone(), path.to_owned());
    tokio::spawn(async move { registry.get_within(&path, 4 * LONG).await.unwrap() })
}

async fn index(registry: &Registry) -> u64 {
    registry.get(&format!("{HEALTH}?stale")).await.unwrap().index().unwrap()
}

/// What a client goes by: the status, the headers that mean something, the body.
fn face(answer: &Answer) -> (u16, BTreeMap<String, String>, String) {
    let telling =
        |name: &str| name.starts_with("x-consul") || ["content-type", "retry-after"].contains(&name);
    let headers = answer.headers.iter().filter(|(name, _)| telling(name.as_str()));
    let headers = headers.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()));
    (answer.status.as_u16(), headers.collect(), answer.text())
}

/// A refusal that comes from the servers.
fn refusal(status: u16, body: &str) -> (u16, BTreeMap<String, String>, String) {
    let mut headers = BTreeMap::new();
    for (name, value) in
        [("x-consul-index", "1"), ("x-consul-knownleader", "false"), ("x-consul-lastcontact", "0")]
    {
        headers.insert(name.to_owned(), value.to_owned());
    }
    if !body.is_empty() {
        headers.insert("content-type".to_owned(), "text/plain; charset=utf-8".to_owned());
    }
    (status, headers, body.to_owned())
}

/// The same without a word about the servers.
fn bare(status: u16, body: &str) -> (u16, BTreeMap<String, String>, String) {
    let (status, mut headers, body) = refusal(status, body);
    headers.retain(|name, _| !name.starts_with("x-consul"));
    (status, headers, body)
}

// === no leader ===

/// `lose` takes the leader away.
async fn leaderless(seen: &Registry, lose: impl AsyncFnOnce()) {
    let waiting = async {
        loop {
            // What was registered just now may still move it.
            let before = index(seen).await;
            let mut strict = ask(seen, &format!("{HEALTH}?index={before}&wait=60s"));
            let mut stale = ask(seen, &format!("{HEALTH}?stale&index={before}&wait=60s"));
            if is_waiting(&mut strict).await && is_waiting(&mut stale).await {
                return (before, strict, stale);
            }
        }
    };
    let (before, strict, mut stale) = timeout(LONG, waiting).await.expect("they wait");
    lose().await;

    let cut = answer(strict).await;
    println!("a query that waited: {:?}", face(&cut));
    assert_eq!((cut.status.as_u16(), cut.index()), (500, Some(1)));
    let known = async {
        loop {
            let answer = seen.get(&format!("{HEALTH}?stale")).await.unwrap();
            if answer.header("x-consul-knownleader") == Some("false") {
                return answer;
            }
        }
    };
    let known = timeout(LONG, known).await.expect("it says so");
    assert_eq!((known.status.as_u16(), known.index()), (200, Some(before)));
    assert_eq!(ids(&known.json()), ["a"]);
    assert_eq!(known.header("x-consul-effective-consistency"), Some("stale"));
    let contact = |answer: &Answer| answer.header("x-consul-lastcontact").unwrap().parse::<u64>().unwrap();
    tokio::time::sleep(SHORT).await;
    let later = seen.get(&format!("{HEALTH}?stale")).await.unwrap();
    println!("stale: {:?}", face(&later));
    assert!(contact(&later) > contact(&known), "{} then {}", contact(&known), contact(&later));
    assert!(is_waiting(&mut stale).await, "what needs no leader waits on");
    stale.abort();

    let asked = Instant::now();
    let operation = |verb: &str| json!([{ "KV": { "Verb": verb, "Key": "k", "Value": "MQ==" } }]).to_string();
    let put = |path: &'static str, body: String| async move { seen.put(path, body).await.unwrap() };
    let (refused, read, written, asked_all, done_all) = tokio::join!(
        async { seen.get_within(HEALTH, LONG).await.unwrap() },
        async { seen.get_within("/v1/kv/k", LONG).await.unwrap() },
        put("/v1/kv/k", "1".to_owned()),
        put("/v1/txn", operation("get")),
        put("/v1/txn", operation("set")),
    );
    assert_eq!(face(&refused), refusal(500, "No cluster leader"));
    // What is asked about keys is refused in the same words, without the headers of a read.
    for answer in [read, written, asked_all, done_all] {
        assert_eq!(face(&answer), bare(500, "No cluster leader"));
    }
    let stale = seen.put("/v1/txn?stale", operation("get")).await.unwrap();
    assert_eq!((stale.status.as_u16(), stale.header("x-consul-knownleader")), (409, Some("false")));
    assert_eq!(stale.json()["Errors"][0]["What"], "key \"k\" doesn't exist");
    // Its `rpc_hold_timeout`.
    assert!(asked.elapsed() >= Duration::from_secs(7), "{:?}", asked.elapsed());
    assert_eq!(seen.get("/v1/status/leader").await.unwrap().json(), json!(""));
    assert_eq!(seen.get("/v1/catalog/datacenters").await.unwrap().json(), json!(["dc1"]));
}

#[tokio::test]
async fn embedded_without_a_leader() {
    let agent = embedded().await;
    leaderless(agent.registry(), async || _ = agent.faults().no_leader()).await;
}

#[tokio::test]
async fn real_without_a_leader() {
    let Some(bin) = consul("real_without_a_leader") else { return };
    let mut cluster = ConsulCluster::start(bin, 3, 0).await.unwrap();
    let leader = cluster.leader().await.unwrap();
    let asked = (leader + 1) % 3;
    let seen = cluster.servers()[asked].registry().clone();
    seen.register(&instance("a")).await.unwrap();
    let listed = async { while seen.passing("s").await.unwrap().is_empty() {} };
    timeout(LONG, listed).await.expect("it is listed");
    leaderless(&seen, async || cluster.kill(&[leader, (leader + 2) % 3]).await.unwrap()).await;
}

// === refusals ===

#[tokio::test]
async fn embedded_refuses_a_token() {
    let agent = embedded().await;
    agent.faults().status(403, "ACL not found");
    let answer = agent.registry().get(&format!("{HEALTH}?passing&stale")).await.unwrap();
    assert_eq!(face(&answer), refusal(403, "ACL not found"));
}

#[tokio::test]
async fn real_refuses_a_token() {
    let Some(bin) = consul("real_refuses_a_token") else { return };
    let acl = r#"acl { enabled = true default_policy = "deny" }"#;
    let agent = ConsulProcess::builder(bin).hcl(acl).start().await.unwrap();
    let stranger = agent.registry().clone().token("unknown");
    let refused = async {
        loop {
            // The first leader may still be setting the tokens up.
            let answer = stranger.get(&format!("{HEALTH}?passing&stale")).await.unwrap();
            if answer.text() != "ACL system is currently in legacy mode." && answer.status != 500 {
                return answer;
            }
        }
    };
    let answer = timeout(LONG, refused).await.expect("it is refused");
    assert_eq!(face(&answer), refusal(403, "ACL not found"));
}

#[tokio::test]
async fn embedded_asks_for_fewer_requests() {
    let agent = embedded().await;
    agent.faults().rate_limit(Duration::from_secs(3));
    let answer = agent.registry().get(&format!("{HEALTH}?stale")).await.unwrap();
    let mut wanted = refusal(429, "");
    // What a real one leaves out, and proxies before it say.
    wanted.1.insert("retry-after".to_owned(), "3".to_owned());
    assert_eq!(face(&answer), wanted);
}

#[tokio::test]
async fn real_asks_for_fewer_requests() {
    let Some(bin) = consul("real_asks_for_fewer_requests") else { return };
    let folder = tempfile::tempdir().unwrap();
    let server = ConsulProcess::builder(&bin).start().await.unwrap();
    let client = ConsulProcess::builder(&bin)
        .node("c1")
        .client(folder.path())
        .retry_join([server.ports().serf_lan])
        .hcl("limits { rpc_rate = 0.01 rpc_max_burst = 200 }")
        .start()
        .await
        .unwrap();
    let spent = async {
        loop {
            let answer = client.registry().get(&format!("{HEALTH}?stale")).await.unwrap();
            if answer.status != 200 {
                return answer;
            }
        }
    };
    let answer = timeout(LONG, spent).await.expect("200 questions are soon asked");
    assert_eq!(face(&answer), refusal(429, ""));
}

// === connections ===

/// An agent that takes three connections from one address closes the fourth
/// unanswered, and takes one again when another is closed.
async fn the_fourth_is_closed(seen: &Registry) {
    let address = seen.url().trim_start_matches("http://").to_owned();
    let request = b"GET /v1/status/leader HTTP/1.1\r\nHost: agent\r\n\r\n";
    let knock = async || {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(request).await?;
        let read = timeout(LONG, stream.read(&mut [0])).await.expect("an answer or an end")?;
        Ok::<_, std::io::Error>((read > 0).then_some(stream))
    };
    let fill = async {
        let mut open = Vec::new();
        while open.len() < 3 {
            // Those that were closed count until the agent has seen it.
            open.extend(knock().await.ok().flatten());
        }
        open
    };
    let open = timeout(LONG, fill).await.expect("three fit");
    for _ in 0..3 {
        // A real one says so by a reset or an end, as chance will have it.
        match knock().await {
            Ok(answered) => assert!(answered.is_none(), "no more fit"),
            Err(error) => {
                let kind = error.kind();
                assert!(matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{kind}");
            }
        }
    }
    let error = seen.get(HEALTH).await.unwrap_err();
    assert!(matches!(error, RequestError::Unreachable { .. }), "{error}");
    drop(open);
    let freed = async { while !matches!(knock().await, Ok(Some(_))) {} };
    timeout(LONG, freed).await.expect("there is room again");
}

#[tokio::test]
async fn embedded_limits_connections() {
    let agent = embedded().await;
    agent.faults().limit_connections(3);
    the_fourth_is_closed(agent.registry()).await;
}

#[tokio::test]
async fn real_limits_connections() {
    let Some(bin) = consul("real_limits_connections") else { return };
    let limit = "limits { http_max_conns_per_client = 3 }";
    let agent = ConsulProcess::builder(bin).hcl(limit).start().await.unwrap();
    the_fourth_is_closed(agent.registry()).await;
}

/// All three connections wait for news, and are closed by who waits.
async fn given_up_queries_count(seen: &Registry) {
    let address = seen.url().trim_start_matches("http://").to_owned();
    let index = index(seen).await;
    let ask = async |path: &str| {
        let mut stream = TcpStream::connect(&address).await?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: agent\r\n\r\n").as_bytes()).await?;
        Ok::<_, std::io::Error>(stream)
    };
    // A connection that is one too many may be reset at any time.
    let answered = async |asked: std::io::Result<TcpStream>| {
        let Ok(mut stream) = asked else { return false };
        let mut byte = [0];
        timeout(LONG, stream.read(&mut byte)).await.expect("an answer or an end").is_ok_and(|it| it > 0)
    };
    let full = async {
        let mut waiting = Vec::new();
        let mut refused = 0;
        // What was closed before counts until the agent has seen it: once is not enough.
        while refused < 20 {
            if answered(ask(HEALTH).await).await {
                refused = 0;
                waiting.push(ask(&format!("{HEALTH}?index={index}&wait=4s")).await);
            } else {
                refused += 1;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        waiting
    };
    let begun = Instant::now();
    let waiting = timeout(LONG, full).await.expect("it is full");
    drop(waiting);
    let freed = async { while !answered(ask(HEALTH).await).await {} };
    timeout(LONG, freed).await.expect("there is room again");
    // The first of them had begun by then, and none is freed before its wait is over.
    assert!(begun.elapsed() >= Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn embedded_counts_queries_that_were_given_up() {
    let agent = embedded().await;
    agent.faults().limit_connections(3);
    given_up_queries_count(agent.registry()).await;
}

#[tokio::test]
async fn real_counts_queries_that_were_given_up() {
    let Some(bin) = consul("real_counts_queries_that_were_given_up") else { return };
    let limit = "limits { http_max_conns_per_client = 3 }";
    let agent = ConsulProcess::builder(bin).hcl(limit).start().await.unwrap();
    agent.registry().register(&instance("a")).await.unwrap();
    given_up_queries_count(agent.registry()).await;
}

/// `lose` ends it as a crash would; its port stays closed.
async fn refused(seen: &Registry, lose: impl AsyncFnOnce()) {
    let mut waiting = tokio::spawn({
        let (seen, index) = (seen.clone(), index(seen).await);
        async move { seen.get_within(&format!("{HEALTH}?index={index}&wait=60s"), 2 * LONG).await }
    });
    assert!(timeout(SHORT, &mut waiting).await.is_err());
    lose().await;
    let cut = timeout(LONG, waiting).await.expect("it ends").unwrap().unwrap_err();
    assert!(matches!(cut, RequestError::Unreachable { .. }), "{cut}");
    let address = seen.url().trim_start_matches("http://");
    // The switch takes effect within moments.
    let closed = async {
        loop {
            if let Err(error) = TcpStream::connect(address).await {
                return error.kind();
            }
        }
    };
    assert_eq!(timeout(LONG, closed).await.expect("it closes"), ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn embedded_refuses_connections() {
    let agent = embedded().await;
    refused(agent.registry(), async || _ = agent.faults().refuse()).await;
}

#[tokio::test]
async fn real_refuses_connections() {
    let Some(bin) = consul("real_refuses_connections") else { return };
    let mut agent = ConsulProcess::builder(bin).start().await.unwrap();
    let seen = agent.registry().clone();
    refused(&seen, async || agent.kill().await.unwrap()).await;
}

/// What is asked while it stands still is answered when it goes on.
async fn still(seen: &Registry, stop: impl AsyncFnOnce(), go_on: impl FnOnce()) {
    stop().await;
    let mut question = ask(seen, HEALTH);
    assert!(is_waiting(&mut question).await, "the connection is taken, and nothing is answered");
    go_on();
    assert_eq!(ids(&answer(question).await.json()), ["a"]);
}

#[tokio::test]
async fn embedded_hangs() {
    let agent = embedded().await;
    still(agent.registry(), async || _ = agent.faults().hang(), || agent.faults().clear()).await;
}

#[tokio::test]
async fn real_hangs() {
    let Some(bin) = consul("real_hangs") else { return };
    let agent = ConsulProcess::builder(bin).start().await.unwrap();
    agent.registry().register(&instance("a")).await.unwrap();
    still(agent.registry(), async || agent.pause().await.unwrap(), || agent.resume().unwrap()).await;
}

// === indexes ===

/// `fall` puts every index below what it is now.
async fn falls(seen: &Registry, fall: impl AsyncFnOnce()) {
    for tag in 0..5 {
        seen.register(&instance("a").tag(tag.to_string())).await.unwrap();
    }
    let before = index(seen).await;
    let mut question = ask(seen, &format!("{HEALTH}?stale&index={before}&wait=60s"));
    assert!(is_waiting(&mut question).await);
    fall().await;
    let ended = answer(question).await;
    assert_eq!((ended.status.as_u16(), ended.index()), (200, Some(before)), "the index it was asked with");
    let now = index(seen).await;
    assert!(now < before, "{now} is not below {before}");
}

#[tokio::test]
async fn embedded_falls() {
    let agent = embedded().await;
    falls(agent.registry(), async || agent.faults().reset_index()).await;
}

#[tokio::test]
async fn real_falls() {
    let Some(bin) = consul("real_falls") else { return };
    let agent = ConsulProcess::builder(bin).start().await.unwrap();
    let seen = agent.registry().clone();
    seen.register(&instance("a")).await.unwrap();
    let saved = seen.save_snapshot().await.unwrap();
    falls(&seen, async || seen.restore_snapshot(saved).await.unwrap()).await;
}

// === datacenters ===

/// `cut` cuts `dc2` off from who is asked, at once.
async fn cut_off(seen: &Registry, cut: impl AsyncFnOnce()) {
    let path = format!("{HEALTH}?dc=dc2");
    let before = seen.get(&path).await.unwrap().index().unwrap();
    let mut waiting = ask(seen, &format!("{path}&index={before}&wait=60s"));
    assert!(is_waiting(&mut waiting).await);
    cut().await;
    assert_eq!(face(&answer(waiting).await), refusal(500, "rpc error making call: EOF"));
    let refused = async {
        loop {
            let answer = seen.get(&path).await.unwrap();
            if answer.text().contains("connection refused") {
                return answer;
            }
        }
    };
    let answer = timeout(LONG, refused).await.expect("it is refused");
    let (status, headers, text) = face(&answer);
    assert_eq!((status, headers), (500, refusal(500, "some").1));
    assert!(text.starts_with("rpc error getting client: failed to get conn: "), "{text}");
    assert_eq!(seen.get("/v1/catalog/datacenters").await.unwrap().json(), json!(["dc1", "dc2"]));
}

/// `stop` lets `dc2` stand still, and `go_on` go on.
async fn stands_still(seen: &Registry, stop: impl AsyncFnOnce(), go_on: impl FnOnce()) {
    let path = format!("{HEALTH}?dc=dc2");
    assert_eq!(seen.get(&path).await.unwrap().status, 200);
    stop().await;
    let mut question = ask(seen, &path);
    assert!(is_waiting(&mut question).await);
    assert_eq!(ids(&seen.get(HEALTH).await.unwrap().json()), ["a"], "the own one is not held up");
    assert_eq!(seen.get("/v1/catalog/datacenters").await.unwrap().json(), json!(["dc1", "dc2"]));
    go_on();
    assert_eq!(answer(question).await.status, 200);
}

async fn two() -> [Agent; 2] {
    let agents = Cluster::start(["dc1", "dc2"]).await.unwrap().into_agents();
    agents[0].registry().register(&instance("a")).await.unwrap();
    agents.try_into().unwrap()
}

async fn two_real(case: &str) -> Option<[ConsulProcess; 2]> {
    let bin = consul(case)?;
    let dc1 = ConsulProcess::builder(&bin).start().await.unwrap();
    let dc2 = ConsulProcess::builder(&bin).datacenter("dc2").join_wan(&dc1).start().await.unwrap();
    dc1.registry().register(&instance("a")).await.unwrap();
    Some([dc1, dc2])
}

#[tokio::test]
async fn embedded_cut_off_from_a_datacenter() {
    let [dc1, _dc2] = two().await;
    cut_off(dc1.registry(), async || _ = dc1.faults().partition("dc2")).await;
}

#[tokio::test]
async fn real_cut_off_from_a_datacenter() {
    let Some([dc1, mut dc2]) = two_real("real_cut_off_from_a_datacenter").await else { return };
    cut_off(dc1.registry(), async || dc2.kill().await.unwrap()).await;
}

/// `forget` lets the agent know no other datacenter.
async fn not_joined(seen: &Registry, forget: impl AsyncFnOnce()) {
    forget().await;
    assert_eq!(seen.get("/v1/catalog/datacenters").await.unwrap().json(), json!(["dc1"]));
    let refused = seen.get(&format!("{HEALTH}?dc=dc2")).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.text().as_str()), (500, "No path to datacenter"));
    assert_eq!(seen.get(HEALTH).await.unwrap().status, 200);
}

#[tokio::test]
async fn embedded_not_joined_to_the_others_yet() {
    let [dc1, _dc2] = two().await;
    not_joined(dc1.registry(), async || _ = dc1.faults().unjoined()).await;
}

#[tokio::test]
async fn real_not_joined_to_the_others_yet() {
    let Some([mut dc1, dc2]) = two_real("real_not_joined_to_the_others_yet").await else { return };
    let seen = dc1.registry().clone();
    // It tells the other one nothing while it stands still.
    let forget = async || {
        dc2.pause().await.unwrap();
        dc1.restart().await.unwrap();
    };
    not_joined(&seen, forget).await;
}

#[tokio::test]
async fn embedded_before_a_datacenter_that_hangs() {
    let [dc1, _dc2] = two().await;
    let (stop, go_on) = (async || _ = dc1.faults().hang_datacenter("dc2"), || dc1.faults().clear());
    stands_still(dc1.registry(), stop, go_on).await;
}

#[tokio::test]
async fn real_before_a_datacenter_that_hangs() {
    let Some([dc1, dc2]) = two_real("real_before_a_datacenter_that_hangs").await else { return };
    stands_still(dc1.registry(), async || dc2.pause().await.unwrap(), || dc2.resume().unwrap()).await;
}
