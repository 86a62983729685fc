//! A lease in files, for processes on one host.
//!
//! No lock is held across a write: a paused holder would block everyone. Instead each term has
//! files of its own, and whoever writes looks for a newer term before it says so:
//!
//! ```text
//!  term-7       who claims term 7; finished and synced first, then linked: the first link wins
//!  void-7       the claim was given up: the primary had renewed after all
//!  state-7-key  a value, renamed into place; a new term begins with links to the last one's
//!  heartbeat-7  the last renewal, renamed into place; all but the first say that the term has begun
//!  start-7      all of the state is there; which term and which writes it is from
//!  released-7   the term was given up
//!
//!  holder of 7:   rename state-7-key   ->  look: a term above 7?  no -> acknowledged
//!  claimant of 8: link term-8          ->  read the heartbeat and the state of 7
//! ```
//!
//! The kernel puts the two in one order, so one of them sees the other: a write that was
//! acknowledged is among those that the new term begins with, and so with a renewal. A paused holder
//! that wakes up writes into its own old term, which nobody reads any more.
//!
//! A term counts from its `start` on, so a claimant that dies on the way leaves a claim over which
//! the next goes on from the last term that has begun. Where somebody has deleted a `start`, a renewal, a release or a
//! value written in the term prove that it has begun.

mod base;
mod contents;
mod directory;
mod error;
mod lane;
mod names;
mod terms;
#[cfg(test)]
mod tests;
mod values;

