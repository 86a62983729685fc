//! Many instances, one store, and everything between them that can go wrong: seeded, on clocks of
//! their own that run unlike, with an invariant after every step.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::*;

/// Microseconds of the world's time.
type Time = u64;
const MS: Time = 1_000;
const SECOND: Time = 1_000 * MS;

/// When the last fault ends, and when everything must have been well for a while.
const CALM: Time = 30 * SECOND;
const END: Time = 45 * SECOND;
/// After the last fault: late writes land, contact is made anew, the first word of a successor that
/// is gone passes, the length passes.
const RECOVERS_IN: Time = 9 * SECOND;

/// A rule that is broken on purpose: the simulation must notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// A holder stops only when its lease is over.
    NoMargin,
    /// It counts from the answer to a renewal.
    FromTheAnswer,
    /// Some standbys wait half of the length.
    Impatient,
    /// The store writes without comparing.
    NoComparison,
    /// The store begins with the same token again.
    SameToken,
    /// A holder that is to release says so only when it is done.
    ReleasesFirst,
    /// The one who lost never campaigns again.
    GivesUpForGood,
}

struct Node {
    election: Election<Seeded>,
    claim: Claim,
    /// Its clock: where it started, and how fast it runs, in millionths.
    origin: Instant,
    rate: u64,
    paused_until: Time,
    /// Cut off from the store.
    cut_until: Time,
    /// The token it was last seen primary with.
    token: Option<FencingToken>,
    /// The number of the wake that holds.
    wake: u64,
    /// What it says while a rule is broken.
    said: Option<Role>,
}

enum Event {
    /// As it wanted to be woken when it was asked last, or from outside.
    Wake(Option<u64>),
    Apply {
        step: Step,
        sent: Instant,
        answered_at: Option<Time>,
    },
    Deliver {
        sent: Instant,
        answer: Answer,
    },
    Fault,
}

struct Queued {
    at: Time,
    serial: u64,
    node: usize,
    /// Of which process of the node.
    process: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.serial) == (other.at, other.serial)
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

struct World {
    rng: Seeded,
    broken: Option<Broken>,
    loses_data: bool,
    now: Time,
    store: Model,
    down_until: Time,
    nodes: Vec<Node>,
    processes: Vec<u64>,
    queue: BinaryHeap<Reverse<Queued>>,
    serial: u64,
    greatest: Option<(usize, FencingToken)>,
    /// Terms that began.
    terms: u64,
}

fn timing(broken: Option<Broken>, node: usize) -> Timing {
    let mut timing = Timing::default();
    match broken {
        Some(Broken::NoMargin) => timing.margin = Duration::ZERO,
        Some(Broken::Impatient) if node % 2 == 1 => timing.length /= 2,
        _ => {}
    }
    timing
}

impl World {
    fn new(seed: u64, broken: Option<Broken>, loses_data: bool) -> Self {
        let mut rng = Seeded(seed);
        let count = 2 + (rng.next_u64() % 3) as usize;
        let mut store = Model::new();
        store.compares = broken != Some(Broken::NoComparison);
        store.counts = broken != Some(Broken::SameToken);
        let mut world = Self {
            rng,
            broken,
            loses_data,
            now: 0,
            store,
            down_until: 0,
            nodes: Vec::new(),
            processes: vec![0; count],
            queue: BinaryHeap::new(),
            serial: 0,
            greatest: None,
            terms: 0,
        };
        for node in 0..count {
            let fresh = world.node(node);
            world.nodes.push(fresh);
            // Started askew.
            let at = world.below(3 * SECOND);
            world.push(at, node, Event::Wake(None));
        }
        for node in 0..count {
            // In the end everybody serves.
            world.push(CALM, node, Event::Wake(None));
        }
        for _ in 0..20 {
            let (at, node) = (world.below(CALM), world.below(count as u64) as usize);
            world.push(at, node, Event::Fault);
        }
        world
    }

