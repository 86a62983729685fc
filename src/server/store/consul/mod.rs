//! Consul as the store of a lease.

mod keys;
mod outcome;
mod record;
mod steps;

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    consul::{BlockingIndex, ConfigError, ConsulClient, ConsulConfig},
    server::store::LeaseRecord,
};
use keys::Keys;

/// A question to an agent ends after this unless the setting says otherwise. Our choice: two agents
/// can be asked in turn within the time that the default lease of 2 s leaves to a renewal.
const TRY_TIMEOUT: Duration = Duration::from_millis(500);
const TRY_TIMEOUTS: std::ops::RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(60);

/// Keeps a lease and its state in Consul's key/value store, each step one transaction
/// (<https://developer.hashicorp.com/consul/api-docs/txn>).
///
/// # Keys
/// All of them are below the prefix, so it should be nobody else's:
///
/// | key | holds | flags |
/// |---|---|---|
/// | `<prefix>/lease/holder` | instance, address, nonce, token, the lease's length, whether released, in JSON | the token |
/// | `<prefix>/lease/heartbeat` | something else at each renewal | the token |
/// | `<prefix>/lease/term/<token>-<nonce>` | the instance; there is one such key, that of the term | the token |
/// | `<prefix>/state/<key>` | a line `sequence <number>`, then the value as it is | the token of the term that wrote it |
///
/// # Steps
/// | step | goes by | writes |
/// |---|---|---|
/// | acquire | holder and heartbeat have the indexes seen, the seen term's key is there | holder, heartbeat, the key of the new term instead of any other |
/// | renew | the holder has the term's index, the term's key is there | heartbeat |
/// | release | the same | holder |
/// | write | the same, and the value has the index expected | the value |
/// | load | the same | nothing: it is a consistent read |
///
/// # Tokens
/// A new term's token is 1 more than any in the holder's key, beside it, beside the state, and any that this
/// value has ever met. So it grows, too, when somebody deletes or overwrites keys, while a process lives that
/// knows better or the state is left. The state is read for it all at once, in one answer of
/// [`max_answer_bytes`](ConsulConfig::max_answer_bytes) at the most; where that fails, the holder's own
/// token counts, which is as high as any beside the state.
///
/// # When Consul loses its data or is put back to an older state
/// Consul's indexes can be lower afterwards than those that processes remember, and name other writes.
/// A deposed primary's index may then be that of another's record by chance. Its steps fail all the same,
/// since they need the key of their own term, whose name no other term has, and a new term deletes it.
/// So, whatever the indexes do, a step succeeds only in a state of the store in which its term is the last
/// one begun.
///
/// What cannot be promised: a snapshot that is restored brings back the term of its time with its state, and takes back
/// all that was acknowledged since. If the primary of that time still runs, believes itself primary and has had no
/// answer since it was deposed, its writes continue the restored state. And tokens given after the snapshot
/// may be given once more, unless a process that has met them takes the lease. Stop all instances before
/// restoring, if others keep these tokens.
///
/// # Several agents
/// With [`ConsulConfig::more_agents`] a step goes to the next agent when one is down, hangs or knows no server.
/// Each has the [`try_timeout`](ConsulLeaseStoreBuilder::try_timeout); a step takes as long as all of them at the most.
/// Renewals and releases go on, too, when an agent took the request and did not answer, since doing them twice is as
/// good as once; an acquisition or a write is [unanswered](crate::server::store::StoreError::Unanswered) then.
/// An agent that failed rests for up to 1 s, then 2 s and so on up to 30 s, as for other questions.
///
/// # Rights
/// Where Consul's ACLs are on, the token needs, for the prefix `services/counter`:
/// ```hcl
/// key_prefix "services/counter/" { policy = "write" }
/// ```
///
/// # Limits
/// A value may have 380 KiB: Consul takes 512 KiB of a transaction's JSON, in which it stands in Base64
/// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#txn_max_req_len>). The prefix may have
/// 128 letters.
#[derive(Debug)]
pub struct ConsulLeaseStore {
    consul: ConsulClient,
    keys: Keys,
    try_timeout: Duration,
    /// The highest token met that has another above it.
    token: AtomicU64,
    /// The key that was read last with the greatest number.
    last: Mutex<Option<String>>,
    /// Of heartbeats written, so that each differs from the one before.
    beats: AtomicU64,
    /// The record that was read last by waiting, and what to wait beyond for another.
    watched: Mutex<Option<(LeaseRecord, BlockingIndex)>>,
}

