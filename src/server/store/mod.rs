//! Where a lease and the state beside it are kept.
//!
//! Whatever the store, its record of a lease has two parts: the *holder*, which changes only
//! when the primary does, and the *heartbeat*, which changes with each renewal. Every step is a
//! comparison and a write in one: it is done when what was read is still so, and not at all otherwise.

mod consul;
mod file;
pub(in crate::server) mod key;

use std::{error::Error, fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use tower::util::rng::{HasherRng, Rng};

use crate::{
    instance::InstanceId,
    role::{FencingToken, Primary},
};

pub use self::file::{FileLeaseStore, FileLeaseStoreBuilder, InvalidFileStore};
pub use consul::{ConsulLeaseStore, ConsulLeaseStoreBuilder, InvalidConsulStore};

/// Which write a value in a store is from. Two reads that give the same version have seen the
/// same write. What the number counts is the store's own affair; it need not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version(u64);

/// Told to nobody else, so that a process knows its own writes again.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Nonce(Arc<str>);

/// Who holds, or held, the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The instance, its address and its term's token.
    pub primary: Primary,
    /// Of the process.
    pub nonce: Nonce,
    /// Its lease's, by which it stops: nobody may take it over sooner. In whole milliseconds. `None`: it
    /// did not say.
    pub length: Option<Duration>,
}

/// A lease as it was at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseRecord {
    /// Nobody, where the lease has never been held or its record was deleted.
    pub holder: Option<Holder>,
    /// The holder has given it up: it may be taken over at once.
    pub released: bool,
    /// The instance that is to take it over, where a release named one: others leave it the
    /// first word for the lease's length.
    pub successor: Option<String>,
    /// Of the holder's part; [`Version::ABSENT`] where there is none.
    pub holder_version: Version,
    /// Of the heartbeat; [`Version::ABSENT`] where there is none.
    pub heartbeat_version: Version,
}

/// What an instance says of itself when it takes a lease.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Claim {
    /// Its name.
    pub instance: String,
    /// Where it serves.
    pub address: InstanceId,
    /// Of this process.
    pub nonce: Nonce,
    /// Of its lease, told again by [`Holder::length`]. Whole milliseconds are kept of it, rounded up.
    pub length: Option<Duration>,
}

/// A term that this process has begun: what it shows to a store to be let in.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Term {
    /// Greater than any token before.
    pub token: FencingToken,
    /// The version of the holder's part that began it.
    pub holder_version: Version,
    /// Of this process.
    pub nonce: Nonce,
}

/// A value of the state beside the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stored {
    /// Of this value, to be expected by the next write.
    pub version: Version,
    /// In whose term it was written.
    pub token: FencingToken,
    /// The how manieth write of its term it is, as the writer said.
    pub sequence: u64,
    /// What was written.
    pub value: Bytes,
}

/// A write of the state beside the lease.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Write {
    /// Which value: 1 to 64 letters, digits, `-`, `_` or `.`, not beginning with `.`.
    pub key: String,
    /// The version that it replaces.
    pub expected: Version,
    /// Told again by [`Stored::sequence`], so that a write without an answer is found again.
    /// Unlike any other of the term.
    pub sequence: u64,
    /// What is to be there.
    pub value: Bytes,
}

