//! A request's parameters.

use std::time::Duration;

use http::request::Parts;
use url::form_urlencoded;

use super::{
    super::duration::{self, Signed},
    refusal::Refusal,
};

/// `wait` where none is given, and at the most.
/// <https://developer.hashicorp.com/consul/api-docs/features/blocking>
const DEFAULT_WAIT: Duration = Duration::from_secs(5 * 60);
const LONGEST_WAIT: Duration = Duration::from_secs(10 * 60);

/// All parameters, in order.
#[derive(Debug)]
pub(crate) struct Params(Vec<(String, String)>);

/// The parameters of every read.
#[derive(Debug)]
pub(crate) struct Query {
    /// `None` is the own one.
    pub(crate) datacenter: Option<String>,
    pub(crate) stale: bool,
    pub(crate) consistent: bool,
    /// 0 does not block.
    pub(crate) index: u64,
    pub(crate) wait: Duration,
}

// === impl Params ===

impl Params {
    pub(crate) fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |it| it.0 == key).map(|it| it.1.as_str())
    }

    /// The first value; `None` where there is none or an empty one.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|it| it.0 == key).map(|it| it.1.as_str()).filter(|value| !value.is_empty())
    }

    /// All of them as they stand in a URL, in the order of their names, as Go has it.
    pub(crate) fn encoded(&self) -> String {
        let mut pairs: Vec<_> = self.0.iter().collect();
        pairs.sort_by_key(|it| &it.0);
        form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
    }

    /// Whether it is there, with a value or without.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.all(key).next().is_some()
    }

    /// A switch in Go's words: absent is false, empty is true.
    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        match self.all(key).next() {
            None | Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Some(false),
            Some("" | "1" | "t" | "T" | "true" | "TRUE" | "True") => Some(true),
            Some(_) => None,
        }
    }
}

impl<S: Sync> axum::extract::FromRequestParts<S> for Params {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let query = parts.uri.query().unwrap_or_default();
        Ok(Self(form_urlencoded::parse(query.as_bytes()).into_owned().collect()))
    }
}

// === impl Query ===

impl Query {
    pub(crate) fn read(params: &Params) -> Result<Self, Refusal> {
        let index = match params.get("index") {
            None => 0,
            Some(text) => text.parse().map_err(|_| Refusal::bad_request("Invalid index"))?,
        };
        let wait = match params.get("wait") {
            None => None,
            Some(text) => duration::parse(text)
                .map_err(|_| Refusal::bad_request("Invalid wait time"))
                .map(Signed::positive)?,
        };
        let (stale, consistent) = (params.has("stale"), params.has("consistent"));
        if stale && consistent {
            return Err(Refusal::bad_request(
                "Cannot specify ?stale with ?consistent, conflicting semantics.",
            ));
        }
        let datacenter = params.get("dc").map(str::to_owned);
        Ok(Self {
            datacenter,
            stale,
            consistent,
            index,
            wait: wait.unwrap_or(DEFAULT_WAIT).min(LONGEST_WAIT),
        })
    }
}
