//! The shape of a service config. Unknown fields are refused; what is absent and
//! what is `null` are the same.

use std::{collections::HashMap, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::{
    ServiceConfig, ServiceConfigError,
    values::{Attempts, Failure, MaxTokens, Multiplier, OfTwo, Seconds, Time, TokenRatio, Unsupported},
};
use crate::client::{
    methods::Name,
    options::Policy,
    policy::{Backoff, HedgingPolicy, MethodOptions, RetryPolicy, Throttling},
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Config {
    method_config: Option<Vec<Object<MethodConfig>>>,
    retry_throttling: Option<Object<RetryThrottling>>,
    load_balancing_config: Option<Balancers>,
    load_balancing_policy: Option<BalancerName>,
    health_check_config: Option<Object<HealthCheckConfig>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct MethodConfig {
    name: Option<Vec<MethodName>>,
    wait_for_ready: Option<bool>,
    timeout: Option<Time>,
    #[serde(rename = "maxRequestMessageBytes")]
    _max_request_message_bytes: Option<Unsupported>,
    #[serde(rename = "maxResponseMessageBytes")]
    _max_response_message_bytes: Option<Unsupported>,
    retry_policy: Option<Object<Retry>>,
    hedging_policy: Option<Object<Hedging>>,
}

/// What is written with braces. serde takes a list of a structure's fields for
/// the structure too.
struct Object<T>(T);

/// A name as [`Name`] parses it.
struct MethodName(String);

/// The names with a capital are those of grpc-go's own examples, which its
/// reader takes for the same.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Retry {
    #[serde(alias = "MaxAttempts")]
    max_attempts: Attempts,
    #[serde(alias = "InitialBackoff")]
    initial_backoff: Time,
    #[serde(alias = "MaxBackoff")]
    max_backoff: Time,
    #[serde(alias = "BackoffMultiplier")]
    backoff_multiplier: Multiplier,
    #[serde(alias = "RetryableStatusCodes")]
    retryable_status_codes: Option<Vec<Failure>>,
    per_attempt_recv_timeout: Option<Time>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Hedging {
    max_attempts: Attempts,
    hedging_delay: Option<Seconds>,
    non_fatal_status_codes: Option<Vec<Failure>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RetryThrottling {
    max_tokens: MaxTokens,
    token_ratio: TokenRatio,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct HealthCheckConfig {
    service_name: Option<String>,
}

/// A list of policies, of which the first known one is taken.
#[derive(Deserialize)]
#[serde(try_from = "Vec<Balancer>")]
struct Balancers(Option<Policy>);

/// One policy, as an object with its name as the only field.
struct Balancer(Option<Policy>);

/// The older form: just a name.
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct BalancerName(Policy);

pub(super) fn read(json: &str) -> Result<ServiceConfig, ServiceConfigError> {
    let mut from = serde_json::Deserializer::from_str(json);
    let Object(config): Object<Config> = serde_path_to_error::deserialize(&mut from).map_err(|error| {
        let path = match error.path().to_string() {
            root if root == "." => String::new(),
            path => path,
        };
        ServiceConfigError { path, problem: error.into_inner().to_string() }
    })?;
    from.end().map_err(|error| ServiceConfigError { path: String::new(), problem: error.to_string() })?;
    let policy = match config.load_balancing_config {
        Some(Balancers(policy @ Some(_))) => policy,
        _ => config.load_balancing_policy.map(|BalancerName(policy)| policy),
    };
    Ok(ServiceConfig {
        policy,
        methods: methods(config.method_config.unwrap_or_default())?,
        throttling: config.retry_throttling.map(|Object(throttling)| Throttling {
            max_tokens: throttling.max_tokens.0,
            token_ratio: throttling.token_ratio.0,
        }),
        health_check_service: config.health_check_config.and_then(|Object(check)| check.service_name),
    })
}

/// What stands in several fields at once.
fn methods(configs: Vec<Object<MethodConfig>>) -> Result<Vec<(String, MethodOptions)>, ServiceConfigError> {
    let mut methods = Vec::new();
    let mut places = HashMap::new();
    for (i, Object(mut config)) in configs.into_iter().enumerate() {
        let refuse = |what: &str, problem: String| {
            Err(ServiceConfigError { path: format!("methodConfig[{i}]{what}"), problem })
        };
        if config.retry_policy.is_some() && config.hedging_policy.is_some() {
            return refuse("", "retryPolicy and hedgingPolicy exclude each other".to_owned());
        }
        if let Some(Object(retry)) = &config.retry_policy
            && retry.per_attempt_recv_timeout.is_none()
            && retry.retryable_status_codes.as_ref().is_none_or(Vec::is_empty)
        {
            return refuse(".retryPolicy.retryableStatusCodes", "must name at least one code".to_owned());
        }
        let names = config.name.take().unwrap_or_default();
        let options = MethodOptions::from(config);
        // Without names it is skipped, as service_config.proto says.
        for (j, MethodName(name)) in names.into_iter().enumerate() {
            if let Some(first) = places.insert(name.clone(), i) {
                return refuse(
                    &format!(".name[{j}]"),
                    format!("{name} is named in methodConfig[{first}] too"),
                );
            }
            methods.push((name, options.clone()));
        }
    }
    Ok(methods)
}

impl From<MethodConfig> for MethodOptions {
    fn from(config: MethodConfig) -> Self {
        let mut options = Self::new().wait_for_ready(config.wait_for_ready.unwrap_or_default());
        if let Some(Time(timeout)) = config.timeout {
            options = options.timeout(timeout);
        }
        options.retry = config.retry_policy.map(|Object(retry)| retry.into());
        options.hedging = config.hedging_policy.map(|Object(hedging)| hedging.into());
        options
    }
}

impl From<Retry> for RetryPolicy {
    fn from(retry: Retry) -> Self {
        let codes = retry.retryable_status_codes.unwrap_or_default();
        let mut policy = Self::new()
            .max_attempts(retry.max_attempts.0)
            .backoff(retry.initial_backoff.0, retry.max_backoff.0, retry.backoff_multiplier.0)
            .jitter(Backoff::OURS.jitter)
            .retry_on(codes.into_iter().map(|Failure(code)| code));
        if let Some(Time(timeout)) = retry.per_attempt_recv_timeout {
            policy = policy.attempt_timeout(timeout);
        }
        policy
    }
}

impl From<Hedging> for HedgingPolicy {
    fn from(hedging: Hedging) -> Self {
        let codes = hedging.non_fatal_status_codes.unwrap_or_default();
        let mut policy = Self::new(hedging.hedging_delay.map(|Seconds(delay)| delay).unwrap_or_default())
            .max_attempts(hedging.max_attempts.0)
            .non_fatal(codes.into_iter().map(|Failure(code)| code));
        policy.declared = true;
        policy
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Braces<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Braces<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        from.deserialize_map(Braces(PhantomData))
    }
}

impl<'de> Deserialize<'de> for MethodName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Fields {
            service: Option<String>,
            method: Option<String>,
        }

        let Object(Fields { service, method }) = Object::deserialize(from)?;
        let (service, method) = (service.unwrap_or_default(), method.unwrap_or_default());
        let name = match (service.as_str(), method.as_str()) {
            ("", "") => "/".to_owned(),
            ("", method) => {
                return Err(D::Error::custom(format_args!("method {method:?} needs its service beside it")));
            }
            (service, method) => format!("/{service}/{method}"),
        };
        match Name::parse(&name) {
            Some(_) => Ok(Self(name)),
            None => Err(D::Error::custom(format_args!("{name:?} is no path like /package.Service/Method"))),
        }
    }
}

// === load balancing ===

/// What can be honoured, by gRPC's names.
const BALANCERS: [(&str, Policy); 3] = [
    ("pick_first", Policy::PickFirst),
    ("round_robin", Policy::RoundRobin),
    ("least_request_experimental", Policy::LeastRequest),
];

fn none_known(given: &[&str]) -> String {
    let known: Vec<_> = BALANCERS.iter().map(|(name, _)| *name).collect();
    format!("none of {} is supported: {}", given.join(", "), known.join(", "))
}

impl TryFrom<Vec<Balancer>> for Balancers {
    type Error = String;

    fn try_from(list: Vec<Balancer>) -> Result<Self, String> {
        let found = list.iter().find_map(|Balancer(policy)| *policy);
        match found {
            None if !list.is_empty() => Err(none_known(&["the policies"])),
            found => Ok(Self(found)),
        }
    }
}

impl TryFrom<String> for BalancerName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let found = BALANCERS.iter().find(|(known, _)| known.eq_ignore_ascii_case(&name));
        found.map(|(_, policy)| Self(*policy)).ok_or_else(|| none_known(&[&name]))
    }
}

impl<'de> Deserialize<'de> for Balancer {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        /// Which addresses come first is decided at random anyway.
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        struct PickFirst {
            #[serde(rename = "shuffleAddressList")]
            _shuffle_address_list: Option<bool>,
        }

        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct RoundRobin {}

        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        struct LeastRequest {
            #[serde(rename = "choiceCount")]
            _choice_count: Option<OfTwo>,
        }

        struct OneField;

        impl<'de> Visitor<'de> for OneField {
            type Value = Balancer;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with a policy's name as its only field")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Balancer, A::Error> {
                let Some(name) = map.next_key::<String>()? else {
                    return Err(A::Error::invalid_length(0, &self));
                };
                let found = BALANCERS.iter().find(|(known, _)| *known == name).map(|(_, policy)| *policy);
                match found {
                    Some(Policy::PickFirst) => map.next_value().map(|Object(PickFirst { .. })| ())?,
                    Some(Policy::RoundRobin) => map.next_value().map(|Object(RoundRobin {})| ())?,
                    Some(Policy::LeastRequest) => map.next_value().map(|Object(LeastRequest { .. })| ())?,
                    None => map.next_value().map(|IgnoredAny| ())?,
                }
                match map.next_key::<IgnoredAny>()? {
                    None => Ok(Balancer(found)),
                    Some(_) => Err(A::Error::invalid_length(2, &self)),
                }
            }
        }

        from.deserialize_map(OneField)
    }
}
