use std::io::Write;

use super::*;

/// The binary, or a loud word and `None`: past the test harness, which swallows
/// what passing tests print.
fn consul() -> Option<PathBuf> {
    let found = ConsulProcess::find();
    if found.is_none() {
        let word = "SKIPPED: no Consul found. Install the package `consul`, or set CONSUL_BIN.";
        let _ = writeln!(io::stderr(), "{word}");
    }
    found
}

async fn services(agent: &ConsulProcess) -> String {
    agent.registry().get("/v1/agent/services").await.unwrap().text()
}

#[tokio::test]
async fn agents_started_at_once_get_ports_of_their_own() {
    let Some(bin) = consul() else { return };
    let starts = (0..4).map(|_| ConsulProcess::builder(&bin).start());
    let agents = futures_util::future::try_join_all(starts).await.unwrap();
    let mut ports: Vec<_> = agents.iter().map(|agent| agent.http_addr().port()).collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 4);
}

#[tokio::test]
async fn two_datacenters_are_ready_when_each_can_ask_the_other() {
    let Some(bin) = consul() else { return };
    let dc1 = ConsulProcess::builder(&bin).start().await.unwrap();
    let dc2 = ConsulProcess::builder(&bin).datacenter("dc2").join_wan(&dc1).start().await.unwrap();
    let ask =
        async |agent: &ConsulProcess| agent.registry().get("/v1/catalog/datacenters").await.unwrap().json();
    assert_eq!(ask(&dc1).await, serde_json::json!(["dc1", "dc2"]));
    assert_eq!(ask(&dc2).await, serde_json::json!(["dc2", "dc1"]));
}

