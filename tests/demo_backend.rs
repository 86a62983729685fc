//! `demo backend` as a process: what it answers, what it writes down, how it is
//! found, and how it ends.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::{
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout},
    time::timeout,
};
use tonic::transport::Channel;
use tonic_failover::{
    demo::pb::{AddRequest, GetRequest, IncrementRequest, WatchRequest, counter_client::CounterClient},
    testkit::ConsulProcess,
};

/// Generous: a busy machine must not fail a test.
const SOON: Duration = Duration::from_secs(20);

/// A `demo backend` of ours, killed with the test.
struct Backend {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    address: String,
}

impl Backend {
    /// Starts one; `consul` may be an address where nobody answers.
    async fn start(consul: &str, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
        command.args(["backend", "--name", "counter-a"]).args(more);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("CONSUL_") || name.starts_with("DEMO_") {
                command.env_remove(name);
            }
        }
        command.env("CONSUL_HTTP_ADDR", consul).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut backend = Self { child, lines, address: String::new() };
        let line = backend.line_with("listens on ").await;
        backend.address = line.split("listens on ").nth(1).unwrap().to_owned();
        backend
    }

    async fn line_with(&mut self, words: &str) -> String {
        let find = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("the backend goes on writing");
                if line.contains(words) {
                    return line;
                }
            }
        };
        timeout(SOON, find).await.unwrap_or_else(|_| panic!("no line with {words:?}"))
    }

    async fn client(&self) -> CounterClient<Channel> {
        CounterClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    /// The exit code; `None` where a signal ended it.
    async fn ended(&mut self) -> Option<i32> {
        timeout(SOON, self.child.wait()).await.expect("the process ends").unwrap().code()
    }
}

/// Nobody listens on port 1.
const NO_CONSUL: &str = "http://127.0.0.1:1";

async fn consul() -> Option<ConsulProcess> {
    let Some(bin) = ConsulProcess::find() else {
        eprintln!("SKIPPED: no consul found; install it or set CONSUL_BIN");
        return None;
    };
    Some(ConsulProcess::builder(bin).start().await.unwrap())
}

async fn passing(consul: &ConsulProcess) -> Vec<String> {
    let answer = consul.registry().get("/v1/health/service/counter?passing").await.unwrap().json();
    let ids = answer.as_array().unwrap().iter();
    ids.map(|it| format!("{}:{}", it["Service"]["Address"].as_str().unwrap(), it["Service"]["Port"]))
        .collect()
}

async fn until<F: Future<Output = bool>>(what: &str, check: impl Fn() -> F) {
    let wait = async {
        while !check().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, wait).await.unwrap_or_else(|_| panic!("never came: {what}"));
}

fn read(journal: &Path) -> String {
    std::fs::read_to_string(journal).unwrap()
}

#[tokio::test]
async fn it_serves_without_consul_and_counts_a_request_key_once() {
    let backend = Backend::start(NO_CONSUL, &[]).await;
    let mut client = backend.client().await;
    let reply = client.increment(IncrementRequest { by: 2, request_id: String::new() }).await.unwrap();
    assert_eq!((reply.get_ref().value, reply.get_ref().instance.as_str()), (2, "counter-a"));
    for _ in 0..2 {
        let add = AddRequest { request_key: "k".into(), by: 3 };
        assert_eq!(client.add(add).await.unwrap().get_ref().value, 5);
    }
    assert_eq!(client.get(GetRequest::default()).await.unwrap().get_ref().value, 5);
    let error = client.add(AddRequest::default()).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::InvalidArgument);
}