/// Settings of a [`ConsulLeaseStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct ConsulLeaseStoreBuilder {
    config: ConsulConfig,
    prefix: String,
    try_timeout: Duration,
}

/// Why there can be no [`ConsulLeaseStore`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidConsulStore {
    /// The prefix would not arrive as it is.
    #[error(
        "the prefix {prefix:?} {problem}: parts of letters, digits, `-`, `_` and `.` with slashes between them \
         make one, for example `services/counter`"
    )]
    Prefix {
        /// The prefix given, its beginning.
        prefix: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The time is out of its bounds.
    #[error("try_timeout is {given:?}: 10 ms to 60 s will do")]
    TryTimeout {
        /// The time given.
        given: Duration,
    },
    /// The way to Consul.
    #[error("Consul cannot be asked with this configuration")]
    Config {
        /// Which setting, and why.
        #[from]
        source: ConfigError,
    },
}

// === impl ConsulLeaseStore ===

impl ConsulLeaseStore {
    /// Keeps a lease below `prefix`, for example `services/counter`, in the Consul of `config`.
    /// Asks nothing yet. Takes some 40 ms for TLS.
    ///
    /// # Errors
    /// Names the setting that cannot be used.
    pub fn new(config: ConsulConfig, prefix: impl Into<String>) -> Result<Self, InvalidConsulStore> {
        Self::builder(config, prefix).build()
    }

    /// As [`new`](Self::new), with more to set.
    pub fn builder(config: ConsulConfig, prefix: impl Into<String>) -> ConsulLeaseStoreBuilder {
        ConsulLeaseStoreBuilder { config, prefix: prefix.into(), try_timeout: TRY_TIMEOUT }
    }

    /// What all keys begin with, a slash at the end.
    fn prefix(&self) -> String {
        self.keys.all()
    }

    /// Remembers a token that was met. The greatest number is none: when it has been repaired it is
    /// as if it had never been.
    fn meet(&self, token: u64) {
        if token < u64::MAX {
            self.token.fetch_max(token, Ordering::Relaxed);
        }
    }
}

// === impl ConsulLeaseStoreBuilder ===

impl ConsulLeaseStoreBuilder {
    /// How long one agent may take over one question, connecting included, beyond the time
    /// that it is asked to wait for news; 10 ms to 60 s. It takes the place of
    /// [`ConsulConfig::request_timeout`], and connecting may take four fifths of it at the most. Together with the
    /// number of agents it must leave a renewal time within the lease. Default: 500 ms.
    pub fn try_timeout(mut self, limit: Duration) -> Self {
        self.try_timeout = limit;
        self
    }

    /// The store. Asks nothing yet. Takes some 40 ms for TLS.
    ///
    /// # Errors
    /// Names the setting that cannot be used.
    pub fn build(self) -> Result<ConsulLeaseStore, InvalidConsulStore> {
        let Self { config, prefix, try_timeout } = self;
        let keys = Keys::new(prefix)?;
        if !TRY_TIMEOUTS.contains(&try_timeout) {
            return Err(InvalidConsulStore::TryTimeout { given: try_timeout });
        }
        // An agent that cannot be connected to must be told from one that does not answer.
        let config = config.connecting_within(try_timeout * 4 / 5).request_timeout(try_timeout);
        Ok(ConsulLeaseStore {
            consul: ConsulClient::new(config)?,
            keys,
            try_timeout,
            token: AtomicU64::new(0),
            last: Mutex::default(),
            beats: AtomicU64::new(0),
            watched: Mutex::default(),
        })
    }
}
