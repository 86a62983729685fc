//! gRPC's service config: the JSON that says how a service's methods are called.
//!
//! ```text
//! JSON --json.rs: shape, paths--> values.rs: each value by itself --> ServiceConfig
//! ```

mod json;
mod values;

use std::str::FromStr;

use super::{
    options::Policy,
    policy::{MethodOptions, Throttling},
};

/// A gRPC service config, as grpc-go, grpc-java and the C core read it
/// (`grpc/service_config/service_config.proto`, gRFC A6); for
/// [`ServiceOptions::service_config`](super::ServiceOptions::service_config).
///
/// | field | what becomes of it |
/// |---|---|
/// | `methodConfig[].name` | `service` and `method`; without `method` all of the service, without both all; the most specific one holds, alone |
/// | `.timeout`, `.waitForReady` | [`MethodOptions::timeout`], [`MethodOptions::wait_for_ready`] |
/// | `.retryPolicy` | [`RetryPolicy`](super::RetryPolicy): its codes are resent, *whether the method is safe or not* |
/// | `.retryPolicy.perAttemptRecvTimeout` | [`RetryPolicy::attempt_timeout`](super::RetryPolicy::attempt_timeout) (the C core's extension) |
/// | `.hedgingPolicy` | [`HedgingPolicy`](super::HedgingPolicy), for all methods it names: whoever writes it declares them safe to run more than once |
/// | `retryThrottling` | [`ServiceOptions::retry_throttling`](super::ServiceOptions::retry_throttling) |
/// | `loadBalancingConfig`, `loadBalancingPolicy` | the first known one: `pick_first`, `round_robin`, `least_request_experimental` (of two) |
/// | `healthCheckConfig.serviceName` | [`ServiceOptions::health_watch`](super::ServiceOptions::health_watch) (gRFC A17) |
///
/// `maxAttempts` above [`max_attempts`](super::ServiceOptions::max_attempts)
/// (5) counts as that (gRFC A6). Calls of methods without a policy are resent as
/// without a service config; gRPC does not resend them when they may have run.
///
/// Read strictly, where gRPC is not: a field that is unknown, or known to gRPC
/// and not to us (`maxRequestMessageBytes`, `maxResponseMessageBytes`,
/// `connectionScaling`), is refused, for it would silently not hold. Where
/// [`descriptors`](super::ServiceOptions::descriptors) know the service that it names and not the
/// method, or only a service of nearly that name, a warning is logged when the client is built.
///
/// ```
/// use tonic_failover::client::{ServiceConfig, ServiceOptions};
///
/// let config: ServiceConfig = r#"{
///     "methodConfig": [{
///         "name": [{"service": "shop.v1.Shop"}],
///         "timeout": "5s",
///         "retryPolicy": {
///             "maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
///             "retryableStatusCodes": ["UNAVAILABLE"]
///         }
///     }],
///     "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}
/// }"#.parse()?;
/// let options = ServiceOptions::new("shop").service_config(config);
/// let error = ServiceConfig::from_json(r#"{"methodConfig": [{"timeout": "soon"}]}"#).unwrap_err();
/// assert!(error.to_string().starts_with("service config: methodConfig[0].timeout: \"soon\" is no duration"));
/// # Ok::<(), tonic_failover::client::ServiceConfigError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceConfig {
    pub(crate) policy: Option<Policy>,
    /// By names that [`Name`](super::methods::Name) can parse, each once.
    pub(crate) methods: Vec<(String, MethodOptions)>,
    pub(crate) throttling: Option<Throttling>,
    pub(crate) health_check_service: Option<String>,
}

/// Why a service config cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("service config: {}{problem}", before(path))]
pub struct ServiceConfigError {
    /// The field, for example `methodConfig[1].retryPolicy.maxAttempts`; empty
    /// for the whole.
    pub path: String,
    /// What is wrong with it.
    pub problem: String,
}

fn before(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("{path}: ") }
}

impl ServiceConfig {
    /// Reads the JSON.
    ///
    /// # Errors
    /// Names the field, its value, and what would be right.
    pub fn from_json(json: &str) -> Result<Self, ServiceConfigError> {
        json::read(json)
    }
}

impl FromStr for ServiceConfig {
    type Err = ServiceConfigError;

    fn from_str(json: &str) -> Result<Self, ServiceConfigError> {
        Self::from_json(json)
    }
}

#[cfg(test)]
mod tests;
