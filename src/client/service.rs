//! `ConsulService`: the services of one Consul, and what keeps each of them bound.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    runtime::Handle,
    sync::{broadcast, mpsc, oneshot, watch},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use tower::util::rng::{HasherRng, Rng};
use tracing::Instrument;

use super::{
    balance::Picker,
    binding::Binding,
    builder::ConsulServiceBuilder,
    call::CallShared,
    connector::TonicConnector,
    datacenters::{Fallback, Kind},
    error::{UnknownService, UpdateError},
    event::{self, FailoverEvent},
    fleet::{Ejection, Settings},
    handle::GrpcClient,
    methods::Methods,
    options::ServiceOptions,
    report::Report,
    resolver::ResolverSettings,
    retry::Retry,
    status::ServiceStatus,
    worker::{Others, Parts, Publisher, Sources, Worker},
};
use crate::consul::{ConfigError, ConsulClient, ConsulConfig, HealthQuery};

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
    inner: Arc<Inner>,
}

struct Inner {
    parts: ServiceParts,
    tasks: TaskTracker,
    closed: CancellationToken,
}

/// What a builder has checked and made.
pub(super) struct ServiceParts {
    pub(super) name: String,
    pub(super) client: ConsulClient,
    pub(super) services: BTreeMap<String, Slot>,
    pub(super) fallback: Fallback,
    pub(super) settings: Common,
    pub(super) runtime: Handle,
}

/// What all services of one `ConsulService` have in common.
#[derive(Clone, Debug)]
pub(super) struct Common {
    pub(super) failback_after: Duration,
    pub(super) demote_after: Duration,
    pub(super) keep_warm: bool,
    /// False only where a test has switched it off.
    pub(super) ejects: bool,
    pub(super) resolver: ResolverSettings,
}

/// One service, and its worker once it is wanted.
pub(super) struct Slot {
    options: Arc<ServiceOptions>,
    methods: Methods,
    query: HealthQuery,
    running: Mutex<Option<Running>>,
}

impl Slot {
    pub(super) fn new(options: ServiceOptions, methods: Methods, query: HealthQuery) -> Self {
        Self { options: Arc::new(options), methods, query, running: Mutex::new(None) }
    }
}

/// The ends of a running worker that its handles hold.
#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) shared: Arc<CallShared>,
    pub(crate) events: broadcast::WeakSender<FailoverEvent>,
    pub(crate) lifetime: Arc<Lifetime>,
}

/// Ends the worker when the last holder is gone.
pub(crate) struct Lifetime {
    _guard: DropGuard,
    /// Agents of others that this service falls back to.
    _fallback: Fallback,
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

    pub(super) fn new(parts: ServiceParts) -> Self {
        Self { inner: Arc::new(Inner { parts, tasks: TaskTracker::new(), closed: CancellationToken::new() }) }
    }

    /// What this Consul is called: the name given, else the agent's address.
    pub fn name(&self) -> &str {
        &self.inner.parts.name
    }

    /// The client that Consul is asked with.
    pub fn consul_client(&self) -> &ConsulClient {
        &self.inner.parts.client
    }

    /// The names of the services it was built with.
    pub fn services(&self) -> impl Iterator<Item = &str> {
        self.inner.parts.services.keys().map(String::as_str)
    }

    /// The handle of one service, at once: neither Consul nor an instance need
    /// be there yet. All handles of one service share its worker.
    ///
    /// # Errors
    /// An unknown name is refused with the list of the known ones.
    pub fn grpc_client(&self, service: &str) -> Result<GrpcClient, UnknownService> {
        let slot = self.slot(service)?;
        Ok(GrpcClient::new(self.clone(), slot.options.clone(), self.running(slot)))
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
        let running = self.running(self.slot(service)?);
        let (reply, answer) = oneshot::channel();
        running.shared.reports.send(Report::Update { reply }).map_err(|_| UpdateError::Closed)?;
        answer.await.unwrap_or(Err(UpdateError::Closed))
    }

