//! The measurements.

use std::collections::BTreeMap;

use tokio::{runtime::Runtime, task::JoinSet};
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};
use tonic_failover::{client::Policy, demo::pb::counter_client::CounterClient};

use super::{
    Outcome,
    common::{
        backend::{Backend, Settings},
        report::bar,
    },
    pairs::{Paired, Side, compare},
    stack::{Caller, Method, Ours, instance},
};

/// How many calls make a slice.
const SLICE: usize = 400;
/// How many callers there are at once.
const CALLERS: [usize; 3] = [1, 16, 128];

/// The client's runtime.
#[derive(Clone, Copy)]
enum Flavour {
    CurrentThread,
    MultiThread,
}

impl Flavour {
    fn runtime(self) -> std::io::Result<Runtime> {
        match self {
            Self::CurrentThread => tokio::runtime::Builder::new_current_thread().enable_all().build(),
            Self::MultiThread => {
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::CurrentThread => "current-thread",
            Self::MultiThread => "multi-thread",
        }
    }
}

fn row(what: &str, paired: &Paired) {
    println!(
        "{what} | {:.0} -> {:.0} | {:+.0} | {} | {}",
        paired.ns.0, paired.ns.1, paired.difference, paired.cpu, paired.wall
    );
}

/// One instance: ours against a raw channel, and a raw channel against itself.
pub(super) fn cost(pairs: usize) -> Outcome {
    println!("\n# one instance, 16-byte unary calls, {pairs} pairs of slices of {SLICE} calls");
    println!("what | CPU of a call, ns | difference, ns [95 %] | CPU ratio [95 %] | wall ratio [95 %]");
    let server = Backend::start(&Settings::new(1))?;
    for flavour in [Flavour::CurrentThread, Flavour::MultiThread] {
        for callers in CALLERS {
            // One caller makes long slices; many on two threads vary more.
            let pairs = match (flavour, callers) {
                (_, 1) => pairs.div_ceil(2).max(200),
                (Flavour::MultiThread, _) => pairs * 2,
                _ => pairs,
            };
            flavour.runtime()?.block_on(cost_of(&server, flavour, callers, pairs))?;
        }
    }
    Ok(())
}

async fn cost_of(server: &Backend, flavour: Flavour, callers: usize, pairs: usize) -> Outcome {
    let raw = Endpoint::from_shared(server.address())?.connect().await?;
    let other = Endpoint::from_shared(server.address())?.connect().await?;
    let ours = Ours::new([instance(server.port)], Policy::PickFirst);
    ours.until_ready(1).await;
    let place = format!("{}, {callers} callers", flavour.name());
    let side = |channel: &Channel, method| Side::new(CounterClient::new(channel.clone()), callers, method);
    let floor = compare(&mut side(&raw, Method::Safe), &mut side(&other, Method::Safe), SLICE, pairs).await;
    row(&format!("{place}: raw, raw"), &floor);
    let published = ours.client.binding().channel().ok_or("nothing is bound")?;
    let bare =
        compare(&mut side(&raw, Method::Safe), &mut side(&published, Method::Safe), SLICE, pairs).await;
    row(&format!("{place}: raw, the published channel by itself"), &bare);
    for (method, name) in [(Method::Safe, "safe"), (Method::Unsafe, "unsafe")] {
        let mut our_side = Side::new(ours.caller(), callers, method);
        let paired = compare(&mut side(&raw, method), &mut our_side, SLICE, pairs).await;
        row(&format!("{place}: raw, ours ({name} method)"), &paired);
        bar(
            &format!("client CPU, {place}, {name} method, upper end"),
            paired.cpu.high,
            if callers == 1 { 1.08 } else { 1.05 },
        );
    }
    Ok(())
}

/// What each stage of a call costs by itself.
pub(super) fn stages() -> Outcome {
    println!("\n# stages of a call, ns, the least of several means");
    for (stage, ns) in Flavour::CurrentThread.runtime()?.block_on(tonic_failover::client::stages()) {
        println!("{stage} | {ns:.0}");
    }
    Ok(())
}

/// Calls of one kind alone, for a profiler: `-- --only profile-raw`, `profile-safe` or
/// `profile-unsafe`; `profile-list` and `profile-two` with two instances; `--callers 16`, `--slices 100`.
pub(super) fn profile(what: &str, callers: usize, slices: usize) -> Outcome {
    let servers = [Backend::start(&Settings::new(1))?, Backend::start(&Settings::new(2))?];
    Flavour::CurrentThread.runtime()?.block_on(async {
        let method = if what == "profile-unsafe" { Method::Unsafe } else { Method::Safe };
        match what {
            "profile-raw" => {
                let raw = Endpoint::from_shared(servers[0].address())?.connect().await?;
                slices_of(CounterClient::new(raw), callers, method, slices).await;
            }
            "profile-list" => slices_of(balance_list(&servers)?, callers, method, slices).await,
            _ => {
                let two = what == "profile-two";
                let (count, policy) = if two { (2, Policy::RoundRobin) } else { (1, Policy::PickFirst) };
                let ours = Ours::new(servers[..count].iter().map(|it| instance(it.port)), policy);
                ours.until_ready(count).await;
                slices_of(ours.caller(), callers, method, slices).await;
            }
        }
        Ok(())
    })
}

async fn slices_of<C: Caller>(caller: C, callers: usize, method: Method, slices: usize) {
    let mut side = Side::new(caller, callers, method);
    for _ in 0..slices {
        side.run(SLICE).await;
    }
}

fn balance_list(servers: &[Backend]) -> Result<CounterClient<Channel>, tonic::transport::Error> {
    let ends = servers.iter().map(|it| Endpoint::from_shared(it.address())).collect::<Result<Vec<_>, _>>()?;
    Ok(CounterClient::new(Channel::balance_list(ends.into_iter())))
}

/// Two instances in turn, against tonic's own balancing.
pub(super) fn balance(pairs: usize) -> Outcome {
    println!("\n# two instances, round robin, current-thread, against balance_list, {pairs} pairs");
    println!("what | CPU of a call, ns | difference, ns [95 %] | CPU ratio [95 %] | wall ratio [95 %]");
    let servers = [Backend::start(&Settings::new(1))?, Backend::start(&Settings::new(2))?];
    for callers in [16, 128] {
        Flavour::CurrentThread.runtime()?.block_on(balance_of(&servers, callers, pairs))?;
    }
    Ok(())
}

async fn balance_of(servers: &[Backend; 2], callers: usize, pairs: usize) -> Outcome {
    let list = balance_list(servers)?;
    let ours = Ours::new(servers.iter().map(|it| instance(it.port)), Policy::RoundRobin);
    ours.until_ready(2).await;
    for (method, name) in [(Method::Safe, "safe"), (Method::Unsafe, "unsafe")] {
        let mut theirs = Side::new(list.clone(), callers, method);
        let mut our_side = Side::new(ours.caller(), callers, method);
        let paired = compare(&mut theirs, &mut our_side, SLICE, pairs).await;
        let place = format!("{callers} callers, {name} method");
        row(&format!("{place}: balance_list, ours"), &paired);
        let share = |answered: &[u64]| answered[1] as f64 / (answered[1] + answered[2]) as f64;
        let (their, our) = (share(&theirs.answered), share(&our_side.answered));
        println!("{place}: share of the first: balance_list {their:.4}, ours {our:.4}");
        bar(&format!("client CPU against balance_list, {place}, upper end"), paired.cpu.high, 0.95);
        bar(&format!("shares apart, {place}"), (2.0 * our - 1.0).abs(), 0.02);
    }
    Ok(())
}

/// Thousands of calls at once on a channel that has just been made.
pub(super) fn burst(bursts: usize) -> Outcome {
    const CALLS: usize = 5000;
    println!("\n# {CALLS} calls at once on a fresh channel, {bursts} times each: how many failed");
    let server = Backend::start(&Settings::new(1))?;
    for flavour in [Flavour::CurrentThread, Flavour::MultiThread] {
        let runtime = flavour.runtime()?;
        let mut failed = [Vec::new(), Vec::new()];
        for _ in 0..bursts {
            let (raw, our) = runtime.block_on(async {
                let raw = Endpoint::from_shared(server.address())?.connect().await?;
                let raw = burst_of(CounterClient::new(raw), CALLS).await;
                let ours = Ours::new([instance(server.port)], Policy::PickFirst);
                let our = burst_of(ours.caller(), CALLS).await;
                Ok::<_, tonic::transport::Error>((raw, our))
            })?;
            failed[0].push(raw.values().sum::<usize>());
            failed[1].push(our.values().sum::<usize>());
            if !our.is_empty() {
                println!("ours failed with {our:?}");
            }
        }
        let name = flavour.name();
        println!("{name}: raw {:?}, ours {:?}", failed[0], failed[1]);
        bar(&format!("calls lost in bursts, {name}"), failed[1].iter().sum::<usize>() as f64, 0.0);
    }
    Ok(())
}

async fn burst_of<C: Caller>(caller: C, calls: usize) -> BTreeMap<i32, usize> {
    let mut running = JoinSet::new();
    for _ in 0..calls {
        let mut caller = caller.clone();
        running.spawn(async move { caller.call(Method::Unsafe).await.err().map(|status| status.code()) });
    }
    let mut failed = BTreeMap::new();
    while let Some(done) = running.join_next().await {
        let code: Option<Code> = done.expect("no caller panics");
        if let Some(code) = code {
            *failed.entry(code as i32).or_default() += 1;
        }
    }
    failed
}
