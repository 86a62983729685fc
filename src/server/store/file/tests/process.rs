//! A process that campaigns, writes and reads, and notes what it was told.

use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    thread::JoinHandle,
};

use bytes::Bytes;

use super::{
    super::{
        directory::{Directory, Stage},
        terms::{Rule, Terms},
    },
    LENGTH, MARGIN, RENEWAL,
    world::{Log, Seat, World},
};
use crate::{
    instance::InstanceId,
    server::store::{Claim, LeaseRecord, Nonce, StoreError, Term, Version, Write},
};

pub(super) struct Process {
    seat: Arc<Seat>,
    terms: Terms,
    claim: Claim,
    seen: Option<(LeaseRecord, u64)>,
    term: Option<Term>,
    sequence: u64,
    renewed: u64,
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
        let is_new = acquired.is_ok();
        let term = match acquired {
            Ok(term) => Some(term),
            Err(StoreError::Unanswered { .. }) => self.own_term(),
            Err(_) => None,
        };
        if let Some(term) = term {
            self.seen = None;
            self.renewed = sent;
            let mut inner = self.seat.inner();
            // One without an answer may be the term that this process has left before.
            if is_new && term.token.get() <= before {
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
            (inner.now, if inner.leases_only { None } else { Some(inner.draw(60)) })
        };
        if now >= self.renewed + RENEWAL {
            self.renew(term);
        } else if choice == Some(0) {
            // Primary no more from here on: another may be before this returns.
            self.lost();
            let _ = self.terms.release(term, None);
        } else if choice.is_some_and(|choice| choice < 20) {
            self.load(term);
        } else if choice.is_some() {
            self.write(term);
        } else {
            let _ = self.seat.enter("idle");
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
            let mut written = self.terms.write(term, &write);
            if matches!(written, Err(StoreError::Conflict)) {
                // Sent before, and there.
                match self.terms.load(term, "log") {
                    Ok(Some(stored)) if stored.token == term.token && stored.sequence == self.sequence => {
                        written = Ok(stored.version);
                    }
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
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

pub(super) fn log(value: Option<Bytes>) -> Log {
    let value = value.unwrap_or_default();
    value.chunks(4).map(|write| u32::from_be_bytes(write.try_into().unwrap())).collect()
}

pub(super) fn claim(name: &str, life: usize) -> Claim {
    Claim::new(name, InstanceId::new("127.0.0.1", 1), Nonce::new(&format!("{name}-{life}")))
}

pub(super) fn start(
    world: &Arc<World>,
    directory: &Path,
    id: usize,
    without: Option<Rule>,
) -> JoinHandle<()> {
    let seat = Arc::new(Seat { world: world.clone(), id, dead: AtomicBool::new(false) });
    let mut terms = Terms::new(Directory::staged(directory.to_owned(), seat.clone()));
    terms.without = without;
    let claim = claim("counter", id);
    world.inner.lock().running += 1;
    let process = Process { seat, terms, claim, seen: None, term: None, sequence: 0, renewed: 0 };
    let thread = std::thread::spawn(move || process.live());
    // Until it stands before its first call, so that one runs at a time.
    let mut inner = world.inner.lock();
    world.changed.wait_while(&mut inner, |inner| inner.running > 0);
    drop(inner);
    thread
}
