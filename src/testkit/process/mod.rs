//! A real `consul agent` as a child process, on free loopback ports.

mod builder;
mod cluster;
mod command;
mod ports;
#[cfg(test)]
mod tests;

use std::{
    env, fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};

use super::registry::Registry;

use ports::Held;

pub use builder::Builder;
pub use cluster::ConsulCluster;
pub use ports::Ports;

/// How long an agent may take until it is ready. Our choice: a lonely server
/// needs 1.7 s and a join that missed its first try is made again after 1 s; but an
/// agent that could not enter itself into the catalog, because the first leader was
/// late (its question is held for 7 s then) or was lost again on a busy machine, tries again
/// only after 15 to 30 s (`retryFailInterval` and its stagger in Consul's `agent/ae/ae.go`).
const READY_WITHIN: Duration = Duration::from_secs(60);
/// How long a terminated agent may take to end; one that leaves its cluster
/// needs 5 s. After that it is killed.
const END_WITHIN: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(25);
/// How much of the agent's log an error carries.
const LOG_LINES: usize = 15;

/// A running `consul agent`. Dropping it kills the process.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tonic_failover::testkit::ConsulProcess;
///
/// let consul = ConsulProcess::find().ok_or("install consul, or set CONSUL_BIN")?;
/// let dc1 = ConsulProcess::builder(&consul).datacenter("dc1").start().await?;
/// let dc2 = ConsulProcess::builder(&consul).datacenter("dc2").join_wan(&dc1).start().await?;
/// # drop(dc2); Ok(()) }
/// ```
#[derive(Debug)]
pub struct ConsulProcess {
    setup: Builder,
    /// For as long as this value lives: the process may be dead in between.
    held: Held,
    /// What this agent, and no other that may have got the port, calls itself.
    nonce: String,
    child: Child,
    registry: Registry,
    /// Holds the log; gone with this value.
    folder: TempDir,
}

