//! The part of a service's settings that says how its methods are called.

use std::time::Duration;

use tonic::Code;

use super::{Budget, MethodOptions, Rules, Throttling, thousandths};
use crate::client::{
    error::BuildError,
    methods::{Methods, Name},
    misspelt::Described,
    options::ServiceOptions,
    service_config::ServiceConfig,
};

impl ServiceOptions {
    /// How calls of `name` are made: one method (`/package.Service/Method`), all
    /// methods of a service (`/package.Service/`), or all (`/`). The most
    /// specific name holds, alone: nothing is taken over from a wider one. A
    /// name given twice is what it was given last. Default: nothing special.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tonic_failover::client::{HedgingPolicy, MethodOptions, RetryPolicy, ServiceOptions};
    /// use tonic::Code;
    ///
    /// let search = RetryPolicy::new()
    ///     .max_attempts(3)
    ///     .backoff(Duration::from_millis(50), Duration::from_secs(1), 2.0)
    ///     .attempt_timeout(Duration::from_millis(300))
    ///     .retry_on([Code::Unavailable, Code::ResourceExhausted]);
    /// let options = ServiceOptions::new("shop")
    ///     .method("/shop.v1.Shop/", MethodOptions::new().timeout(Duration::from_secs(5)))
    ///     .method("/shop.v1.Shop/Search", MethodOptions::new().retry(search))
    ///     .method("/shop.v1.Shop/Price", MethodOptions::new().hedging(HedgingPolicy::new(Duration::from_millis(20))))
    ///     .safe_method("/shop.v1.Shop/Price");
    /// ```
    pub fn method(mut self, name: impl Into<String>, options: MethodOptions) -> Self {
        self.method_options.push((name.into(), options));
        self
    }

    /// gRPC's token rule (gRFC A6, "Throttling Retry Attempts and Hedged RPCs")
    /// in place of [`retry_budget`](Self::retry_budget): there are `max_tokens`
    /// (1 to 1000) at first, a failed attempt takes one, a successful one gives back
    /// `token_ratio` (three decimals count), and while no more than half of them
    /// are left nothing that may have run is resent, and nothing hedged.
    /// Default: off.
    pub fn retry_throttling(mut self, max_tokens: u32, token_ratio: f64) -> Self {
        self.throttling = Some(Throttling { max_tokens, token_ratio });
        self
    }

    /// Settings from a gRPC service config. What is said here in code, before or
    /// after, precedes what it says of the same thing: the policy, the
    /// throttling, the health that is watched, a method's name. Default: none.
    pub fn service_config(mut self, config: ServiceConfig) -> Self {
        if !self.policy_given {
            // Also where it says nothing: another one given before may have.
            self.policy = config.policy.unwrap_or_default();
        }
        self.service_config = Some(config);
        self
    }

    /// The service whose health is watched, if any is.
    pub(crate) fn watched_health(&self) -> Option<&str> {
        let config = self.service_config.as_ref().and_then(|it| it.health_check_service.as_deref());
        self.traffic.health_watch.as_deref().or(config)
    }

    /// What pays for resending.
    pub(crate) fn budget(&self) -> Budget {
        let config = self.service_config.as_ref();
        match self.throttling.or(config.and_then(|config| config.throttling)) {
            Some(throttling) => Budget::tokens(throttling),
            None => Budget::share(self.retry_ratio, self.retries_per_second),
        }
    }

