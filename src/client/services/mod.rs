//! `Services`: the services of any registry, and what keeps each of them bound.

mod builder;
mod runtime;
mod start;

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    runtime::Handle,
    sync::{broadcast, oneshot},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};
use tower::util::rng::{HasherRng, Rng};
use tracing::Instrument;

pub use self::builder::ServicesBuilder;
pub(crate) use self::start::Start;
use super::{
    binding::Binding,
    call::CallShared,
    connector::TonicConnector,
    datacenters::Fallback,
    error::{BuildError, UnknownService, UpdateError},
    event::FailoverEvent,
    fleet::{Ejection, Settings},
    handle::GrpcClient,
    mechanisms::{CallWithout, FleetWithout},
    methods::Methods,
    options::ServiceOptions,
    registry::Registry,
    report::Report,
    resolver::ResolverSettings,
    worker::{Others, Sources},
};

/// One or several services of any [`Registry`], with a connection to each kept
/// ready: what [`ConsulService`](super::ConsulService) is for Consul.
///
/// Cheap to clone; clones are the same thing. A service is looked for from the
/// first [`grpc_client`](Self::grpc_client) call for it on. When the last clone,
/// the last [`GrpcClient`] and the last [`FailoverChannel`](super::FailoverChannel)
/// are gone, so are all tasks, questions and connections.
///
/// ```no_run
/// use tonic_failover::{Instance, client::{ServiceOptions, Services, registry::StaticList}};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let list = StaticList::new();
/// list.set("counter", [7, 8].map(|n| Instance::new(format!("counter-{n}"), &format!("10.0.0.{n}"), 50051, "rack-1")));
/// let services = Services::builder(list).service(ServiceOptions::new("counter")).build()?;
/// let counter = services.grpc_client("counter")?;
/// println!("{}", counter.ready().await?.instance().expect("ready"));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Services {
    inner: Arc<Inner>,
}

struct Inner {
    parts: ServicesParts,
    tasks: TaskTracker,
    closed: CancellationToken,
}

/// What a builder has checked and made.
pub(super) struct ServicesParts {
    name: String,
    slots: BTreeMap<String, Slot>,
    settings: Common,
    /// Agents of others, kept as long as anything here.
    fallback: Fallback,
    runtime: Handle,
}

/// What all services have in common.
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
    registry: Arc<dyn Registry>,
    others: Others,
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
    /// Other agents that this service falls back to.
    _fallback: Fallback,
}

// === impl Services ===

impl Services {
    /// Begins with the registry that lists the services.
    pub fn builder(registry: impl Registry) -> ServicesBuilder {
        ServicesBuilder::new(registry)
    }

    pub(super) fn new(parts: ServicesParts) -> Self {
        Self { inner: Arc::new(Inner { parts, tasks: TaskTracker::new(), closed: CancellationToken::new() }) }
    }

    /// What the registry is called.
    pub fn name(&self) -> &str {
        &self.inner.parts.name
    }

    /// The names of the services it was built with.
    pub fn services(&self) -> impl Iterator<Item = &str> {
        self.inner.parts.slots.keys().map(String::as_str)
    }

    /// The handle of one service, at once: neither the registry nor an instance
    /// need be there yet. All handles of one service share its worker.
    ///
    /// # Errors
    /// An unknown name is refused with the list of the known ones.
    pub fn grpc_client(&self, service: &str) -> Result<GrpcClient<Self>, UnknownService> {
        self.handle(service, self.clone())
    }

    /// The handle that `owner` hands out.
    pub(super) fn handle<O>(&self, service: &str, owner: O) -> Result<GrpcClient<O>, UnknownService> {
        let slot = self.slot(service)?;
        Ok(GrpcClient::new(owner, slot.options.clone(), self.running(slot)))
    }

    /// Asks the registry afresh (one question that does not wait), makes sure
    /// that the bound instance answers, connects to another where it does not,
    /// and returns what is bound then. Where nothing has changed and the bound
    /// instance answers, that is the present binding, and nothing is published.
    ///
    /// Failing calls do the same by themselves and share the look-up: a thousand
    /// of them cause one. Dropping the future gives up the answer alone.
    ///
    /// # Errors
    /// An unknown name; nothing usable, and why; the registry's failure, where no
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
        self.inner.parts.slots.get(service).ok_or_else(|| UnknownService {
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
        let span = tracing::info_span!("service", name = %service);
        // A child: shutting all down ends every service.
        let closed = self.inner.closed.child_token();
        let start = Start {
            connector: Arc::new(TonicConnector::new(options.clone())),
            methods: slot.methods.clone(),
            settings: self.fleet_settings(&options),
            sources: Sources::new(
                service,
                slot.registry.clone(),
                slot.others.clone(),
                parts.settings.resolver.clone(),
            ),
            lots: HasherRng::new().next_u64(),
            fallback: parts.fallback.clone(),
            runtime: &parts.runtime,
            without: CallWithout::default(),
            options,
        };
        let (running, worker, ticker) = start.prepare(closed);
        self.inner.tasks.spawn_on(worker.instrument(span), &parts.runtime);
        self.inner.tasks.spawn_on(ticker, &parts.runtime);
        running
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
            panic_threshold: options.traffic.panic_threshold,
            primary_only: options.primary_only,
            watches_health: options.watched_health().is_some(),
            seed: rng.next_u64(),
            without: FleetWithout::default(),
        }
    }
}

// === impl ServicesParts ===

impl ServicesParts {
    /// Checks what all services have in common, and makes a slot of each.
    pub(super) fn new(
        name: String,
        services: Vec<ServiceOptions>,
        settings: Common,
        fallback: Fallback,
        slot: impl Fn(ServiceOptions) -> Result<Slot, BuildError>,
    ) -> Result<Self, BuildError> {
        let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
        runtime::check()?;
        let mut slots = BTreeMap::new();
        for options in services {
            let name = options.name.clone();
            if slots.insert(name.clone(), slot(options)?).is_some() {
                return Err(BuildError::DuplicateService { name });
            }
        }
        if slots.is_empty() {
            return Err(BuildError::NoService);
        }
        let wait = settings.resolver.wait;
        if !(Duration::from_secs(1)..=Duration::from_secs(600)).contains(&wait) {
            return Err(BuildError::Wait { value: wait });
        }
        Ok(Self { name, slots, settings, fallback, runtime })
    }
}

// === impl Slot ===

impl Slot {
    /// Checks the options.
    pub(super) fn new(
        options: ServiceOptions,
        registry: Arc<dyn Registry>,
        others: Others,
    ) -> Result<Self, BuildError> {
        options.check()?;
        let methods = options.methods()?;
        Ok(Self { options: Arc::new(options), methods, registry, others, running: Mutex::new(None) })
    }
}

// === impl Common ===

impl Default for Common {
    fn default() -> Self {
        Self {
            failback_after: Duration::from_secs(5),
            demote_after: Duration::from_secs(4),
            keep_warm: false,
            ejects: true,
            resolver: ResolverSettings::default(),
        }
    }
}

impl fmt::Debug for Services {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Services")
            .field("name", &self.inner.parts.name)
            .field("services", &self.inner.parts.slots.keys())
            .finish_non_exhaustive()
    }
}
