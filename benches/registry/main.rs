//! What many services cost at a real Consul, and how soon a change is known.
//!
//! `cargo bench --bench registry`; a Consul is taken from `CONSUL_BIN` or the PATH.
//! Each number of services has a process of its own, so that memory and CPU are
//! its alone. It prints a line of a table for each, then whether the bars are held,
//! and ends by itself.

#![allow(clippy::unwrap_used, reason = "a measurement may fail")]

mod measure;

use std::{env, fs, process::Stdio, time::Duration};

use serde_json::json;
use tokio::{
    net::TcpListener,
    process::Command,
    time::{Instant, timeout},
};
use tonic::transport::server::TcpIncoming;
use tonic_failover::testkit::{ConsulProcess, Registry};

const STAGES: [usize; 4] = [1, 64, 200, 1000];
const INSTANCES: usize = 10;
/// A stage as this process is to run it: Consul's address and the number of services.
const STAGE: &str = "REGISTRY_BENCH_STAGE";
/// Its Consul's process.
const CONSUL: &str = "REGISTRY_BENCH_CONSUL";
/// Told in docs/registry.md. A third of it is enough on a machine with nothing else to do.
const LIMIT: Duration = Duration::from_secs(290);

type Outcome = Result<(), Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Outcome {
    if let Ok(stage) = env::var(STAGE) {
        let (url, services) = stage.split_once(' ').ok_or("no stage")?;
        return measure::stage(url, services.parse()?).await;
    }
    let Some(bin) = ConsulProcess::find() else {
        println!("SKIPPED: no consul found; install it or set CONSUL_BIN");
        return Ok(());
    };
    let Ok(outcome) = timeout(LIMIT, all(bin)).await else {
        let load = load();
        return Err(format!(
            "not done within {} s (load {load}): the machine is too busy; what is printed above was measured",
            LIMIT.as_secs()
        )
        .into());
    };
    outcome
}

/// Starts Consul and the backends, and each stage in turn.
async fn all(bin: std::path::PathBuf) -> Outcome {
    let before = load();
    // The stage's own questions go to the second address, so as not to be counted; and
    // the agent is to tell what it is doing.
    let consul = ConsulProcess::builder(bin)
        .hcl("enable_debug = true")
        .hcl("addresses { http = \"127.0.0.1 127.0.0.2\" }")
        .start()
        .await?;
    let mut ports = Vec::new();
    for _ in 0..INSTANCES {
        ports.push(backend().await?);
    }
    let begun = Instant::now();
    populate(consul.registry(), &ports).await?;
    println!(
        "{} services x {INSTANCES} instances registered in {:.1} s; {} profile; load {before} on {} cores",
        STAGES[3],
        begun.elapsed().as_secs_f64(),
        if cfg!(debug_assertions) { "dev" } else { "optimised" },
        std::thread::available_parallelism()?,
    );
    println!(
        "| services | all ready, s | connections to Consul, most / idle | long polls | KiB a service | CPU idle, % of a \
         core (Consul's) | changes | bare blocking query, median / p99 / most, ms | new binding | difference | \
         change without a long poll, median / most, s |\n|---|---|---|---|---|---|---|---|---|---|---|"
    );
    // Numbers on the command line choose among the stages.
    let chosen: Vec<usize> = env::args().filter_map(|it| it.parse().ok()).collect();
    for services in STAGES.into_iter().filter(|it| chosen.is_empty() || chosen.contains(it)) {
        // Consul goes on with the questions of a process that has ended until something
        // changes; every service has an instance on this node.
        let node =
            json!({"Node": "n-0", "Address": "127.0.0.1", "NodeMeta": {"stage": services.to_string()}});
        put(consul.registry(), "/v1/catalog/register", &node).await?;
        let pid = consul.pid().unwrap_or_default();
        let mut stage = Command::new(env::current_exe()?);
        stage.env(STAGE, format!("{} {services}", consul.url())).env(CONSUL, pid.to_string());
        let status = stage.stdin(Stdio::null()).kill_on_drop(true).spawn()?.wait().await?;
        if !status.success() {
            return Err(format!("the stage of {services} services has failed").into());
        }
    }
    println!("done in {:.0} s; load {}", begun.elapsed().as_secs_f64(), load());
    Ok(())
}

/// One instance that answers health checks, at the port returned.
async fn backend() -> Result<u16, std::io::Error> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let (_, health) = tonic_health::server::health_reporter();
    let server = tonic::transport::Server::builder().add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    Ok(port)
}

fn id(service: usize, instance: usize) -> String {
    format!("s-{service}-{instance}")
}

fn record(service: usize, instance: usize, port: u16) -> serde_json::Value {
    json!({"ID": id(service, instance), "Service": format!("s-{service}"), "Address": "127.0.0.1", "Port": port})
}

async fn put(registry: &Registry, path: &str, body: &serde_json::Value) -> Outcome {
    let answer = registry.put(path, body.to_string()).await?;
    if answer.status.is_success() { Ok(()) } else { Err(answer.text().into()) }
}

/// Puts everything into the catalog, on nodes without an agent.
async fn populate(registry: &Registry, ports: &[u16]) -> Outcome {
    for instance in 0..INSTANCES {
        let node = json!({"Node": format!("n-{instance}"), "Address": "127.0.0.1"});
        put(registry, "/v1/catalog/register", &node).await?;
    }
    let mut all = Vec::new();
    for service in 0..STAGES[3] {
        for (instance, port) in ports.iter().enumerate() {
            let node = format!("n-{instance}");
            let service = record(service, instance, *port);
            all.push(json!({"Service": {"Verb": "set", "Node": node, "Service": service}}));
        }
    }
    // A transaction takes 64 operations.
    for some in all.chunks(64) {
        put(registry, "/v1/txn", &some.into()).await?;
    }
    Ok(())
}

/// The average number of processes that ran or waited to, in the last minute.
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}
