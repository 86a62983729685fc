//! What a case runs on.

use std::{io::Write, time::Duration};

use serde_json::Value;
use tokio::{task::JoinHandle, time::timeout};
use tonic_failover::testkit::{Agent, Answer, Cluster, ConsulProcess, Registration, Registry};

/// Long enough for anything that is to happen.
pub(crate) const LONG: Duration = Duration::from_secs(15);
/// Long enough to see that something has not happened.
pub(crate) const SHORT: Duration = Duration::from_millis(300);

/// Agents of `dc1` and perhaps `dc2`.
pub(crate) struct World {
    pub(crate) dc1: Registry,
    pub(crate) dc2: Registry,
    agents: Agents,
}

enum Agents {
    Embedded(Vec<Agent>),
    Real(Vec<ConsulProcess>),
}

// === impl World ===

impl World {
    pub(crate) async fn embedded(datacenters: usize) -> Self {
        let agents =
            Cluster::start(["dc1", "dc2"].into_iter().take(datacenters)).await.unwrap().into_agents();
        let registries: Vec<_> = agents.iter().map(|agent| agent.registry().clone()).collect();
        Self::new(&registries, Agents::Embedded(agents))
    }

    /// `None`, and a word about it, where no Consul is found.
    pub(crate) async fn real(datacenters: usize, case: &str) -> Option<Self> {
        let Some(bin) = ConsulProcess::find() else {
            // Past the test harness, which swallows what passing tests print.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED real::{case}: no Consul found. Install the package `consul`, or set CONSUL_BIN."
            );
            return None;
        };
        let mut agents = vec![ConsulProcess::builder(&bin).start().await.unwrap()];
        if datacenters == 2 {
            let second = ConsulProcess::builder(&bin).datacenter("dc2").join_wan(&agents[0]);
            agents.push(second.start().await.unwrap());
        }
        let registries: Vec<_> = agents.iter().map(|agent| agent.registry().clone()).collect();
        Some(Self::new(&registries, Agents::Real(agents)))
    }

    fn new(registries: &[Registry], agents: Agents) -> Self {
        let [dc1, dc2] = [0, 1].map(|at| registries[at.min(registries.len() - 1)].clone());
        Self { dc1, dc2, agents }
    }

    /// Ends the last agent as a crash would.
    pub(crate) async fn kill_last(&mut self) {
        match &mut self.agents {
            Agents::Embedded(agents) => agents.pop().unwrap().shutdown().await,
            Agents::Real(agents) => agents.last_mut().unwrap().kill().await.unwrap(),
        }
    }

    pub(crate) async fn restart_first(&mut self) {
        match &mut self.agents {
            Agents::Embedded(agents) => agents[0].restart_empty().await,
            Agents::Real(agents) => agents[0].restart().await.unwrap(),
        }
    }

    pub(crate) async fn register(&self, registration: Registration) {
        self.dc1.register(&registration).await.unwrap();
    }

    /// Registers what only JSON can say.
    pub(crate) async fn register_json(&self, body: &Value) {
        let answer = self.dc1.put("/v1/agent/service/register", body.to_string()).await.unwrap();
        assert!(answer.status.is_success(), "{body}: {}", answer.text());
    }

    /// A good answer of `dc1`.
    pub(crate) async fn get(&self, path: &str) -> Answer {
        let answer = self.dc1.get(path).await.unwrap();
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer
    }

    pub(crate) async fn health(&self, service: &str) -> Value {
        self.get(&format!("/v1/health/service/{service}")).await.json()
    }

    pub(crate) async fn index(&self, service: &str) -> u64 {
        self.get(&format!("/v1/health/service/{service}")).await.index().unwrap()
    }

    /// The ids that a question about a service brings.
    pub(crate) async fn ids(&self, service_and_query: &str) -> Vec<String> {
        ids(&self.health(service_and_query).await)
    }

    /// The status of a service's checks, but the node's.
    pub(crate) async fn statuses(&self, service: &str) -> Vec<(String, String)> {
        own_checks(&self.health(service).await[0])
            .iter()
            .map(|check| (text(&check["CheckID"]), text(&check["Status"])))
            .collect()
    }

    /// A question that is under way.
    pub(crate) fn ask(&self, path: &str) -> JoinHandle<Answer> {
        let (registry, path) = (self.dc1.clone(), path.to_owned());
        tokio::spawn(async move { registry.get_within(&path, 2 * LONG).await.unwrap() })
    }

    /// Waits until a service's one check has this status.
    pub(crate) async fn until_status(&self, service: &str, status: &str) {
        let reached = async {
            while self.statuses(service).await.iter().all(|it| it.1 != status) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(LONG, reached).await.unwrap_or_else(|_| panic!("{service} never becomes {status}"));
    }
}

pub(crate) fn ids(entries: &Value) -> Vec<String> {
    entries.as_array().unwrap().iter().map(|entry| text(&entry["Service"]["ID"])).collect()
}

pub(crate) fn own_checks(entry: &Value) -> Vec<Value> {
    let all = entry["Checks"].as_array().unwrap().iter();
    all.filter(|check| check["CheckID"] != "serfHealth").cloned().collect()
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

/// Whether a question is still unanswered after a while.
pub(crate) async fn is_waiting(question: &mut JoinHandle<Answer>) -> bool {
    timeout(SHORT, question).await.is_err()
}

/// The answer to a question, which must come.
pub(crate) async fn answer(question: JoinHandle<Answer>) -> Answer {
    timeout(LONG, question).await.expect("the answer comes").unwrap()
}
