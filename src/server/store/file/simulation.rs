//! Processes that share a directory, held before each of their system calls, let go one at a time
//! in an order drawn by a seed, paused, failed and killed anywhere.
//!
//! The state is the list of all writes, each with a number of its own, so that a lost, doubled,
//! reordered or returning write shows. Time is counted in system calls.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    directory::{Directory, Stage},
    terms::{Rule, Terms},
};
use crate::{
    instance::InstanceId,
    server::store::{Claim, LeaseRecord, Nonce, StoreError, Term, Version, Write},
};

/// Of the lease, in system calls; the margin is what a holder stops earlier.
const LENGTH: u64 = 80;
const MARGIN: u64 = 10;
const RENEWAL: u64 = 25;
const CALLS: u64 = 2_500;
const PROCESSES: usize = 3;

type Log = Vec<u32>;

#[derive(Debug, Clone, Copy)]
enum Fate {
    Go,
    Fail(io::ErrorKind),
    Die,
}

#[derive(Debug, Default)]
struct Inner {
    now: u64,
    running: usize,
    waiting: BTreeSet<usize>,
    granted: Option<(usize, Fate)>,
    random: u64,
    /// Until when each process takes itself for the primary.
    until: BTreeMap<usize, u64>,
    next_write: u32,
    /// The longest log that was acknowledged or read.
    settled: Log,
    /// Writes that must not be there.
    undone: BTreeSet<u32>,
    tokens: u64,
    counts: BTreeMap<&'static str, u32>,
    violations: Vec<String>,
}

#[derive(Debug, Default)]
struct World {
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// A process's place in the world.
#[derive(Debug)]
struct Seat {
    world: Arc<World>,
    id: usize,
    dead: AtomicBool,
}

struct Process {
    seat: Arc<Seat>,
    terms: Terms,
    claim: Claim,
    seen: Option<(LeaseRecord, u64)>,
    term: Option<Term>,
    sequence: u64,
    renewed: u64,
}

// === impl Inner ===

impl Inner {
    /// SplitMix64 (Steele, Lea and Flood, 2014).
    fn draw(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn violated(&mut self, what: String) {
        let now = self.now;
        self.violations.push(format!("call {now}: {what}"));
    }

    /// `log` was acknowledged or read by an operation that began when `before` was settled.
    fn observed(&mut self, log: &Log, before: &Log, what: &str) {
        if !log.starts_with(before) {
            self.violated(format!("{what}: {log:?} does not go on from {before:?}"));
        }
        let twice = log.iter().collect::<BTreeSet<_>>().len() != log.len();
        if twice || log.iter().any(|write| self.undone.contains(write)) {
            self.violated(format!("{what}: {log:?} has a write twice, or one of {:?}", self.undone));
        }
        if log.len() > self.settled.len() {
            self.settled = log.clone();
        }
    }

    fn primary(&mut self, id: usize, until: u64) {
        self.until.insert(id, until);
        let now = self.now;
        let primaries: Vec<_> = self.until.iter().filter(|(_, until)| **until > now).collect();
        if primaries.len() > 1 {
            let what = format!("{primaries:?} take themselves for primary");
            self.violated(what);
        }
    }
}

// === impl Seat ===

impl Stage for Seat {
    fn enter(&self, _: &'static str) -> io::Result<()> {
        if self.dead.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let mut inner = self.world.inner.lock();
        inner.running -= 1;
        inner.waiting.insert(self.id);
        self.world.changed.notify_all();
        self.world.changed.wait_while(&mut inner, |inner| inner.granted.is_none_or(|(id, _)| id != self.id));
        inner.waiting.remove(&self.id);
        match inner.granted.take() {
            Some((_, Fate::Fail(kind))) => Err(kind.into()),
            Some((_, Fate::Die)) => {
                self.dead.store(true, Ordering::Relaxed);
                inner.until.remove(&self.id);
                Err(io::ErrorKind::Interrupted.into())
            }
            _ => Ok(()),
        }
    }
}

impl Seat {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.world.inner.lock()
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }
}

// === impl Process ===

impl Process {
    fn live(mut self) {
        while !self.seat.is_dead() {
            let idle = self.seat.inner().draw(4);
            for _ in 0..idle {
                // Whatever becomes of it: it is no call of the store's.
                let _ = self.seat.enter("idle");
            }
            match self.term.clone() {
                None => self.stand_by(),
                Some(term) => self.serve(&term),
            }
        }
        let mut inner = self.seat.inner();
        inner.running -= 1;
        self.seat.world.changed.notify_all();
    }