/// Why no agent is running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The program could not be run.
    #[error("cannot run {}", bin.display())]
    Spawn {
        /// The program.
        bin: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No free ports, ports that somebody else listens on, or no folder for the log.
    #[error("cannot prepare an agent's {what}")]
    Prepare {
        /// What was being prepared.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The process ended before it was ready.
    #[error("the agent ended with {status}; its last words:\n{log}")]
    Ended {
        /// How it ended.
        status: std::process::ExitStatus,
        /// The last lines of its log.
        log: String,
    },
    /// The process runs but does not become ready.
    #[error("the agent has no {missing} after {waited:?}; its last words:\n{log}")]
    NotReady {
        /// What it lacks.
        missing: String,
        /// How long it was waited for.
        waited: Duration,
        /// The last lines of its log.
        log: String,
    },
}

/// A signal could not be sent to an agent, most likely because it has ended.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the agent")]
pub struct SignalError {
    action: &'static str,
    source: io::Error,
}

// === impl ConsulProcess ===

impl ConsulProcess {
    /// The `consul` to use: `CONSUL_BIN` as it stands, else `consul` on `PATH`,
    /// else `target/consul/usr/bin/consul` under the package being built or the
    /// current folder.
    pub fn find() -> Option<PathBuf> {
        if let Some(set) = env::var_os("CONSUL_BIN").filter(|set| !set.is_empty()) {
            return Some(set.into());
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let mut found = env::split_paths(&path).map(|folder| folder.join("consul"));
        let package = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let mut unpacked = package
            .into_iter()
            .chain(env::current_dir().ok())
            .map(|folder| folder.join("target/consul/usr/bin/consul"));
        found.find(|file| runnable(file)).or_else(|| unpacked.find(|file| runnable(file)))
    }

    /// Begins the set-up of an agent of datacenter `dc1`, in memory, that runs
    /// the program `bin`.
    pub fn builder(bin: impl Into<PathBuf>) -> Builder {
        Builder::new(bin.into())
    }

    /// Where it answers HTTP.
    pub fn http_addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.held.ports.http).into()
    }

    /// The same as a URL, without a slash at its end.
    pub fn url(&self) -> String {
        format!("http://{}", self.http_addr())
    }

    /// The same, ready to register and ask.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Its datacenter.
    pub fn datacenter(&self) -> &str {
        &self.setup.datacenter
    }

    /// Its ports, which it keeps over a restart.
    pub fn ports(&self) -> Ports {
        self.held.ports
    }

    /// Its process id; `None` once it has ended.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// The last lines of what the agent logged.
    pub fn log(&self) -> String {
        last_lines(&self.folder.path().join("log"))
    }

    /// Ends it as a crash would (SIGKILL) and waits until it is gone.
    ///
    /// # Errors
    /// Where the system refuses. One that has ended already is no error.
    pub async fn kill(&mut self) -> Result<(), SignalError> {
        self.child.kill().await.map_err(|source| SignalError { action: "kill", source })
    }

    /// Asks it to end (SIGTERM) and waits until it is gone; one that takes longer
    /// than 15 s is killed. A server ends without leaving its cluster, which is
    /// Consul's default for servers.
    ///
    /// # Errors
    /// Where it has ended already.
    pub async fn terminate(&mut self) -> Result<(), SignalError> {
        self.signal(Signal::TERM, "terminate")?;
        match timeout(END_WITHIN, self.child.wait()).await {
            Ok(ended) => ended.map(drop).map_err(|source| SignalError { action: "await the end of", source }),
            Err(_) => self.kill().await,
        }
    }

    /// Stops its process (SIGSTOP): connections are accepted, nothing answers.
    /// Returns when it stands still, which takes a while on a busy machine.
    ///
    /// # Errors
    /// Where it has ended.
    pub async fn pause(&self) -> Result<(), SignalError> {
        self.signal(Signal::STOP, "pause")?;
        let still = async {
            while self.pid().is_some_and(|pid| !stands_still(pid)) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(END_WITHIN, still).await.map_err(|_| {
            let source = io::Error::new(io::ErrorKind::TimedOut, "it goes on");
            SignalError { action: "pause", source }
        })
    }

    /// Lets a paused one go on (SIGCONT).
    ///
    /// # Errors
    /// Where it has ended.
    pub fn resume(&self) -> Result<(), SignalError> {
        self.signal(Signal::CONT, "resume")
    }

    /// As [`restart`](Self::restart), with its data folder emptied while it is down:
    /// it has forgotten its services. Without a `node_id` of its own (a
    /// [`ConsulCluster`] gives one) it is another node of the same name, which Consul
    /// 1.8.7 does not let take the old one's place: what that had registered stays.
    ///
    /// # Errors
    /// As [`restart`](Self::restart), or where the folder cannot be emptied.
    pub async fn restart_empty(&mut self) -> Result<(), StartError> {
        let _ = self.kill().await;
        if let Some(dir) = self.setup.data_dir() {
            let emptied = match fs::remove_dir_all(dir) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => fs::create_dir_all(dir),
            };
            emptied.map_err(|source| StartError::Prepare { what: "empty data folder", source })?;
        }
        self.restart().await
    }

    /// Starts it again on the same ports, killing it first where it still runs,
    /// and waits until it has a leader (not for the other datacenters, which may
    /// be down on purpose). One with a data folder keeps its state; one in
    /// memory has lost it.
    ///
    /// # Errors
    /// As when starting. A later call may still succeed.
    pub async fn restart(&mut self) -> Result<(), StartError> {
        // Ending a process that has ended is fine, and no other failure is of
        // use here: the port tells.
        let _ = self.kill().await;
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            self.child =
                command::spawn(&self.setup, self.held.ports, &self.nonce, self.folder.path()).await?;
            match self.has_leader(deadline).await {
                // UDP ports cannot be held: somebody may have one just now.
                Err(StartError::Ended { log, .. })
                    if command::port_taken(&log) && Instant::now() < deadline =>
                {
                    sleep(POLL).await;
                }
                other => return other,
            }
        }
    }

    async fn start(setup: Builder) -> Result<Self, StartError> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            let held = setup.ports.map_or_else(Held::free, Held::these);
            let held = held.map_err(|source| StartError::Prepare { what: "ports", source })?;
            let folder =
                tempfile::tempdir().map_err(|source| StartError::Prepare { what: "folder", source })?;
            let nonce = command::nonce(folder.path());
            let child = command::spawn(&setup, held.ports, &nonce, folder.path()).await?;
            let registry = Registry::new(format!("http://{}:{}", Ipv4Addr::LOCALHOST, held.ports.http));
            let mut agent = Self { setup: setup.clone(), held, nonce, child, registry, folder };
            match agent.is_ready(deadline).await {
                Ok(()) => return Ok(agent),
                Err(StartError::Ended { log, .. })
                    if setup.ports.is_none() && command::port_taken(&log) && Instant::now() < deadline => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn is_ready(&mut self, deadline: Instant) -> Result<(), StartError> {
        self.has_leader(deadline).await?;
        let Some(peer) = self.setup.joined.clone() else { return Ok(()) };
        let (here, there) = (self.registry.clone(), Registry::new(peer.url));
        let own = self.setup.datacenter.clone();
        self.wait_until(deadline, &format!("way to datacenter {}", peer.datacenter), async || {
            reaches(&here, &peer.datacenter).await
        })
        .await?;
        self.wait_until(deadline, &format!("way back from datacenter {}", peer.datacenter), async || {
            reaches(&there, &own).await
        })
        .await
    }

    async fn has_leader(&mut self, deadline: Instant) -> Result<(), StartError> {
        let (registry, setup, nonce) = (self.registry.clone(), self.setup.clone(), self.nonce.clone());
        self.wait_until(deadline, "leader", async || {
            let leader = registry.get_within("/v1/status/leader", 40 * POLL).await;
            leader
                .is_ok_and(|it| it.status.is_success() && it.json().as_str().is_some_and(|it| !it.is_empty()))
        })
        .await?;
        self.wait_until(deadline, "entry in the catalog", async || {
            command::is_settled(&registry, &setup, &nonce).await
        })
        .await
    }

    async fn wait_until(
        &mut self,
        deadline: Instant,
        missing: &str,
        mut met: impl AsyncFnMut() -> bool,
    ) -> Result<(), StartError> {
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(StartError::Ended { status, log: self.log() });
            }
            if met().await {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let missing = missing.to_owned();
                return Err(StartError::NotReady { missing, waited: READY_WITHIN, log: self.log() });
            }
            sleep(POLL).await;
        }
    }

    fn signal(&self, signal: Signal, action: &'static str) -> Result<(), SignalError> {
        // An id is there only while the child has not been waited for, so it
        // cannot have become another process's.
        let pid = self.child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let sent = match pid {
            Some(pid) => kill_process(pid, signal).map_err(io::Error::from),
            None => Err(io::Error::new(io::ErrorKind::NotFound, "it has ended")),
        };
        sent.map_err(|source| SignalError { action, source })
    }
}

