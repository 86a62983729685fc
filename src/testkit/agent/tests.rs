use std::{io::ErrorKind, time::Duration};

use serde_json::{Value, json};
use tokio::{
    net::TcpStream,
    runtime::Handle,
    task::JoinHandle,
    time::{Instant, timeout},
};

use super::*;
use crate::testkit::{Answer, Check, Registration, RequestError};

const HEALTH: &str = "/v1/health/service/s";
const LEADER: &str = "/v1/status/leader";
/// Long enough for anything that is to happen.
const LONG: Duration = Duration::from_secs(10);
/// Long enough to see that something has not happened.
const SHORT: Duration = Duration::from_millis(200);

type Question = JoinHandle<Result<Answer, RequestError>>;

async fn agent() -> Agent {
    let agent = Agent::start("dc1").await.unwrap();
    agent.registry().register(&Registration::new("s", "a", "127.0.0.1", 1)).await.unwrap();
    agent
}

fn ask(agent: &Agent, path: &str) -> Question {
    let (registry, path) = (agent.registry().clone(), path.to_owned());
    tokio::spawn(async move { registry.get_within(&path, LONG).await })
}

async fn answer(question: Question) -> Answer {
    question.await.unwrap().unwrap()
}

async fn is_waiting(question: &mut Question) -> bool {
    timeout(SHORT, question).await.is_err()
}

async fn get(agent: &Agent, path: &str) -> (u16, String) {
    let answer = agent.registry().get(path).await.unwrap();
    (answer.status.as_u16(), answer.text())
}

/// A blocking query that is waiting by now, and the index it was asked with.
async fn blocked(agent: &Agent, query: &str) -> (Question, u64) {
    let path = format!("{HEALTH}?{query}");
    let index = agent.registry().get(&path).await.unwrap().index().unwrap();
    let question = ask(agent, &format!("{path}&wait=60s&index={index}"));
    agent.wait_for(|it| it.blocked == 1).await.unwrap();
    (question, index)
}

#[tokio::test]
async fn a_hanging_agent_answers_when_it_hangs_no_more() {
    let agent = agent().await;
    let (waiting, _) = blocked(&agent, "").await;
    let fault = agent.faults().hang();
    let mut question = ask(&agent, LEADER);
    assert!(is_waiting(&mut question).await);
    // An answer that is due hangs as well: registering is heard of after the fault.
    let (registry, more) = (agent.registry().clone(), Registration::new("s", "b", "", 0));
    let registered = tokio::spawn(async move { registry.register(&more).await });
    let mut waiting = waiting;
    assert!(is_waiting(&mut waiting).await);
    fault.off();
    assert_eq!(answer(question).await.status, 200);
    registered.await.unwrap().unwrap();
    assert_eq!(answer(waiting).await.json().as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_fault_of_health_requests_leaves_the_others_alone() {
    let agent = agent().await;
    agent.faults().health_only().status(503, "no");
    assert_eq!(get(&agent, HEALTH).await, (503, "no".to_owned()));
    assert_eq!(get(&agent, LEADER).await.0, 200);
    agent.faults().clear();
    assert_eq!(get(&agent, HEALTH).await.0, 200);
}

#[tokio::test]
async fn a_slow_agent_is_late_until_it_is_hurried() {
    let agent = agent().await;
    agent.faults().slow(SHORT);
    let start = Instant::now();
    assert_eq!(get(&agent, HEALTH).await.0, 200);
    assert!(start.elapsed() >= SHORT);
    agent.faults().clear();
    let slow = agent.faults().slow(Duration::from_secs(3600));
    let mut question = ask(&agent, HEALTH);
    assert!(is_waiting(&mut question).await);
    slow.off();
    assert_eq!(answer(question).await.status, 200);
}

#[tokio::test]
async fn a_status_is_given_to_what_is_under_way_as_well() {
    let agent = agent().await;
    let (question, _) = blocked(&agent, "").await;
    agent.faults().status(429, "slow down");
    agent.faults().reset_index();
    let refused = answer(question).await;
    assert_eq!((refused.status.as_u16(), refused.text().as_str()), (429, "slow down"));
    assert_eq!(refused.index(), Some(1));
    agent.faults().status(42, "no status at all");
    assert_eq!(get(&agent, LEADER).await.0, 500, "the newest fault wins, mended");
}

#[tokio::test]
async fn garbage_is_no_json_and_an_oversized_body_is() {
    let agent = agent().await;
    let garbage = agent.faults().garbage();
    let (status, body) = get(&agent, HEALTH).await;
    assert_eq!(status, 200);
    assert!(serde_json::from_str::<Value>(&body).is_err());
    garbage.off();
    for bytes in [2, 3, 16 * 1024 + 2, 1_000_000] {
        agent.faults().oversized(bytes);
        let (status, body) = get(&agent, HEALTH).await;
        assert_eq!((status, body.len()), (200, bytes));
        assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), json!([]));
    }
}