    fn node(&mut self, node: usize) -> Node {
        let process = self.processes[node];
        let claim = claim(&format!("n{node}"), &format!("{node}.{process}"));
        let origin = Instant::now();
        // Five in a hundred each way: ten between two, of which 2 s less the margin of 0.3 s bear 15.
        let rate = 950_000 + self.below(100_001);
        let chance = Seeded(self.rng.next_u64());
        let election = Election::new(timing(self.broken, node), &claim, chance, origin);
        Node {
            election,
            claim,
            origin,
            rate,
            paused_until: 0,
            cut_until: 0,
            token: None,
            wake: 0,
            said: None,
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.rng.next_u64() % end
    }

    fn chance(&mut self, of_a_hundred: u64) -> bool {
        self.below(100) < of_a_hundred
    }

    fn push(&mut self, at: Time, node: usize, event: Event) {
        self.serial += 1;
        let process = self.processes[node];
        self.queue.push(Reverse(Queued { at, serial: self.serial, node, process, event }));
    }

    /// The node's own clock.
    fn clock(&self, node: usize) -> Instant {
        let node = &self.nodes[node];
        node.origin + Duration::from_micros(self.now * node.rate / 1_000_000)
    }

    /// When the node's clock will show this.
    fn world_time(&self, node: usize, at: Instant) -> Time {
        let node = &self.nodes[node];
        ((at - node.origin).as_micros() as u64 * 1_000_000).div_ceil(node.rate) + 1
    }

    /// How long a message takes.
    fn delay(&mut self) -> Time {
        match self.below(100) {
            _ if self.now >= CALM => MS + self.below(20 * MS),
            0..80 => MS + self.below(20 * MS),
            80..97 => MS + self.below(500 * MS),
            _ => MS + self.below(3 * SECOND),
        }
    }

    /// To the end, or to the first thing that may not be.
    fn run(&mut self) -> Result<(), String> {
        while let Some(Reverse(Queued { at, node, process, event, .. })) = self.queue.pop() {
            if at > END {
                break;
            }
            self.now = self.now.max(at);
            let is_of_now = process == self.processes[node];
            match event {
                Event::Fault => self.fault(node),
                // What is on its way lands, whatever became of its sender.
                Event::Apply { step, sent, answered_at } => {
                    self.apply(node, process, step, sent, answered_at)
                }
                _ if !is_of_now => {}
                event if self.nodes[node].paused_until > self.now => {
                    let until = self.nodes[node].paused_until;
                    self.push(until, node, event);
                }
                Event::Wake(Some(number)) if number != self.nodes[node].wake => {}
                Event::Wake(_) => self.pump(node),
                Event::Deliver { sent, answer } => self.deliver(node, sent, answer),
            }
            self.check()?;
        }
        Ok(())
    }

    /// Lets a node do what it wants to.
    fn pump(&mut self, node: usize) {
        let now = self.clock(node);
        while let Some(step) = self.nodes[node].election.next(now) {
            let (there, back) = (self.delay(), self.delay());
            let lost = self.now < CALM && self.chance(3);
            let applied_at = self.now + there;
            let answered_at = (!lost).then_some(applied_at + back);
            // It gives an answer up that takes longer than this.
            let given_up = self.now + 2 * SECOND;
            let answered_at = answered_at.filter(|at| *at < given_up);
            if answered_at.is_none() {
                let answer = fail(&step, &unanswered());
                self.push(given_up, node, Event::Deliver { sent: now, answer });
            }
            self.push(applied_at, node, Event::Apply { step, sent: now, answered_at });
        }
        if let Some(at) = self.nodes[node].election.wake(now) {
            let at = self.world_time(node, at).max(self.now + 1);
            self.nodes[node].wake += 1;
            let number = self.nodes[node].wake;
            self.push(at, node, Event::Wake(Some(number)));
        }
    }

    fn apply(&mut self, node: usize, process: u64, step: Step, sent: Instant, answered_at: Option<Time>) {
        let is_away = self.now < self.down_until || self.now < self.nodes[node].cut_until;
        let answer = if is_away {
            fail(&step, &unavailable())
        } else {
            let sender = Claim::new(
                format!("n{node}"),
                self.nodes[node].claim.address.clone(),
                Nonce::new(&format!("{node}.{process}")),
            );
            match step {
                Step::Read => Answer::Read(Ok(self.store.record.clone())),
                Step::Acquire(seen) => Answer::Acquire(self.store.acquire(&seen, &sender)),
                Step::Renew(term) => Answer::Renew(term.token, self.store.renew(&term)),
                Step::Release(term, to) => {
                    Answer::Release(term.token, self.store.release(&term, to.as_deref()))
                }
            }
        };
        if let Some(at) = answered_at
            && process == self.processes[node]
        {
            self.push(at, node, Event::Deliver { sent, answer });
        }
    }

    fn deliver(&mut self, node: usize, sent: Instant, answer: Answer) {
        let now = self.clock(node);
        let sent = match &answer {
            Answer::Renew(..) | Answer::Acquire(_) if self.broken == Some(Broken::FromTheAnswer) => now,
            _ => sent,
        };
        let lost = self.nodes[node].token.is_some() && self.nodes[node].election.term().is_none();
        if self.broken == Some(Broken::GivesUpForGood) && lost {
            self.nodes[node].election.live(false, now);
        }
        self.nodes[node].election.answered(sent, now, answer);
        self.pump(node);
    }

    fn fault(&mut self, node: usize) {
        let lasts = MS + self.below(6 * SECOND);
        let now = self.clock(node);
        match self.below(if self.loses_data { 9 } else { 8 }) {
            0 | 1 => self.nodes[node].paused_until = self.now + lasts,
            2 => self.nodes[node].cut_until = self.now + lasts,
            3 => self.down_until = self.now + lasts,
            4 => {
                // The process dies, and another one starts.
                let at = self.now + lasts;
                self.processes[node] += 1;
                let fresh = self.node(node);
                self.nodes[node] = fresh;
                self.push(at, node, Event::Wake(None));
            }
            5 => {
                let drain = Duration::from_micros(self.below(2 * SECOND));
                let to = self.chance(50).then(|| format!("n{}", self.below(5)));
                if self.broken == Some(Broken::ReleasesFirst) {
                    self.nodes[node].said = Some(self.nodes[node].election.role(now));
                }
                self.nodes[node].election.give_up(to, now + drain, now);
                self.push(self.now, node, Event::Wake(None));
            }
            6 | 7 => {
                let alive = self.chance(50);
                self.nodes[node].election.live(alive, now);
                self.push(self.now, node, Event::Wake(None));
            }
            _ if self.loses_data => self.store.lose(),
            _ => {}
        }
    }

    fn primaries(&self) -> Vec<(usize, FencingToken)> {
        let of = |node: usize| {
            let (now, it) = (self.clock(node), &self.nodes[node]);
            let role = match &it.said {
                Some(said) if it.election.is_giving_up(now) => said.clone(),
                _ => it.election.role(now),
            };
            role.primary_at(now).map(|token| (node, token))
        };
        (0..self.nodes.len()).filter_map(of).collect()
    }

    fn check(&mut self) -> Result<(), String> {
        if self.now >= CALM {
            for node in 0..self.nodes.len() {
                let now = self.clock(node);
                if self.broken != Some(Broken::GivesUpForGood) {
                    self.nodes[node].election.live(true, now);
                }
            }
        }
        let primaries = self.primaries();
        // What is lost with the store's data is lost: then there may be two for a moment.
        if primaries.len() > 1 && !self.loses_data {
            return Err(format!("two primaries at {} us: {primaries:?}", self.now));
        }
        for (node, token) in primaries {
            if self.greatest != Some((node, token)) {
                let grows = self.greatest.is_none_or(|(_, greatest)| token > greatest);
                if !grows && !self.loses_data {
                    return Err(format!("{token} of n{node} after {:?}", self.greatest));
                }
                self.greatest = Some((node, token));
                self.terms += 1;
            }
            self.nodes[node].token = Some(token);
        }
        if self.now >= CALM + RECOVERS_IN && self.primaries().len() != 1 {
            return Err(format!("no primary at {} us: {:?}", self.now, self.store.record));
        }
        Ok(())
    }
}

fn fail(step: &Step, error: &StoreError) -> Answer {
    let error = error.clone();
    match step {
        Step::Read => Answer::Read(Err(error)),
        Step::Acquire(_) => Answer::Acquire(Err(error)),
        Step::Renew(term) => Answer::Renew(term.token, Err(error)),
        Step::Release(term, _) => Answer::Release(term.token, Err(error)),
    }
}

/// `SIMULATION_SEEDS` has more of them run.
fn seeds() -> u64 {
    std::env::var("SIMULATION_SEEDS").ok().and_then(|it| it.parse().ok()).unwrap_or(300)
}

/// How many terms began.
fn simulate(seed: u64, broken: Option<Broken>, loses_data: bool) -> Result<u64, String> {
    let mut world = World::new(seed, broken, loses_data);
    world.run().map_err(|wrong| format!("seed {seed}: {wrong}"))?;
    Ok(world.terms)
}

#[test]
fn there_are_never_two_primaries_and_always_one_again() {
    let terms: u64 = (0..seeds()).map(|seed| simulate(seed, None, false).unwrap()).sum();
    assert!(terms > 2 * seeds(), "only {terms} terms: the faults do little");
}

#[test]
fn a_store_that_loses_its_data_has_one_primary_again() {
    for seed in 0..seeds() {
        simulate(seed, None, true).unwrap();
    }
}

#[test]
fn each_broken_rule_is_noticed() {
    for broken in [
        Broken::NoMargin,
        Broken::FromTheAnswer,
        Broken::Impatient,
        Broken::NoComparison,
        Broken::SameToken,
        Broken::ReleasesFirst,
        Broken::GivesUpForGood,
    ] {
        let noticed = (0..1_000).find_map(|seed| simulate(seed, Some(broken), false).err());
        println!("{broken:?}: {}", noticed.unwrap_or_else(|| panic!("{broken:?} goes unnoticed")));
    }
}
