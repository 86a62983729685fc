//! How long it takes until another instance is primary, by what became of the first; and what an
//! acknowledged increment costs meanwhile.
//!
//! `cargo bench --bench takeover`, `-- --runs 5` for a quick look, `--only files` for the part without
//! Consul. A takeover is timed from the strike to the end of the first call that the other instance answers to a client
//! that calls one after another and waits for each. Beside it stands how late a task of this process was at the worst in
//! the meantime: what the machine did to everybody.
//!
//! `--origin FILE` measures the program of the first design beside it, its takeovers and the same load of increments: FILE holds it, alone or within a text.

#![allow(clippy::unwrap_used, reason = "a measurement may fail")]

#[path = "../../tests/common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../tests/primary_standby/history.rs"]
mod history;
#[path = "../common/mod.rs"]
mod measuring;
mod origin;
mod scenes;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../tests/primary_standby/workload.rs"]
mod workload;
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../../tests/primary_standby/world.rs"]
mod world;

use std::{env, time::Duration};

use measuring::{option, report};
use scenes::{Strike, Taken};
use tonic_failover::testkit::{ConsulCluster, ConsulProcess, Ports};
use world::{Kind, TAKEOVER, World};

/// What a primary that leaves in order is to cost at most, in the median.
const PLANNED: Duration = Duration::from_millis(100);

fn main() {
    let runs = option("--runs", 100);
    let chosen = |name: &str| env::args().skip_while(|arg| arg != name).nth(1);
    let only = chosen("--only");
    let wanted = |part: &str| only.as_deref().is_none_or(|only| only == part);
    report::preface();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        println!(
            "what happened | runs | takeover, ms: median (least..most) | worst stall of the machine, ms"
        );
        if wanted("files") {
            files(runs).await;
        }
        if wanted("consul") {
            consul(runs).await;
        }
        if wanted("leader") {
            for multiplier in [1, 5] {
                leader(multiplier, (runs / 20).max(1)).await;
            }
        }
        if let Some(file) = chosen("--origin") {
            origin::measure(&file, (runs / 4).max(1)).await;
        }
    });
    println!("load {} at the end", report::load());
}

async fn files(runs: usize) {
    let mut world = World::of(Kind::Files).await.expect("needs nothing");
    world.start_both().await;
    for (strike, share) in [(Strike::Kill, 1), (Strike::Terminate, 1), (Strike::Hang, 5)] {
        row("files", strike, &scenes::takeovers(&mut world, strike, (runs / share).max(1), None).await);
    }
    scenes::rate("files", &world).await;
}

/// Three servers, and each instance with a client agent of its own, as in production.
async fn consul(runs: usize) {
    let Some(bin) = common::consul_bin() else { return };
    let mut cluster = ConsulCluster::start(bin, 3, 2).await.expect("consul starts");
    let agents = [cluster.agents()[0].url(), cluster.agents()[1].url()];
    let mut world = World::at(agents, cluster.servers()[0].url());
    world.start_both().await;
    for (strike, share) in
        [(Strike::Kill, 1), (Strike::KillWithAgent, 5), (Strike::Terminate, 1), (Strike::Hang, 5)]
    {
        let runs = (runs / share).max(1);
        row("consul", strike, &scenes::takeovers(&mut world, strike, runs, Some(&mut cluster)).await);
    }
    scenes::rate("consul", &world).await;
}

/// The leader of three servers dies: nobody can renew until there is another.
async fn leader(multiplier: u32, runs: usize) {
    let Some(bin) = common::consul_bin() else { return };
    let folder = tempfile::tempdir().unwrap();
    let ports: Vec<_> = (0..3).map(|_| Ports::free().unwrap()).collect();
    let gossip: Vec<_> = ports.iter().map(|it| it.serf_lan).collect();
    let hcl = format!("performance {{ raft_multiplier = {multiplier} }} leave_on_terminate = false");
    let servers = ports.iter().enumerate().map(|(number, ports)| {
        let node = format!("s{number}");
        let server = ConsulProcess::builder(&bin).node(&node).hcl(&hcl).ports(*ports);
        server.server_of(3, folder.path().join(&node)).retry_join(gossip.clone()).start()
    });
    let mut servers = match futures_util::future::try_join_all(servers).await {
        Ok(servers) => servers,
        Err(error) => return println!("raft_multiplier {multiplier}: {error}"),
    };
    let found = scenes::leader_dies(&mut servers, runs).await;
    let name = format!("Consul's leader killed, raft_multiplier = {multiplier}: nobody counts for");
    println!("{}", line(&name, &found));
}

fn row(store: &str, strike: Strike, taken: &[Taken]) {
    println!("{}", line(&format!("{store}: {}", strike.name()), taken));
    let most = taken.iter().map(|it| it.after.saturating_sub(it.stall)).max().unwrap_or_default();
    report::bar(&format!("{store}: {}, without the stall, ms", strike.name()), ms(most), ms(TAKEOVER));
    if strike == Strike::Terminate {
        report::bar(&format!("{store}: SIGTERM, median, ms"), ms(median(taken)), ms(PLANNED));
    }
}

fn sorted(taken: &[Taken]) -> Vec<Duration> {
    let mut after: Vec<_> = taken.iter().map(|it| it.after).collect();
    after.sort();
    after
}

fn median(taken: &[Taken]) -> Duration {
    let after = sorted(taken);
    after.get(after.len() / 2).copied().unwrap_or_default()
}

fn line(name: &str, taken: &[Taken]) -> String {
    let after = sorted(taken);
    let stall = taken.iter().map(|it| it.stall).max().unwrap_or_default();
    let (Some(least), Some(most)) = (after.first(), after.last()) else { return format!("{name} | 0") };
    let mid = median(taken);
    format!(
        "{name} | {} | {:.0} ({:.0}..{:.0}) | {:.0}",
        after.len(),
        ms(mid),
        ms(*least),
        ms(*most),
        ms(stall)
    )
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