    /// Ends all services in order: subscribers see an empty binding, queries and
    /// connection attempts are given up, calls in flight finish on their
    /// connections. Returns when the tasks have ended. Later calls fail.
    pub async fn shutdown(&self) {
        self.inner.closed.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    fn slot(&self, service: &str) -> Result<&Slot, UnknownService> {
        self.inner.parts.services.get(service).ok_or_else(|| UnknownService {
            name: service.to_owned(),
            known: self.services().map(str::to_owned).collect(),
        })
    }

    fn running(&self, slot: &Slot) -> Running {
        slot.running.lock().get_or_insert_with(|| self.start(slot)).clone()
    }

    /// Starts the worker of a service.
    fn start(&self, slot: &Slot) -> Running {
        let parts = &self.inner.parts;
        let options = slot.options.clone();
        let service: Arc<str> = options.name.as_str().into();
        let (reporter, reports) = mpsc::unbounded_channel();
        let (binding_tx, binding) = watch::channel(Binding::default());
        let (status_tx, status) = watch::channel(ServiceStatus::at_start(service.clone()));
        let events = event::channel();
        let starving = Arc::new(AtomicBool::new(false));
        let shared = Arc::new(CallShared {
            options: options.clone(),
            methods: slot.methods.clone(),
            picker: Picker::new(options.policy),
            retry: Retry::new(&options),
            binding,
            status,
            reports: reporter.clone(),
            starving: starving.clone(),
        });
        let weak_events = events.downgrade();
        // A child: shutting the ConsulService down ends every service.
        let closed = self.inner.closed.child_token();
        let guard = closed.clone().drop_guard();
        let span = tracing::info_span!("service", name = %service);
        let ends = Parts {
            connector: Arc::new(TonicConnector::new(options.clone())),
            settings: self.fleet_settings(&options),
            sources: Sources::new(
                parts.client.clone(),
                slot.query.clone(),
                self.others(),
                parts.settings.resolver.clone(),
            ),
            publisher: Publisher::new(service, binding_tx, status_tx, events),
            options,
            reporter,
            reports,
            starving,
        };
        let worker = async move { Worker::new(ends).run(closed).await };
        self.inner.tasks.spawn_on(worker.instrument(span), &parts.runtime);
        let lifetime = Arc::new(Lifetime { _guard: guard, _fallback: parts.fallback.clone() });
        Running { shared, events: weak_events, lifetime }
    }

    fn fleet_settings(&self, options: &ServiceOptions) -> Settings {
        let common = &self.inner.parts.settings;
        let mut rng = HasherRng::new();
        // Clients of one fleet must not return to a datacenter at the same moment.
        let jitter = common.failback_after.mul_f64(0.2 * rng.next_f64());
        Settings {
            policy: options.policy,
            spares: options.spares,
            registry_order: options.near.is_some(),
            ejection: if common.ejects {
                Ejection { first: options.eject_for, at_most: options.eject_at_most }
            } else {
                Ejection { first: Duration::ZERO, at_most: Duration::ZERO }
            },
            failback_after: common.failback_after + jitter,
            demote_after: common.demote_after,
            keep_warm: common.keep_warm,
            seed: rng.next_u64(),
        }
    }

    fn others(&self) -> Others {
        match &self.inner.parts.fallback.0 {
            Kind::None => Others::None,
            Kind::Nearest => Others::Agent { wanted: None },
            Kind::Datacenters(names) => Others::Agent { wanted: Some(names.clone()) },
            Kind::Services(services) => Others::Services(
                services
                    .iter()
                    // The own one is skipped: it is asked already.
                    .filter(|other| other.consul_client().address() != self.inner.parts.client.address())
                    .map(|other| (other.name().to_owned(), other.consul_client().clone()))
                    .collect(),
            ),
        }
    }
}

impl fmt::Debug for ConsulService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsulService")
            .field("name", &self.inner.parts.name)
            .field("services", &self.inner.parts.services.keys())
            .finish_non_exhaustive()
    }
}
