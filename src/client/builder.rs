//! Builds a `ConsulService`: every setting is checked here, and nothing starts.

use std::{sync::Arc, time::Duration};

#[cfg(any(test, feature = "testkit"))]
use super::mechanisms::Mechanism;
use super::{
    datacenters::Fallback,
    deadline::FOR_EVER,
    error::BuildError,
    options::ServiceOptions,
    registry::ConsulQuery,
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
}

impl ConsulServiceBuilder {
    pub(super) fn new(config: ConsulConfig) -> Self {
        Self {
            config,
            name: None,
            services: Vec::new(),
            fallback: Fallback::none(),
            settings: Common::default(),
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
        }
        self
    }

    /// How long a blocking query waits for news, from 1 s to 10 min. Default: 60 s.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.resolver.wait = wait;
        self
    }

    /// Checks every setting, and prepares to start. Asks nobody yet.
    ///
    /// # Errors
    /// Names the setting that cannot be used, and what would be right; or says
    /// that there is no tokio runtime.
    pub fn build(self) -> Result<ConsulService, BuildError> {
        let client = ConsulClient::new(self.config)?;
        let slot = |options: ServiceOptions| {
            let query = query(&options)?;
            let others = self.fallback.others(&client, &query);
            let registry = Arc::new(ConsulQuery::new(client.clone(), query));
            Slot::new(options, registry, others)
        };
        let name = self.name.unwrap_or_else(|| client.address().to_owned());
        let parts = ServicesParts::new(name, self.services, self.settings, self.fallback.clone(), slot)?;
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
