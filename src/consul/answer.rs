//! What came back.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    Denied, RegistryError,
    instances::{self, Wanted},
    secrets::Answer,
};
use crate::instance::Snapshot;

/// How long a server may be without word from its leader before its stale answers
/// count as old. A healthy follower hears from it many times a second and gives
/// it up after 5 s with the default settings (`raft_multiplier` 5,
/// <https://developer.hashicorp.com/consul/docs/install/performance>); this is twice that.
const OUT_OF_TOUCH: Duration = Duration::from_secs(10);

/// The registry's answer to a [`HealthQuery`](super::HealthQuery).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HealthAnswer {
    /// The usable instances.
    pub snapshot: Snapshot,
    /// The address of the agent that answered; empty where it was none.
    pub agent: Arc<str>,
    /// `X-Consul-Index`, at least 1: what to wait beyond next. Where several agents
    /// were given it is marked with the one it came from.
    pub index: Option<u64>,
    /// Whether the server that answered knows a leader.
    pub known_leader: Option<bool>,
    /// How long ago that server last heard from the leader.
    pub last_contact: Option<Duration>,
    /// True where the token hides a part of the answer. Consul before 1.11 never
    /// says so: there, an empty answer may be a refused one.
    pub filtered_by_acl: bool,
    /// What the token may not read, as far as that is known: [`Denied::Part`] where
    /// the registry says so by itself. [`ConsulClient::denied`](super::ConsulClient::denied)
    /// asks.
    pub denied: Option<Denied>,
    /// The entries that describe nothing to connect to.
    pub skipped: Vec<SkippedEntry>,
}

// === impl HealthAnswer ===

impl HealthAnswer {
    /// Whether the registry says that there are no instances. A list of entries that
    /// name nothing to connect to does not say so: they may be misread here.
    pub(crate) fn is_empty(&self) -> bool {
        self.snapshot.instances.is_empty() && self.skipped.is_empty()
    }

    /// Reads a good answer. It does not tell which agent it came from.
    pub(super) fn read(answer: &Answer, wanted: Wanted<'_>) -> Result<Self, RegistryError> {
        let (snapshot, skipped) = instances::read(answer, wanted)?;
        let filtered = answer.flag("x-consul-results-filtered-by-acls") == Some(true);
        Ok(Self {
            index: answer.number("x-consul-index").filter(|it| *it > 0),
            known_leader: answer.flag("x-consul-knownleader"),
            last_contact: answer.number("x-consul-lastcontact").map(Duration::from_millis),
            filtered_by_acl: filtered,
            denied: filtered.then_some(Denied::Part),
            skipped,
            ..Self::of(snapshot)
        })
    }

    /// Where the server that answered is cut off from its leader: for how long.
    pub(crate) fn behind(&self) -> Option<Duration> {
        let last_contact = self.last_contact.unwrap_or_default();
        let behind = self.known_leader == Some(false) || last_contact >= OUT_OF_TOUCH;
        behind.then_some(last_contact)
    }

    /// An answer that says nothing but this.
    pub(crate) fn of(snapshot: Snapshot) -> Self {
        Self {
            snapshot,
            agent: Arc::default(),
            index: None,
            known_leader: None,
            last_contact: None,
            denied: None,
            filtered_by_acl: false,
            skipped: Vec::new(),
        }
    }
}

/// An entry of an answer that was left out although its checks allow it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub struct SkippedEntry {
    /// Its service id; empty where it has none.
    pub id: String,
    /// Its node; empty where it has none.
    pub node: String,
    /// Why it was left out.
    pub reason: SkipReason,
}

/// Why an entry was left out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SkipReason {
    /// Its port is none that TCP has, or 0.
    Port(i64),
    /// Neither the service nor its node has an address.
    NoAddress,
    /// Its address is neither an IP address nor a host name.
    Address(String),
    /// It is not of the form that Consul gives such entries.
    NotUnderstood(String),
}

impl fmt::Display for SkippedEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on node {:?}: {}", self.id, self.node, self.reason)
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(f, "{port} is no port to connect to"),
            Self::NoAddress => f.write_str("it has no address"),
            Self::Address(address) => write!(f, "{address:?} is neither an IP address nor a host name"),
            Self::NotUnderstood(what) => write!(f, "it is not understood ({what})"),
        }
    }
}
