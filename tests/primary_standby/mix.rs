//! A seeded mix of all faults, for a while, while callers add and increment without pause: what was
//! acknowledged has been counted, once.
//!
//! `MIX_SECONDS` says how long (40), `MIX_SEED` repeats a run.

use std::{env, time::Duration};

use rustix::process::Signal;
use tokio::time::{Instant, timeout};

use crate::{
    common::SOON,
    faults::{Fault, strike},
    history::{Broken, Kind as Of, Op, judge},
    workload::Workload,
    world::{A, Ask, B, Kind, NAMES, World},
};

/// Eight callers, as many of each kind.
const CALLERS: [Of; 8] =
    [Of::Add, Of::Increment, Of::Add, Of::Increment, Of::Add, Of::Increment, Of::Add, Of::Increment];

/// A small generator of chance, the same for the same seed (xorshift64*, Vigna 2016).
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(bits).unwrap() % bound
    }
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Waits until callers go on; tells what each instance says of itself where they do not.
async fn goes_on(world: &mut World, workload: &Workload) {
    if workload.goes_on(20).await {
        return;
    }
    for who in [A, B] {
        eprintln!("{} answers {:?}", NAMES[who], world.ask(who, &Ask::Get).await);
        if let Some(backend) = &mut world.backends[who] {
            backend.last_words().await.iter().for_each(|line| eprintln!("    {line}"));
        }
    }
    panic!("requests are not acknowledged again");
}

struct Outcome {
    ops: Vec<Op>,
    counted: u64,
    struck: usize,
}

async fn mixed(kind: Kind, faults: &[Fault], seconds: u64) -> Option<Outcome> {
    let mut world = World::of(kind).await?;
    world.start_both().await;
    let seed = number("MIX_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 8 | 1);
    eprintln!("{kind:?}: MIX_SEED={seed} MIX_SECONDS={seconds}");
    let mut chance = Chance(seed);
    let client = world.client();
    let workload = Workload::start(&client.channel, &CALLERS);
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut bag, mut struck) = (Vec::new(), 0);
    while Instant::now() < until {
        if bag.is_empty() {
            bag.extend_from_slice(faults);
        }
        let fault = bag.swap_remove(chance.below(bag.len()));
        goes_on(&mut world, &workload).await;
        let primary = world.until_primary().await;
        // Mostly the primary; the standby's faults must cost nobody anything.
        let victim = if chance.below(4) == 0 { A + B - primary } else { primary };
        let pause = Duration::from_millis(200 + 40 * chance.below(100) as u64);
        eprintln!("{:>7.2?} {fault:?} of {victim} (primary {primary}) for {pause:?}", until - Instant::now());
        strike(&mut world, fault, victim, pause).await;
        struck += 1;
    }
    goes_on(&mut world, &workload).await;
    let ops = workload.stop().await;
    let primary = world.until_primary().await;
    let counted = world.ask(primary, &Ask::Get).await.unwrap().value;
    Some(Outcome { ops, counted, struck })
}

async fn nothing_is_lost(kind: Kind, faults: &[Fault]) {
    let seconds = number("MIX_SECONDS").unwrap_or(40);
    let Some(Outcome { ops, counted, struck }) = mixed(kind, faults, seconds).await else {
        return;
    };
    let broken = judge(&ops, counted);
    let unanswered = ops.iter().filter(|op| op.ack.is_none()).count();
    let acknowledged = ops.len() - unanswered;
    let terms = ops.iter().filter_map(|op| Some(op.ack.as_ref()?.token)).max().unwrap_or_default();
    eprintln!(
        "{kind:?}: {struck} faults, {terms} terms, {acknowledged} acknowledged, {unanswered} unanswered, {counted} counted"
    );
    assert!(broken.is_empty(), "{} of {}: {:?}", broken.len(), ops.len(), &broken[..broken.len().min(20)]);
    assert!(ops.iter().all(|op| op.kind == Of::Increment || op.ack.is_some()), "each Add has its answer");
    assert!(terms > 1, "somebody took over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_consul_a_mix_of_all_faults_loses_nothing_and_counts_nothing_twice() {
    nothing_is_lost(Kind::Consul, &Fault::OF_CONSUL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_three_servers_a_mix_of_all_faults_loses_nothing_and_counts_nothing_twice() {
    nothing_is_lost(Kind::Cluster, &Fault::OF_A_CLUSTER).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_files_a_mix_of_all_faults_loses_nothing_and_counts_nothing_twice() {
    nothing_is_lost(Kind::Files, &Fault::OF_FILES).await;
}

/// The same check, where nobody fences the state: it must see what a paused primary does when it
/// wakes in the middle of its work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_fencing_a_paused_primary_loses_what_was_acknowledged() {
    let world = World::of(Kind::Files).await.unwrap();
    let file = world.path("state").display().to_string();
    let mut world = world.with(&["--unfenced", &file]);
    world.start_both().await;
    let client = world.client();
    let workload = Workload::start(&client.channel, &[Of::Add; 8]);
    // Whether it is paused in the middle of a write is chance, so until it was.
    let lost = async {
        loop {
            workload.go_on_for(50).await;
            let primary = world.until_primary().await;
            let other = A + B - primary;
            world.signal(primary, Signal::STOP);
            world.backend(other).says("became PRIMARY").await;
            workload.go_on_for(50).await;
            world.signal(primary, Signal::CONT);
            world.backend(primary).says("lost primary role").await;
            let acknowledged = workload.acknowledged();
            if world.ask(other, &Ask::Get).await.is_ok_and(|it| it.value < acknowledged) {
                return;
            }
        }
    };
    timeout(4 * SOON, lost).await.expect("a primary is paused in the middle of its work");
    workload.go_on_for(50).await;
    let ops = workload.stop().await;
    let primary = world.until_primary().await;
    let counted = world.ask(primary, &Ask::Get).await.unwrap().value;
    let broken = judge(&ops, counted);
    let lost =
        |it: &Broken| matches!(it, Broken::Lost { .. } | Broken::SameValue { .. } | Broken::Backwards { .. });
    assert!(broken.iter().any(lost), "the check does not see what fencing is for: {broken:?}");
    eprintln!("without fencing {} promises were broken, for example {:?}", broken.len(), broken[0]);
}