/// Whether every thread of a process is stopped or has ended, as far as the system tells.
fn stands_still(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The state follows the name, which is in brackets and may hold anything.
        stat.rsplit(')')
            .next()
            .is_none_or(|rest| matches!(rest.trim_start().chars().next(), Some('T' | 'Z' | 'X') | None))
    })
}

/// Whether `registry`'s agent can ask `datacenter`; a refused token is an answer.
/// Being listed comes first: before that, asking costs the agent an error line.
async fn reaches(registry: &Registry, datacenter: &str) -> bool {
    let listed = registry.get_within("/v1/catalog/datacenters", 40 * POLL).await;
    let listed = listed.is_ok_and(|it| {
        it.json().as_array().is_some_and(|all| all.iter().any(|one| one.as_str() == Some(datacenter)))
    });
    if !listed {
        return false;
    }
    let asked = registry.get_within(&format!("/v1/catalog/services?dc={datacenter}"), 40 * POLL).await;
    asked.is_ok_and(|it| !it.status.is_server_error())
}

fn runnable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(file).is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
}

fn last_lines(file: &Path) -> String {
    let text = fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

/// A command that leaves its log in `folder`.
fn logged(bin: &Path, folder: &Path) -> io::Result<Command> {
    let log = fs::OpenOptions::new().create(true).append(true).open(folder.join("log"))?;
    let mut command = Command::new(bin);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).kill_on_drop(true);
    Ok(command)
}
