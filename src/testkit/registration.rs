//! A service's registration, as a test writes it down.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Map, Value, json};

/// A service instance to register, at a real agent or an embedded one.
///
/// ```
/// use std::time::Duration;
/// use tonic_failover::testkit::{Check, Registration};
///
/// let counter = Registration::new("counter", "counter-1", "127.0.0.1", 4000)
///     .tag("v2")
///     .meta("rack", "b")
///     .weight(3)
///     .check(Check::grpc("127.0.0.1:4000").interval(Duration::from_secs(1)));
/// # drop(counter);
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Registration {
    pub(super) id: String,
    name: String,
    address: String,
    port: i64,
    tags: Vec<String>,
    meta: BTreeMap<String, String>,
    weights: Option<(u32, u32)>,
    tagged: BTreeMap<String, (String, u16)>,
    checks: Vec<Check>,
}

/// A health check of a [`Registration`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Check {
    fields: Map<String, Value>,
}

// === impl Registration ===

impl Registration {
    /// Service `name`, instance `id`, at `address` and `port`. The address may be
    /// empty (then the node's counts) and the port out of range, since Consul
    /// takes both.
    pub fn new(
        name: impl Into<String>,
        id: impl Into<String>,
        address: impl Into<String>,
        port: impl Into<i64>,
    ) -> Self {
        Self {
            id: id.into(),
            name: name.into(),
            address: address.into(),
            port: port.into(),
            tags: Vec::new(),
            meta: BTreeMap::new(),
            weights: None,
            tagged: BTreeMap::new(),
            checks: Vec::new(),
        }
    }

    /// Adds a tag. Default: none.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Adds metadata; Consul takes letters, digits, `-` and `_` in keys. Default:
    /// none.
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.meta.insert(key.into(), value.into());
        self
    }

    /// Its weight among its peers while passing; while warning it is 1. Consul
    /// refuses 0. Default: 1.
    pub fn weight(mut self, passing: u32) -> Self {
        self.weights = Some((passing, 1));
        self
    }

    /// Another address of it, for example `wan`. Default: those that Consul adds.
    pub fn tagged_address(mut self, tag: impl Into<String>, address: impl Into<String>, port: u16) -> Self {
        self.tagged.insert(tag.into(), (address.into(), port));
        self
    }

    /// Adds a check. Default: none, which passes.
    pub fn check(mut self, check: Check) -> Self {
        self.checks.push(check);
        self
    }

    /// The body to `PUT` to `/v1/agent/service/register`.
    pub fn to_json(&self) -> Value {
        let mut body = json!({
            "ID": self.id, "Name": self.name, "Address": self.address, "Port": self.port,
            "Tags": self.tags, "Meta": self.meta,
            "Checks": self.checks.iter().map(|check| &check.fields).collect::<Vec<_>>(),
        });
        if let Some((passing, warning)) = self.weights {
            body["Weights"] = json!({ "Passing": passing, "Warning": warning });
        }
        if !self.tagged.is_empty() {
            let entry = |(address, port): &(String, u16)| json!({ "Address": address, "Port": port });
            body["TaggedAddresses"] = self.tagged.iter().map(|(tag, it)| (tag.clone(), entry(it))).collect();
        }
        body
    }
}

// === impl Check ===

impl Check {
    /// Passes as long as somebody says so at least every `ttl`. Critical until
    /// the first time, unless [`passing`](Self::passing).
    pub fn ttl(ttl: Duration) -> Self {
        Self { fields: Map::new() }.with("TTL", go(ttl))
    }

    /// Passes when `target` (`host:port`) can be connected to.
    pub fn tcp(target: impl Into<String>) -> Self {
        Self { fields: Map::new() }.with("TCP", target.into()).interval(Duration::from_secs(1))
    }

    /// Passes when the `grpc.health.v1` service at `target` (`host:port`, or
    /// `host:port/service`) says so.
    pub fn grpc(target: impl Into<String>) -> Self {
        Self { fields: Map::new() }.with("GRPC", target.into()).interval(Duration::from_secs(1))
    }

    /// How often it runs; Consul makes less than a second a second. Not for TTL
    /// checks. Default: 1 s.
    pub fn interval(self, interval: Duration) -> Self {
        self.with("Interval", go(interval))
    }

    /// How long one look may take. Default: Consul's, 10 s.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.with("Timeout", go(timeout))
    }

    /// Passing until it has been looked at for the first time. Default: critical.
    /// Consul ignores it where the check is registered already.
    pub fn passing(self) -> Self {
        self.with("Status", "passing")
    }

    /// Its id. Default: `service:<service id>`, with `:1`, `:2`, ... where there
    /// are several.
    pub fn id(self, id: impl Into<String>) -> Self {
        self.with("CheckID", id.into())
    }

    /// Takes the service out when it has been critical for so long; Consul makes
    /// less than a minute a minute, and looks every half minute. Default: never.
    pub fn deregister_after(self, critical: Duration) -> Self {
        self.with("DeregisterCriticalServiceAfter", go(critical))
    }

    fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.fields.insert(key.to_owned(), value.into());
        self
    }
}

/// A duration in Go's words, to the microsecond.
fn go(duration: Duration) -> String {
    format!("{}us", duration.as_micros())
}
