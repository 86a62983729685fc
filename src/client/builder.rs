//! Builds a `ConsulService`: every setting is checked here, and nothing starts.

use std::{sync::Arc, time::Duration};

#[cfg(any(test, feature = "testkit"))]
use super::mechanisms::{self, Mechanism};
use super::{
    datacenters::Fallback,
    deadline::FOR_EVER,
    error::BuildError,
    options::ServiceOptions,
    registry::{ConsulQuery, Registry},
    resolver::Turns,
    service::ConsulService,
    services::{Common, Services, ServicesParts, Slot},
};
use crate::consul::{ConsulClient, ConsulConfig, HealthQuery};

/// Builds a [`ConsulService`]. A time longer than a year counts as a year.
#[derive(Clone, Debug)]
pub struct ConsulServiceBuilder {
    config: ConsulConfig,
    name: Option<String>,
    services: Vec<ServiceOptions>,
    fallback: Fallback,
    settings: Common,
    max_long_polls: usize,
    read_at_least_every: Duration,
}

/// The most long polls: with them, the reads beside them and the connections kept
/// for later stay below the 200 that Consul takes from one address.
const MOST_LONG_POLLS: usize = 128;

impl ConsulServiceBuilder {
    pub(super) fn new(config: ConsulConfig) -> Self {
        Self {
            config,
            name: None,
            services: Vec::new(),
            fallback: Fallback::none(),
            settings: Common::default(),
            max_long_polls: 64,
            read_at_least_every: Duration::from_secs(10),
        }
    }

    /// What to call this Consul. Default: the agent's address.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Adds a service; at least one is needed.
    pub fn service(mut self, options: ServiceOptions) -> Self {
        self.services.push(options);
        self
    }

    /// Where to look when the own datacenter has no usable instance. Default: nowhere.
    pub fn fallback(mut self, fallback: Fallback) -> Self {
        self.fallback = fallback;
        self
    }

    /// How long a more preferred datacenter must have been usable without a
    /// break before calls return to it; each client adds up to a fifth, so that
    /// not all return at once. Default: 5 s.
    pub fn failback_after(mut self, time: Duration) -> Self {
        self.settings.failback_after = time.min(FOR_EVER);
        self
    }

    /// How long a list that held instances must stay empty before these are used
    /// only after every other datacenter's. They stay in use until then, and as
    /// the last resort after it: an empty list alone proves nothing. Default:
    /// 4 s, which is longer than an agent's restart hides instances (2.6 s, measured
    /// with Consul 1.8.7).
    pub fn demote_after(mut self, time: Duration) -> Self {
        self.settings.demote_after = time.min(FOR_EVER);
        self
    }

    /// Keeps asking about the other datacenters, and one connection to each
    /// ready, instead of only on need. Default: on need.
    pub fn keep_warm(mut self, yes: bool) -> Self {
        self.settings.keep_warm = yes;
        self
    }

    /// Switches a mechanism off, so that a test can show what it is there for.
    #[cfg(any(test, feature = "testkit"))]
    #[doc(hidden)]
    pub fn without(mut self, mechanism: Mechanism) -> Self {
        let settings = &mut self.settings;
        let resolver = &mut settings.resolver.without;
        match mechanism {
            Mechanism::KeepOnError => resolver.keep_on_error = true,
            Mechanism::KeepOnEmpty => resolver.keep_on_empty = true,
            Mechanism::IndexReset => resolver.index_reset = true,
            // Ten years.
            Mechanism::Demotion => settings.demote_after = Duration::from_secs(10 * 365 * 86_400),
            Mechanism::Ejection => settings.ejects = false,
            Mechanism::Quiet => (resolver.quiet, self.config.without.quiet) = (true, true),
            Mechanism::Spacing => resolver.spacing = true,
            Mechanism::Behind => resolver.behind = true,
            Mechanism::Seats => resolver.seats = true,
            Mechanism::GivenUpSeats => resolver.given_up_seats = true,
            Mechanism::Confirmation => resolver.confirmation = true,
            Mechanism::Lanes => self.config.without.lanes = true,
            Mechanism::NextAgent => self.config.without.next_agent = true,
        }
        self
    }

    /// How long a blocking query waits for news, from 1 s to 10 min. Default: 60 s.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.resolver.wait = wait;
        self
    }

    /// How many questions may wait for news in Consul at once, for all services and
    /// datacenters of this `ConsulService` together, from 1 to 128. Each has a
    /// connection of its own, and an agent takes 200 from one address
    /// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#http_max_conns_per_client>).
    /// Default: 64, so that the host's other programs keep their share.
    ///
    /// Where there are more services, they take turns: one whose list has just
    /// changed goes on waiting, one that waited in vain hands on to the one that has
    /// been without the longest, and those without are read without waiting, at
    /// least once in [`read_at_least_every`](Self::read_at_least_every). At most
    /// 16 such reads are under way at once.
    pub fn max_long_polls(mut self, polls: usize) -> Self {
        self.max_long_polls = polls;
        self
    }

    /// How long a service may go unread while others have all the long polls, from
    /// 100 ms to 10 min; so long a change of it may go unseen. Default: 10 s.
    pub fn read_at_least_every(mut self, time: Duration) -> Self {
        self.read_at_least_every = time;
        self
    }

    /// Checks every setting, and prepares to start. Asks nobody yet.
    ///
    /// # Errors
    /// Names the setting that cannot be used, and what would be right; or says
    /// that there is no tokio runtime, or one without timers or IO. (tokio answers that
    /// by a panic alone, which is caught here; its words come by the panic hook all the same.)
    pub fn build(self) -> Result<ConsulService, BuildError> {
        if !(1..=MOST_LONG_POLLS).contains(&self.max_long_polls) {
            return Err(BuildError::MaxLongPolls { value: self.max_long_polls });
        }
        let every = self.read_at_least_every;
        if !(Duration::from_millis(100)..=Duration::from_secs(600)).contains(&every) {
            return Err(BuildError::ReadAtLeastEvery { value: every });
        }
        let mut settings = self.settings;
        let without = settings.resolver.without;
        settings.resolver.turns =
            if without.seats { Turns::for_all() } else { Turns::new(self.max_long_polls, every) };
        let client = ConsulClient::new(self.config)?;
        let slot = |options: ServiceOptions| {
            let query = query(&options)?;
            let others = self.fallback.others(&client, &query);
            let registry: Arc<dyn Registry> = Arc::new(ConsulQuery::new(client.clone(), query));
            #[cfg(any(test, feature = "testkit"))]
            let registry = mechanisms::deaf(registry, without);
            Slot::new(options, registry, others)
        };
        let name = self.name.unwrap_or_else(|| client.address().to_owned());
        let parts = ServicesParts::new(name, self.services, settings, self.fallback.clone(), slot)?;
        Ok(ConsulService::new(Services::new(parts), client))
    }
}

/// The question that the options ask.
fn query(options: &ServiceOptions) -> Result<HealthQuery, BuildError> {
    let mut query = HealthQuery::new(&options.name)?
        .consistency(options.consistency)
        .include_warning(options.include_warning);
    for tag in &options.tags {
        query = query.tag(tag);
    }
    for (key, value) in &options.meta {
        query = query.meta(key, value);
    }
    if let Some(filter) = &options.filter {
        query = query.filter(filter);
    }
    if let Some(near) = &options.near {
        query = query.near(near);
    }
    Ok(query)
}
