//! Builds `Services`: every setting is checked here, and nothing starts.

use std::{fmt, sync::Arc, time::Duration};

use super::{Common, Services, ServicesParts, Slot};
use crate::client::{
    datacenters::Fallback,
    deadline::FOR_EVER,
    error::BuildError,
    options::ServiceOptions,
    registry::{Guarded, Registry},
    resolver::Turns,
    worker::Others,
};

/// Builds [`Services`]. A time longer than a year counts as a year.
#[derive(Clone)]
pub struct ServicesBuilder {
    registry: Arc<dyn Registry>,
    name: String,
    services: Vec<ServiceOptions>,
    fallback: Vec<(String, Arc<dyn Registry>)>,
    settings: Common,
}

impl ServicesBuilder {
    pub(super) fn new(registry: impl Registry) -> Self {
        let mut settings = Common::default();
        settings.resolver.turns = Turns::for_all();
        Self {
            registry: Arc::new(Guarded(Arc::new(registry))),
            name: "registry".to_owned(),
            services: Vec::new(),
            fallback: Vec::new(),
            settings,
        }
    }

    /// What to call the registry. Default: `registry`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Adds a service; at least one is needed. Options that choose among
    /// instances by a query to Consul (`tag`, `meta`, `filter`, `near`,
    /// `include_warning`) are refused.
    pub fn service(mut self, options: ServiceOptions) -> Self {
        self.services.push(options);
        self
    }

    /// Another registry to look in when those before have no usable instance;
    /// several are asked in this order. `name` is what status and events call it.
    /// Default: none.
    pub fn fallback(mut self, name: impl Into<String>, registry: impl Registry) -> Self {
        self.fallback.push((name.into(), Arc::new(Guarded(Arc::new(registry)))));
        self
    }

    /// How long a more preferred registry's instances must have been usable
    /// without a break before calls return to them; each client adds up to a
    /// fifth. Default: 5 s.
    pub fn failback_after(mut self, time: Duration) -> Self {
        self.settings.failback_after = time.min(FOR_EVER);
        self
    }

    /// How long a list that held instances must stay empty before these are used
    /// only after every other registry's. They stay in use until then, and as the
    /// last resort after it. Default: 4 s.
    pub fn demote_after(mut self, time: Duration) -> Self {
        self.settings.demote_after = time.min(FOR_EVER);
        self
    }

    /// Keeps asking the other registries, and one connection through each
    /// ready, instead of only on need. Default: on need.
    pub fn keep_warm(mut self, yes: bool) -> Self {
        self.settings.keep_warm = yes;
        self
    }

    /// How long a question waits for news, from 1 s to 10 min. Default: 60 s.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.resolver.wait = wait;
        self
    }

    /// Checks every setting, and prepares to start. Asks nobody yet.
    ///
    /// # Errors
    /// Names the setting that cannot be used, and what would be right; or says
    /// that there is no tokio runtime, or one without timers or IO. (tokio answers that
    /// by a panic alone, which is caught here; its words come by the panic hook all the same.)
    pub fn build(self) -> Result<Services, BuildError> {
        let others = if self.fallback.is_empty() { Others::None } else { Others::Registries(self.fallback) };
        let slot = |options: ServiceOptions| {
            options.refuse_query()?;
            Slot::new(options, self.registry.clone(), others.clone())
        };
        let parts = ServicesParts::new(self.name, self.services, self.settings, Fallback::none(), slot)?;
        Ok(Services::new(parts))
    }
}

impl fmt::Debug for ServicesBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServicesBuilder")
            .field("name", &self.name)
            .field("services", &self.services)
            .finish_non_exhaustive()
    }
}
