//! Registering an instance.

use std::{collections::BTreeMap, time::Duration};

use serde::{Serialize, Serializer};

use super::name;

/// An instance as an agent is to know it.
///
/// ```
/// # use std::time::Duration;
/// # use tonic_failover::consul::{Check, ServiceRegistration};
/// let registration = ServiceRegistration::new("counter", "counter-1", "10.0.0.7", 50051)?
///     .tag("v2")
///     .check(Check::grpc("10.0.0.7:50051", Duration::from_secs(1)));
/// # Ok::<_, tonic_failover::consul::InvalidRegistration>(())
/// ```
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
#[must_use]
pub struct ServiceRegistration {
    name: String,
    #[serde(rename = "ID")]
    id: String,
    address: String,
    port: u16,
    tags: Vec<String>,
    meta: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<Weights>,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<FullCheck>,
}

/// How the agent finds out whether the instance is healthy.
///
/// Consul runs TCP and gRPC checks once a second at the most and says nothing
/// where less is asked for.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
#[must_use]
pub struct Check {
    #[serde(flatten)]
    kind: Kind,
    #[serde(serialize_with = "maybe_go_duration", skip_serializing_if = "Option::is_none")]
    timeout: Option<Duration>,
    #[serde(serialize_with = "maybe_go_duration", skip_serializing_if = "Option::is_none")]
    deregister_critical_service_after: Option<Duration>,
}

/// Why a registration cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot register under the {what}")]
pub struct InvalidRegistration {
    what: &'static str,
    source: super::InvalidName,
}

#[derive(Clone, Debug, Serialize)]
enum Kind {
    #[serde(rename = "TTL", serialize_with = "go_duration")]
    Ttl(Duration),
    #[serde(untagged, rename_all = "PascalCase")]
    Tcp {
        #[serde(rename = "TCP")]
        address: String,
        #[serde(serialize_with = "go_duration")]
        interval: Duration,
    },
    #[serde(untagged, rename_all = "PascalCase")]
    Grpc {
        #[serde(rename = "GRPC")]
        address: String,
        #[serde(serialize_with = "go_duration")]
        interval: Duration,
    },
}

#[derive(Clone, Debug, Serialize)]
struct FullCheck {
    #[serde(rename = "CheckID")]
    id: String,
    #[serde(flatten)]
    check: Check,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Weights {
    passing: u16,
    warning: u16,
}

// === impl ServiceRegistration ===

impl ServiceRegistration {
    /// The instance `id` of the service `name` at `address` (an IP address or host
    /// name; empty: the agent's own) and `port`.
    ///
    /// # Errors
    /// Where name or id would not arrive as they are; see [`ServiceName::new`](super::ServiceName::new).
    pub fn new(
        name: impl Into<String>,
        id: impl Into<String>,
        address: impl Into<String>,
        port: u16,
    ) -> Result<Self, InvalidRegistration> {
        let (name, id) = (name.into(), id.into());
        name::check(&name).map_err(|source| InvalidRegistration { what: "name", source })?;
        name::check(&id).map_err(|source| InvalidRegistration { what: "id", source })?;
        Ok(Self {
            name,
            id,
            address: address.into(),
            port,
            tags: Vec::new(),
            meta: BTreeMap::new(),
            weights: None,
            check: None,
        })
    }

    /// Adds a tag. Default: none.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Adds metadata. Default: none.
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.meta.insert(key.into(), value.into());
        self
    }

    /// Its share of the calls while passing (at least 1) and while in warning.
    /// Default: Consul's, 1 and 1.
    pub fn weights(mut self, passing: u16, warning: u16) -> Self {
        self.weights = Some(Weights { passing, warning });
        self
    }

    /// How its health is found out. Default: not at all, it is always healthy.
    pub fn check(mut self, check: Check) -> Self {
        self.check = Some(FullCheck { id: self.check_id(), check });
        self
    }

    /// The service id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The id of its check, for [`ConsulClient::pass_check`](super::ConsulClient::pass_check).
    pub fn check_id(&self) -> String {
        format!("service:{}", self.id)
    }

    /// The service's name.
    pub fn service_name(&self) -> &str {
        &self.name
    }
}

// === impl Check ===

impl Check {
    /// Healthy while [`pass_check`](super::ConsulClient::pass_check) is called at
    /// least this often; at least 1 ms. Critical until the first time.
    pub fn ttl(ttl: Duration) -> Self {
        Self::of(Kind::Ttl(ttl))
    }

    /// Healthy while `address` (`host:port`) accepts connections, tried every
    /// `interval`.
    pub fn tcp(address: impl Into<String>, interval: Duration) -> Self {
        Self::of(Kind::Tcp { address: address.into(), interval })
    }

    /// Healthy while `grpc.health.v1` at `address` (`host:port`, or
    /// `host:port/service`) says SERVING, asked every `interval`.
    pub fn grpc(address: impl Into<String>, interval: Duration) -> Self {
        Self::of(Kind::Grpc { address: address.into(), interval })
    }

    /// How long one try of a TCP or gRPC check may take. Default: Consul's, 10 s.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// Takes the instance out when it has been critical for so long. Consul makes a
    /// minute of less, and looks only every 30 s. Default: never.
    pub fn deregister_critical_after(mut self, limit: Duration) -> Self {
        self.deregister_critical_service_after = Some(limit);
        self
    }

    fn of(kind: Kind) -> Self {
        Self { kind, timeout: None, deregister_critical_service_after: None }
    }
}

/// In Go's form, not below the millisecond that it shows.
fn go_duration<S: Serializer>(duration: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&format!("{}ms", duration.as_millis().max(1)))
}

fn maybe_go_duration<S: Serializer>(duration: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => go_duration(duration, out),
        None => out.serialize_none(),
    }
}