#[tokio::test]
async fn an_emptied_service_wakes_its_watchers_and_moves_no_index() {
    let agent = agent().await;
    let (question, index) = blocked(&agent, "passing").await;
    let fault = agent.faults().empty("s");
    let emptied = answer(question).await;
    assert_eq!((emptied.json(), emptied.index()), (json!([]), Some(index)));
    let (question, again) = blocked(&agent, "passing").await;
    assert_eq!(again, index);
    fault.off();
    assert_eq!(answer(question).await.json().as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_reset_index_falls_and_ends_blocked_queries_with_the_old_one() {
    let agent = agent().await;
    let (question, index) = blocked(&agent, "").await;
    agent.faults().reset_index();
    assert_eq!(answer(question).await.index(), Some(index));
    let fallen = agent.registry().get(HEALTH).await.unwrap();
    assert!(fallen.index().unwrap() < index);
    assert_eq!(fallen.json().as_array().unwrap().len(), 1, "nothing is lost");
    // With the old index a change stays unseen until the wait ends.
    let mut unseeing = ask(&agent, &format!("{HEALTH}?index={index}&wait=60s"));
    agent.wait_for(|it| it.blocked == 1).await.unwrap();
    agent.registry().deregister("a").await.unwrap();
    assert!(is_waiting(&mut unseeing).await);
    unseeing.abort();
}

#[tokio::test]
async fn without_a_leader_only_stale_reads_and_the_agent_itself_answer() {
    let agent = agent().await;
    let (question, _) = blocked(&agent, "").await;
    let fault = agent.faults().no_leader_after(SHORT);
    let cut = answer(question).await;
    assert_eq!((cut.status.as_u16(), cut.text().as_str()), (500, "rpc error making call: EOF"));
    for query in ["", "?consistent"] {
        let start = Instant::now();
        let refused = agent.registry().get(&format!("{HEALTH}{query}")).await.unwrap();
        assert_eq!((refused.status.as_u16(), refused.text().as_str()), (500, "No cluster leader"));
        assert_eq!(refused.index(), Some(1));
        assert!(start.elapsed() >= SHORT);
    }
    let stale = agent.registry().get(&format!("{HEALTH}?stale")).await.unwrap();
    assert_eq!(stale.status, 200);
    assert_eq!(stale.header("x-consul-knownleader"), Some("false"));
    assert!(stale.header("x-consul-lastcontact").unwrap().parse::<u64>().unwrap() > 0);
    assert_eq!(get(&agent, LEADER).await, (200, "\"\"".to_owned()));
    assert_eq!(get(&agent, "/v1/catalog/datacenters").await.0, 200);
    agent.registry().register(&Registration::new("s", "b", "", 0)).await.unwrap();
    fault.off();
    // As long as a real one waits; a leader that comes in that time is in time.
    let fault = agent.faults().no_leader();
    let mut question = ask(&agent, HEALTH);
    assert!(is_waiting(&mut question).await);
    fault.off();
    assert_eq!(answer(question).await.status, 200);
}

#[tokio::test]
async fn another_datacenter_can_be_cut_off_hang_and_be_leaderless() {
    let cluster = Cluster::start(["dc1", "dc2"]).await.unwrap();
    let (dc1, dc2) = (cluster.agent("dc1").unwrap(), cluster.agent("dc2").unwrap());
    let path = format!("{HEALTH}?dc=dc2");

    let (question, _) = blocked(dc1, "dc=dc2").await;
    let fault = dc1.faults().partition("dc2");
    assert_eq!(answer(question).await.text(), "rpc error making call: EOF");
    let (status, text) = get(dc1, &path).await;
    assert!(status == 500 && text.ends_with("connect: connection refused"), "{text}");
    assert_eq!(get(dc1, HEALTH).await.0, 200);
    assert_eq!(get(dc2, &format!("{HEALTH}?dc=dc1")).await.0, 200, "one way");
    assert_eq!(get(dc1, "/v1/catalog/datacenters").await.1, r#"["dc1","dc2"]"#);
    fault.off();

    let fault = dc1.faults().unjoined();
    assert_eq!(get(dc1, "/v1/catalog/datacenters").await.1, r#"["dc1"]"#);
    assert_eq!(get(dc1, &path).await, (500, "No path to datacenter".to_owned()));
    assert_eq!(get(dc1, HEALTH).await.0, 200);
    fault.off();
    assert_eq!(get(dc1, "/v1/catalog/datacenters").await.1, r#"["dc1","dc2"]"#);

    let fault = dc1.faults().hang_datacenter("dc2");
    let mut question = ask(dc1, &path);
    assert!(is_waiting(&mut question).await);
    assert_eq!(get(dc1, HEALTH).await.0, 200);
    fault.off();
    assert_eq!(answer(question).await.status, 200);

    dc2.faults().no_leader_after(SHORT);
    assert_eq!(get(dc1, &path).await, (500, "No cluster leader".to_owned()));
    assert_eq!(get(dc1, &format!("{path}&stale")).await.0, 200);
    assert_eq!(get(dc1, HEALTH).await.0, 200);
}

#[tokio::test]
async fn dropped_connections_break_and_new_ones_with_them() {
    let agent = agent().await;
    let (question, _) = blocked(&agent, "").await;
    let fault = agent.faults().drop_connections();
    question.await.unwrap().unwrap_err();
    agent.registry().get(LEADER).await.unwrap_err();
    assert_eq!(agent.wait_for(|it| it.connections == 0).await.unwrap().blocked, 0);
    fault.off();
    assert_eq!(get(&agent, LEADER).await.0, 200);
    // On for a blink: what was open is cut all the same.
    let (question, _) = blocked(&agent, "").await;
    agent.faults().drop_connections().off();
    question.await.unwrap().unwrap_err();
}

#[tokio::test]
async fn a_refusing_agent_keeps_its_port_and_comes_back_to_it() {
    let agent = agent().await;
    let fault = agent.faults().refuse();
    let refused = async {
        while TcpStream::connect(agent.http_addr()).await.map_err(|it| it.kind()).err()
            != Some(ErrorKind::ConnectionRefused)
        {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, refused).await.unwrap();
    fault.off();
    let back = async {
        while agent.registry().get(HEALTH).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, back).await.unwrap();
    assert_eq!(agent.registry().passing("s").await.unwrap(), ["a"]);
}

#[tokio::test]
async fn counters_count_requests_queries_and_connections() {
    let agent = agent().await;
    agent.reset_counters();
    let index = agent.registry().get(HEALTH).await.unwrap().index().unwrap();
    let questions: Vec<_> = (0..3).map(|_| ask(&agent, &format!("{HEALTH}?index={index}"))).collect();
    let seen = agent.wait_for(|it| it.blocked == 3).await.unwrap();
    assert_eq!(seen.requests_to(HEALTH), 4);
    assert_eq!(seen.requests_to("/v1/health/"), 4);
    assert_eq!(seen.requests_to("/v1/hea"), 0);
    assert!(seen.connections >= 3 && seen.connects == 4);
    for question in questions {
        question.abort();
    }
    let seen = agent.wait_for(|it| it.blocked == 0 && it.connections == 0).await.unwrap();
    assert_eq!(seen.most_blocked, 3);
    assert!(seen.most_connections >= 3);
}

#[tokio::test]
async fn an_agent_restarted_empty_has_lost_everything_but_its_port() {
    let agent = agent().await;
    let (question, index) = blocked(&agent, "").await;
    agent.restart_empty().await;
    question.await.unwrap().unwrap_err();
    let fresh = agent.registry().get(HEALTH).await.unwrap();
    assert_eq!(fresh.json(), json!([]));
    assert!(fresh.index().unwrap() < index);
}

#[tokio::test]
async fn a_dropped_agent_leaves_no_task_and_no_socket() {
    let before = Handle::current().metrics().num_alive_tasks();
    for kind in ["drop", "shutdown"] {
        let agent = agent().await;
        let addr = agent.http_addr();
        let hour = Duration::from_secs(3600);
        let checks = [Check::ttl(hour), Check::tcp("127.0.0.1:1"), Check::grpc("127.0.0.1:1").interval(hour)];
        let it = checks.into_iter().fold(Registration::new("s", "b", "", 0), Registration::check);
        agent.registry().register(&it).await.unwrap();
        let (question, _) = blocked(&agent, "").await;
        agent.faults().hang();
        let hung = ask(&agent, LEADER);
        agent.wait_for(|it| it.requests_to(LEADER) == 1).await.unwrap();
        if kind == "drop" {
            drop(agent)
        } else {
            agent.shutdown().await
        }
        question.await.unwrap().unwrap_err();
        hung.await.unwrap().unwrap_err();
        let gone = async {
            while Handle::current().metrics().num_alive_tasks() > before {
                tokio::task::yield_now().await;
            }
        };
        timeout(LONG, gone).await.expect("all tasks end");
        assert_eq!(TcpStream::connect(addr).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}

#[tokio::test]
async fn bad_names_and_taken_addresses_are_refused() {
    for name in ["", "DC1", "dc 1", "dc/1"] {
        let error = Agent::start(name).await.unwrap_err();
        assert!(matches!(error, AgentError::Name { .. }), "{error}");
        assert!(error.to_string().contains("lower-case letters"));
    }
    let agent = agent().await;
    let error = Agent::start_on("dc2", agent.http_addr()).await.unwrap_err();
    assert!(matches!(error, AgentError::Listen { .. }), "{error}");
    let error = Cluster::start(["dc1", "dc1"]).await.unwrap_err();
    assert!(matches!(error, AgentError::Twice { .. }), "{error}");
}

#[tokio::test]
async fn a_datacenter_whose_agent_was_taken_stays_listed_and_is_refused() {
    let mut cluster = Cluster::start(["dc1", "dc2", "dc3"]).await.unwrap();
    drop(cluster.take("dc2"));
    let dc1 = cluster.agent("dc1").unwrap();
    assert_eq!(get(dc1, "/v1/catalog/datacenters").await.1, r#"["dc1","dc2","dc3"]"#);
    assert_eq!(get(dc1, &format!("{HEALTH}?dc=dc2")).await.0, 500);
    assert_eq!(get(dc1, &format!("{HEALTH}?dc=dc3")).await.0, 200);
    assert!(cluster.agent("dc2").is_none());
}

#[test]
fn handles_can_be_sent_and_shared() {
    fn check<T: Send + Sync>() {}
    check::<Agent>();
    check::<Cluster>();
    check::<Switch>();
    check::<Faults<'_>>();
    check::<Registration>();
    check::<crate::testkit::Registry>();
    check::<crate::testkit::ConsulProcess>();
}
