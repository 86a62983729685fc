use std::time::Duration;

use proptest::prelude::*;
use tonic::Code;

use super::*;
use crate::client::{HedgingPolicy, RetryPolicy, ServiceOptions};

fn read(json: &str) -> ServiceConfig {
    ServiceConfig::from_json(json).unwrap_or_else(|error| panic!("{error}: {json}"))
}

fn refused(json: &str) -> ServiceConfigError {
    ServiceConfig::from_json(json).map_or_else(|error| error, |_| panic!("taken: {json}"))
}

/// A retry policy with this field in place of its own.
fn retry(field: &str, value: &str) -> String {
    let mut fields = vec![
        ("maxAttempts", "4"),
        ("initialBackoff", r#""0.1s""#),
        ("maxBackoff", r#""1s""#),
        ("backoffMultiplier", "2"),
        ("retryableStatusCodes", r#"["UNAVAILABLE"]"#),
    ];
    fields.retain(|(name, _)| *name != field);
    fields.push((field, value));
    let fields: Vec<_> = fields.iter().map(|(name, value)| format!("{name:?}: {value}")).collect();
    format!(r#"{{"methodConfig": [{{}}, {{"name": [{{}}], "retryPolicy": {{{}}}}}]}}"#, fields.join(", "))
}

#[test]
fn the_example_of_grfc_a6_is_read() {
    let config = read(
        r#"{
          "loadBalancingPolicy": "round_robin",
          "methodConfig": [
            {
              "name": [{"service": "s.S", "method": "M"}, {"service": "s.S"}, {}],
              "waitForReady": true,
              "timeout": "1.5s",
              "retryPolicy": {
                "maxAttempts": 4, "initialBackoff": ".1s", "maxBackoff": "1s", "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", 10]
              }
            },
            {
              "name": [{"service": "h.H"}],
              "hedgingPolicy": {
                "maxAttempts": 4, "hedgingDelay": ".5s", "nonFatalStatusCodes": ["UNAVAILABLE", "INTERNAL", "ABORTED"]
              }
            }
          ],
          "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
          "healthCheckConfig": {"serviceName": "s.S"}
        }"#,
    );
    let names: Vec<_> = config.methods.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["/s.S/M", "/s.S/", "/", "/h.H/"]);
    let ms = Duration::from_millis;
    let retry = RetryPolicy::new()
        .max_attempts(4)
        .backoff(ms(100), ms(1000), 2.0)
        .jitter(0.2)
        .retry_on([Code::Unavailable, Code::Aborted]);
    let first = MethodOptions::new().wait_for_ready(true).timeout(ms(1500)).retry(retry);
    assert_eq!(config.methods[0].1, first);
    let codes = [Code::Unavailable, Code::Internal, Code::Aborted];
    let mut hedging = HedgingPolicy::new(ms(500)).max_attempts(4).non_fatal(codes);
    hedging.declared = true;
    assert_eq!(config.methods[3].1, MethodOptions::new().hedging(hedging));
    assert_eq!(config.throttling, Some(Throttling { max_tokens: 10, token_ratio: 0.1 }));
    assert_eq!(config.policy, Some(Policy::RoundRobin));
    assert_eq!(config.health_check_service.as_deref(), Some("s.S"));
}

#[test]
fn nothing_and_null_are_the_same() {
    assert_eq!(read("{}"), ServiceConfig::default());
    let all_null = r#"{"methodConfig": null, "retryThrottling": null, "loadBalancingConfig": null,
        "loadBalancingPolicy": null, "healthCheckConfig": {"serviceName": null}}"#;
    assert_eq!(read(all_null), ServiceConfig::default());
    let nulls = r#"{"methodConfig": [{"name": [{"service": "a.B", "method": null}], "timeout": null,
        "retryPolicy": null, "hedgingPolicy": null, "waitForReady": null,
        "maxRequestMessageBytes": null, "maxResponseMessageBytes": null}]}"#;
    assert_eq!(read(nulls).methods, [("/a.B/".to_owned(), MethodOptions::new())]);
}