#[tokio::test]
async fn a_restarted_agent_keeps_its_address_and_only_a_server_its_data() {
    let Some(bin) = consul() else { return };
    let data = tempfile::tempdir().unwrap();
    let memory = ConsulProcess::builder(&bin).dev();
    let disk = ConsulProcess::builder(&bin).server(data.path());
    for (setup, kept) in [(memory, false), (disk, true)] {
        let mut agent = setup.start().await.unwrap();
        let put = agent.registry().put("/v1/agent/service/register", r#"{"Name":"x"}"#).await.unwrap();
        assert!(put.status.is_success());
        let before = (agent.url(), agent.pid());
        agent.kill().await.unwrap();
        assert_eq!(agent.pid(), None);
        assert!(agent.pause().await.is_err(), "an ended process takes no signal");
        agent.restart().await.unwrap();
        assert_eq!(agent.url(), before.0);
        assert_ne!(agent.pid(), before.1);
        assert_eq!(services(&agent).await.contains("\"x\""), kept);
        agent.terminate().await.unwrap();
        assert_eq!(agent.pid(), None);
    }
}

#[tokio::test]
async fn a_paused_agent_answers_nothing_until_it_is_resumed() {
    let Some(bin) = consul() else { return };
    let agent = ConsulProcess::builder(&bin).start().await.unwrap();
    agent.pause().await.unwrap();
    let asked = agent.registry().get_within("/v1/status/leader", Duration::from_millis(300)).await;
    assert!(asked.is_err(), "{asked:?}");
    agent.resume().unwrap();
    assert!(agent.registry().get("/v1/status/leader").await.is_ok());
}

#[tokio::test]
async fn an_agent_that_refuses_its_configuration_says_so_in_the_error() {
    let Some(bin) = consul() else { return };
    let error = ConsulProcess::builder(&bin).hcl("no_such_setting = 1").start().await.unwrap_err();
    assert!(matches!(error, StartError::Ended { .. }), "{error:?}");
    assert!(error.to_string().contains("no_such_setting"), "{error}");
}

#[tokio::test]
async fn ports_that_somebody_holds_are_refused_when_given() {
    let Some(bin) = consul() else { return };
    let held = ConsulProcess::builder(&bin).start().await.unwrap();
    let error = ConsulProcess::builder(&bin).ports(held.ports()).start().await.unwrap_err();
    assert_eq!(error.to_string(), "cannot prepare an agent's ports");
    let source = std::error::Error::source(&error).and_then(|it| it.downcast_ref::<io::Error>()).unwrap();
    assert_eq!(source.kind(), io::ErrorKind::AddrInUse);
}

#[tokio::test]
async fn the_ports_of_a_dead_agent_are_nobody_elses() {
    let Some(bin) = consul() else { return };
    let mut agent = ConsulProcess::builder(&bin).start().await.unwrap();
    let there = agent.http_addr();
    agent.kill().await.unwrap();
    // As one that is given an outgoing connection's port, or any: it does not share.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    assert_eq!(socket.bind(there).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    agent.restart().await.unwrap();
    assert_eq!(agent.http_addr(), there);
}

#[tokio::test]
async fn a_missing_program_is_named() {
    let error = ConsulProcess::builder("/nonexistent/consul").start().await.unwrap_err();
    assert_eq!(error.to_string(), "cannot run /nonexistent/consul");
}

#[tokio::test]
async fn dropping_an_agent_ends_its_process_and_removes_its_folder() {
    let Some(bin) = consul() else { return };
    let agent = ConsulProcess::builder(&bin).start().await.unwrap();
    let (registry, folder) = (agent.registry().clone(), agent.folder.path().to_owned());
    drop(agent);
    assert!(!folder.exists());
    let gone = async {
        while registry.get_within("/v1/status/leader", POLL).await.is_ok() {
            sleep(POLL).await;
        }
    };
    timeout(Duration::from_secs(10), gone).await.expect("the process ends");
}

#[tokio::test]
async fn an_agent_with_acls_starts_and_its_settings_are_not_printed() {
    let Some(bin) = consul() else { return };
    let acl = r#"acl { enabled = true default_policy = "deny" tokens { agent = "a-secret" } }"#;
    let agent = ConsulProcess::builder(&bin).hcl(acl).start().await.unwrap();
    let asked = agent.registry().get("/v1/agent/self").await.unwrap();
    assert_eq!(asked.status, 403);
    let asked = agent.registry().clone().token("a-wrong-one").get("/v1/agent/self").await.unwrap();
    assert_eq!((asked.status.as_u16(), asked.text().as_str()), (403, "ACL not found"));
    let printed = format!("{agent:?} {:?}", agent.registry().clone().token("a-secret"));
    assert!(!printed.contains("a-secret"), "{printed}");
}

#[tokio::test]
async fn a_cluster_elects_another_leader_and_its_agents_ask_that() {
    let Some(bin) = consul() else { return };
    let mut cluster = ConsulCluster::start(bin, 3, 1).await.unwrap();
    let registry = cluster.agents()[0].registry().clone();
    registry.put("/v1/agent/service/register", r#"{"Name":"x"}"#).await.unwrap();
    let listed = async || registry.passing("x").await.is_ok_and(|it| it == ["x"]);
    let until_listed = async || {
        while !listed().await {
            sleep(POLL).await;
        }
    };
    timeout(READY_WITHIN, until_listed()).await.unwrap();
    let saved = registry.save_snapshot().await.unwrap();
    let first = cluster.leader().await.unwrap();
    cluster.kill(&[first]).await.unwrap();
    let second = async {
        while cluster.leader().await.is_none_or(|it| it == first) || !listed().await {
            sleep(POLL).await;
        }
    };
    timeout(READY_WITHIN, second).await.expect("another leader");
    cluster.restart(&[first]).await.unwrap();
    registry.restore_snapshot(saved).await.unwrap();
    timeout(READY_WITHIN, until_listed()).await.unwrap();
    // An agent that has lost its data has lost its services.
    cluster.agents_mut()[0].restart_empty().await.unwrap();
    assert_eq!(services(&cluster.agents()[0]).await, "{}");
}
