//! The stage: the registry and the servers, all processes of our own.

use std::{
    env, fs, io,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

use super::{journal::Journal, registry::Registry};
use crate::demo::calls::Method;

/// How long a server may take to end after SIGTERM: it drains for 5 s at most.
const GOODBYE: Duration = Duration::from_secs(10);
/// How much of a server's log a failure shows.
const LOG_TAIL: usize = 8;

/// How long a request is made to take, so that at 60 calls a second there is
/// always something in a server's hands.
const WORK: Duration = Duration::from_millis(40);

/// Why the stage could not be set, or a server did not do as it should.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StageError {
    #[error("cannot {what}")]
    Io { what: String, source: io::Error },
    #[error("no port below 32768 is free on 127.0.0.1")]
    NoPort,
    #[error("{name} has already ended")]
    Gone { name: String },
    #[error("{name} should have ended well after SIGTERM, but {how}")]
    BadEnd { name: String, how: String },
}

/// A server of the story. It may live several times, always on its port.
struct Server {
    name: &'static str,
    datacenter: &'static str,
    port: u16,
    running: Option<Running>,
}

/// Killed when dropped.
struct Running {
    child: Child,
    /// Its place among all processes of the story.
    life: usize,
}

pub(crate) struct Stage {
    registry: Registry,
    servers: Vec<Server>,
    /// The journal of each process, in the order of their starts.
    lives: Vec<PathBuf>,
    dir: PathBuf,
    program: PathBuf,
}

// === impl Stage ===

