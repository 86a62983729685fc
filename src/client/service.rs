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
    call::CallShared,
    connector::TonicConnector,
    datacenters::{Fallback, Kind},
    error::{BuildError, UnknownService, UpdateError},
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
    name: String,
    client: ConsulClient,
    services: BTreeMap<String, Slot>,
    fallback: Fallback,
    settings: Common,
    runtime: Handle,
    tasks: TaskTracker,
    closed: CancellationToken,
}

/// What all services of one `ConsulService` have in common.
#[derive(Clone)]
struct Common {
    failback_after: Duration,
    demote_after: Duration,
    keep_warm: bool,
    resolver: ResolverSettings,
}

struct Slot {
    options: Arc<ServiceOptions>,
    methods: Methods,
    query: HealthQuery,
    running: Mutex<Option<Running>>,
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
        ConsulServiceBuilder {
            config,
            name: None,
            services: Vec::new(),
            fallback: Fallback::none(),
            settings: Common {
                failback_after: Duration::from_secs(5),
                demote_after: Duration::from_secs(4),
                keep_warm: false,
                resolver: ResolverSettings::default(),
            },
        }
    }

    /// What this Consul is called: the name given, else the agent's address.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The client that Consul is asked with.
    pub fn consul_client(&self) -> &ConsulClient {
        &self.inner.client
    }

    /// The names of the services it was built with.
    pub fn services(&self) -> impl Iterator<Item = &str> {
        self.inner.services.keys().map(String::as_str)
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
        self.inner.services.get(service).ok_or_else(|| UnknownService {
            name: service.to_owned(),
            known: self.services().map(str::to_owned).collect(),
        })
    }

    fn running(&self, slot: &Slot) -> Running {
        slot.running.lock().get_or_insert_with(|| self.start(slot)).clone()
    }

    /// Starts the worker of a service.
    fn start(&self, slot: &Slot) -> Running {
        let inner = &*self.inner;
        let options = slot.options.clone();
        let service: Arc<str> = options.name.as_str().into();
        let (reporter, reports) = mpsc::unbounded_channel();
        let (binding_tx, binding) = watch::channel(Binding::default());
        let (status_tx, status) =
            watch::channel(ServiceStatus { service: service.clone(), ..ServiceStatus::default() });
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
        let closed = inner.closed.child_token();
        let guard = closed.clone().drop_guard();
        let span = tracing::info_span!("service", name = %service);
        let parts = Parts {
            connector: Arc::new(TonicConnector::new(options.clone())),
            settings: self.fleet_settings(&options),
            sources: Sources::new(
                inner.client.clone(),
                slot.query.clone(),
                self.others(),
                inner.settings.resolver.clone(),
            ),
            publisher: Publisher::new(service, binding_tx, status_tx, events),
            options,
            reporter,
            reports,
            starving,
        };
        let worker = async move { Worker::new(parts).run(closed).await };
        inner.tasks.spawn_on(worker.instrument(span), &inner.runtime);
        let lifetime = Arc::new(Lifetime { _guard: guard, _fallback: inner.fallback.clone() });
        Running { shared, events: weak_events, lifetime }
    }

    fn fleet_settings(&self, options: &ServiceOptions) -> Settings {
        let common = &self.inner.settings;
        let mut rng = HasherRng::new();
        // Clients of one fleet must not return to a datacenter at the same moment.
        let jitter = common.failback_after.mul_f64(0.2 * rng.next_f64());
        Settings {
            policy: options.policy,
            spares: options.spares,
            registry_order: options.near.is_some(),
            ejection: Ejection { first: options.eject_for, at_most: options.eject_at_most },
            failback_after: common.failback_after + jitter,
            demote_after: common.demote_after,
            keep_warm: common.keep_warm,
            seed: rng.next_u64(),
        }
    }

    fn others(&self) -> Others {
        match &self.inner.fallback.0 {
            Kind::None => Others::None,
            Kind::Nearest => Others::Agent { wanted: None },
            Kind::Datacenters(names) => Others::Agent { wanted: Some(names.clone()) },
            Kind::Services(services) => Others::Services(
                services
                    .iter()
                    // The own one is skipped: it is asked already.
                    .filter(|other| other.consul_client().address() != self.inner.client.address())
                    .map(|other| (other.name().to_owned(), other.consul_client().clone()))
                    .collect(),
            ),
        }
    }
}

impl fmt::Debug for ConsulService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsulService")
            .field("name", &self.inner.name)
            .field("services", &self.inner.services.keys())
            .finish_non_exhaustive()
    }
}

/// Builds a [`ConsulService`].
#[derive(Clone, Debug)]
pub struct ConsulServiceBuilder {
    config: ConsulConfig,
    name: Option<String>,
    services: Vec<ServiceOptions>,
    fallback: Fallback,
    settings: Common,
}

impl fmt::Debug for Common {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Common").field("failback_after", &self.failback_after).finish_non_exhaustive()
    }
}

impl ConsulServiceBuilder {
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
        self.settings.failback_after = time;
        self
    }

    /// How long a list that held instances must stay empty before these are used
    /// only after every other datacenter's. They stay in use until then, and as
    /// the last resort after it: an empty list alone proves nothing. Default:
    /// 4 s, which is longer than an agent's restart hides instances (2.6 s, measured
    /// with Consul 1.8.7).
    pub fn demote_after(mut self, time: Duration) -> Self {
        self.settings.demote_after = time;
        self
    }

    /// Keeps asking about the other datacenters, and one connection to each
    /// ready, instead of only on need. Default: on need.
    pub fn keep_warm(mut self, yes: bool) -> Self {
        self.settings.keep_warm = yes;
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
        let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
        let mut services = BTreeMap::new();
        for options in self.services {
            options.check()?;
            let (methods, query) = (options.methods()?, query(&options)?);
            let name = options.name.clone();
            let slot = Slot { options: Arc::new(options), methods, query, running: Mutex::new(None) };
            if services.insert(name.clone(), slot).is_some() {
                return Err(BuildError::DuplicateService { name });
            }
        }
        if services.is_empty() {
            return Err(BuildError::NoService);
        }
        let wait = self.settings.resolver.wait;
        if !(Duration::from_secs(1)..=Duration::from_secs(600)).contains(&wait) {
            return Err(BuildError::Wait { value: wait });
        }
        let client = ConsulClient::new(self.config)?;
        Ok(ConsulService {
            inner: Arc::new(Inner {
                name: self.name.unwrap_or_else(|| client.address().to_owned()),
                client,
                services,
                fallback: self.fallback,
                settings: self.settings,
                runtime,
                tasks: TaskTracker::new(),
                closed: CancellationToken::new(),
            }),
        })
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
