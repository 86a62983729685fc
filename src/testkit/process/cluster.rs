//! Several agents of one datacenter: servers that elect a leader, and client agents.

use std::{
    hash::{BuildHasher, RandomState},
    path::PathBuf,
};

use futures_util::future::try_join_all;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::{
    Builder, ConsulProcess, POLL, Ports, READY_WITHIN, SignalError, StartError, command::port_taken,
    ports::Held,
};

/// A server counts as stable, and gets its vote back, after this. Consul's
/// default of 10 s is what every restart in a test would wait
/// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#server_stabilization_time>).
const HCL: &str = r#"leave_on_terminate = false autopilot { server_stabilization_time = "1s" }"#;

/// How often all ports are chosen anew when somebody was faster at one.
const TRIES: usize = 5;

/// Real servers and client agents of one datacenter (`dc1`), each a process with a
/// data folder, with `raft_multiplier = 1`. Dropping it kills them all.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tonic_failover::testkit::{ConsulCluster, ConsulProcess};
///
/// let consul = ConsulProcess::find().ok_or("install consul, or set CONSUL_BIN")?;
/// let mut cluster = ConsulCluster::start(consul, 3, 2).await?;
/// // ... point what is to be tested at `cluster.agents()[0].url()` ...
/// let leader = cluster.leader().await.ok_or("no leader")?;
/// cluster.kill(&[leader]).await?;
/// cluster.restart(&[leader]).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ConsulCluster {
    servers: Vec<ConsulProcess>,
    agents: Vec<ConsulProcess>,
    _folder: TempDir,
}

// === impl ConsulCluster ===

impl ConsulCluster {
    /// Runs the program `bin` as so many servers and client agents, and waits until
    /// every server may vote and every agent is in the catalog.
    ///
    /// # Errors
    /// As [`Builder::start`].
    pub async fn start(bin: impl Into<PathBuf>, servers: usize, agents: usize) -> Result<Self, StartError> {
        let bin = bin.into();
        let mut tries = 1;
        loop {
            match Self::try_start(&bin, servers, agents).await {
                Err(StartError::Ended { log, .. }) if port_taken(&log) && tries < TRIES => tries += 1,
                other => return other,
            }
        }
    }

    async fn try_start(bin: &PathBuf, servers: usize, agents: usize) -> Result<Self, StartError> {
        let prepare = |what| move |source| StartError::Prepare { what, source };
        let folder = tempfile::tempdir().map_err(prepare("folder"))?;
        // Held until each agent holds its own.
        let held: Vec<_> = (0..servers + agents)
            .map(|_| Held::free())
            .collect::<Result<_, _>>()
            .map_err(prepare("ports"))?;
        let ports: Vec<_> = held.iter().map(|held| held.ports).collect();
        let key = gossip_key();
        let gossip: Vec<_> = ports[..servers].iter().map(|it| it.serf_lan).collect();
        let setup = |node: String, ports: Ports| -> Builder {
            // One of its own, which an emptied agent keeps as a host's would.
            let number = RandomState::new().hash_one(ports.http);
            let id = format!(
                "node_id = \"{:08x}-0000-4000-8000-{:012x}\"",
                number >> 32,
                number & 0xffff_ffff_ffff
            );
            let setup = ConsulProcess::builder(bin).node(node).hcl(HCL).hcl(id).hcl(&key);
            setup.ports(ports).retry_join(gossip.clone())
        };
        let started = ports[..servers].iter().zip(1..).map(|(ports, number)| {
            let node = format!("s{number}");
            let dir = folder.path().join(&node);
            setup(node, *ports).server_of(servers, dir).start()
        });
        let started = try_join_all(started).await?;
        let cluster = Self { servers: started, agents: Vec::new(), _folder: folder };
        cluster.until_voters().await?;
        let started = ports[servers..].iter().zip(1..).map(|(ports, number)| {
            let node = format!("c{number}");
            let dir = cluster._folder.path().join(&node);
            setup(node, *ports).client(dir).start()
        });
        let agents = try_join_all(started).await?;
        Ok(Self { agents, ..cluster })
    }