    /// What is known about the methods; refuses what is no path, descriptor set or policy.
    pub(crate) fn methods(&self) -> Result<Methods, BuildError> {
        let mut methods = Methods::new(Rules::new(&MethodOptions::new(), self.max_attempts));
        for set in &self.descriptors {
            methods
                .read(set)
                .map_err(|source| BuildError::Descriptors { service: self.name.clone(), source })?;
        }
        let described = methods.described();
        let misspelt = |setting, value: &str, meant: Option<Vec<String>>| match meant {
            Some(meant) => Err(BuildError::Misspelt {
                service: self.name.clone(),
                setting,
                value: value.to_owned(),
                meant,
            }),
            None => Ok(()),
        };
        if let Some(watched) = &self.traffic.health_watch {
            misspelt("health_watch", watched, described.services_near(watched))?;
        }
        for path in &self.safe_methods {
            match Name::parse(path) {
                Some(Name::Method(path)) => {
                    misspelt("safe_method", path, described.meant_for(path))?;
                    methods.declare_safe(path);
                }
                _ => return Err(self.wrong("safe_method", path, "a path like /package.Service/Method")),
            }
        }
        for (name, meant) in self.misnamed(&described) {
            tracing::warn!(
                service = %self.name, name, meant = %meant.join(" or "),
                "the service config names what is not in the descriptors: what it says of that holds for no call"
            );
        }
        for (name, options) in self.service_config.iter().flat_map(|config| &config.methods) {
            // Checked when it was read; its attempts are capped (gRFC A6, "Limits on Retries and Hedges").
            let name = Name::parse(name).expect("a service config holds only names that can be parsed");
            methods.rule(name, Rules::new(&options.capped(self.max_attempts), self.max_attempts));
        }
        for (name, options) in &self.method_options {
            let Some(parsed) = Name::parse(name) else {
                return Err(self.wrong("method", name, "/package.Service/Method, /package.Service/ or /"));
            };
            misspelt("method", name, described.meant_for(name))?;
            self.check_method(name, options)?;
            if let Some(hedging) = &options.hedging
                && !methods.any_safe(parsed)
            {
                let value = format!("{:?} (of {name})", hedging.delay);
                let expected = "a name with a method that is safe to repeat, by safe_method or the descriptors: \
                    no other is hedged";
                return Err(self.wrong("hedging", value, expected));
            }
            methods.rule(parsed, Rules::new(options, self.max_attempts));
        }
        Ok(methods.resolved())
    }

    /// What the service config names and the descriptors do not know, each with what was probably meant. No error:
    /// whoever writes it may know newer descriptors, and more programs than this one read it.
    fn misnamed<'a>(&'a self, described: &Described) -> Vec<(&'a str, Vec<String>)> {
        let Some(config) = &self.service_config else { return Vec::new() };
        let names = config.methods.iter().map(|(name, _)| name.as_str());
        let methods = names.filter_map(|name| Some((name, described.meant_for(name)?)));
        let watched = config.health_check_service.as_deref();
        let watched = watched.and_then(|name| Some((name, described.services_near(name)?)));
        methods.chain(watched).collect()
    }

    fn check_method(&self, name: &str, options: &MethodOptions) -> Result<(), BuildError> {
        let refuse = |is_wrong: bool, setting, value: String, expected| match is_wrong {
            true => Err(self.wrong(setting, format!("{value} (of {name})"), expected)),
            false => Ok(()),
        };
        let time = |setting, value: Option<Duration>| {
            let is_zero = value.is_some_and(|value| value.is_zero());
            refuse(is_zero, setting, format!("{:?}", value.unwrap_or_default()), "more than nothing")
        };
        time("timeout", options.timeout)?;
        if let Some(hedging) = &options.hedging {
            let n = hedging.max_attempts;
            refuse(options.retry.is_some(), "hedging", "beside retry".into(), "only one of the two")?;
            refuse(n < 2, "hedging.max_attempts", n.to_string(), "2 or more")?;
            refuse(
                hedging.non_fatal.contains(Code::Ok),
                "hedging.non_fatal",
                "OK".into(),
                "codes of failures",
            )?;
        }
        let Some(retry) = &options.retry else { return Ok(()) };
        time("retry.attempt_timeout", retry.attempt_timeout)?;
        refuse(retry.max_attempts == Some(0), "retry.max_attempts", 0.to_string(), "1 or more")?;
        let names_ok = retry.codes.is_some_and(|codes| codes.contains(Code::Ok));
        refuse(names_ok, "retry.retry_on", "OK".into(), "codes of failures")?;
        if let Some(share) = retry.jitter {
            let is_share = (0.0..=1.0).contains(&share);
            refuse(!is_share, "retry.jitter", share.to_string(), "a share from 0 to 1")?;
        }
        if let Some(backoff) = retry.backoff {
            time("retry.backoff", Some(backoff.initial.min(backoff.max)))?;
            let by = backoff.multiplier;
            let grows = by.is_finite() && by > 0.0;
            refuse(!grows, "retry.backoff", format!("times {by}"), "a multiplier of more than 0")?;
        }
        Ok(())
    }

    pub(crate) fn check_throttling(&self) -> Result<(), BuildError> {
        let Some(Throttling { max_tokens, token_ratio }) = self.throttling else { return Ok(()) };
        if !(1..=1000).contains(&max_tokens) {
            return Err(self.wrong("retry_throttling", max_tokens, "1 to 1000 tokens"));
        }
        if thousandths(token_ratio) == 0 || !token_ratio.is_finite() {
            return Err(self.wrong("retry_throttling", token_ratio, "a finite ratio of 0.001 or more"));
        }
        Ok(())
    }
}

