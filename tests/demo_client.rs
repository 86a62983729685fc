//! `demo client` as a process: what its log says, and how it ends.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use common::{Backend, NOWHERE, SOON};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout},
    time::timeout,
};
use tonic_failover::testkit::Cluster;

struct Client {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Client {
    fn start(consul: &str, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
        command.arg("client").args(more);
        for (variable, _) in std::env::vars_os() {
            let variable = variable.to_string_lossy().into_owned();
            if variable.starts_with("CONSUL_") || variable.starts_with("DEMO_") {
                command.env_remove(variable);
            }
        }
        command.env("CONSUL_HTTP_ADDR", consul).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    async fn line_with(&mut self, words: &str) -> String {
        let find = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("the client goes on writing");
                if line.contains(words) {
                    return line;
                }
            }
        };
        timeout(SOON, find).await.unwrap_or_else(|_| panic!("no line with {words:?}"))
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    async fn ended(&mut self) -> Option<i32> {
        timeout(SOON, self.child.wait()).await.expect("the client ends").unwrap().code()
    }
}

#[tokio::test]
async fn its_log_follows_the_calls_to_the_other_datacenter_and_back() {
    let cluster = Cluster::start(["dc1", "dc2"]).await.unwrap();
    let url = |dc: &str| cluster.agent(dc).unwrap().url();
    // Before its servers.
    let mut client = Client::start(&url("dc1"), &["--rate", "50"]);
    let mut a = Backend::start_with("counter-a", 0, &url("dc1"), &[]).await;
    client.line_with("bound to counter-a@dc1 in ").await;
    let _c = Backend::start_with("counter-c", 0, &url("dc2"), &[]).await;
    a.terminate().await;
    client.line_with("rebound from counter-a@dc1 to counter-c@dc2 (").await;
    let _a = Backend::start_with("counter-a", a.port, &url("dc1"), &[]).await;
    client.line_with("rebound from counter-c@dc2 to counter-a@dc1 (preferred datacenter is back) in ").await;

    client.signal(Signal::TERM);
    let totals = client.line_with("ended (SIGTERM)").await;
    assert!(totals.contains("answered") && totals.contains("failed"), "{totals}");
    client.line_with("counter-a@dc1 answered").await;
    assert_eq!(client.ended().await, Some(0));
}

#[tokio::test]
async fn it_goes_on_without_consul_and_ctrl_c_ends_it_within_seconds() {
    let mut client = Client::start(NOWHERE, &[]);
    client.line_with("failed after").await;
    client.signal(Signal::INT);
    client.line_with("ended (Ctrl-C)").await;
    assert_eq!(client.ended().await, Some(0));
}

#[tokio::test]
async fn machines_get_one_object_a_line_and_the_totals_last() {
    let cluster = Cluster::start(["dc1"]).await.unwrap();
    let url = cluster.agent("dc1").unwrap().url();
    let _a = Backend::start_with("counter-a", 0, &url, &[]).await;
    let mut client = Client::start(&url, &["--json", "--for", "1s", "--method", "get"]);
    let mut last = serde_json::Value::Null;
    while let Some(line) = timeout(SOON, client.lines.next_line()).await.unwrap().unwrap() {
        last = serde_json::from_str(&line).unwrap();
    }
    assert_eq!(last["event"], "totals");
    assert!(last["answered"]["counter-a@dc1"].as_u64().unwrap() > 0, "{last}");
    assert_eq!(last["failed"], 0);
    assert_eq!(client.ended().await, Some(0));
}

#[tokio::test]
async fn it_ends_when_nobody_reads_it() {
    let mut client = Client::start(NOWHERE, &["--rate", "100", "--deadline", "50ms"]);
    client.line_with("calls counter").await;
    let Client { mut child, lines } = client;
    drop(lines);
    let ended = timeout(SOON + Duration::from_secs(1), child.wait()).await.expect("it ends").unwrap();
    assert_eq!(ended.code(), Some(0));
}

#[test]
fn a_wrong_setting_is_named_with_what_would_be_right() {
    let cases = [
        (["--rate", "0"], "calls a second from 0.01"),
        (["--deadline", "0s"], "more than zero"),
        (["--fallback", "dc2,,"], "nearest, none, or datacenters"),
    ];
    for (arguments, words) in cases {
        let output = Command::new(env!("CARGO_BIN_EXE_demo")).arg("client").args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2));
        assert!(said.contains(words), "{said}");
    }
}
