//! The words of primary and standby that both halves share, and the form in which
//! a standby's refusal crosses the wire.

use std::fmt;

use tokio::time::Instant;

use crate::instance::{InstanceId, Shown};

/// Counts the terms of one lease: each new primary's is greater than any before, so
/// that whatever takes writes from primaries can refuse a deposed one's by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

/// Who is primary, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Primary {
    /// The instance's name, for example `counter-a`.
    pub instance: String,
    /// Where it serves.
    pub address: InstanceId,
    /// The token of its term. Of two that claim to be primary, the greater one's is right.
    pub token: FencingToken,
}

/// What an instance may do, at this moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// It is the one that may write.
    Primary {
        /// Of its term.
        token: FencingToken,
        /// When it is primary no more unless the lease is renewed, by this process's own
        /// monotonic clock. A reader compares it with now: the value may be older than that.
        until: Instant,
    },
    /// Another is, or nobody yet.
    Standby {
        /// The primary, where it is known.
        primary: Option<Primary>,
    },
    /// The store could not say. Fenced like a standby.
    Unknown,
}

// === impl FencingToken ===

impl FencingToken {
    /// The token of the term with this number; the first term's is 1.
    pub const fn new(term: u64) -> Self {
        Self(term)
    }

    /// The number of the term.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl Primary ===

impl Primary {
    /// The instance called `instance`, which serves at `address`, in the term of `token`.
    pub fn new(instance: impl Into<String>, address: InstanceId, token: FencingToken) -> Self {
        Self { instance: instance.into(), address, token }
    }
}

/// `counter-a at 10.0.0.7:50051, term 3`, long names cut.
impl fmt::Display for Primary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}, term {}", Shown(&self.instance), Shown(self.address.authority()), self.token)
    }
}

// === impl Role ===

impl Role {
    /// The token, where this is a primary's role and still is at `now`.
    pub fn primary_at(&self, now: Instant) -> Option<FencingToken> {
        match self {
            Self::Primary { token, until } if now < *until => Some(*token),
            _ => None,
        }
    }
}
