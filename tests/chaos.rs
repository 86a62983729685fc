//! Everything at once: whatever fails, no call does while one known instance answers.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{collections::BTreeMap, time::Duration};

use common::{Backend, Callers, Method, deregister, record::Record, register, steady, until};
use tonic_failover::{
    client::{ConsulService, GrpcClient, Policy},
    consul::ConsulConfig,
    testkit::{Agent, Port, Switch},
};
use tower::util::rng::{HasherRng, Rng};

/// Chance that can be repeated: SplitMix64.
struct Dice(u64);

impl Rng for Dice {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// What can happen in a step.
#[derive(Clone, Copy, Debug)]
enum Step {
    Kill,
    KillBound,
    Terminate,
    Start,
    Deregister,
    Register,
    Fault,
    Mend,
    Forget,
    FallingIndex,
    Update,
    Calm,
}

const STEPS: [Step; 12] = [
    Step::Kill,
    Step::KillBound,
    Step::Terminate,
    Step::Start,
    Step::Deregister,
    Step::Register,
    Step::Fault,
    Step::Mend,
    Step::Forget,
    Step::FallingIndex,
    Step::Update,
    Step::Calm,
];

/// One instance.
struct Instance {
    port: Port,
    alive: Option<Backend>,
    listed: bool,
    /// The client has known it while it was alive and listed, and since then it
    /// has been both.
    sure: bool,
}

struct World {
    agent: Agent,
    client: GrpcClient,
    instances: BTreeMap<String, Instance>,
    fault: Option<Switch>,
    dice: Dice,
}

impl World {
    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.dice.next_u64() % n as u64).unwrap()
    }

    /// Whether another one would go on answering.
    fn may_lose(&self, name: &str) -> bool {
        self.instances.iter().any(|(other, it)| other != name && it.sure)
    }

    async fn list(&mut self, name: &str) {
        let instance = self.instances.get_mut(name).unwrap();
        instance.listed = true;
        register(self.agent.registry(), "counter", name, instance.port.number()).await;
    }

    /// Faults of the health endpoint alone, so that the test can still register.
    fn fail(&mut self) {
        self.mend();
        let kind = self.below(6);
        let faults = self.agent.faults().health_only();
        let fault = match kind {
            0 => faults.status(500, "rpc error"),
            1 => faults.status(403, "ACL not found"),
            2 => faults.garbage(),
            3 => faults.hang(),
            4 => faults.slow(Duration::from_millis(600)),
            _ => self.agent.faults().empty("counter"),
        };
        self.fault = Some(fault);
    }

    fn mend(&mut self) {
        if let Some(fault) = self.fault.take() {
            fault.off();
        }
    }

    async fn step(&mut self, step: Step) {
        let names: Vec<_> = self.instances.keys().cloned().collect();
        let mut name = names[self.below(names.len())].clone();
        if matches!(step, Step::KillBound) {
            name = self.client.status().bound.map_or(name, |i| i.name.clone());
        }
        let may_lose = self.may_lose(&name);
        let instance = self.instances.get_mut(&name).unwrap();
        match step {
            Step::Kill | Step::KillBound | Step::Terminate if may_lose => {
                instance.sure = false;
                match instance.alive.take() {
                    Some(mut backend) if matches!(step, Step::Terminate) => backend.terminate().await,
                    Some(mut backend) => backend.kill().await,
                    None => {}
                }
            }
            Step::Start if instance.alive.is_none() => {
                instance.alive =
                    Some(Backend::start_with(&name, instance.port.number(), common::NOWHERE, &[]).await);
            }
            Step::Deregister if may_lose => {
                (instance.sure, instance.listed) = (false, false);
                deregister(self.agent.registry(), &name).await;
            }
            Step::Register => self.list(&name).await,
            Step::Fault => self.fail(),
            Step::Mend => self.mend(),
            Step::Forget => self.forget().await,
            Step::FallingIndex => self.agent.faults().reset_index(),
            Step::Update => {
                // That it fails while Consul does is no failure here.
                let _ = self.client.consul_service().update_grpc_client("counter").await;
            }
            _ => {}
        }
    }

    /// The agent forgets all. One that answers registers first: a list of dead
    /// ones alone would be believed.
    async fn forget(&mut self) {
        self.agent.restart_empty().await;
        let first = self.instances.iter().find(|(_, it)| it.sure).map(|(name, _)| name.clone()).unwrap();
        for (name, instance) in &mut self.instances {
            instance.listed = false;
            instance.sure &= *name == first;
        }
        self.list(&first).await;
    }

    /// Where the registry is well: waits until the client knows what it lists.
    async fn settle(&mut self) {
        if self.fault.is_some() {
            return;
        }
        let listed = self.instances.values().filter(|it| it.listed).count();
        until(&self.client, &format!("{listed} are known"), |c| {
            let dc = c.status().datacenters.first().cloned().unwrap_or_default();
            dc.known == listed && dc.stale_since.is_none() && dc.empty_since.is_none()
        })
        .await;
        for instance in self.instances.values_mut() {
            instance.sure = instance.listed && instance.alive.is_some();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_safe_call_fails_while_one_known_instance_answers() {
    for policy in [Policy::PickFirst, Policy::RoundRobin] {
        let seed = std::env::var("CHAOS_SEED").ok().and_then(|it| it.parse().ok());
        let seed: u64 = seed.unwrap_or_else(|| HasherRng::new().next_u64());
        println!("{policy:?}: CHAOS_SEED={seed}");
        storm(policy, seed).await;
    }
}

async fn storm(policy: Policy, seed: u64) {
    let agent = Agent::start("dc1").await.unwrap();
    let config = ConsulConfig::new(&agent.url()).unwrap().request_timeout(Duration::from_millis(500));
    let service = ConsulService::builder(config)
        .wait(Duration::from_secs(1))
        .service(steady().policy(policy))
        .build()
        .unwrap();
    let client = service.grpc_client("counter").unwrap();
    let record = Record::of(&client);
    let mut world = World { agent, client, instances: BTreeMap::new(), fault: None, dice: Dice(seed) };
    for name in ["a", "b", "c", "d"] {
        let port = Port::free().unwrap();
        let backend = Backend::start_with(name, port.number(), common::NOWHERE, &[]).await;
        let instance = Instance { port, alive: Some(backend), listed: false, sure: false };
        world.instances.insert(name.to_owned(), instance);
        world.list(name).await;
    }
    world.settle().await;
    world.client.ready().await.unwrap();
    let callers = Callers::start(&world.client, 8, Method::Get);
    let mut steps = Vec::new();
    for _ in 0..80 {
        let step = STEPS[world.below(STEPS.len())];
        steps.push(step);
        world.step(step).await;
        let calls = 1 + world.below(60);
        callers.go_on_for(calls as u64).await;
        world.settle().await;
    }
    let tally = callers.stop().await;
    println!("{} calls, {} resent, slowest {:?}", tally.calls, tally.resent, tally.slowest);
    assert!(tally.failed.is_empty(), "seed {seed}, {steps:?}: {:#?}\n{:#?}", tally.failed, record.words());

    // When all is well again, all of it is in use again.
    world.mend();
    for name in ["a", "b", "c", "d"] {
        world.step_back(name).await;
    }
    world.settle().await;
    let wanted = if policy == Policy::RoundRobin { 4 } else { 2 };
    until(&world.client, "as many are ready as are wanted", |c| c.status().datacenters[0].ready == wanted)
        .await;
}

impl World {
    async fn step_back(&mut self, name: &str) {
        // Out and in again: news that ends every rest.
        let instance = self.instances.get_mut(name).unwrap();
        if instance.alive.is_none() {
            instance.alive =
                Some(Backend::start_with(name, instance.port.number(), common::NOWHERE, &[]).await);
        }
        if self.may_lose(name) {
            deregister(self.agent.registry(), name).await;
            self.instances.get_mut(name).unwrap().listed = false;
            self.settle().await;
        }
        self.list(name).await;
        self.settle().await;
    }
}
