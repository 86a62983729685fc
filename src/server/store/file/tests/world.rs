//! One order of everything, drawn by a seed, and what must hold in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::super::directory::Stage;

pub(super) type Log = Vec<u32>;

#[derive(Debug, Clone, Copy)]
pub(super) enum Fate {
    Go,
    Fail(io::ErrorKind),
    Die,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) now: u64,
    pub(super) running: usize,
    pub(super) waiting: BTreeSet<usize>,
    pub(super) granted: Option<(usize, Fate)>,
    pub(super) random: u64,
    /// Nobody reads or writes, so that all calls are about who is primary.
    pub(super) leases_only: bool,
    /// Until when each process takes itself for the primary.
    pub(super) until: BTreeMap<usize, u64>,
    pub(super) next_write: u32,
    /// The longest log that was acknowledged or read.
    pub(super) settled: Log,
    /// Writes that must not be there.
    pub(super) undone: BTreeSet<u32>,
    pub(super) tokens: u64,
    pub(super) counts: BTreeMap<&'static str, u32>,
    pub(super) violations: Vec<String>,
}

#[derive(Debug, Default)]
pub(super) struct World {
    pub(super) inner: Mutex<Inner>,
    pub(super) changed: Condvar,
}

/// A process's place in the world.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) world: Arc<World>,
    pub(super) id: usize,
    pub(super) dead: AtomicBool,
}

// === impl Inner ===

impl Inner {
    /// SplitMix64 (Steele, Lea and Flood, 2014).
    pub(super) fn draw(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    pub(super) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    pub(super) fn violated(&mut self, what: String) {
        let now = self.now;
        self.violations.push(format!("call {now}: {what}"));
    }

    /// `log` was acknowledged or read by an operation that began when `before` was settled.
    pub(super) fn observed(&mut self, log: &Log, before: &Log, what: &str) {
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

    pub(super) fn primary(&mut self, id: usize, until: u64) {
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
    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.world.inner.lock()
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }
}
