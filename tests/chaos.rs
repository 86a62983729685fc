//! Everything at once: whatever fails, no call does while one known instance answers.

mod common;

use std::{collections::BTreeMap, time::Duration};

use common::{Backend, Callers, Method, deregister, record::Record, register, steady, until};
use tonic_failover::{
    client::{ConsulService, Policy},
    consul::ConsulConfig,
    testkit::{Agent, Switch},
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
    Terminate,
    Start,
    Deregister,
    Register,
    Fault,
    Mend,
    Forget,
    FallBack,
    Update,
    Calm,
}

const STEPS: [Step; 11] = [
    Step::Kill,
    Step::Terminate,
    Step::Start,
    Step::Deregister,
    Step::Register,
    Step::Fault,
    Step::Mend,
    Step::Forget,
    Step::FallBack,
    Step::Update,
    Step::Calm,
];

/// One instance that may be dead, unlisted or both; `anchor` never is.
struct Instance {
    port: u16,
    alive: Option<Backend>,
}

struct World {
    agent: Agent,
    others: BTreeMap<&'static str, Instance>,
    anchor: Backend,
    fault: Option<Switch>,
    dice: Dice,
}

impl World {
    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.dice.next_u64() % n as u64).unwrap()
    }

    async fn list(&self, name: &str, port: u16) {
        register(self.agent.registry(), "counter", name, port).await;
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

    async fn step(&mut self, step: Step, service: &ConsulService) {
        let names: Vec<_> = self.others.keys().copied().collect();
        let pick = self.below(names.len());
        let name = names[pick];
        let port = self.others[name].port;
        let instance = self.others.get_mut(name).unwrap();
        match step {
            Step::Kill => {
                if let Some(mut backend) = instance.alive.take() {
                    backend.kill().await;
                }
            }
            Step::Terminate => {
                if let Some(mut backend) = instance.alive.take() {
                    backend.terminate().await;
                }
            }
            Step::Start => {
                if instance.alive.is_none() {
                    instance.alive = Some(Backend::start_with(name, port, common::NOWHERE, &[]).await);
                }
            }
            Step::Deregister => deregister(self.agent.registry(), name).await,
            Step::Register => self.list(name, port).await,
            Step::Fault => self.fail(),
            Step::Mend => self.mend(),
            Step::Forget => {
                self.agent.restart_empty().await;
                // The anchor first: a list without it, of dead ones, would be believed.
                self.list("anchor", self.anchor.port).await;
            }
            Step::FallBack => self.agent.faults().reset_index(),
            Step::Update => {
                let _ = service.update_grpc_client("counter").await;
            }
            Step::Calm => {}
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
    let anchor = Backend::start("anchor").await;
    let mut others = BTreeMap::new();
    for name in ["a", "b", "c"] {
        let backend = Backend::start(name).await;
        others.insert(name, Instance { port: backend.port, alive: Some(backend) });
    }
    let mut world = World { agent, others, anchor, fault: None, dice: Dice(seed) };
    world.list("anchor", world.anchor.port).await;
    for name in ["a", "b", "c"] {
        world.list(name, world.others[name].port).await;
    }
    let config = ConsulConfig::new(&world.agent.url()).unwrap().request_timeout(Duration::from_millis(500));
    let service = ConsulService::builder(config)
        .wait(Duration::from_secs(1))
        .service(steady().policy(policy))
        .build()
        .unwrap();
    let client = service.grpc_client("counter").unwrap();
    let record = Record::of(&client);
    until(&client, "all are known", |c| c.status().datacenters.first().is_some_and(|dc| dc.known == 4)).await;
    client.ready().await.unwrap();
    let callers = Callers::start(&client, 8, Method::Get);
    let mut steps = Vec::new();
    for _ in 0..60 {
        let step = STEPS[world.below(STEPS.len())];
        steps.push(step);
        world.step(step, &service).await;
        let calls = 1 + world.below(60);
        callers.go_on_for(calls as u64).await;
        assert!(!client.binding().is_empty(), "{steps:?}");
    }
    let tally = callers.stop().await;
    println!("{} calls, {} resent, slowest {:?}", tally.calls, tally.resent, tally.slowest);
    assert!(tally.failed.is_empty(), "seed {seed}, {steps:?}: {:#?}\n{:#?}", tally.failed, record.words());

    // When all is well again, all of it is in use again.
    world.mend();
    for name in ["a", "b", "c"] {
        world.step_back(name).await;
    }
    until(&client, "all are known again", |c| {
        let dc = c.status().datacenters[0].clone();
        dc.known == 4 && dc.stale_since.is_none() && dc.empty_since.is_none() && dc.ready >= 2
    })
    .await;
}

impl World {
    async fn step_back(&mut self, name: &'static str) {
        let instance = self.others.get_mut(name).unwrap();
        let port = instance.port;
        if instance.alive.is_none() {
            instance.alive = Some(Backend::start_with(name, port, common::NOWHERE, &[]).await);
        }
        self.list(name, port).await;
    }
}
