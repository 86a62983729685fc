//! The settings of one service.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    deadline::FOR_EVER,
    error::BuildError,
    hook::{CallFailure, Hook},
    policy::{MethodOptions, Throttling},
    service_config::ServiceConfig,
    traffic::Traffic,
};
use crate::consul::Consistency;

/// How calls are given to the ready instances of the datacenter in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// All calls to one instance, chosen at random among equals, with spare
    /// connections ready beside it.
    #[default]
    PickFirst,
    /// Each call, whatever its method, to the next one in turn, to each as often as its weight
    /// ([`Instance::weight`](crate::Instance::weight)) wants.
    RoundRobin,
    /// Each call to the less busy of two, one in turn and one by lot, considered as
    /// often as their weights want: of instances that differ in speed, the slow ones
    /// get fewer. A call counts until its response has ended.
    LeastRequest,
}

impl Policy {
    /// Calls are spread over all ready instances.
    pub(crate) fn spreads(self) -> bool {
        match self {
            Self::PickFirst => false,
            Self::RoundRobin | Self::LeastRequest => true,
        }
    }
}

/// What is kept of a request unless the setting says otherwise. Our choice.
const REPLAYED: usize = 64 << 10;
/// The same where any call may be refused: the longest message that tonic decodes by default, and the five bytes before it.
const REPLAYED_TO_PRIMARY: usize = (4 << 20) + 5;

/// What to find in Consul under one service name, and how to call it.
///
/// Settings are checked by [`build`](super::ConsulServiceBuilder::build), whose
/// error names the one that is wrong. A time longer than a year counts as a year.
#[derive(Clone)]
pub struct ServiceOptions {
    pub(crate) name: String,
    pub(crate) tags: Vec<String>,
    pub(crate) meta: Vec<(String, String)>,
    pub(crate) filter: Option<String>,
    pub(crate) near: Option<String>,
    pub(crate) consistency: Consistency,
    pub(crate) include_warning: bool,
    pub(crate) policy: Policy,
    /// Said in code: a service config does not change it.
    pub(crate) policy_given: bool,
    pub(crate) spares: usize,
    pub(crate) connect_timeout: Duration,
    pub(crate) default_timeout: Option<Duration>,
    pub(crate) fail_fast_after: Duration,
    pub(crate) suspect_after: Duration,
    pub(crate) probe_timeout: Duration,
    pub(crate) eject_for: Duration,
    pub(crate) eject_at_most: Duration,
    pub(crate) failures_to_eject: u32,
    pub(crate) max_attempts: u32,
    pub(crate) retry_ratio: f32,
    pub(crate) retries_per_second: u32,
    pub(crate) throttling: Option<Throttling>,
    pub(crate) method_options: Vec<(String, MethodOptions)>,
    pub(crate) service_config: Option<ServiceConfig>,
    pub(crate) replay_limit: Option<usize>,
    pub(crate) keep_alive: Option<(Duration, Duration)>,
    #[cfg(feature = "tls")]
    pub(crate) tls: Option<tonic::transport::ClientTlsConfig>,
    pub(crate) safe_methods: Vec<String>,
    pub(crate) descriptors: Vec<Vec<u8>>,
    pub(crate) hook: Option<Hook>,
    pub(crate) traffic: Traffic,
    pub(crate) primary_only: bool,
}