    /// The servers.
    pub fn servers(&self) -> &[ConsulProcess] {
        &self.servers
    }

    /// The client agents.
    pub fn agents(&self) -> &[ConsulProcess] {
        &self.agents
    }

    /// The client agents, each to be killed, paused and restarted.
    pub fn agents_mut(&mut self) -> &mut [ConsulProcess] {
        &mut self.agents
    }

    /// The place of the leader among the servers; `None` while there is none that
    /// a running server knows.
    pub async fn leader(&self) -> Option<usize> {
        for server in self.servers.iter().filter(|it| it.pid().is_some()) {
            let Ok(answer) = server.registry().get_within("/v1/status/leader", 40 * POLL).await else {
                continue;
            };
            let leader = answer.json();
            let port = leader.as_str().and_then(|it| it.rsplit(':').next()?.parse::<u16>().ok());
            let place = self.servers.iter().position(|it| Some(it.ports().server) == port);
            if place.is_some() {
                return place;
            }
        }
        None
    }

    /// Ends these servers as a crash would.
    ///
    /// # Errors
    /// As [`ConsulProcess::kill`].
    pub async fn kill(&mut self, servers: &[usize]) -> Result<(), SignalError> {
        for server in self.chosen(servers) {
            server.kill().await?;
        }
        Ok(())
    }

    /// Starts these servers again, at the same time, and waits until every server
    /// may vote again: a cluster that loses the next one before that stays without
    /// a leader.
    ///
    /// # Errors
    /// As [`ConsulProcess::restart`].
    pub async fn restart(&mut self, servers: &[usize]) -> Result<(), StartError> {
        try_join_all(self.chosen(servers).map(ConsulProcess::restart)).await?;
        self.until_voters().await
    }

    /// Stops all servers (SIGSTOP): they take what is sent and answer nothing.
    ///
    /// # Errors
    /// Where one has ended.
    pub async fn pause_servers(&self) -> Result<(), SignalError> {
        for server in &self.servers {
            server.pause().await?;
        }
        Ok(())
    }

    /// Lets all go on (SIGCONT).
    ///
    /// # Errors
    /// Where one has ended.
    pub fn resume_servers(&self) -> Result<(), SignalError> {
        self.servers.iter().try_for_each(ConsulProcess::resume)
    }

    fn chosen(&mut self, servers: &[usize]) -> impl Iterator<Item = &mut ConsulProcess> {
        let all = self.servers.iter_mut().enumerate();
        all.filter(|(place, _)| servers.contains(place)).map(|(_, server)| server)
    }

    /// Waits until as many servers as there are may vote.
    async fn until_voters(&self) -> Result<(), StartError> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            for server in self.servers.iter().filter(|it| it.pid().is_some()) {
                let asked = server.registry().get_within("/v1/operator/raft/configuration", 40 * POLL).await;
                let json = asked.map(|it| it.json()).unwrap_or_default();
                let voters = json["Servers"].as_array().into_iter().flatten();
                if voters.filter(|it| it["Voter"] == true).count() == self.servers.len() {
                    return Ok(());
                }
            }
            if Instant::now() >= deadline {
                let (missing, log) = ("vote for every server".to_owned(), self.servers[0].log());
                return Err(StartError::NotReady { missing, waited: READY_WITHIN, log });
            }
            sleep(POLL).await;
        }
    }
}

/// A key for the gossip of one cluster
/// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#encrypt>):
/// an agent of another one, which was faster at a port, is not joined by mistake.
fn gossip_key() -> String {
    let random = |seed: u8| format!("{:016x}", RandomState::new().hash_one(seed));
    let digits = [0, 1, 2].map(random).concat();
    // 32 bytes in Base64, as hex digits are of its alphabet: the last of 43 has four bits.
    format!("encrypt = \"{}A=\"", &digits[..42])
}
