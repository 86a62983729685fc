//! The stage: the registry and the servers, all processes of our own.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::process::Signal;

use super::{
    journal::Journal,
    process::{self, Running, StageError, failed},
    registry::Registry,
};
use crate::{demo::calls::Method, testkit::Port};

/// How long a request is made to take, so that at 60 calls a second there is
/// always something in a server's hands.
const WORK: Duration = Duration::from_millis(40);

/// A server of the story. It may live several times, always on its port.
struct Server {
    name: &'static str,
    datacenter: &'static str,
    port: Port,
    /// And its place among all processes of the story.
    running: Option<(Running, usize)>,
}

pub(crate) struct Stage {
    registry: Registry,
    servers: Vec<Server>,
    /// The journal of each process, in the order of their starts.
    lives: Vec<PathBuf>,
    dir: PathBuf,
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
        let mut all = Vec::new();
        for (name, datacenter) in servers {
            let port = Port::free().map_err(|source| failed("find a free port", source))?;
            all.push(Server { name, datacenter, port, running: None });
        }
        Ok(Self { registry, servers: all, lives: Vec::new(), dir: dir.to_owned() })
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
        let url = self.registry.url(server.datacenter);
        let (listen, work) = (server.port.addr().to_string(), format!("{}ms", WORK.as_millis()));
        let arguments = ["--listen", &listen, "--work", &work, "--journal"].map(str::to_owned);
        let arguments: Vec<_> = arguments.into_iter().chain([journal.display().to_string()]).collect();
        let running = Running::start(name, &arguments, Some(&url), log)?;
        let pid = running.pid();
        self.lives.push(journal);
        self.server_mut(name).running = Some((running, life));
        Ok(pid)
    }

    /// SIGKILL: the process ends where it stands. Gives the number of its life.
    pub(crate) async fn kill(&mut self, name: &str) -> Result<usize, StageError> {
        let (running, life) = self.take(name)?;
        running.kill().await?;
        Ok(life)
    }

    /// SIGTERM: the process takes its leave, and must do so well.
    pub(crate) async fn terminate(&mut self, name: &str) -> Result<(), StageError> {
        self.take(name)?.0.terminate().await
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
        let Some((_, life)) = &self.server(name).running else { return Ok(false) };
        let journal = read(&self.lives[*life])?;
        Ok(journal.in_hand(method).any(|other| other == id))
    }

    /// The ends of the logs of the servers: what a failure is explained by.
    pub(crate) fn explain(&mut self) -> Vec<String> {
        let running = self.servers.iter_mut().filter_map(|server| server.running.as_mut());
        running.flat_map(|(running, _)| running.explain()).collect()
    }

    /// Ends every server, the paused as well, and the registry after them.
    pub(crate) async fn strike(mut self) {
        for server in &mut self.servers {
            if let Some((running, _)) = server.running.take() {
                running.end().await;
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

    fn take(&mut self, name: &str) -> Result<(Running, usize), StageError> {
        self.server_mut(name).running.take().ok_or_else(|| StageError::Gone { name: name.to_owned() })
    }

    fn signal(&self, name: &str, what: Signal) -> Result<(), StageError> {
        match &self.server(name).running {
            Some((running, _)) => running.signal(what),
            None => Err(StageError::Gone { name: name.to_owned() }),
        }
    }
}

fn read(journal: &Path) -> Result<Journal, StageError> {
    process::read(journal).map(|text| Journal::parse(&text))
}