impl ServiceOptions {
    /// The service called `name` in Consul, with every setting at its default.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            tags: Vec::new(),
            meta: Vec::new(),
            filter: None,
            near: None,
            consistency: Consistency::default(),
            include_warning: false,
            policy: Policy::default(),
            policy_given: false,
            spares: 1,
            connect_timeout: Duration::from_secs(1),
            default_timeout: Some(Duration::from_secs(10)),
            fail_fast_after: Duration::from_secs(3),
            suspect_after: Duration::from_millis(500),
            probe_timeout: Duration::from_millis(500),
            eject_for: Duration::from_millis(500),
            eject_at_most: Duration::from_secs(30),
            failures_to_eject: 5,
            max_attempts: 5,
            retry_ratio: 0.2,
            retries_per_second: 100,
            throttling: None,
            method_options: Vec::new(),
            service_config: None,
            replay_limit: None,
            keep_alive: None,
            #[cfg(feature = "tls")]
            tls: None,
            safe_methods: Vec::new(),
            descriptors: Vec::new(),
            hook: None,
            traffic: Traffic::default(),
            primary_only: false,
        }
    }

    /// Only instances that carry this tag; several add up. Default: any.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Only instances whose service metadata has this value under this key;
    /// several add up. Default: any.
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.meta.push((key.into(), value.into()));
        self
    }

    /// Only instances that match this Consul filter expression. Default: none.
    pub fn filter(mut self, expression: impl Into<String>) -> Self {
        self.filter = Some(expression.into());
        self
    }

    /// Prefers instances near this node (`_agent`: the agent's own), in the
    /// order Consul gives, instead of a random one. Default: random.
    pub fn near(mut self, node: impl Into<String>) -> Self {
        self.near = Some(node.into());
        self
    }

    /// How fresh Consul's answers must be. Default: [`Consistency::Stale`],
    /// which is answered without a leader too.
    pub fn consistency(mut self, consistency: Consistency) -> Self {
        self.consistency = consistency;
        self
    }

    /// Uses instances with a check in the warning state, after all others.
    /// Default: they are not used.
    pub fn include_warning(mut self, yes: bool) -> Self {
        self.include_warning = yes;
        self
    }

    /// How calls are spread. Default: [`Policy::PickFirst`].
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self.policy_given = true;
        self
    }

    /// How many connections [`Policy::PickFirst`] keeps ready beside the one in use. Default: 1.
    pub fn spares(mut self, spares: usize) -> Self {
        self.spares = spares;
        self
    }

    /// The time for one connection to be made and to answer: TCP, TLS and one
    /// exchange together. Default: 1 s, as linkerd has it.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout.min(FOR_EVER);
        self
    }

    /// The deadline of calls that bring none, up to the response's headers
    /// (and to its end where the descriptors say that it is a single message).
    /// `None`: no bound. Default: 10 s.
    pub fn default_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.default_timeout = timeout.into();
        self
    }

    /// How long a call waits for a usable instance, within its deadline.
    /// Default: 3 s, as linkerd has it.
    pub fn fail_fast_after(mut self, wait: Duration) -> Self {
        self.fail_fast_after = wait.min(FOR_EVER);
        self
    }

    /// How long an attempt may be out, with nothing else heard from its instance, before that is probed; one that stays
    /// out after an answered probe waits twice as long for the next, up to 5 s, and so long a response that has begun
    /// may be silent. Our choice: [`keep_alive`](Self::keep_alive) finds out sooner. Default: 500 ms.
    pub fn suspect_after(mut self, wait: Duration) -> Self {
        self.suspect_after = wait.min(FOR_EVER);
        self
    }

    /// How long a probe (`grpc.health.v1` Check) of a suspect may take; from half of
    /// it on a second connection is tried as well. An instance with no ready peer
    /// is given up only when four in a row are not answered. Default: 500 ms.
    pub fn probe_timeout(mut self, timeout: Duration) -> Self {
        self.probe_timeout = timeout.min(FOR_EVER);
        self
    }

    /// How long a failed instance is left alone: `first`, then 1.6 times as
    /// long after each further failure, up to `at_most`, each varied by a fifth
    /// (gRPC's connection back-off). A connection that answers ends the row, but not that of
    /// ejections from use: of these, one is forgiven for each 10 s in use (the interval of gRFC
    /// A50). Default: 500 ms and 30 s.
    pub fn ejection(mut self, first: Duration, at_most: Duration) -> Self {
        self.eject_for = first.min(FOR_EVER);
        self.eject_at_most = at_most.min(FOR_EVER);
        self
    }

    /// How many attempts in a row must be answered UNAVAILABLE, be reset or not be answered
    /// in the time of an attempt, for an instance to be ejected, if there are peers enough
    /// (see [`panic_threshold`](Self::panic_threshold)). Default: 5 (Envoy's consecutive failures).
    pub fn failures_to_eject(mut self, failures: u32) -> Self {
        self.failures_to_eject = failures;
        self
    }

    /// How many times one call may be sent in all, whatever the reasons; where a
    /// [`RetryPolicy`](super::RetryPolicy) or [`HedgingPolicy`](super::HedgingPolicy)
    /// has attempts of its own, how many more than those. Default: 5 (gRFC A6's cap).
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// The budget for resending calls that may have run: this share of all
    /// calls, and at least so many a second, of which those of ten seconds may be spent at once. Calls that
    /// provably never ran do not count. Hedges do. Default: 0.2 and 100.
    pub fn retry_budget(mut self, share: f32, per_second: u32) -> Self {
        self.retry_ratio = share;
        self.retries_per_second = per_second;
        self
    }

    /// How many bytes of a request are kept for resending. Default: 64 KiB, and 4 MiB (what a tonic server takes
    /// by itself) with [`primary_only`](Self::primary_only), where any call may meet one that is not the primary.
    pub fn replay_limit(mut self, bytes: usize) -> Self {
        self.replay_limit = Some(bytes);
        self
    }

    /// How much of a request is kept, which goes `to_primary` or to anybody.
    #[inline]
    pub(crate) fn request_limit(&self, to_primary: bool) -> usize {
        self.replay_limit.unwrap_or(if to_primary { REPLAYED_TO_PRIMARY } else { REPLAYED })
    }

    /// How much of an answer is taken in before any of it is handed over.
    #[inline]
    pub(crate) fn answer_limit(&self) -> usize {
        self.replay_limit.unwrap_or(REPLAYED)
    }

    /// HTTP/2 keepalive pings every `interval`, also while idle; where one is not answered within
    /// `timeout` the connection is given up. Unary calls do not need them: a silent instance is probed. A silent
    /// stream is looked after every 5 s only. They keep middleboxes from forgetting idle connections.
    ///
    /// Mind the servers, which police them (gRFC A8). grpc-go's `keepalive.EnforcementPolicy` and
    /// grpc-java's `permitKeepAliveTime` allow one ping in 5 minutes, and none without a call (grpc-go:
    /// one in 2 hours), unless told otherwise (`PermitWithoutStream`, `permitKeepAliveWithoutCalls`); the
    /// third offence ends the connection with GOAWAY ENHANCE_YOUR_CALM, "too_many_pings". Such a
    /// connection is replaced like any other that is lost. Default: off.
    pub fn keep_alive(mut self, interval: Duration, timeout: Duration) -> Self {
        self.keep_alive = Some((interval.min(FOR_EVER), timeout.min(FOR_EVER)));
        self
    }

    /// TLS to the instances. Default: none.
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: tonic::transport::ClientTlsConfig) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Declares `/package.Service/Method` safe to repeat. Where the [descriptors](Self::descriptors) know
    /// the service and not the method, or only a service of nearly this name, that is refused. Default: what the descriptors say.
    pub fn safe_method(mut self, path: impl Into<String>) -> Self {
        self.safe_methods.push(path.into());
        self
    }

    /// A file descriptor set, as the proto compiler writes it: methods with
    /// `idempotency_level` `NO_SIDE_EFFECTS` or `IDEMPOTENT` are safe to repeat. Default: none.
    pub fn descriptors(mut self, file_descriptor_set: impl Into<Vec<u8>>) -> Self {
        self.descriptors.push(file_descriptor_set.into());
        self
    }

    /// Calls `hook` for every failed attempt, also those that the caller never
    /// sees. It runs on the calling task and must not block. Default: none.
    pub fn on_error(mut self, hook: impl Fn(&CallFailure<'_>) + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn check(&self) -> Result<(), BuildError> {
        self.check_traffic()?;
        let times = [
            ("connect_timeout", self.connect_timeout),
            ("fail_fast_after", self.fail_fast_after),
            ("suspect_after", self.suspect_after),
            ("probe_timeout", self.probe_timeout),
            ("ejection", self.eject_for),
            ("default_timeout", self.default_timeout.unwrap_or(Duration::MAX)),
            (
                "keep_alive",
                self.keep_alive.map_or(Duration::MAX, |(interval, timeout)| interval.min(timeout)),
            ),
        ];
        for (setting, value) in times {
            if value.is_zero() {
                return Err(self.wrong(setting, format!("{value:?}"), "more than nothing"));
            }
        }
        if self.eject_at_most < self.eject_for {
            let value = format!("{:?}, at most {:?}", self.eject_for, self.eject_at_most);
            return Err(self.wrong("ejection", value, "a first time no longer than the longest"));
        }
        if self.max_attempts == 0 {
            return Err(self.wrong("max_attempts", 0, "1 or more"));
        }
        if self.failures_to_eject == 0 {
            return Err(self.wrong("failures_to_eject", 0, "1 or more"));
        }
        self.check_throttling()?;
        // The bounds of tower's budget, which panics beyond them.
        if !(0.0..=1000.0).contains(&self.retry_ratio) {
            return Err(self.wrong("retry_budget", self.retry_ratio, "a share from 0 to 1000"));
        }
        if self.retries_per_second > 1_000_000 {
            return Err(self.wrong("retry_budget", self.retries_per_second, "at most 1000000 a second"));
        }
        Ok(())
    }

    /// Refuses what only a query to Consul can do.
    pub(crate) fn refuse_query(&self) -> Result<(), BuildError> {
        let expected = "nothing: only Consul is asked by it, through `ConsulService`";
        let set = [
            ("tag", self.tags.first()),
            ("meta", self.meta.first().map(|(key, _)| key)),
            ("filter", self.filter.as_ref()),
            ("near", self.near.as_ref()),
            ("include_warning", self.include_warning.then(|| "true".to_owned()).as_ref()),
        ]
        .map(|(setting, value)| value.map(|value| self.wrong(setting, value, expected)));
        set.into_iter().flatten().next().map_or(Ok(()), Err)
    }

    pub(crate) fn wrong(
        &self,
        setting: &'static str,
        value: impl fmt::Display,
        expected: &'static str,
    ) -> BuildError {
        BuildError::Setting { service: self.name.clone(), setting, value: value.to_string(), expected }
    }
}

impl fmt::Debug for ServiceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceOptions")
            .field("name", &self.name)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Servers punish pings that they do not expect, and nothing here needs them.
    #[test]
    fn no_server_is_pinged_unless_that_is_asked_for() {
        assert_eq!(ServiceOptions::new("x").keep_alive, None);
        let second = Duration::from_secs(1);
        assert_eq!(ServiceOptions::new("x").keep_alive(second, second).keep_alive, Some((second, second)));
    }
}
