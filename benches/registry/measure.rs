//! One stage: so many services in this process, and what they cost.

use std::{collections::HashSet, env, fs, time::Duration};

use futures_util::future::join_all;
use serde_json::json;
use tokio::time::{Instant, sleep};
use tonic_failover::{
    client::{ConsulService, GrpcClient, ServiceOptions},
    consul::ConsulConfig,
    testkit::Registry,
};

use super::{CONSUL, INSTANCES, Outcome, id, put, record};

const IDLE: Duration = Duration::from_secs(5);
/// How many changes are timed in each stage, unless that takes too long.
const ROUNDS: usize = 100;
const ROUNDS_WITHIN: Duration = Duration::from_secs(25);
/// The services that are changed in turn, so that churn need not be waited for.
const CHANGED: usize = 4;
/// The time between two changes of one service: longer than two of the steps in which
/// churn is followed, and than it takes with a thousand services until one is given a
/// seat whose read has found a change.
const BETWEEN: Duration = Duration::from_millis(1500);
/// How many services without a long poll are changed.
const UNWATCHED: usize = 16;

/// The bars: how much later than a bare blocking query has the news a service may be
/// bound elsewhere, as the median; and how many connections there may be: 64 long
/// polls, 16 reads, 32 kept for later.
const LATER: f64 = 10.0;
const CONNECTIONS: usize = 64 + 16 + 32;

pub(super) async fn stage(url: &str, services: usize) -> Outcome {
    let port = url.rsplit(':').next().ok_or("no port")?.parse()?;
    let registry = Registry::new(url.replace("127.0.0.1", "127.0.0.2"));
    let before = memory();
    let builder = ConsulService::builder(ConsulConfig::new(url)?);
    let options = |service| ServiceOptions::new(format!("s-{service}"));
    let consul = (0..services).fold(builder, |all, service| all.service(options(service))).build()?;
    let begun = Instant::now();
    let clients: Vec<_> =
        (0..services).map(|service| consul.grpc_client(&format!("s-{service}"))).collect::<Result<_, _>>()?;
    let mut connections = Connections { port, most: 0 };
    while !clients.iter().all(|it| it.status().is_ready()) {
        connections.count();
        sleep(Duration::from_millis(10)).await;
    }
    let ready = begun.elapsed();
    // The reads that follow upon the first ones, and the spare connections.
    for _ in 0..200 {
        connections.count();
        sleep(Duration::from_millis(10)).await;
    }
    let memory = memory().saturating_sub(before) / services;
    let its = env::var(CONSUL)?;
    let cpu = [cpu("self"), cpu(&its)];
    sleep(IDLE).await;
    let cpu =
        [self::cpu("self") - cpu[0], self::cpu(&its) - cpu[1]].map(|it| 100.0 * it / IDLE.as_secs_f64());
    let idle = connections.count();
    let polls = long_polls(&registry).await?;
    let times = changes(&registry, &clients[..services.min(CHANGED)], &mut connections).await?;
    let [bare, bound, difference] = [0, 1, 2].map(|which| Spread::of(times.iter().map(|it| it[which])));
    let without = unwatched(&registry, &clients).await?;
    println!(
        "| {services} | {:.2} | {} / {idle} | {polls} | {memory} | {:.1} ({:.1}) | {} | {bare} | {bound} | {difference} | \
         {without} |",
        ready.as_secs_f64(),
        connections.most,
        cpu[0],
        cpu[1],
        times.len(),
    );
    let later = bound.median - bare.median;
    println!(
        "bar: {services} services: the median binding is {later:.2} ms later than the median bare query, at most \
         {LATER} ms: {}",
        verdict(later <= LATER)
    );
    println!(
        "bar: {services} services: {} connections to Consul, at most {CONNECTIONS}: {}",
        connections.most,
        verdict(connections.most <= CONNECTIONS)
    );
    Ok(())
}

fn verdict(held: bool) -> &'static str {
    if held { "held" } else { "missed" }
}

struct Spread {
    median: f64,
    p99: f64,
    most: f64,
}

impl Spread {
    fn of(times: impl Iterator<Item = f64>) -> Self {
        let mut all: Vec<f64> = times.collect();
        all.sort_by(f64::total_cmp);
        Self {
            median: all[all.len() / 2],
            p99: all[(all.len() * 99).div_ceil(100) - 1],
            most: all[all.len() - 1],
        }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} / {:.1} / {:.1}", self.median, self.p99, self.most)
    }
}

/// Changes each of `clients` again and again, each on its own and one as often as the other.
async fn changes(
    registry: &Registry,
    clients: &[GrpcClient],
    connections: &mut Connections,
) -> Result<Vec<[f64; 3]>, Box<dyn std::error::Error>> {
    // The first change may find a service without a long poll; then it has one, and keeps it.
    let of_one = clients.iter().enumerate().map(async |(service, client)| {
        change(registry, client, service).await?;
        let (mut times, begun) = (Vec::new(), Instant::now());
        while times.len() < ROUNDS / clients.len() && begun.elapsed() < ROUNDS_WITHIN {
            times.push(change(registry, client, service).await?);
        }
        Ok::<_, Box<dyn std::error::Error>>(times)
    });
    let counts = async {
        loop {
            connections.count();
            sleep(Duration::from_millis(100)).await;
        }
    };
    let all: Vec<Result<_, _>> = tokio::select! {
        all = join_all(of_one) => all,
        () = counts => unreachable!("it has no end"),
    };
    Ok(all.into_iter().collect::<Result<Vec<_>, _>>()?.concat())
}

