//! What can go wrong when the registry is asked.

use std::{error::Error, sync::Arc, time::Duration};

use crate::instance::Shown;

/// Why the registry gave no answer to go by. None of these says that there are
/// no instances.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// No connection could be made: nobody listens, the name is unknown, TLS
    /// failed or the connect time-out passed.
    #[error("cannot connect to the registry")]
    Unreachable {
        /// What the connector said.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The connection broke within the answer, or the agent was found to fail meanwhile.
    #[error("the connection to the registry broke before it had answered")]
    Interrupted {
        /// What happened to it.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The connection was reset or closed before anything was answered: the agent died, or
    /// this host holds all the connections that an agent takes from one address,
    /// 200 by default
    /// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#http_max_conns_per_client>).
    #[error(
        "the registry closed the connection unanswered: it has ended, or takes no more from this host (http_max_conns_per_client)"
    )]
    Reset {
        /// What happened to it.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The registry took the request and did not answer in time.
    #[error("the registry did not answer within {after:?}")]
    TimedOut {
        /// How long it was waited for.
        after: Duration,
    },
    /// It was not asked: so many reads were under way that none could be added, and none of
    /// them was answered meanwhile.
    #[error("the registry was not asked: no read before it was answered within {after:?}")]
    Unasked {
        /// How long none was answered.
        after: Duration,
    },
    /// The servers are there and have no leader. Consul takes 7 s to say so, longer than
    /// the default [`request_timeout`](super::ConsulConfig::request_timeout): a read that
    /// does not block ends as [`TimedOut`](Self::TimedOut) before.
    #[error("the registry has no leader")]
    NoLeader,
    /// The agent that was asked knows no server.
    #[error("the agent has no server to ask")]
    NoServers,
    /// The agent does not know the datacenter.
    #[error("the registry knows no way to datacenter \"{}\"", Shown(datacenter))]
    NoPath {
        /// The datacenter asked for.
        datacenter: String,
    },
    /// The token is not known or may not do this.
    #[error("the registry refuses the token: {message}")]
    Forbidden {
        /// What it said, cut short.
        message: String,
    },
    /// Too many requests.
    #[error("the registry asks for fewer requests")]
    RateLimited {
        /// How long it asks to wait.
        retry_after: Option<Duration>,
    },
    /// What was asked for does not exist there.
    #[error("the registry does not have what was asked for")]
    NotFound,
    /// Any other answer that is not a success, redirects among them.
    #[error("the registry answered with status {code}: {body}")]
    Status {
        /// The HTTP status.
        code: u16,
        /// The beginning of the body.
        body: String,
    },
    /// An answer of a form that Consul does not use.
    #[error("the registry's answer is not understood")]
    NotUnderstood {
        /// What is wrong with it.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// An answer larger than the limit.
    #[error("the registry's answer is larger than {limit} bytes")]
    TooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
    /// The request cannot be put into HTTP, for example because it is too long.
    #[error("the request cannot be sent: {reason}")]
    Unsendable {
        /// What is wrong with it.
        reason: String,
    },
    /// A registry other than Consul could not say.
    #[error("the registry could not be asked")]
    Other {
        /// What it said.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// Whoever was to ask has ended.
    #[error("nobody asks the registry any more")]
    Closed,
}

// === impl RegistryError ===

impl RegistryError {
    /// How long the registry asked to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after } => *retry_after,
            _ => None,
        }
    }

    /// The failure of a registry other than Consul.
    pub fn other(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other { source: source.into().into() }
    }

    pub(super) fn not_understood(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::NotUnderstood { source: source.into().into() }
    }
}