#[tokio::test]
async fn a_watch_gets_the_value_at_once_and_after_each_change() {
    let backend = Backend::start(NO_CONSUL, &[]).await;
    let mut client = backend.client().await;
    let mut watch = client.watch(WatchRequest::default()).await.unwrap().into_inner();
    for value in 0..3 {
        let seen = timeout(SOON, watch.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(seen.value, value);
        client.increment(IncrementRequest { by: 1, request_id: String::new() }).await.unwrap();
    }
}

#[tokio::test]
async fn the_journal_of_a_killed_process_tells_what_it_had_in_hand() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("journal");
    let mut backend =
        Backend::start(NO_CONSUL, &["--work", "300ms", "--journal", journal.to_str().unwrap()]).await;
    let mut client = backend.client().await;
    let request = |id: &str| IncrementRequest { by: 1, request_id: id.into() };
    client.increment(request("first")).await.unwrap();
    until("the first answer", async || read(&journal).contains("answered Increment first\n")).await;
    let second = tokio::spawn(async move { client.increment(request("second")).await });
    until("the second request", async || read(&journal).contains("received Increment second\n")).await;
    backend.signal(Signal::KILL);
    assert_eq!(backend.ended().await, None);
    second.await.unwrap().unwrap_err();
    let lines = "received Increment first\nanswered Increment first\nreceived Increment second\n";
    assert_eq!(read(&journal), lines);
}

#[tokio::test]
async fn sigterm_ends_an_open_watch_and_finishes_calls_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("journal");
    let mut backend =
        Backend::start(NO_CONSUL, &["--work", "500ms", "--journal", journal.to_str().unwrap()]).await;
    let mut client = backend.client().await;
    let mut watch = client.watch(WatchRequest::default()).await.unwrap().into_inner();
    assert_eq!(timeout(SOON, watch.message()).await.unwrap().unwrap().unwrap().value, 0);
    let call = tokio::spawn(async move { client.get(GetRequest { request_id: "late".into() }).await });
    until("the request", async || read(&journal).contains("received Get late")).await;

    backend.signal(Signal::TERM);
    assert_eq!(call.await.unwrap().unwrap().get_ref().instance, "counter-a");
    let end = timeout(SOON, watch.message()).await.unwrap().unwrap_err();
    assert_eq!(end.code(), tonic::Code::Unavailable);
    backend.line_with("every call in flight was answered").await;
    assert_eq!(backend.ended().await, Some(0));
    assert!(read(&journal).contains("answered Get late"));
}

#[tokio::test]
async fn it_is_found_in_consul_by_each_kind_of_check_and_gone_after_ctrl_c() {
    let Some(consul) = consul().await else { return };
    for check in ["ttl", "tcp", "grpc"] {
        let mut backend = Backend::start(&consul.url(), &["--check", check]).await;
        until(check, async || passing(&consul).await == [backend.address.clone()]).await;
        let mut client = backend.client().await;
        let reply = client.get(GetRequest::default()).await.unwrap().into_inner();
        assert_eq!(reply.datacenter, "dc1");
        backend.signal(Signal::INT);
        assert_eq!(backend.ended().await, Some(0));
        until("it is gone", async || passing(&consul).await.is_empty()).await;
    }
}

#[tokio::test]
async fn it_registers_when_consul_comes_and_again_when_consul_has_forgotten() {
    let Some(mut consul) = consul().await else { return };
    consul.kill().await.unwrap();
    let mut backend = Backend::start(&consul.url(), &[]).await;
    backend.line_with("not in Consul, trying on").await;
    for _ in 0..2 {
        // In memory only: each start is an empty catalog.
        consul.restart().await.unwrap();
        until("the instance", async || passing(&consul).await == [backend.address.clone()]).await;
        consul.kill().await.unwrap();
    }
    backend.signal(Signal::TERM);
    assert_eq!(backend.ended().await, Some(0), "it ends without Consul, too");
}

#[tokio::test]
async fn a_paused_one_turns_critical_and_is_found_again_when_it_wakes() {
    let Some(consul) = consul().await else { return };
    let backend = Backend::start(&consul.url(), &[]).await;
    until("the instance", async || passing(&consul).await.len() == 1).await;
    backend.signal(Signal::STOP);
    until("it is critical", async || passing(&consul).await.is_empty()).await;
    backend.signal(Signal::CONT);
    until("it is back", async || passing(&consul).await.len() == 1).await;
}

#[tokio::test]
async fn a_port_that_is_taken_is_named_in_the_error() {
    let backend = Backend::start(NO_CONSUL, &[]).await;
    let second = Command::new(env!("CARGO_BIN_EXE_demo"))
        .args(["backend", "--listen", &backend.address])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1));
    assert!(said.contains(&backend.address) && said.contains("--listen"), "{said}");
}
