//! What the tasks of one agent share.

use std::{
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use super::{
    catalog::{Catalog, Health, NodeRecord, Pairs},
    checks::Checks,
    counters::Tally,
    definition::{CheckKind, Definition},
    faults::{Effect, Table},
    waiting::Abandoned,
};

/// How often a real agent looks for services that were critical for too long.
/// The `CheckReapInterval` in its answer to `/v1/agent/self`.
const REAP_EVERY: Duration = Duration::from_secs(30);

/// One agent, alone in its datacenter.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) addr: SocketAddr,
    pub(crate) datacenter: String,
    pub(crate) catalog: Mutex<Catalog>,
    pub(crate) faults: Arc<Table>,
    pub(crate) tally: Arc<Tally>,
    pub(crate) checks: Checks,
    pub(crate) abandoned: Abandoned,
    /// The other datacenters; one whose agent is gone stays listed.
    peers: Mutex<Vec<(String, Weak<Node>)>>,
    /// Moves whenever the catalog may have.
    moved: watch::Sender<()>,
    closed: AtomicBool,
}

/// The way to another datacenter.
pub(crate) enum Peer {
    Open(Arc<Node>),
    /// Its agent is gone.
    Closed,
    Unknown,
}

// === impl Node ===

impl Node {
    pub(crate) fn new(datacenter: &str, addr: SocketAddr) -> Arc<Self> {
        let random = RandomState::new();
        let (high, low) = (random.hash_one((datacenter, addr)), random.hash_one(addr));
        let record = NodeRecord {
            id: format!(
                "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
                high >> 32,
                (high >> 16) & 0xffff,
                high & 0xffff,
                low >> 48,
                low & 0xffff_ffff_ffff
            ),
            name: format!("{datacenter}-s1"),
            datacenter: datacenter.to_owned(),
        };
        Arc::new(Self {
            addr,
            datacenter: datacenter.to_owned(),
            catalog: Mutex::new(Catalog::new(record)),
            faults: Arc::default(),
            tally: Tally::new(),
            checks: Checks::default(),
            abandoned: Abandoned::default(),
            peers: Mutex::default(),
            moved: watch::Sender::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// Makes two datacenters know each other.
    pub(crate) fn join(self: &Arc<Self>, other: &Arc<Self>) {
        for (one, another) in [(self, other), (other, self)] {
            one.peers.lock().push((another.datacenter.clone(), Arc::downgrade(another)));
        }
    }

    /// All datacenters, the own one first.
    pub(crate) fn datacenters(&self) -> Vec<String> {
        let mut others: Vec<_> = self.peers.lock().iter().map(|(name, _)| name.clone()).collect();
        if self.is_unjoined() {
            others.clear();
        }
        others.sort();
        others.insert(0, self.datacenter.clone());
        others
    }

    pub(crate) fn peer(&self, datacenter: &str) -> Peer {
        match self.peers.lock().iter().find(|(name, _)| name == datacenter) {
            _ if self.is_unjoined() => Peer::Unknown,
            None => Peer::Unknown,
            Some((_, peer)) => match peer.upgrade() {
                Some(peer) if !peer.is_closed() => Peer::Open(peer),
                _ => Peer::Closed,
            },
        }
    }

    fn is_unjoined(&self) -> bool {
        self.faults.is(|it| matches!(it, Effect::Unjoined))
    }

    /// Tells blocked queries that the catalog may have changed.
    pub(crate) fn changed(&self) {
        self.moved.send_replace(());
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.moved.subscribe()
    }

    pub(crate) fn register(self: &Arc<Self>, definition: Definition, replace: bool) {
        let started = self.catalog.lock().register(definition, replace, Instant::now());
        self.changed();
        for id in &started.gone {
            self.checks.stop(id);
        }
        for check in &started.checks {
            self.checks.start(self, check);
        }
    }

    pub(crate) fn deregister(&self, id: &str) {
        let gone = self.catalog.lock().deregister(id);
        self.changed();
        for check in &gone {
            self.checks.stop(check);
        }
    }

    /// Takes a heartbeat; false where there is no such TTL check.
    pub(crate) fn beat(self: &Arc<Self>, check: &str, status: Health, output: &str) -> bool {
        let Some(ttl) = self.catalog.lock().ttl(check) else { return false };
        self.checks.run(self, check, &CheckKind::Ttl(ttl), (0, 0));
        self.set(check, status, output);
        true
    }

    pub(crate) fn set(&self, check: &str, status: Health, output: &str) {
        self.catalog.lock().set(check, status, output, Instant::now());
        self.changed();
    }

    /// Changes keys; the number is the index of the change.
    pub(crate) fn change<T>(&self, how: impl FnOnce(&mut Pairs, u64) -> T) -> T {
        let told = self.catalog.lock().change(how);
        self.changed();
        told
    }

    /// Forgets every registration and every key, and ends every check.
    pub(crate) fn forget(&self) {
        self.checks.stop_all();
        self.catalog.lock().forget();
        self.changed();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Ends what runs by itself; there is no way back.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.checks.close();
        self.changed();
    }

    /// Takes services out that were critical for too long, for ever.
    pub(crate) async fn reap(self: Arc<Self>) {
        loop {
            sleep(REAP_EVERY).await;
            let overdue = self.catalog.lock().overdue(Instant::now());
            for id in overdue {
                self.deregister(&id);
            }
        }
    }
}
