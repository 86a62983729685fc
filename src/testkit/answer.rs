//! What an agent said, kept whole: a test looks at status, headers and body.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

/// An HTTP answer of an agent, of any status.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Answer {
    /// The HTTP status.
    pub status: StatusCode,
    /// All headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

/// Why a request to an agent brought no answer, or not the one asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The address is not one that HTTP can be spoken to.
    #[error("not an http address: {url}")]
    Address {
        /// The address with the path asked for.
        url: String,
        /// What is wrong with it.
        source: http::Error,
    },
    /// Nobody answered there, or the connection broke.
    #[error("no answer from {url}")]
    Unreachable {
        /// The address with the path asked for.
        url: String,
        /// What happened to the connection.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The answer did not come in time.
    #[error("no answer from {url} within {waited:?}")]
    TimedOut {
        /// The address with the path asked for.
        url: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// An answer came that refuses what was asked.
    #[error("{url} answered {status}: {body}")]
    Refused {
        /// The address with the path asked for.
        url: String,
        /// The HTTP status.
        status: StatusCode,
        /// The body, as text.
        body: String,
    },
}

// === impl Answer ===

impl Answer {
    /// A header's value; `None` where it is absent or no text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// `X-Consul-Index` as a number. Look at the status first: refusals carry
    /// the index 1, which is nobody's state.
    pub fn index(&self) -> Option<u64> {
        self.header("x-consul-index")?.parse().ok()
    }

    /// The body as text; bytes that are none are replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; `Null` where it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}