impl MethodOptions {
    /// With no more attempts than this, as an author elsewhere may not overrule.
    fn capped(&self, most: u32) -> Self {
        let mut options = self.clone();
        if let Some(retry) = &mut options.retry {
            retry.max_attempts = retry.max_attempts.map(|attempts| attempts.min(most));
        }
        if let Some(hedging) = &mut options.hedging {
            hedging.max_attempts = hedging.max_attempts.min(most);
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{HedgingPolicy, RetryPolicy};

    fn refused(options: ServiceOptions) -> String {
        let checked = options.check().and_then(|()| options.methods().map(|_| ()));
        checked.expect_err("refused").to_string()
    }

    fn of_a_method(options: MethodOptions) -> ServiceOptions {
        ServiceOptions::new("x").method("/a.B/C", options)
    }

    fn retry(policy: RetryPolicy) -> ServiceOptions {
        of_a_method(MethodOptions::new().retry(policy))
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_name_and_value() {
        let second = Duration::from_secs(1);
        let cases = [
            (ServiceOptions::new("x").method("a.B/C", MethodOptions::new()), "method = a.B/C"),
            (ServiceOptions::new("x").safe_method("/a.B/"), "safe_method = /a.B/"),
            (of_a_method(MethodOptions::new().timeout(Duration::ZERO)), "timeout = 0ns (of /a.B/C)"),
            (retry(RetryPolicy::new().max_attempts(0)), "retry.max_attempts = 0 (of /a.B/C)"),
            (
                retry(RetryPolicy::new().retry_on([Code::Unavailable, Code::Ok])),
                "retry.retry_on = OK (of /a.B/C)",
            ),
            (
                of_a_method(MethodOptions::new().hedging(HedgingPolicy::new(second).non_fatal([Code::Ok]))),
                "hedging.non_fatal = OK",
            ),
            (retry(RetryPolicy::new().jitter(1.5)), "retry.jitter = 1.5"),
            (retry(RetryPolicy::new().jitter(f64::NAN)), "retry.jitter = NaN"),
            (retry(RetryPolicy::new().backoff(Duration::ZERO, second, 2.0)), "retry.backoff = 0ns"),
            (retry(RetryPolicy::new().backoff(second, second, 0.0)), "retry.backoff = times 0"),
            (retry(RetryPolicy::new().backoff(second, second, f64::INFINITY)), "retry.backoff = times inf"),
            (retry(RetryPolicy::new().attempt_timeout(Duration::ZERO)), "retry.attempt_timeout = 0ns"),
            (
                of_a_method(MethodOptions::new().hedging(HedgingPolicy::new(second).max_attempts(1))),
                "hedging.max_attempts = 1",
            ),
            (
                of_a_method(
                    MethodOptions::new().retry(RetryPolicy::new()).hedging(HedgingPolicy::new(second)),
                ),
                "hedging = beside retry",
            ),
            (
                of_a_method(MethodOptions::new().hedging(HedgingPolicy::new(second))),
                "hedging = 1s (of /a.B/C) is not usable: a name with a method that is safe",
            ),
            (ServiceOptions::new("x").retry_throttling(0, 0.1), "retry_throttling = 0"),
            (ServiceOptions::new("x").retry_throttling(1001, 0.1), "retry_throttling = 1001"),
            (ServiceOptions::new("x").retry_throttling(10, 0.0005), "retry_throttling = 0.0005"),
            (ServiceOptions::new("x").retry_throttling(10, f64::INFINITY), "retry_throttling = inf"),
            (ServiceOptions::new("x").retry_throttling(10, f64::NAN), "retry_throttling = NaN"),
        ];
        for (options, expected) in cases {
            let error = refused(options);
            assert!(error.contains(expected), "{error}: {expected}");
        }
    }

    #[test]
    fn a_name_that_the_descriptors_do_not_know_is_refused_where_they_know_what_was_meant() {
        let options = || ServiceOptions::new("x").descriptors(crate::demo::pb::FILE_DESCRIPTOR_SET);
        let any = MethodOptions::new;
        for (options, expected) in [
            (
                options().safe_method("/counter.v1.Counter/get"),
                "safe_method = /counter.v1.Counter/get is not in",
            ),
            (
                options().method("/counter.v1.Counter/Incremet", any()),
                "was /counter.v1.Counter/Increment meant?",
            ),
            (options().method("/Counter/", any()), "was /counter.v1.Counter/ meant?"),
            (options().health_watch("counter.v1.counter"), "was counter.v1.Counter meant?"),
        ] {
            let error = refused(options);
            assert!(error.contains(expected), "{error}: {expected}");
        }
        for options in [
            options().safe_method("/grpc.health.v1.Health/Check").health_watch("").method("/", any()),
            options().safe_method("/counter.v1.Counter/Get").health_watch("counter.v1.Counter"),
            ServiceOptions::new("x").safe_method("/counter.v1.Counter/get"),
        ] {
            assert!(options.methods().is_ok());
        }
    }

    #[test]
    fn only_a_name_with_a_safe_method_may_be_hedged() {
        let hedging = || MethodOptions::new().hedging(HedgingPolicy::new(Duration::from_millis(20)));
        let described = || ServiceOptions::new("x").descriptors(crate::demo::pb::FILE_DESCRIPTOR_SET);
        for (options, usable) in [
            (described().method("/counter.v1.Counter/Get", hedging()), true),
            (described().method("/counter.v1.Counter/", hedging()), true),
            (described().method("/", hedging()), true),
            (described().method("/counter.v1.Counter/Increment", hedging()), false),
            (described().method("/other.v1.Other/", hedging()), false),
            (ServiceOptions::new("x").method("/a.B/", hedging()).safe_method("/a.B/C"), true),
            (ServiceOptions::new("x").method("/a.B/", hedging()).safe_method("/a.Bc/C"), false),
            (ServiceOptions::new("x").method("/", hedging()), false),
        ] {
            assert_eq!(options.methods().is_ok(), usable, "{:?}", options.method_options);
        }
    }

    #[test]
    fn what_a_service_config_probably_misspells_is_told_and_no_error() {
        let config = r#"{"healthCheckConfig": {"serviceName": "counter.v1.Countr"}, "methodConfig": [{"name": [
            {}, {"service": "counter.v1.Counter"}, {"service": "counter.v1.Counter", "method": "Get"},
            {"service": "other.v1.Other", "method": "Get"},
            {"service": "counter.v1.Counter", "method": "Gett"}, {"service": "Counter"}], "timeout": "1s"}]}"#;
        let options = ServiceOptions::new("x").service_config(config.parse().unwrap());
        let known = options.clone().descriptors(crate::demo::pb::FILE_DESCRIPTOR_SET);
        assert!(known.methods().is_ok());
        let described = |options: &ServiceOptions| {
            let mut methods = Methods::new(Rules::new(&MethodOptions::new(), 5));
            for set in &options.descriptors {
                methods.read(set).unwrap();
            }
            methods.described()
        };
        assert_eq!(options.misnamed(&described(&options)), []);
        let told = |name, meant: &str| (name, vec![meant.to_owned()]);
        assert_eq!(
            known.misnamed(&described(&known)),
            [
                told("/counter.v1.Counter/Gett", "/counter.v1.Counter/Get"),
                told("/Counter/", "/counter.v1.Counter/"),
                told("counter.v1.Countr", "counter.v1.Counter"),
            ]
        );
    }

    #[test]
    fn the_code_precedes_the_service_config_in_either_order() {
        let config = || {
            ServiceConfig::from_json(
                r#"{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": "a.B"},
                    "methodConfig": [{"name": [{"service": "a.B"}], "timeout": "1s"},
                                     {"name": [{"service": "a.B", "method": "C"}], "timeout": "2s"}]}"#,
            )
            .unwrap()
        };
        let mine = MethodOptions::new().timeout(Duration::from_secs(3));
        let policy = crate::client::Policy::PickFirst;
        let first = ServiceOptions::new("x").policy(policy).method("/a.B/C", mine.clone());
        let options = [
            first.service_config(config()),
            ServiceOptions::new("x").service_config(config()).policy(policy).method("/a.B/C", mine),
        ];
        for options in options {
            assert_eq!(options.policy, policy);
            let methods = options.methods().unwrap();
            let timeout = |path: &str| methods.rules(methods.get(path)).timeout.map(|it| it.as_secs());
            assert_eq!((timeout("/a.B/C"), timeout("/a.B/D"), timeout("/c.D/E")), (Some(3), Some(1), None));
        }
        let alone = ServiceOptions::new("x").service_config(config());
        assert_eq!(alone.policy, crate::client::Policy::RoundRobin);
        assert_eq!(alone.watched_health(), Some("a.B"));
        assert_eq!(alone.health_watch("").watched_health(), Some(""));
        assert_eq!(ServiceOptions::new("x").watched_health(), None);
    }

    #[test]
    fn of_two_service_configs_the_last_one_holds_alone() {
        let config = |json| ServiceConfig::from_json(json).unwrap();
        let first = config(r#"{"loadBalancingConfig": [{"round_robin": {}}]}"#);
        let options = ServiceOptions::new("x").service_config(first).service_config(config("{}"));
        assert_eq!(options.policy, crate::client::Policy::PickFirst);
    }

    #[test]
    fn a_service_config_has_no_more_attempts_than_the_options_allow() {
        let json = r#"{"methodConfig": [
            {"name": [{}], "retryPolicy": {"maxAttempts": 100, "initialBackoff": "1s",
                "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["ABORTED"]}},
            {"name": [{"service": "h.H"}], "hedgingPolicy": {"maxAttempts": 100}}]}"#;
        let read = || ServiceOptions::new("x").service_config(ServiceConfig::from_json(json).unwrap());
        for (options, most) in [(read(), 5), (read().max_attempts(3), 3)] {
            let methods = options.methods().unwrap();
            let rules = &methods.rules(methods.get("/any.Service/Method")).retry;
            assert_eq!(rules.attempts, most, "gRFC A6: 5 where nothing else is said");
            assert!(rules.resends(Code::Aborted, false));
            let hedging = methods.rules(methods.get("/h.H/M")).hedging.as_ref().expect("hedged");
            assert_eq!(hedging.attempts, most);
        }
    }
}
