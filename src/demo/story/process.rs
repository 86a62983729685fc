//! A server of a story: a process of our own, killed when dropped.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

/// How long a server may take to end after SIGTERM: it drains for 5 s at most.
const GOODBYE: Duration = Duration::from_secs(10);
/// How much of a server's log a failure shows.
const LOG_TAIL: usize = 8;

/// Why the stage could not be set, or a server did not do as it should.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StageError {
    #[error("cannot {what}")]
    Io { what: String, source: io::Error },
    #[error("{name} has already ended")]
    Gone { name: String },
    #[error("{name} should have ended well after SIGTERM, but {how}")]
    BadEnd { name: String, how: String },
}

/// Killed when dropped.
pub(crate) struct Running {
    name: String,
    child: Child,
    log: PathBuf,
}

// === impl Running ===

impl Running {
    /// Starts `demo backend` with these arguments and the Consul at `consul`; what it says goes to `log`.
    pub(crate) fn start(
        name: &str,
        arguments: &[String],
        consul: Option<&str>,
        log: PathBuf,
    ) -> Result<Self, StageError> {
        let program = env::current_exe().map_err(|source| failed("find this program", source))?;
        let mut command = Command::new(program);
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
            .args(["backend", "--ends-with-stdin", "--name", name])
            .args(arguments)
            .envs(consul.map(|url| ("CONSUL_HTTP_ADDR", url)))
            // Its end is our end, however that comes.
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(err)
            // Ctrl-C is for us; we end the servers in our order.
            .process_group(0)
            .kill_on_drop(true);
        let child = command.spawn().map_err(|source| failed(format!("start {name}"), source))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().unwrap_or_default()
    }

    /// SIGKILL: the process ends where it stands.
    pub(crate) async fn kill(mut self) -> Result<(), StageError> {
        self.signal(Signal::KILL)?;
        let ended = self.child.wait().await;
        ended.map(drop).map_err(|source| failed(format!("wait for {}", self.name), source))
    }

    /// SIGTERM: the process takes its leave, and must do so well.
    pub(crate) async fn terminate(mut self) -> Result<(), StageError> {
        self.signal(Signal::TERM)?;
        let bad = |how: String| StageError::BadEnd { name: self.name.clone(), how };
        match timeout(GOODBYE, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(bad(format!("it ended with {status}"))),
            Ok(Err(error)) => Err(bad(error.to_string())),
            Err(_) => Err(bad(format!("it has not ended {} s later", GOODBYE.as_secs()))),
        }
    }

    /// The child has not been waited for, so its process id is still its own.
    pub(crate) fn signal(&self, what: Signal) -> Result<(), StageError> {
        let name = &self.name;
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        let pid = pid.ok_or_else(|| StageError::Gone { name: name.to_owned() })?;
        kill_process(pid, what).map_err(|error| failed(format!("signal {name}"), error.into()))
    }

    /// What it has said so far.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Whether it lives, and the end of its log: what a failure is explained by.
    pub(crate) fn explain(&mut self) -> Vec<String> {
        let state = match self.child.try_wait() {
            Ok(Some(status)) => format!("has ended by itself ({status})"),
            _ => "is running".to_owned(),
        };
        let mut lines = vec![format!("{} {state}; its log ends:", self.name)];
        let text = self.said();
        let tail: Vec<_> = text.lines().rev().take(LOG_TAIL).collect();
        lines.extend(tail.into_iter().rev().map(|line| format!("    {line}")));
        lines
    }

    /// Ends it, paused or not.
    pub(crate) async fn end(mut self) {
        let _ = self.child.kill().await;
    }
}

/// Reads what a server wrote.
pub(crate) fn read(file: &Path) -> Result<String, StageError> {
    fs::read_to_string(file).map_err(|source| failed(format!("read {}", file.display()), source))
}

pub(crate) fn failed(what: impl Into<String>, source: io::Error) -> StageError {
    StageError::Io { what: what.into(), source }
}