use std::{path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::time::{Instant, sleep};

use self::{directory::Directory, lane::Lane, terms::Terms, values::LONGEST_VALUE};
use super::{Claim, LeaseRecord, LeaseStore, StoreError, Stored, Term, Version, Write};

pub use self::error::InvalidFileStore;

/// A lease in a directory, for processes on one host.
///
/// ```no_run
/// # use tonic_failover::server::store::FileLeaseStore;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = FileLeaseStore::new("/var/lib/counter/lease")?;
/// # Ok(()) }
/// ```
///
/// The directory is for one lease alone, and its files are for the store alone: to begin anew, end
/// all processes and empty it. What is put there by others, cut or emptied never counts as a
/// free lease: a claim that cannot be read is held by nobody known, and may be taken over when it has
/// not changed for the lease's length; a value that cannot be read, or that is missing where it must have been, is an
/// error that names its file, and is not replaced. What is no file (a FIFO, a directory, a device) is not opened, and
/// is such an error, too. All processes run as one user, since Linux lets nobody link
/// others' files (`fs.protected_hardlinks`).
///
/// Where the directory is away, or another one is in its place that has not the terms which this process has seen (what
/// it is on is no longer mounted, for example), nobody is primary until it is back.
///
/// **Not for network file systems**: the order of links, renames and listings that it depends on is one
/// kernel's. Nor for several hosts, nor for containers that do not share the directory's
/// mount.
///
/// A step on a disk that hangs goes on in its thread of tokio's blocking pool, one thread for each kind of step that
/// writes and four for those that read; the runtime's shutdown waits for them unless it is
/// told not to (`shutdown_background`).
#[derive(Debug)]
pub struct FileLeaseStore {
    terms: Arc<Terms>,
    poll: Duration,
    reads: Lane,
    claims: Lane,
    heartbeats: Lane,
    writes: Lane,
}

/// Settings of a [`FileLeaseStore`].
#[derive(Clone, Debug)]
pub struct FileLeaseStoreBuilder {
    directory: PathBuf,
    durable: bool,
    poll: Duration,
    step_timeout: Duration,
}

// === impl FileLeaseStore ===

impl FileLeaseStore {
    /// In `directory`, with the default settings.
    ///
    /// # Errors
    /// As [`FileLeaseStoreBuilder::build`].
    pub fn new(directory: impl Into<PathBuf>) -> Result<Self, InvalidFileStore> {
        Self::builder(directory).build()
    }

    /// In `directory`, with other settings.
    pub fn builder(directory: impl Into<PathBuf>) -> FileLeaseStoreBuilder {
        FileLeaseStoreBuilder {
            directory: directory.into(),
            durable: true,
            poll: Duration::from_millis(50),
            step_timeout: Duration::from_secs(1),
        }
    }

    fn terms(&self) -> Arc<Terms> {
        self.terms.clone()
    }
}

#[async_trait]
impl LeaseStore for FileLeaseStore {
    async fn read(&self) -> Result<LeaseRecord, StoreError> {
        let terms = self.terms();
        self.reads.read(move || terms.read()).await
    }

    async fn changed(&self, seen: &LeaseRecord, wait: Duration) -> Result<LeaseRecord, StoreError> {
        let until = Instant::now() + wait;
        loop {
            let record = self.read().await?;
            let left = until.saturating_duration_since(Instant::now());
            if record != *seen || left.is_zero() {
                return Ok(record);
            }
            sleep(self.poll.min(left)).await;
        }
    }

    async fn acquire(&self, seen: &LeaseRecord, claim: &Claim) -> Result<Term, StoreError> {
        let (terms, seen, claim) = (self.terms(), seen.clone(), claim.clone());
        self.claims.write(move || terms.acquire(&seen, &claim)).await
    }

    async fn renew(&self, term: &Term) -> Result<(), StoreError> {
        let (terms, term) = (self.terms(), term.clone());
        self.heartbeats.write(move || terms.renew(&term)).await
    }

    async fn release(&self, term: &Term, successor: Option<&str>) -> Result<(), StoreError> {
        let (terms, term, successor) = (self.terms(), term.clone(), successor.map(str::to_owned));
        self.claims.write(move || terms.release(&term, successor.as_deref())).await
    }

    async fn load(&self, term: &Term, key: &str) -> Result<Option<Stored>, StoreError> {
        let (terms, term, key) = (self.terms(), term.clone(), key.to_owned());
        self.reads.read(move || terms.load(&term, &key)).await
    }

    async fn write(&self, term: &Term, write: &Write) -> Result<Version, StoreError> {
        let (terms, term, write) = (self.terms(), term.clone(), write.clone());
        self.writes.write(move || terms.write(&term, &write)).await
    }

    fn value_limit(&self) -> usize {
        LONGEST_VALUE
    }
}

// === impl FileLeaseStoreBuilder ===

impl FileLeaseStoreBuilder {
    /// Whether a step that was acknowledged outlasts the machine's failure.
    ///
    /// True: claims and values are on the disk (`fsync` of the file and of the directory) before they are
    /// acknowledged, so they outlast a power cut as far as the disk keeps what it has said to keep.
    /// False: they outlast the death of any process, but a power cut or a kernel's crash may take the
    /// last seconds' writes, and even a term whose token others have seen. Renewals are never
    /// synced: after a crash of the machine nobody is left whom they could be about.
    ///
    /// Default: true.
    #[must_use]
    pub fn durable(mut self, durable: bool) -> Self {
        self.durable = durable;
        self
    }

    /// How often [`changed`](LeaseStore::changed) looks; from 1 ms to 10 s. A look lists the directory and reads
    /// two small files.
    ///
    /// Default: 50 ms.
    #[must_use]
    pub fn poll(mut self, interval: Duration) -> Self {
        self.poll = interval;
        self
    }

    /// How long a step is waited for; from 10 ms to 60 s. One that writes goes on and is
    /// [`Unanswered`](StoreError::Unanswered).
    ///
    /// Default: 1 s.
    #[must_use]
    pub fn step_timeout(mut self, limit: Duration) -> Self {
        self.step_timeout = limit;
        self
    }

    /// Makes and links a file in the directory, to see that it can be done. Blocks for as
    /// long as that takes.
    ///
    /// # Errors
    /// [`InvalidFileStore`]: there is no such directory, it is not writable, its file system has
    /// no hard links, or a setting is out of its bounds.
    pub fn build(self) -> Result<FileLeaseStore, InvalidFileStore> {
        let bounds = [
            ("poll", self.poll, Duration::from_millis(1), Duration::from_secs(10)),
            ("step_timeout", self.step_timeout, Duration::from_millis(10), Duration::from_secs(60)),
        ];
        for (setting, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                return Err(InvalidFileStore::Setting { setting, value, least, most });
            }
        }
        let directory = Directory::new(self.directory, self.durable);
        directory.try_out()?;
        let lane = |places| Lane::new(places, directory.path(), self.step_timeout);
        let (reads, claims, heartbeats, writes) = (lane(4), lane(1), lane(1), lane(1));
        let terms = Arc::new(Terms::new(directory));
        Ok(FileLeaseStore { terms, poll: self.poll, reads, claims, heartbeats, writes })
    }
}