#[test]
fn a_method_config_without_names_is_skipped_and_checked_all_the_same() {
    assert!(
        read(r#"{"methodConfig": [{"timeout": "1s"}, {"name": [], "timeout": "1s"}]}"#).methods.is_empty()
    );
    refused(r#"{"methodConfig": [{"timeout": "1"}]}"#);
}

#[test]
fn an_error_names_the_field_the_value_and_what_would_be_right() {
    let cases = [
        (retry("maxAttempts", "1"), "maxAttempts", "1 is below 2"),
        (retry("maxAttempts", "2.5"), "maxAttempts", "2.5 is no whole number"),
        (retry("maxAttempts", "1e300"), "maxAttempts", "is above 4294967295"),
        (retry("maxAttempts", "\"many\""), "maxAttempts", "\"many\" is no number"),
        (retry("maxAttempts", "\"NaN\""), "maxAttempts", "\"NaN\" is no number"),
        (retry("backoffMultiplier", "\"inf\""), "backoffMultiplier", "\"inf\" is no number"),
        (retry("maxAttempts", "null"), "maxAttempts", "expected a number"),
        (retry("initialBackoff", "\"0s\""), "initialBackoff", "must be more than 0s"),
        (
            retry("maxBackoff", "\"1\""),
            "maxBackoff",
            "\"1\" is no duration: seconds with an s, like \"0.1s\"",
        ),
        (retry("maxBackoff", "1"), "maxBackoff", "expected a string"),
        (retry("backoffMultiplier", "0"), "backoffMultiplier", "0 is not above 0"),
        (retry("backoffMultiplier", "-2"), "backoffMultiplier", "-2 is not above 0"),
        (retry("retryableStatusCodes", "[]"), "retryableStatusCodes", "must name at least one code"),
        (retry("retryableStatusCodes", "null"), "retryableStatusCodes", "must name at least one code"),
        (
            retry("retryableStatusCodes", r#"["UNAVAILABLE", "OK"]"#),
            "retryableStatusCodes[1]",
            "\"OK\" is no failure's code",
        ),
        (retry("perAttemptRecvTimeout", "\"0s\""), "perAttemptRecvTimeout", "must be more than 0s"),
        (retry("attempts", "3"), "attempts", "unknown field `attempts`"),
    ];
    for (json, field, problem) in cases {
        let error = refused(&json);
        assert_eq!(error.path, format!("methodConfig[1].retryPolicy.{field}"), "{json}");
        assert!(error.problem.contains(problem), "{error}");
        assert!(error.to_string().starts_with(&format!("service config: {}: ", error.path)), "{error}");
    }
    let hedging = |fields: &str| format!(r#"{{"methodConfig": [{{"hedgingPolicy": {{{fields}}}}}]}}"#);
    let method = |fields: &str| format!(r#"{{"methodConfig": [{{{fields}}}]}}"#);
    let cases = [
        (String::new(), "", "EOF"),
        ("[null, null, null, null, null]".to_owned(), "", "expected an object"),
        (r#"{"retryThrottling": [10, 0.1]}"#.to_owned(), "retryThrottling", "expected an object"),
        (method(r#""name": [["a", "b"]]"#), "methodConfig[0].name[0]", "expected an object"),
        ("{} {}".to_owned(), "", "trailing characters"),
        (r#"{"methodConfigs": []}"#.to_owned(), "methodConfigs", "unknown field"),
        (hedging(r#""hedgingDelay": "1s""#), "methodConfig[0].hedgingPolicy", "missing field `maxAttempts`"),
        (hedging(r#""maxAttempts": 0"#), "methodConfig[0].hedgingPolicy.maxAttempts", "0 is below 2"),
        (
            hedging(r#""maxAttempts": 2, "hedgingDelay": "-1s""#),
            "methodConfig[0].hedgingPolicy.hedgingDelay",
            "\"-1s\" is no duration",
        ),
        (
            hedging(r#""maxAttempts": 2, "nonFatalStatusCodes": [99]"#),
            "methodConfig[0].hedgingPolicy.nonFatalStatusCodes[0]",
            "99 is no failure's code: 1 to 16",
        ),
        (method(r#""timeout": "0s""#), "methodConfig[0].timeout", "more than 0s"),
        (method(r#""waitForReady": 1"#), "methodConfig[0].waitForReady", "expected a boolean"),
        (
            method(r#""maxRequestMessageBytes": 1"#),
            "methodConfig[0].maxRequestMessageBytes",
            "max_encoding_message_size",
        ),
        (method(r#""name": [{"method": "M"}]"#), "methodConfig[0].name[0]", "\"M\" needs its service"),
        (method(r#""name": [{"service": "a/b"}]"#), "methodConfig[0].name[0]", "\"/a/b/\" is no path"),
        (method(r#""name": [{"servce": "a"}]"#), "methodConfig[0].name[0].servce", "unknown field"),
        (
            r#"{"methodConfig": [{"name": [{"service": "a"}]}, {"name": [{}, {"service": "a", "method": ""}]}]}"#
                .to_owned(),
            "methodConfig[1].name[1]",
            "/a/ is named in methodConfig[0] too",
        ),
        (
            r#"{"retryThrottling": {"maxTokens": 1001, "tokenRatio": 1}}"#.to_owned(),
            "retryThrottling.maxTokens",
            "1001 is above 1000",
        ),
        (
            r#"{"retryThrottling": {"maxTokens": 10, "tokenRatio": 0.0001}}"#.to_owned(),
            "retryThrottling.tokenRatio",
            "0.0001 is below 0.001",
        ),
        (r#"{"retryThrottling": {"maxTokens": 10}}"#.to_owned(), "retryThrottling", "missing field `tokenRatio`"),
        (
            r#"{"loadBalancingConfig": [{"xds": {}}, {"grpclb": {"a": [1]}}]}"#.to_owned(),
            "loadBalancingConfig",
            "is supported: pick_first, round_robin, least_request_experimental",
        ),
        (
            r#"{"loadBalancingConfig": [{"round_robin": {"a": 1}}]}"#.to_owned(),
            "loadBalancingConfig[0].round_robin.a",
            "unknown field",
        ),
        (
            r#"{"loadBalancingConfig": [{"least_request_experimental": {"choiceCount": 3}}]}"#.to_owned(),
            "loadBalancingConfig[0].least_request_experimental.choiceCount",
            "3 is not supported: 2",
        ),
        (r#"{"loadBalancingConfig": [{}]}"#.to_owned(), "loadBalancingConfig[0]", "only field"),
        (
            r#"{"loadBalancingConfig": [{"pick_first": {}, "round_robin": {}}]}"#.to_owned(),
            "loadBalancingConfig[0]",
            "only field",
        ),
        (
            r#"{"loadBalancingPolicy": "xds"}"#.to_owned(),
            "loadBalancingPolicy",
            "none of xds is supported: pick_first, round_robin, least_request_experimental",
        ),
    ];
    for (json, path, problem) in cases {
        let error = refused(&json);
        assert_eq!(error.path, path, "{json}: {error}");
        assert!(error.problem.contains(problem), "{error}");
    }
    let both = retry("x", "1").replace(r#""x": 1"#, r#""perAttemptRecvTimeout": "1s""#);
    let both = both.replace(r#""name": [{}]"#, r#""name": [{}], "hedgingPolicy": {"maxAttempts": 2}"#);
    assert_eq!(refused(&both).path, "methodConfig[1]");
}

#[test]
fn the_first_known_load_balancer_is_taken_and_precedes_the_older_field() {
    let json = r#"{"loadBalancingConfig": [{"xds_cluster_manager": {"children": {}}},
        {"pick_first": {"shuffleAddressList": true}}, {"round_robin": {}}], "loadBalancingPolicy": "ROUND_ROBIN"}"#;
    assert_eq!(read(json).policy, Some(Policy::PickFirst));
    assert_eq!(read(r#"{"loadBalancingPolicy": "ROUND_ROBIN"}"#).policy, Some(Policy::RoundRobin));
    assert_eq!(read(r#"{"loadBalancingConfig": []}"#).policy, None);
    for choices in ["{}", r#"{"choiceCount": 2}"#] {
        let json = format!(r#"{{"loadBalancingConfig": [{{"least_request_experimental": {choices}}}]}}"#);
        assert_eq!(read(&json).policy, Some(Policy::LeastRequest));
    }
}

#[test]
fn what_grpc_go_and_the_c_core_write_otherwise_is_read_too() {
    let capitals = retry("maxAttempts", "\"4\"")
        .replace("maxAttempts", "MaxAttempts")
        .replace("initialBackoff", "InitialBackoff")
        .replace("retryableStatusCodes", "RetryableStatusCodes");
    assert_eq!(read(&capitals), read(&retry("maxAttempts", "4.0")));
    let timed = retry("perAttemptRecvTimeout", "\"1s\"").replace(r#"["UNAVAILABLE"]"#, "[]");
    let retry = read(&timed).methods[0].1.retry.clone().expect("a policy");
    assert_eq!(retry.attempt_timeout, Some(Duration::from_secs(1)));
}

/// What the fuzz target begins with.
fn seeds() -> Vec<Vec<u8>> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/seeds/service_config");
    let seeds: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|it| std::fs::read(it.unwrap().path()).unwrap()).collect();
    assert!(!seeds.is_empty());
    seeds
}

#[test]
fn every_seed_is_read() {
    for seed in seeds() {
        read(std::str::from_utf8(&seed).unwrap());
        crate::client::fuzz::service_config(&seed);
    }
}

/// A service config with chance in it, mostly of the right shape.
fn config() -> impl Strategy<Value = String> {
    let value = prop_oneof![
        Just("null".to_owned()),
        any::<f64>().prop_map(|it| it.to_string()),
        any::<i64>().prop_map(|it| it.to_string()),
        "-?[0-9]{0,14}(\\.[0-9]{0,10})?s?".prop_map(|it| format!("{it:?}")),
        "[A-Z_]{0,12}".prop_map(|it| format!("[{it:?}]")),
        Just(r#"["UNAVAILABLE", 10]"#.to_owned()),
        Just("[{\"service\": \"a.B\", \"method\": \"C\"}, {}]".to_owned()),
        Just("{}".to_owned()),
        any::<bool>().prop_map(|it| it.to_string()),
    ];
    let names = prop::sample::select(vec![
        "maxAttempts",
        "initialBackoff",
        "maxBackoff",
        "backoffMultiplier",
        "retryableStatusCodes",
        "perAttemptRecvTimeout",
        "hedgingDelay",
        "nonFatalStatusCodes",
        "name",
        "timeout",
        "waitForReady",
        "maxTokens",
        "tokenRatio",
        "retryThrottling",
        "methodConfig",
        "loadBalancingConfig",
    ]);
    value.prop_recursive(6, 64, 8, move |inner| {
        let fields = prop::collection::vec((names.clone(), inner.clone()), 0..6).prop_map(|fields| {
            let fields: Vec<_> = fields.iter().map(|(name, value)| format!("{name:?}: {value}")).collect();
            format!("{{{}}}", fields.join(", "))
        });
        let policy = |kind: &'static str| {
            move |it: String| format!(r#"{{"methodConfig": [{{"name": [{{}}], "{kind}": {it}}}]}}"#)
        };
        prop_oneof![
            fields.clone(),
            fields.clone().prop_map(policy("retryPolicy")),
            fields.clone().prop_map(policy("hedgingPolicy")),
            fields.prop_map(|it| format!(r#"{{"retryThrottling": {it}}}"#)),
            prop::collection::vec(inner, 0..4).prop_map(|it| format!("[{}]", it.join(", "))),
        ]
    })
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in any::<String>()) {
        crate::client::fuzz::service_config(text.as_bytes());
    }

    #[test]
    fn nothing_like_a_service_config_makes_the_reader_panic(text in config()) {
        crate::client::fuzz::service_config(text.as_bytes());
    }

    #[test]
    fn a_seed_changed_anywhere_makes_nothing_panic(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 32_u8..127), 0..4),
        end in any::<prop::sample::Index>(),
    ) {
        let seeds = seeds();
        let mut data = seeds[which.index(seeds.len())].clone();
        for (place, byte) in changes {
            let place = place.index(data.len());
            data[place] = byte;
        }
        crate::client::fuzz::service_config(&data);
        data.truncate(end.index(data.len() + 1));
        crate::client::fuzz::service_config(&data);
    }

    /// Any policy that is read can be built with, and waits no longer than it may.
    #[test]
    fn numbers_within_their_bounds_are_taken_as_they_are(
        attempts in 2_u32..100, initial in 1_u64..10_000_000, max in 1_u64..10_000_000,
        multiplier in 0.001_f64..1e9, tokens in 1_u32..=1000, thousandths in 1_u32..100_000,
    ) {
        let ms = |it: u64| format!("{}.{:03}s", it / 1000, it % 1000);
        let json = format!(
            r#"{{"methodConfig": [{{"name": [{{}}], "retryPolicy": {{"maxAttempts": {attempts},
                "initialBackoff": "{}", "maxBackoff": "{}", "backoffMultiplier": {multiplier},
                "retryableStatusCodes": [14]}}}}],
                "retryThrottling": {{"maxTokens": {tokens}, "tokenRatio": {}}}}}"#,
            ms(initial), ms(max), f64::from(thousandths) / 1000.0,
        );
        let config = read(&json);
        let retry = config.methods[0].1.retry.clone().expect("a policy");
        prop_assert_eq!(retry.max_attempts, Some(attempts));
        let backoff = retry.backoff.expect("a back-off");
        prop_assert_eq!(backoff.initial, Duration::from_millis(initial));
        prop_assert_eq!(backoff.max, Duration::from_millis(max));
        prop_assert!((backoff.multiplier / multiplier - 1.0).abs() < 1e-12, "{}", backoff.multiplier);
        let throttling = config.throttling.expect("throttling");
        prop_assert_eq!(throttling.max_tokens, tokens);
        prop_assert_eq!(crate::client::policy::thousandths(throttling.token_ratio), thousandths);
        let options = ServiceOptions::new("x").service_config(config);
        prop_assert!(options.check().is_ok() && options.methods().is_ok());
    }
}