/// Why a step was not done, or may not have been. "No" and "could not find out" are told apart.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No: another holder or heartbeat is there than the step went by. Nothing was written.
    #[error("the lease is no longer as it was read")]
    Superseded,
    /// No: the lease is as it should be, the value is not of the version expected. Nothing was written.
    #[error("the value has been written meanwhile")]
    Conflict,
    /// It may have been written, or still be: no answer came.
    #[error("the store gave no answer, so it may or may not have been written")]
    Unanswered {
        /// What happened.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The store could not be asked, or could not answer. Nothing was written.
    #[error("the store cannot be asked")]
    Unavailable {
        /// What happened.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The store will not do this, whenever it is asked: a right is missing, for example. Nothing
    /// was written.
    #[error("the store refuses: {reason}")]
    Refused {
        /// What it said, without secrets.
        reason: String,
    },
    /// The value does not fit. Nothing was written.
    #[error("the value has {size} bytes, more than the {limit} that the store takes")]
    TooLarge {
        /// Of the value, in bytes.
        size: usize,
        /// The store's, in bytes.
        limit: usize,
    },
    /// What is there cannot be read as what it should be.
    #[error("what the store has at {place} is not understood: {reason}")]
    NotUnderstood {
        /// The key or file.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Keeps one lease, and the state that only its holder may write.
///
/// A step's answer is final: what it says was not written never will be, unless it is
/// [`StoreError::Unanswered`]. Every method bounds its own time. Clocks of other machines have no
/// part in it: a store only ever says whether something has changed.
///
/// # Cancel safety
/// A dropped future of a step that writes is a write without an answer.
#[async_trait]
pub trait LeaseStore: fmt::Debug + Send + Sync + 'static {
    /// The lease as it is now: never from a cache, never from a server that may be behind.
    ///
    /// # Errors
    /// [`Unavailable`](StoreError::Unavailable), [`Refused`](StoreError::Refused). A part that is not
    /// understood is no error: it is there with its version and no holder, so that it can be replaced.
    async fn read(&self) -> Result<LeaseRecord, StoreError>;

    /// The lease as soon as it is other than `seen`, or after about `wait` as it is then. It serves
    /// to be woken sooner; what a takeover goes by is [`read`](Self::read).
    ///
    /// # Errors
    /// As [`read`](Self::read).
    async fn changed(&self, seen: &LeaseRecord, wait: Duration) -> Result<LeaseRecord, StoreError>;

    /// Begins a new term for `claim`, if holder and heartbeat are still of the versions in `seen`.
    /// Its token is greater than the one in the record, those beside the state, and any that this
    /// store has seen.
    ///
    /// # Errors
    /// [`Superseded`](StoreError::Superseded) where they are not. After
    /// [`Unanswered`](StoreError::Unanswered), [`read`](Self::read) and look for the own nonce.
    async fn acquire(&self, seen: &LeaseRecord, claim: &Claim) -> Result<Term, StoreError>;

    /// Writes the heartbeat, if the holder is still the term's.
    ///
    /// # Errors
    /// [`Superseded`](StoreError::Superseded) where it is not.
    async fn renew(&self, term: &Term) -> Result<(), StoreError>;

    /// Marks the lease as given up, for `successor` first if one is named, if the holder is still
    /// the term's. Nothing can be written in this term afterwards. Another may hold the lease before
    /// this returns: whoever calls it ceases to be primary first.
    ///
    /// # Errors
    /// [`Superseded`](StoreError::Superseded) where it is not, which is as good.
    async fn release(&self, term: &Term, successor: Option<&str>) -> Result<(), StoreError>;

    /// The value called `key`, if the holder is still the term's when it is read: what this gives
    /// is what the last acknowledged write left. `None`: never written.
    ///
    /// # Errors
    /// [`Superseded`](StoreError::Superseded) where the holder is another.
    async fn load(&self, term: &Term, key: &str) -> Result<Option<Stored>, StoreError>;

    /// Writes a value, if the holder is still the term's and the value of the version expected
    /// ([`Version::ABSENT`]: not there).
    ///
    /// # Errors
    /// [`Superseded`](StoreError::Superseded), [`Conflict`](StoreError::Conflict),
    /// [`TooLarge`](StoreError::TooLarge). After [`Unanswered`](StoreError::Unanswered) the same
    /// write may be sent again: it is done once at the most, and [`Stored::sequence`] tells.
    async fn write(&self, term: &Term, write: &Write) -> Result<Version, StoreError>;

    /// The longest value that [`write`](Self::write) takes, in bytes.
    fn value_limit(&self) -> usize;
}

// === impl Version ===

impl Version {
    /// Of what is not there.
    pub const ABSENT: Self = Self(0);

    /// The version that a store calls by this number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The store's number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

// === impl Nonce ===

impl Nonce {
    /// As it was written.
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// One that no other process has: 128 bits of the system's randomness.
    pub fn random() -> Self {
        let mut random = HasherRng::new();
        Self(format!("{:016x}{:016x}", random.next_u64(), HasherRng::new().next_u64()).into())
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// No secret, but long: its beginning tells one from another.
impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.get(..8).unwrap_or(&self.0))
    }
}

// === impl the records ===

impl Holder {
    /// `primary`, in the process of `nonce`.
    pub fn new(primary: Primary, nonce: Nonce) -> Self {
        Self { primary, nonce, length: None }
    }

    /// As it is kept.
    fn with_length_ms(self, length: Option<u64>) -> Self {
        Self { length: length.map(Duration::from_millis), ..self }
    }

    fn length_ms(&self) -> Option<u64> {
        self.length.map(in_ms)
    }
}

/// Rounded up, so that nobody waits less.
fn in_ms(length: Duration) -> u64 {
    u64::try_from(length.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl LeaseRecord {
    /// Of a lease that nobody has ever held.
    pub fn empty() -> Self {
        Self {
            holder: None,
            released: false,
            successor: None,
            holder_version: Version::ABSENT,
            heartbeat_version: Version::ABSENT,
        }
    }
}

impl Claim {
    /// `instance`, which serves at `address`, in the process of `nonce`.
    pub fn new(instance: impl Into<String>, address: InstanceId, nonce: Nonce) -> Self {
        Self { instance: instance.into(), address, nonce, length: None }
    }

    /// Says how long the lease is.
    #[must_use]
    pub fn with_length(self, length: Duration) -> Self {
        Self { length: Some(length), ..self }
    }

    /// The holder that this makes in the term of `token`.
    pub(in crate::server) fn holder(&self, token: FencingToken) -> Holder {
        let primary = Primary::new(&*self.instance, self.address.clone(), token);
        Holder::new(primary, self.nonce.clone()).with_length_ms(self.length.map(in_ms))
    }
}

impl Term {
    /// The term of `token` that began with the holder's part at `holder_version`.
    pub fn new(token: FencingToken, holder_version: Version, nonce: Nonce) -> Self {
        Self { token, holder_version, nonce }
    }
}

impl Stored {
    /// `value` at `version`, the `sequence`th of the term of `token`.
    pub fn new(version: Version, token: FencingToken, sequence: u64, value: Bytes) -> Self {
        Self { version, token, sequence, value }
    }
}

impl Write {
    /// `value` for `key`, in place of the one at `expected`.
    pub fn new(key: impl Into<String>, expected: Version, sequence: u64, value: Bytes) -> Self {
        Self { key: key.into(), expected, sequence, value }
    }
}

// === impl StoreError ===

impl StoreError {
    /// Whether the step may have been done, or may still be.
    pub fn may_have_happened(&self) -> bool {
        matches!(self, Self::Unanswered { .. })
    }
}

const _: () = {
    const fn shareable<T: Send + Sync + 'static>() {}
    const fn usable_as_object(_: &dyn LeaseStore) {}
    shareable::<StoreError>();
    let _ = usable_as_object;
};
