//! What to ask for.

use std::time::Duration;

use url::form_urlencoded;

use super::{BlockingIndex, InvalidName, ServiceName};

/// The longest that Consul waits for news
/// (<https://developer.hashicorp.com/consul/api-docs/features/blocking>).
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Which instances of a service to ask for.
///
/// ```
/// # use tonic_failover::consul::HealthQuery;
/// let query = HealthQuery::new("counter")?.datacenter("dc2").tag("v2").meta("zone", "a");
/// # Ok::<_, tonic_failover::consul::InvalidName>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct HealthQuery {
    service: ServiceName,
    datacenter: Option<String>,
    tags: Vec<String>,
    meta: Vec<(String, String)>,
    filter: Option<String>,
    near: Option<String>,
    consistency: Consistency,
    include_warning: bool,
}

/// How fresh a read must be
/// (<https://developer.hashicorp.com/consul/api-docs/features/consistency>).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Consistency {
    /// Any server answers, with or without a leader. The default here, as in
    /// Consul's own DNS (`dns_config.allow_stale`): without a leader the other
    /// modes hang for 7 s and fail, this one goes on answering in milliseconds.
    #[default]
    Stale,
    /// The leader answers without asking its peers: Consul's default for HTTP.
    Default,
    /// The leader answers after a round to its peers.
    Consistent,
}

// === impl HealthQuery ===

impl HealthQuery {
    /// All usable instances of `service` in the agent's own datacenter.
    ///
    /// # Errors
    /// Where the name would not arrive as it is; see [`ServiceName::new`].
    pub fn new(service: impl Into<String>) -> Result<Self, InvalidName> {
        ServiceName::new(service).map(Self::of)
    }

    /// As [`new`](Self::new), of a name already checked.
    pub fn of(service: ServiceName) -> Self {
        Self {
            service,
            datacenter: None,
            tags: Vec::new(),
            meta: Vec::new(),
            filter: None,
            near: None,
            consistency: Consistency::default(),
            include_warning: false,
        }
    }

    /// Asks in this datacenter, through the same agent. Default: the agent's own.
    ///
    /// Where the agent does not tell its own datacenter's name within 1 s, this one counts as
    /// another, and its instances' WAN addresses are used.
    pub fn datacenter(mut self, datacenter: impl Into<String>) -> Self {
        self.datacenter = Some(datacenter.into()).filter(|it| !it.is_empty());
        self
    }

    /// Only instances with this tag. May be called several times: all must be
    /// there. Consul compares without regard to case. Default: any.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Only instances whose metadata has this value under this key, compared
    /// exactly. May be called several times: all must hold. Default: any.
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.meta.push((key.into(), value.into()));
        self
    }

    /// Only instances that match this expression in Consul's filter language
    /// (<https://developer.hashicorp.com/consul/api-docs/features/filtering>), for
    /// example `Service.Meta.zone != "b"`. Consul answers a faulty one with 500.
    /// Default: any.
    pub fn filter(mut self, expression: impl Into<String>) -> Self {
        self.filter = Some(expression.into()).filter(|it| !it.is_empty());
        self
    }

    /// In the order of the round-trip time from this node; `_agent` is the node of
    /// the agent that is asked. Default: Consul's order.
    pub fn near(mut self, node: impl Into<String>) -> Self {
        self.near = Some(node.into()).filter(|it| !it.is_empty());
        self
    }

    /// Default: [`Consistency::Stale`].
    pub fn consistency(mut self, consistency: Consistency) -> Self {
        self.consistency = consistency;
        self
    }

    /// Whether instances with a check in the warning state count as usable.
    /// Default: no.
    pub fn include_warning(mut self, yes: bool) -> Self {
        self.include_warning = yes;
        self
    }

    /// The service's name.
    pub fn service_name(&self) -> &str {
        self.service.as_str()
    }

    /// The datacenter asked in; `None` is the agent's own.
    pub fn datacenter_name(&self) -> Option<&str> {
        self.datacenter.as_deref()
    }

    pub(super) fn wants_warning(&self) -> bool {
        self.include_warning
    }

    pub(super) fn wanted_meta(&self) -> &[(String, String)] {
        &self.meta
    }

    pub(super) fn path(&self) -> String {
        format!("v1/health/service/{}", self.service)
    }

    /// The query string; `block` is the index to wait beyond and how long.
    pub(super) fn query(&self, namespace: Option<&str>, block: Option<(BlockingIndex, Duration)>) -> String {
        let mut pairs = form_urlencoded::Serializer::new(String::new());
        if !self.include_warning {
            pairs.append_key_only("passing");
        }
        let options = [
            ("dc", self.datacenter.as_deref()),
            ("ns", namespace),
            ("near", self.near.as_deref()),
            ("filter", self.filter.as_deref()),
        ];
        for (key, value) in options {
            if let Some(value) = value {
                pairs.append_pair(key, value);
            }
        }
        for tag in &self.tags {
            pairs.append_pair("tag", tag);
        }
        match self.consistency {
            Consistency::Stale => _ = pairs.append_key_only("stale"),
            Consistency::Default => {}
            Consistency::Consistent => _ = pairs.append_key_only("consistent"),
        }
        if let Some((index, wait)) = block
            && let Some(index) = index.get()
        {
            pairs.append_pair("index", &index.to_string());
            pairs.append_pair("wait", &format!("{}ms", bounded(wait).as_millis()));
        }
        pairs.finish()
    }
}

/// The query string of other questions about a datacenter.
pub(super) fn in_datacenter(datacenter: Option<&str>) -> String {
    let mut pairs = form_urlencoded::Serializer::new(String::new());
    if let Some(datacenter) = datacenter {
        pairs.append_pair("dc", datacenter);
    }
    pairs.finish()
}

/// `wait` as Consul will take it: 0 would mean its default of 5 minutes.
pub(super) fn bounded(wait: Duration) -> Duration {
    wait.clamp(Duration::from_millis(1), LONGEST_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_string_says_everything_that_was_asked() {
        let query = HealthQuery::new("counter")
            .unwrap()
            .datacenter("dc2")
            .tag("a&b")
            .tag("é")
            .filter("Service.Meta.zone == \"x\"")
            .near("_agent")
            .consistency(Consistency::Consistent);
        let text = query.query(Some("team"), Some((BlockingIndex::from(9), Duration::from_secs(30))));
        assert_eq!(
            text,
            "passing&dc=dc2&ns=team&near=_agent&filter=Service.Meta.zone+%3D%3D+%22x%22&tag=a%26b\
             &tag=%C3%A9&consistent&index=9&wait=30000ms"
        );
    }

    #[test]
    fn without_an_index_nothing_waits() {
        let query = HealthQuery::new("counter").unwrap().include_warning(true);
        assert_eq!(query.query(None, Some((BlockingIndex::NONE, Duration::from_secs(30)))), "stale");
    }

    #[test]
    fn a_wait_of_nothing_is_not_five_minutes_and_one_too_long_is_consuls_longest() {
        assert_eq!(bounded(Duration::ZERO), Duration::from_millis(1));
        assert_eq!(bounded(Duration::MAX), Duration::from_secs(600));
    }
}
