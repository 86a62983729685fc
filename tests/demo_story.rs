//! `demo story` as a process: its verdict, and that nothing of it is left behind.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{process::Stdio, time::Duration};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::{sleep, timeout},
};

/// Three times what the story takes on a quiet machine.
const STORY: Duration = Duration::from_secs(60);
/// The same of the story of primary and standby.
const STANDBY: Duration = Duration::from_secs(100);

fn story(more: &[&str]) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
    command.arg("story").args(more).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    // It must not even look at this one.
    command.env("CONSUL_HTTP_ADDR", common::NOWHERE);
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

async fn ends_well(registry: &str) {
    let (mut child, mut lines) = story(&["--json", "--registry", registry]);
    let mut told = Vec::new();
    let play = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            told.push(serde_json::from_str::<serde_json::Value>(&line).unwrap());
        }
        child.wait().await.unwrap()
    };
    let ended = timeout(STORY, play).await.expect("the story ends");
    let verdict = told.last().expect("it says something");
    assert_eq!((&verdict["event"], &verdict["held"]), (&"verdict".into(), &true.into()), "{told:#?}");
    assert_eq!(ended.code(), Some(0));
    let rebinds: Vec<_> = told.iter().filter(|it| it["event"] == "rebound").collect();
    for to in ["counter-b@dc1", "counter-c@dc2", "counter-a@dc1"] {
        assert!(rebinds.iter().any(|it| it["to"] == to), "{rebinds:#?}");
    }
    let gentle = verdict["acts"].as_array().unwrap().iter().find(|act| act["act"] == "5  stop a").unwrap();
    assert_eq!(gentle["failed"], 0);
}

#[tokio::test]
async fn on_the_embedded_agents_only_what_had_to_fail_fails() {
    ends_well("embedded").await;
}

#[tokio::test]
async fn on_a_real_consul_only_what_had_to_fail_fails() {
    if common::consul_bin().is_some() {
        ends_well("consul").await;
    }
}

/// `demo story --primary-standby`: its verdict, and who took over how often.
async fn loses_nothing(more: &[&str], takeovers: usize) {
    let arguments = [&["--json", "--primary-standby"], more].concat();
    let (mut child, mut lines) = story(&arguments);
    let mut told = Vec::new();
    let play = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            told.push(serde_json::from_str::<serde_json::Value>(&line).unwrap());
        }
        child.wait().await.unwrap()
    };
    let ended = timeout(STANDBY, play).await.expect("the story ends");
    let verdict = told.last().expect("it says something");
    assert_eq!((&verdict["event"], &verdict["held"]), (&"verdict".into(), &true.into()), "{told:#?}");
    assert_eq!(verdict["acknowledged"], verdict["counted"]);
    assert_eq!(ended.code(), Some(0));
    let primaries = told.iter().filter(|it| it["event"] == "primary").count();
    assert_eq!(primaries, takeovers, "{told:#?}");
}

#[tokio::test]
async fn on_files_all_that_was_acknowledged_is_counted() {
    loses_nothing(&["--store", "file"], 6).await;
}

#[tokio::test]
async fn on_the_embedded_agent_all_that_was_acknowledged_is_counted() {
    loses_nothing(&["--registry", "embedded"], 7).await;
}

#[tokio::test]
async fn on_a_real_consul_all_that_was_acknowledged_is_counted() {
    if common::consul_bin().is_some() {
        loses_nothing(&["--registry", "consul"], 8).await;
    }
}

/// The process ids of the servers, once all three are started.
async fn servers(lines: &mut Lines<BufReader<ChildStdout>>) -> Vec<Pid> {
    let mut pids = Vec::new();
    while pids.len() < 3 {
        let line = timeout(STORY, lines.next_line()).await.unwrap().unwrap().expect("it goes on");
        if let Some((_, pid)) = line.split_once("is started (process ") {
            pids.push(Pid::from_raw(pid.trim_end_matches(')').parse().unwrap()).unwrap());
        }
    }
    pids
}

async fn all_gone(pids: &[Pid]) {
    let gone = async {
        while pids.iter().any(|pid| test_kill_process(*pid).is_ok()) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(common::SOON, gone).await.expect("the servers end with the story");
}

#[tokio::test]
async fn ctrl_c_ends_the_story_and_its_servers() {
    let (mut child, mut lines) = story(&["--registry", "embedded"]);
    let pids = servers(&mut lines).await;
    let pid = i32::try_from(child.id().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::INT).unwrap();
    let ended = timeout(common::SOON, child.wait()).await.expect("the story ends").unwrap();
    assert_eq!(ended.code(), Some(130));
    all_gone(&pids).await;
}

#[tokio::test]
async fn the_servers_end_with_a_story_that_was_killed() {
    let (mut child, mut lines) = story(&["--registry", "embedded"]);
    let pids = servers(&mut lines).await;
    child.kill().await.unwrap();
    all_gone(&pids).await;
}
