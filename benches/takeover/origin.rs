//! The program of the first design, a Python one with a lease file and HTTP, measured in the same way.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use futures_util::future::join_all;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tonic_failover::testkit::Port;

use crate::{
    line,
    scenes::{CLIENTS, STEADY, Taken, print_rate},
    world::Stalls,
};

/// How long anything is waited for.
const BOUND: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);

struct Instance {
    name: &'static str,
    port: Port,
    process: Child,
}

impl Drop for Instance {
    fn drop(&mut self) {
        // One that has ended already is as good.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Takeovers after SIGKILL and after Ctrl-C, and whether the counter went on from where it was; then
/// increments under the same load as ours.
pub(crate) async fn measure(file: &str, runs: usize) {
    let text = fs::read_to_string(file).expect("--origin names a file that can be read");
    // The program within a text: from its first import to the call of its main.
    let begin = text.find("import time").expect("the program begins with its imports");
    let last = "main(inst, port)";
    let end = text.rfind(last).expect("the program ends with its main") + last.len();
    let program = &text[begin..end];
    for (name, signal) in [("kill -9", Signal::KILL), ("Ctrl-C", Signal::INT)] {
        let (mut taken, mut lost) = (Vec::new(), 0);
        for _ in 0..runs {
            let folder = tempfile::tempdir().unwrap();
            let a = start(program, folder.path(), "A");
            let mut counted = first(&a).await;
            let b = start(program, folder.path(), "B");
            // For longer than its period: the strike comes at any moment of it.
            let until = Instant::now() + Duration::from_millis(1500 + 97 * (taken.len() as u64 % 11));
            while Instant::now() < until {
                counted = count(&a).await.unwrap_or(counted);
            }
            let stalls = Stalls::watch();
            let began = Instant::now();
            kill_process(Pid::from_child(&a.process), signal).unwrap();
            let next = first(&b).await;
            taken.push(Taken { after: began.elapsed(), stall: stalls.worst() });
            lost += (counted + 1).saturating_sub(next);
        }
        println!("{}; {lost} acknowledged increments lost", line(&format!("the origin: {name}"), &taken));
    }
    rate(program).await;
}

fn start(text: &str, folder: &Path, name: &'static str) -> Instance {
    let (program, port) = (folder.join("origin.py"), Port::free().expect("the system has a port"));
    fs::write(&program, text.replace("/tmp/", &format!("{}/", folder.display()))).unwrap();
    let mut command = Command::new("python3");
    command.arg(&program).arg(name).arg(port.number().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Instance { name, port, process: command.spawn().expect("python3 runs") }
}

/// As many clients as ours has, calling without pause for as long, with a standby beside: how many
/// increments are acknowledged, how long each takes, and what is wrong with what they were told.
async fn rate(program: &str) {
    let folder = tempfile::tempdir().unwrap();
    let a = start(program, folder.path(), "A");
    first(&a).await;
    let _standby = start(program, folder.path(), "B");
    let began = Instant::now();
    let clients = (0..CLIENTS).map(|_| async {
        let (mut answers, mut refused) = (Vec::new(), 0_usize);
        while began.elapsed() < STEADY {
            let sent = Instant::now();
            match timeout(BOUND, count(&a)).await.ok().flatten() {
                Some(value) => answers.push((value, sent.elapsed())),
                None => {
                    refused += 1;
                    sleep(LOOK).await;
                }
            }
        }
        (answers, refused)
    });
    let (mut values, mut took, mut refused) = (BTreeSet::new(), Vec::new(), 0);
    for (answers, not) in join_all(clients).await {
        refused += not;
        for (value, time) in answers {
            values.insert(value);
            took.push(time);
        }
    }
    let twice = took.len() - values.len();
    print_rate("the origin", &mut took, began.elapsed());
    println!("the origin: {refused} calls without a count, {twice} counts given more than once");
}

/// The first count that it gives.
async fn first(instance: &Instance) -> u64 {
    let wait = async {
        loop {
            if let Some(value) = count(instance).await {
                return value;
            }
            sleep(LOOK).await;
        }
    };
    timeout(BOUND, wait).await.unwrap_or_else(|_| panic!("{} never answers", instance.name))
}

async fn count(instance: &Instance) -> Option<u64> {
    let mut connection = TcpStream::connect(instance.port.addr()).await.ok()?;
    connection.write_all(b"GET / HTTP/1.0\r\n\r\n").await.ok()?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.ok()?;
    let body = answer.strip_prefix("HTTP/1.0 200")?.split("\r\n\r\n").nth(1)?.to_owned();
    serde_json::from_str::<serde_json::Value>(&body).ok()?["counter"].as_u64()
}
