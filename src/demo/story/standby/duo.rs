//! The two servers, each a process with its own way to Consul.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::process::Signal;
use tokio::time::{sleep, timeout};

use super::{store::Store, wire::Wire};
use crate::{
    demo::{
        cli::Failure,
        story::process::{Running, StageError, failed},
    },
    testkit::Port,
};

pub(super) const NAMES: [&str; 2] = ["counter-a", "counter-b"];

/// How long a server's own log is waited for. Our choice: generous, for a busy machine.
const BOUND: Duration = Duration::from_secs(20);

pub(super) struct Duo {
    store: Store,
    dir: PathBuf,
    lives: usize,
    servers: [Server; 2],
}

struct Server {
    name: &'static str,
    port: Port,
    wire: Option<Wire>,
    running: Option<Running>,
}

// === impl Duo ===

impl Duo {
    /// Starts none yet. Logs go to `dir`.
    pub(super) async fn set(store: Store, dir: &Path) -> Result<Self, Failure> {
        let [a, b] = NAMES;
        let server = async |name| {
            let port = Port::free().map_err(|source| failed("find a free port", source))?;
            Ok::<_, Failure>(Server { name, port, wire: store.wire().await?, running: None })
        };
        let servers = [server(a).await?, server(b).await?];
        Ok(Self { store, dir: dir.to_owned(), lives: 0, servers })
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// To restart Consul, if there is a real one.
    pub(super) fn store_mut(&mut self) -> &mut Store {
        &mut self.store
    }

    pub(super) fn port(&self, name: &str) -> u16 {
        self.server(name).port.number()
    }

    /// The other of the two.
    pub(super) fn other(&self, name: &str) -> &'static str {
        if name == NAMES[0] { NAMES[1] } else { NAMES[0] }
    }

    /// Starts a server, and waits until it is primary or standby.
    pub(super) async fn start(&mut self, name: &str) -> Result<u32, Failure> {
        let log = self.dir.join(format!("{}-{name}.log", self.lives));
        let lease = self.store.lease();
        let place = self.place(name);
        let server = &mut self.servers[place];
        let listen = server.port.addr().to_string();
        let mut arguments =
            ["--listen", &listen, "--lease", &lease, "--blockable"].map(str::to_owned).to_vec();
        let url = server.wire.as_ref().map(Wire::url);
        if url.is_none() {
            arguments.push("--no-consul".to_owned());
        }
        let running = Running::start(name, &arguments, url.as_deref(), log)?;
        let pid = running.pid();
        server.running = Some(running);
        self.lives += 1;
        self.says(name, &["became PRIMARY", "standby of"]).await?;
        Ok(pid)
    }

    /// Waits until the server has said one of these.
    pub(super) async fn says(&self, name: &str, words: &[&str]) -> Result<(), Failure> {
        let look = async {
            loop {
                let said = self.running(name)?.said();
                if words.iter().any(|words| said.contains(words)) {
                    return Ok::<_, StageError>(());
                }
                sleep(Duration::from_millis(10)).await;
            }
        };
        match timeout(BOUND, look).await {
            Ok(found) => Ok(found?),
            Err(_) => Err(format!("{name} never said {words:?}").into()),
        }
    }

    pub(super) async fn kill(&mut self, name: &str) -> Result<(), Failure> {
        Ok(self.take(name)?.kill().await?)
    }

    /// Asks it to end, and waits until it has.
    pub(super) async fn terminate(&mut self, name: &str) -> Result<(), Failure> {
        Ok(self.take(name)?.terminate().await?)
    }

    pub(super) fn signal(&self, name: &str, what: Signal) -> Result<(), Failure> {
        Ok(self.running(name)?.signal(what)?)
    }

    /// Cuts the server's way to Consul, or mends it.
    pub(super) fn cut(&self, name: &str, cut: bool) {
        match &self.server(name).wire {
            Some(wire) if cut => wire.cut(),
            Some(wire) => wire.mend(),
            None => {}
        }
    }

    /// The ends of the logs: what a failure is explained by.
    pub(super) fn explain(&mut self) -> Vec<String> {
        let running = self.servers.iter_mut().filter_map(|server| server.running.as_mut());
        running.flat_map(Running::explain).collect()
    }

    /// Ends both, and the store after them.
    pub(super) async fn strike(mut self) {
        for server in &mut self.servers {
            if let Some(running) = server.running.take() {
                running.end().await;
            }
        }
    }

    fn place(&self, name: &str) -> usize {
        self.servers.iter().position(|it| it.name == name).expect("the acts name servers of the stage")
    }

    fn server(&self, name: &str) -> &Server {
        &self.servers[self.place(name)]
    }

    fn running(&self, name: &str) -> Result<&Running, StageError> {
        self.server(name).running.as_ref().ok_or_else(|| StageError::Gone { name: name.to_owned() })
    }

    fn take(&mut self, name: &str) -> Result<Running, StageError> {
        let place = self.place(name);
        self.servers[place].running.take().ok_or_else(|| StageError::Gone { name: name.to_owned() })
    }
}
