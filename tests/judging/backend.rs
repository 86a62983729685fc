//! The `demo backend` as a process, for what only a process can suffer.

use std::{path::PathBuf, process::Stdio};

use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdout, Command},
};

use crate::stage::SOON;

/// Where its program is. This test's own package may not be the one that builds it.
fn program() -> PathBuf {
    let built = option_env!("CARGO_BIN_EXE_demo").map(PathBuf::from);
    let built = built.or_else(|| std::env::var_os("JUDGING_DEMO").map(PathBuf::from));
    let program = built
        .unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/debug/demo")));
    assert!(
        program.exists(),
        "{} is not there: `cargo build --all-features --bin demo` at the root makes it, or JUDGING_DEMO names it",
        program.display()
    );
    program
}

/// A running backend, killed with the test.
pub(crate) struct Backend {
    pub(crate) port: u16,
    child: Child,
    _lines: BufReader<ChildStdout>,
    journal: tempfile::NamedTempFile,
}

impl Backend {
    /// One whose handlers take so long.
    pub(crate) async fn start(work: &str) -> Self {
        let journal = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new(program());
        for (variable, _) in std::env::vars_os() {
            let name = variable.to_string_lossy();
            if name.starts_with("CONSUL_") || name.starts_with("DEMO_") {
                command.env_remove(&variable);
            }
        }
        command.args(["backend", "--name", "a", "--listen", "127.0.0.1:0", "--work", work, "--journal"]);
        // Nobody listens there: it registers itself nowhere.
        command.arg(journal.path()).env("CONSUL_HTTP_ADDR", "http://127.0.0.1:1");
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let listening = async {
            loop {
                let mut line = String::new();
                assert!(lines.read_line(&mut line).await.unwrap() > 0, "it ended before it listened");
                if let Some((_, address)) = line.split_once("listens on ") {
                    return address.trim().rsplit(':').next().unwrap().parse().unwrap();
                }
            }
        };
        let port = tokio::time::timeout(SOON, listening).await.expect("it listens");
        Self { port, child, _lines: lines, journal }
    }

    /// SIGKILL, and waits for the end.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// How many requests had reached a handler.
    pub(crate) fn received(&self) -> usize {
        let text = std::fs::read_to_string(self.journal.path()).unwrap();
        text.lines().filter(|line| line.starts_with("received ")).count()
    }
}