impl Stage {
    /// Chooses ports for `servers` (name and datacenter); starts none yet. Their
    /// logs and journals go to `dir`.
    pub(crate) fn set(
        registry: Registry,
        dir: &Path,
        servers: &[(&'static str, &'static str)],
    ) -> Result<Self, StageError> {
        let program = env::current_exe().map_err(|source| failed("find this program", source))?;
        let mut all = Vec::new();
        for (name, datacenter) in servers {
            let taken: Vec<u16> = all.iter().map(|server: &Server| server.port).collect();
            all.push(Server { name, datacenter, port: free_port(&taken)?, running: None });
        }
        Ok(Self { registry, servers: all, lives: Vec::new(), dir: dir.to_owned(), program })
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Starts the server and gives its process id.
    pub(crate) fn start(&mut self, name: &str) -> Result<u32, StageError> {
        let life = self.lives.len();
        let journal = self.dir.join(format!("{life}-{name}.journal"));
        let log = self.dir.join(format!("{life}-{name}.log"));
        let server = self.server(name);
        let (listen, url) = (format!("127.0.0.1:{}", server.port), self.registry.url(server.datacenter));
        let mut command = Command::new(&self.program);
        // Only what is said here: never the Consul of the caller's environment.
        for (variable, _) in env::vars_os() {
            let variable = variable.to_string_lossy().into_owned();
            if ["CONSUL_", "DEMO_"].iter().any(|ours| variable.starts_with(ours)) {
                command.env_remove(variable);
            }
        }
        let out =
            fs::File::create(&log).map_err(|source| failed(format!("write {}", log.display()), source))?;
        let err = out.try_clone().map_err(|source| failed(format!("write {}", log.display()), source))?;
        command
            .args(["backend", "--ends-with-stdin", "--name", name, "--listen", &listen])
            .args(["--work", &format!("{}ms", WORK.as_millis()), "--journal"])
            .arg(&journal)
            .env("CONSUL_HTTP_ADDR", url)
            // Its end is our end, however that comes.
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(err)
            // Ctrl-C is for us; we end the servers in our order.
            .process_group(0)
            .kill_on_drop(true);
        let child = command.spawn().map_err(|source| failed(format!("start {name}"), source))?;
        let pid = child.id().unwrap_or_default();
        self.lives.push(journal);
        self.server_mut(name).running = Some(Running { child, life });
        Ok(pid)
    }

    /// SIGKILL: the process ends where it stands. Gives the number of its life.
    pub(crate) async fn kill(&mut self, name: &str) -> Result<usize, StageError> {
        let mut running = self.take(name)?;
        let life = running.life;
        signal(name, &running, Signal::KILL)?;
        running.child.wait().await.map_err(|source| failed(format!("wait for {name}"), source))?;
        Ok(life)
    }

    /// SIGTERM: the process takes its leave, and must do so well.
    pub(crate) async fn terminate(&mut self, name: &str) -> Result<(), StageError> {
        let mut running = self.take(name)?;
        signal(name, &running, Signal::TERM)?;
        let bad = |how: String| StageError::BadEnd { name: name.to_owned(), how };
        match timeout(GOODBYE, running.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(bad(format!("it ended with {status}"))),
            Ok(Err(error)) => Err(bad(error.to_string())),
            Err(_) => Err(bad(format!("it has not ended {} s later", GOODBYE.as_secs()))),
        }
    }

    /// SIGSTOP: the process stands still with all its connections.
    pub(crate) fn pause(&self, name: &str) -> Result<(), StageError> {
        self.signal(name, Signal::STOP)
    }

    /// SIGCONT: it goes on as if nothing had been.
    pub(crate) fn resume(&self, name: &str) -> Result<(), StageError> {
        self.signal(name, Signal::CONT)
    }

    /// The journals of all processes so far, in the order of their starts.
    pub(crate) fn journals(&self) -> Result<Vec<Journal>, StageError> {
        self.lives.iter().map(|path| read(path)).collect()
    }

    /// Whether the server has received this request and not answered it.
    pub(crate) fn has_in_hand(&self, name: &str, method: Method, id: &str) -> Result<bool, StageError> {
        let Some(running) = &self.server(name).running else { return Ok(false) };
        let journal = read(&self.lives[running.life])?;
        Ok(journal.in_hand(method).any(|other| other == id))
    }

    /// The ends of the logs of servers that have ended without having been told
    /// to, or of all where there are none: what a failure is explained by.
    pub(crate) fn explain(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        let dir = self.dir.clone();
        for server in &mut self.servers {
            let Some(running) = &mut server.running else { continue };
            let state = match running.child.try_wait() {
                Ok(Some(status)) => format!("has ended by itself ({status})"),
                _ => "is running".to_owned(),
            };
            lines.push(format!("{} {state}; its log ends:", server.name));
            let log = dir.join(format!("{}-{}.log", running.life, server.name));
            let text = fs::read_to_string(log).unwrap_or_default();
            let tail: Vec<_> = text.lines().rev().take(LOG_TAIL).collect();
            lines.extend(tail.into_iter().rev().map(|line| format!("    {line}")));
        }
        lines
    }

    /// Ends every server, the paused as well, and the registry after them.
    pub(crate) async fn strike(mut self) {
        for server in &mut self.servers {
            if let Some(mut running) = server.running.take() {
                let _ = running.child.kill().await;
            }
        }
    }

    fn server(&self, name: &str) -> &Server {
        self.servers.iter().find(|server| server.name == name).expect("the acts name servers of the stage")
    }

    fn server_mut(&mut self, name: &str) -> &mut Server {
        self.servers
            .iter_mut()
            .find(|server| server.name == name)
            .expect("the acts name servers of the stage")
    }

    fn take(&mut self, name: &str) -> Result<Running, StageError> {
        self.server_mut(name).running.take().ok_or_else(|| StageError::Gone { name: name.to_owned() })
    }

    fn signal(&self, name: &str, what: Signal) -> Result<(), StageError> {
        match &self.server(name).running {
            Some(running) => signal(name, running, what),
            None => Err(StageError::Gone { name: name.to_owned() }),
        }
    }
}

/// The child has not been waited for, so its process id is still its own.
fn signal(name: &str, running: &Running, what: Signal) -> Result<(), StageError> {
    let pid = running.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let pid = pid.ok_or_else(|| StageError::Gone { name: name.to_owned() })?;
    kill_process(pid, what).map_err(|error| failed(format!("signal {name}"), error.into()))
}

fn read(journal: &Path) -> Result<Journal, StageError> {
    let text = fs::read_to_string(journal);
    text.map(|text| Journal::parse(&text))
        .map_err(|source| failed(format!("read {}", journal.display()), source))
}

/// A port that no outgoing connection is given while its server is dead: below
/// Linux's ephemeral range, 32768 to 60999 (Documentation/networking/ip-sysctl).
fn free_port(taken: &[u16]) -> Result<u16, StageError> {
    let spread = std::process::id() as u16;
    let ports = (0..2000u16).map(|step| 20_000 + spread.wrapping_mul(31).wrapping_add(step * 7) % 12_000);
    let mut free =
        ports.filter(|port| !taken.contains(port) && TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    free.next().ok_or(StageError::NoPort)
}

fn failed(what: impl Into<String>, source: io::Error) -> StageError {
    StageError::Io { what: what.into(), source }
}