/// Takes the bound instance of a service out, and brings it back: how long until a bare
/// blocking query has the news, until the service is bound elsewhere, and how much later
/// that is, in ms.
async fn change(
    registry: &Registry,
    client: &GrpcClient,
    service: usize,
) -> Result<[f64; 3], Box<dyn std::error::Error>> {
    let mut bindings = client.subscribe();
    until(client, |status| status.datacenters[0].known == INSTANCES && status.datacenters[0].ready > 1).await;
    sleep(BETWEEN).await;
    let bound = bindings.borrow_and_update().instance().ok_or("nothing is bound")?.clone();
    let instance: usize = bound.name.rsplit('-').next().ok_or("no name")?.parse()?;
    let path = format!("/v1/health/service/s-{service}?passing&stale");
    let index = registry.get(&path).await?.headers["x-consul-index"].to_str()?.to_owned();
    let waits = tokio::spawn({
        let (registry, path) = (registry.clone(), format!("{path}&index={index}&wait=60s"));
        async move {
            let answer = registry.get_within(&path, Duration::from_secs(70)).await;
            (Instant::now(), answer.is_ok_and(|it| it.status.is_success()))
        }
    });
    // It is on its way, and then it waits.
    sleep(Duration::from_millis(30)).await;
    let out = json!({"Node": format!("n-{instance}"), "ServiceID": id(service, instance)}).to_string();
    let begun = Instant::now();
    let binding = async {
        bindings.wait_for(|it| it.instance().is_some_and(|it| it.name != bound.name)).await.map(drop)?;
        Ok::<_, tokio::sync::watch::error::RecvError>(Instant::now())
    };
    let (done, bound_at, woken) = tokio::join!(registry.put("/v1/catalog/deregister", out), binding, waits);
    done?;
    let (woken_at, good) = woken?;
    if !good {
        return Err("the bare query was not answered".into());
    }
    let port = bound.id.authority().rsplit(':').next().ok_or("no port")?.parse()?;
    let back = json!({"Node": format!("n-{instance}"), "Address": "127.0.0.1", "SkipNodeUpdate": true,
        "Service": record(service, instance, port)});
    put(registry, "/v1/catalog/register", &back).await?;
    let [woken, rebound] = [woken_at, bound_at?].map(|it| (it - begun).as_secs_f64() * 1e3);
    Ok([woken, rebound, rebound - woken])
}

/// Changes the last services, which had no change: how long until that is known.
async fn unwatched(
    registry: &Registry,
    clients: &[GrpcClient],
) -> Result<String, Box<dyn std::error::Error>> {
    if clients.len() <= 64 {
        return Ok("-".to_owned());
    }
    let changed = (clients.len() - UNWATCHED..clients.len()).map(|service| async move {
        let out = json!({"Node": "n-0", "ServiceID": id(service, 0)});
        put(registry, "/v1/catalog/deregister", &out).await.ok()?;
        let begun = Instant::now();
        until(&clients[service], |status| status.datacenters[0].known == INSTANCES - 1).await;
        Some(begun.elapsed().as_secs_f64())
    });
    let mut times = join_all(changed).await.into_iter().collect::<Option<Vec<_>>>().ok_or("not changed")?;
    times.sort_by(f64::total_cmp);
    Ok(format!("{:.1} / {:.1}", times[times.len() / 2], times[times.len() - 1]))
}

async fn until(client: &GrpcClient, met: impl Fn(&tonic_failover::client::ServiceStatus) -> bool) {
    while !met(&client.status()) {
        sleep(Duration::from_millis(2)).await;
    }
}

// === what the system says of this process ===

/// This process's connections to the agent.
struct Connections {
    port: u16,
    most: usize,
}

impl Connections {
    /// Counts those that are established. The table is that of the whole host and takes
    /// long to read where that is busy, while sockets come and go: so each counts once,
    /// by its inode, and only if it is still open afterwards.
    fn count(&mut self) -> usize {
        let table = fs::read_to_string("/proc/self/net/tcp").unwrap_or_default();
        let fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        // Remote address, which is 127.0.0.1, and state; 01 is ESTABLISHED (proc(5)).
        let address = format!("0100007F:{:04X}", self.port);
        let all: HashSet<String> = fields
            .filter(|it| it.len() > 9 && it[2] == address && it[3] == "01")
            .map(|it| format!("socket:[{}]", it[9]))
            .collect();
        let own = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let own = own.filter_map(|it| fs::read_link(it.path()).ok());
        let count = own.filter(|it| it.to_str().is_some_and(|it| all.contains(it))).count();
        self.most = self.most.max(count);
        count
    }
}

/// The questions about instances that wait for news at the agent, by its own word: its
/// goroutines that wait within one.
async fn long_polls(registry: &Registry) -> Result<usize, Box<dyn std::error::Error>> {
    let answer = registry.get("/debug/pprof/goroutine?debug=1").await?;
    if !answer.status.is_success() {
        return Err(answer.text().into());
    }
    // Blocks of a line that begins with the number of goroutines and an @, and their stack.
    let text = answer.text();
    let asked = text
        .split("\n\n")
        .filter(|it| ["HealthServiceNodes", "WatchSet"].iter().all(|part| it.contains(part)));
    let numbers = asked.flat_map(str::lines).filter_map(|it| it.split_once(" @ "));
    Ok(numbers.filter_map(|(number, _)| number.parse::<usize>().ok()).sum())
}

/// The memory in use, in KiB.
fn memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches("kB").trim().parse().unwrap_or_default()
}

/// CPU time used up to now, in seconds.
fn cpu(process: &str) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // After the name, which is in parentheses: user and system time are fields 14 and 15, in
    // units of 10 ms on every Linux (proc(5)).
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|it| it.parse::<f64>().ok()).unwrap_or_default();
    (ticks(11) + ticks(12)) / 100.0
}
