//! What a connected instance takes of the client's memory.

use std::{
    env, fs,
    process::{Command, Stdio},
};

use tonic::transport::Endpoint;
use tonic_failover::{
    Instance,
    client::{Policy, ServiceOptions, Services, registry::StaticList},
    demo::pb::counter_client::CounterClient,
};

use super::{
    Outcome,
    common::{
        ROLE,
        backend::{Backend, Settings},
        report::bar,
        stats::Median,
    },
    stack::{Caller, Method, Ours},
};

/// How many connections a process makes.
const CONNECTIONS: usize = 500;
/// What each kind of process has so many of.
const KINDS: [(&str, &str); 3] = [
    ("raw", "a raw channel"),
    ("instance", "an instance of one service, round robin"),
    ("service", "a service with one instance, its tasks included"),
];

/// Several processes of each kind, taking turns.
pub(super) fn measure(processes: usize) -> Outcome {
    println!("\n# resident memory, KiB, of {CONNECTIONS} connections that have each answered a call");
    let server = Backend::start(&Settings { listen: ([0, 0, 0, 0], 0).into(), ..Settings::new(1) })?;
    let mut all = KINDS.map(|_| Vec::new());
    for _ in 0..processes {
        for ((kind, _), found) in KINDS.iter().zip(&mut all) {
            let mut process = Command::new(env::current_exe()?);
            let output = process
                .env(ROLE, format!("memory {kind} {}", server.port))
                .stdin(Stdio::null())
                .stderr(Stdio::inherit())
                .output()?;
            found.push(String::from_utf8(output.stdout)?.trim().parse::<f64>()?);
        }
    }
    let each = all.map(Median::of);
    for ((_, name), each) in KINDS.iter().zip(&each) {
        println!("{name} | {each:.1}");
    }
    bar("memory of an instance, against a raw channel", each[1].mid / each[0].mid, 1.10);
    Ok(())
}

/// The host with this number: all of 127.0.0.0/8 is this one.
fn host(number: usize) -> String {
    format!("127.0.{}.{}", 1 + number / 250, 1 + number % 250)
}

/// One such process: prints how much the second and later connections have taken.
pub(super) fn act(role: &str) -> Outcome {
    let mut words = role.split(' ').skip(1);
    let kind = words.next().ok_or("no kind")?;
    let port: u16 = words.next().ok_or("no port")?.parse()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let taken = runtime.block_on(async {
        match kind {
            "raw" => raw(port).await,
            "instance" => instances(port).await,
            _ => services(port).await,
        }
    })?;
    println!("{}", taken as f64 / CONNECTIONS as f64);
    Ok(())
}

async fn raw(port: u16) -> Result<usize, Box<dyn std::error::Error>> {
    let (mut before, mut kept) = (0, Vec::new());
    for number in 0..=CONNECTIONS {
        let channel = Endpoint::from_shared(format!("http://{}:{port}", host(number)))?.connect().await?;
        CounterClient::new(channel.clone()).call(Method::Safe).await?;
        kept.push(channel);
        if number == 0 {
            before = memory();
        }
    }
    Ok(memory().saturating_sub(before))
}

fn at(number: usize, port: u16) -> Instance {
    Instance::new(format!("i-{number}"), &host(number), port, "here")
}

async fn instances(port: u16) -> Result<usize, Box<dyn std::error::Error>> {
    let ours = Ours::new([at(0, port)], Policy::RoundRobin);
    ours.until_ready(1).await;
    ours.caller().call(Method::Safe).await?;
    let before = memory();
    ours.list.set("counter", (0..=CONNECTIONS).map(|number| at(number, port)));
    ours.until_ready(CONNECTIONS + 1).await;
    let mut caller = ours.caller();
    for _ in 0..=CONNECTIONS {
        caller.call(Method::Safe).await?;
    }
    Ok(memory().saturating_sub(before))
}

async fn services(port: u16) -> Result<usize, Box<dyn std::error::Error>> {
    let (list, mut kept, mut before) = (StaticList::new(), Vec::new(), 0);
    for number in 0..=CONNECTIONS {
        list.set(&format!("s-{number}"), [at(number, port)]);
    }
    for number in 0..=CONNECTIONS {
        let name = format!("s-{number}");
        let services = Services::builder(list.clone()).service(ServiceOptions::new(&name)).build()?;
        let client = services.grpc_client(&name)?;
        CounterClient::new(client.channel()).call(Method::Safe).await?;
        kept.push(client);
        if number == 0 {
            before = memory();
        }
    }
    Ok(memory().saturating_sub(before))
}

/// The memory in use, in KiB.
fn memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches("kB").trim().parse().unwrap_or_default()
}