    fn stand_by(&mut self) {
        let Ok(record) = self.terms.read() else {
            self.seen = None;
            return;
        };
        let now = self.seat.inner().now;
        let since = match &self.seen {
            Some((seen, since)) if *seen == record => *since,
            _ => now,
        };
        let never = record == LeaseRecord::empty();
        self.seen = Some((record.clone(), since));
        if !never && !record.released && now < since + LENGTH {
            return;
        }
        let (sent, before) = {
            let inner = self.seat.inner();
            (inner.now, inner.tokens)
        };
        let acquired = self.terms.acquire(&record, &self.claim);
        if self.seat.is_dead() {
            return;
        }
        let term = match acquired {
            Ok(term) => Some(term),
            Err(StoreError::Unanswered { .. }) => self.own_term(),
            Err(_) => None,
        };
        if let Some(term) = term {
            self.seen = None;
            self.renewed = sent;
            let mut inner = self.seat.inner();
            if term.token.get() <= before {
                inner.violated(format!("token {} after {before}", term.token));
            }
            inner.tokens = inner.tokens.max(term.token.get());
            inner.count("terms");
            if sent + LENGTH - MARGIN > inner.now {
                inner.primary(self.seat.id, sent + LENGTH - MARGIN);
            }
            drop(inner);
            self.term = Some(term);
        }
    }

    /// The term that was claimed without an answer, if it was.
    fn own_term(&self) -> Option<Term> {
        let record = self.terms.read().ok()?;
        let holder = record.holder.filter(|holder| holder.nonce == self.claim.nonce)?;
        let term = Term::new(holder.primary.token, record.holder_version, self.claim.nonce.clone());
        self.terms.renew(&term).ok()?;
        self.seat.inner().count("terms begun late");
        Some(term)
    }

    fn lost(&mut self) {
        self.term = None;
        self.seen = None;
        self.seat.inner().until.remove(&self.seat.id);
    }

    fn serve(&mut self, term: &Term) {
        let (now, choice) = {
            let mut inner = self.seat.inner();
            (inner.now, inner.draw(60))
        };
        if now >= self.renewed + RENEWAL {
            self.renew(term);
        } else if choice == 0 {
            let _ = self.terms.release(term, None);
            self.lost();
        } else if choice < 20 {
            self.load(term);
        } else {
            self.write(term);
        }
    }

    fn renew(&mut self, term: &Term) {
        let sent = self.seat.inner().now;
        let renewed = self.terms.renew(term);
        if self.seat.is_dead() {
            return;
        }
        match renewed {
            Ok(()) => {
                self.renewed = sent;
                let mut inner = self.seat.inner();
                inner.count("renewals");
                if sent + LENGTH - MARGIN > inner.now {
                    inner.primary(self.seat.id, sent + LENGTH - MARGIN);
                }
            }
            Err(StoreError::Superseded) => self.lost(),
            Err(_) => {}
        }
    }

    fn load(&mut self, term: &Term) -> Option<(Log, Version)> {
        let before = self.seat.inner().settled.clone();
        match self.terms.load(term, "log") {
            Ok(stored) => {
                let version = stored.as_ref().map_or(Version::ABSENT, |stored| stored.version);
                let log = log(stored.map(|stored| stored.value));
                self.seat.inner().observed(&log, &before, "read");
                Some((log, version))
            }
            Err(StoreError::Superseded) => {
                self.lost();
                None
            }
            Err(_) => None,
        }
    }

