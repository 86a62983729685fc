//! `ConsulService`: services found in one Consul.

use std::fmt;

use super::{
    binding::Binding,
    builder::ConsulServiceBuilder,
    error::{UnknownService, UpdateError},
    handle::GrpcClient,
    services::Services,
};
use crate::consul::{ConfigError, ConsulClient, ConsulConfig};

/// Finds the healthy instances of one or several services in one Consul, and
/// keeps a connection to each service ready.
///
/// Cheap to clone; clones are the same thing. Several may exist in one process,
/// for different agents or datacenters. A service is looked for from the first
/// [`grpc_client`](Self::grpc_client) call for it on. When the last clone, the
/// last [`GrpcClient`] and the last [`FailoverChannel`](super::FailoverChannel)
/// are gone, so are all tasks, requests and connections.
///
/// ```no_run
/// use tonic_failover::client::{ConsulService, Fallback, ServiceOptions};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let consul = ConsulService::from_env()?
///     .service(ServiceOptions::new("counter"))
///     .fallback(Fallback::nearest())
///     .build()?;
/// let counter = consul.grpc_client("counter")?;
/// println!("{}", counter.ready().await?.instance().expect("ready"));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ConsulService {
    services: Services,
    client: ConsulClient,
}

// === impl ConsulService ===

impl ConsulService {
    /// Begins with the `CONSUL_*` environment
    /// ([`ConsulConfig::from_env`]).
    ///
    /// # Errors
    /// Names the variable that cannot be used.
    pub fn from_env() -> Result<ConsulServiceBuilder, ConfigError> {
        Ok(Self::builder(ConsulConfig::from_env()?))
    }

    /// Begins with the given Consul settings.
    pub fn builder(config: ConsulConfig) -> ConsulServiceBuilder {
        ConsulServiceBuilder::new(config)
    }

    pub(super) fn new(services: Services, client: ConsulClient) -> Self {
        Self { services, client }
    }

    /// What this Consul is called: the name given, else the agent's address.
    pub fn name(&self) -> &str {
        self.services.name()
    }

    /// The client that Consul is asked with.
    pub fn consul_client(&self) -> &ConsulClient {
        &self.client
    }

    /// The names of the services it was built with.
    pub fn services(&self) -> impl Iterator<Item = &str> {
        self.services.services()
    }

    /// The handle of one service, at once: neither Consul nor an instance need
    /// be there yet. All handles of one service share its worker.
    ///
    /// # Errors
    /// An unknown name is refused with the list of the known ones.
    pub fn grpc_client(&self, service: &str) -> Result<GrpcClient, UnknownService> {
        self.services.handle(service, self.clone())
    }

    /// Looks the service up in Consul afresh (one query that does not wait),
    /// makes sure that the bound instance answers, connects to another where it
    /// does not, and returns what is bound then. Where nothing has changed and
    /// the bound instance answers, that is the present binding, and nothing is
    /// published.
    ///
    /// Failing calls do the same by themselves and share the look-up: a thousand
    /// of them cause one. Dropping the future gives up the answer alone.
    ///
    /// # Errors
    /// An unknown name; nothing usable, and why; Consul's failure, where no
    /// instance known from before answers either.
    pub async fn update_grpc_client(&self, service: &str) -> Result<Binding, UpdateError> {
        self.services.update_grpc_client(service).await
    }

    /// Ends all services in order: subscribers see an empty binding, queries and
    /// connection attempts are given up, calls in flight finish on their
    /// connections. Returns when the tasks have ended. Later calls fail.
    pub async fn shutdown(&self) {
        self.services.shutdown().await;
    }
}

impl fmt::Debug for ConsulService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsulService")
            .field("name", &self.name())
            .field("services", &self.services().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}
