//! The program of the first design, a Python one with a lease file and HTTP, measured in the same way.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use crate::{
    line,
    scenes::Taken,
    world::{Stalls, free_port},
};

/// How long anything is waited for.
const BOUND: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);

struct Instance {
    name: &'static str,
    port: u16,
    process: Child,
}

impl Drop for Instance {
    fn drop(&mut self) {
        // One that has ended already is as good.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Takeovers after SIGKILL and after Ctrl-C, and whether the counter went on from where it was.
pub(crate) async fn measure(file: &str, runs: usize) {
    let text = fs::read_to_string(file).expect("--origin names a file that can be read");
    // The program within a text: from its first import to the call of its main.
    let begin = text.find("import time").expect("the program begins with its imports");
    let last = "main(inst, port)";
    let end = text.rfind(last).expect("the program ends with its main") + last.len();
    for (name, signal) in [("kill -9", Signal::KILL), ("Ctrl-C", Signal::INT)] {
        let (mut taken, mut lost) = (Vec::new(), 0);
        for _ in 0..runs {
            let folder = tempfile::tempdir().unwrap();
            let own = format!("{}/", folder.path().display());
            let program = folder.path().join("origin.py");
            fs::write(&program, text[begin..end].replace("/tmp/", &own)).unwrap();
            let start = |name| {
                let port = free_port();
                let mut command = Command::new("python3");
                command.arg(&program).arg(name).arg(port.to_string());
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                Instance { name, port, process: command.spawn().expect("python3 runs") }
            };
            let a = start("A");
            let mut counted = first(&a).await;
            let b = start("B");
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
    let mut connection = TcpStream::connect(("127.0.0.1", instance.port)).await.ok()?;
    connection.write_all(b"GET / HTTP/1.0\r\n\r\n").await.ok()?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.ok()?;
    let body = answer.strip_prefix("HTTP/1.0 200")?.split("\r\n\r\n").nth(1)?.to_owned();
    serde_json::from_str::<serde_json::Value>(&body).ok()?["counter"].as_u64()
}