    fn write(&mut self, term: &Term) {
        let Some((mut log, expected)) = self.load(term) else { return };
        let before = self.seat.inner().settled.clone();
        let number = {
            let mut inner = self.seat.inner();
            inner.next_write += 1;
            inner.next_write
        };
        log.push(number);
        self.sequence += 1;
        let value: Vec<u8> = log.iter().flat_map(|write| write.to_be_bytes()).collect();
        let write = Write::new("log", expected, self.sequence, Bytes::from(value));
        for _ in 0..3 {
            let written = self.terms.write(term, &write);
            if self.seat.is_dead() {
                return;
            }
            let mut inner = self.seat.inner();
            match written {
                Ok(_) => {
                    inner.count("writes");
                    inner.observed(&log, &before, "written");
                    return;
                }
                Err(StoreError::Unanswered { .. }) => inner.count("writes unanswered"),
                Err(error) => {
                    inner.undone.insert(number);
                    inner.count("writes undone");
                    drop(inner);
                    if matches!(error, StoreError::Superseded) {
                        self.lost();
                    }
                    return;
                }
            }
        }
        // Nobody knows: it may count, so this process writes no more in this term.
        self.lost();
    }
}

fn log(value: Option<Bytes>) -> Log {
    let value = value.unwrap_or_default();
    value.chunks(4).map(|write| u32::from_be_bytes(write.try_into().unwrap())).collect()
}

fn claim(name: &str, life: usize) -> Claim {
    Claim::new(name, InstanceId::new("127.0.0.1", 1), Nonce::new(&format!("{name}-{life}")))
}

fn start(world: &Arc<World>, directory: &Path, id: usize, without: Option<Rule>) -> JoinHandle<()> {
    let seat = Arc::new(Seat { world: world.clone(), id, dead: AtomicBool::new(false) });
    let mut terms = Terms::new(Directory::staged(directory.to_owned(), seat.clone()));
    terms.without = without;
    let claim = claim("counter", id);
    world.inner.lock().running += 1;
    let process = Process { seat, terms, claim, seen: None, term: None, sequence: 0, renewed: 0 };
    std::thread::spawn(move || process.live())
}

/// Runs a world to its end; what happened and what should not have.
fn run(seed: u64, without: Option<Rule>) -> (BTreeMap<&'static str, u32>, Vec<String>) {
    let directory = tempfile::tempdir().unwrap();
    let world = Arc::new(World::default());
    world.inner.lock().random = seed;
    let mut threads: Vec<_> = (0..PROCESSES).map(|id| start(&world, directory.path(), id, without)).collect();
    let mut live: Vec<usize> = (0..PROCESSES).collect();
    let mut paused: BTreeMap<usize, u64> = BTreeMap::new();
    loop {
        let mut inner = world.inner.lock();
        world.changed.wait_while(&mut inner, |inner| inner.running > 0);
        if inner.now >= CALLS || !inner.violations.is_empty() {
            break;
        }
        inner.now += 1;
        let now = inner.now;
        paused.retain(|_, until| *until > now);
        let ready: Vec<_> = live.iter().copied().filter(|id| !paused.contains_key(id)).collect();
        if ready.is_empty() {
            continue;
        }
        let chosen = ready[inner.draw(ready.len() as u64) as usize];
        let fate = match inner.draw(400) {
            0 => Fate::Die,
            1..3 => Fate::Fail(io::ErrorKind::StorageFull),
            3..5 => Fate::Fail(io::ErrorKind::Other),
            5..25 => {
                let length = 1 + inner.draw(3 * LENGTH);
                paused.insert(chosen, now + length);
                continue;
            }
            _ => Fate::Go,
        };
        inner.granted = Some((chosen, fate));
        inner.running += 1;
        world.changed.notify_all();
        if matches!(fate, Fate::Die) {
            inner.count("deaths");
            world.changed.wait_while(&mut inner, |inner| inner.running > 0);
            drop(inner);
            live.retain(|id| *id != chosen);
            let next = threads.len();
            threads.push(start(&world, directory.path(), next, without));
            live.push(next);
        }
    }
    // All of them die where they stand; one that comes after them finds what counts.
    for id in live {
        let mut inner = world.inner.lock();
        inner.granted = Some((id, Fate::Die));
        inner.running += 1;
        world.changed.notify_all();
        world.changed.wait_while(&mut inner, |inner| inner.running > 0);
    }
    for thread in threads {
        thread.join().unwrap();
    }
    let mut inner = world.inner.lock();
    let last = Terms::new(Directory::new(directory.path().to_owned(), false));
    let voids = std::fs::read_dir(directory.path()).unwrap();
    if voids.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("void-")) {
        inner.count("claims given up");
    }
    let term = last.acquire(&last.read().unwrap(), &claim("last", 0)).unwrap();
    let found = log(last.load(&term, "log").unwrap().map(|stored| stored.value));
    let before = inner.settled.clone();
    inner.observed(&found, &before, "found at the end");
    (inner.counts.clone(), inner.violations.clone())
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    let count = std::env::var("SIMULATION_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    0..count.unwrap_or(default)
}

#[test]
fn whatever_dies_or_pauses_before_whatever_call_no_write_is_lost_and_no_two_are_primary() {
    let mut counts: BTreeMap<_, u32> = BTreeMap::new();
    for seed in seeds(60) {
        let (counted, violations) = run(seed, None);
        assert!(violations.is_empty(), "seed {seed}: {violations:#?}");
        for (what, count) in counted {
            *counts.entry(what).or_default() += count;
        }
    }
    println!("{counts:?}");
    // It has all happened.
    for what in
        ["terms", "terms begun late", "deaths", "writes", "writes undone", "writes unanswered", "renewals"]
    {
        assert!(counts.get(what).is_some_and(|count| *count > 5), "{what}: {counts:?}");
    }
}

/// The seed with which a world without the rule goes wrong.
fn goes_wrong_without(rule: Rule) {
    let wrong = seeds(400).find_map(|seed| {
        let (_, violations) = run(seed, Some(rule));
        violations.first().map(|violation| (seed, violation.clone()))
    });
    let (seed, violation) = wrong.expect("a world goes wrong");
    println!("{rule:?}: seed {seed}: {violation}");
}

#[test]
fn without_the_look_after_writing_a_write_is_lost() {
    goes_wrong_without(Rule::LookAfterWriting);
}

#[test]
fn without_the_look_after_renewing_two_are_primary() {
    goes_wrong_without(Rule::LookAfterRenewing);
}

#[test]
fn without_the_look_after_claiming_two_are_primary() {
    goes_wrong_without(Rule::LookAfterClaiming);
}

#[test]
fn going_on_from_a_term_that_has_not_begun_loses_writes() {
    goes_wrong_without(Rule::GoOnFromBegun);
}

#[test]
fn a_write_that_was_overtaken_is_not_undone_for_that() {
    goes_wrong_without(Rule::AskTheLaterTerm);
}

#[test]
fn a_claim_that_is_renamed_into_place_is_claimed_by_two() {
    goes_wrong_without(Rule::ClaimByLink);
}
