//! One service put together: its calls and its worker, and what joins them.

use std::{
    future::Future,
    sync::{Arc, atomic::AtomicBool},
};

use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;

use super::{Lifetime, Running};
use crate::client::{
    admission::Admission,
    balance::Picker,
    binding::Binding,
    call::CallShared,
    connector::Connector,
    datacenters::Fallback,
    event,
    fleet::Settings,
    latecomers::Latecomers,
    mechanisms::CallWithout,
    methods::Methods,
    options::ServiceOptions,
    primary::Lookout,
    retry::Retry,
    status::ServiceStatus,
    worker::{Parts, Publisher, Sources, Worker},
};

/// What one service is put together of.
pub(crate) struct Start<'a> {
    pub(crate) options: Arc<ServiceOptions>,
    pub(crate) methods: Methods,
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) settings: Settings,
    pub(crate) sources: Sources,
    /// Where the drawing of lots begins.
    pub(crate) lots: u64,
    /// Agents of others, kept as long as the service runs.
    pub(crate) fallback: Fallback,
    pub(crate) runtime: &'a Handle,
    pub(crate) without: CallWithout,
}

impl Start<'_> {
    /// The ends for the handles, and two tasks to be run: the worker's and the ticker's of its
    /// [`Latecomers`]. Both end with `closed`, which is cancelled when the last handle is gone.
    pub(crate) fn prepare(
        self,
        closed: CancellationToken,
    ) -> (Running, impl Future<Output = ()> + Send + use<>, impl Future<Output = Option<()>> + Send + use<>)
    {
        let Self { options, methods, connector, settings, sources, lots, fallback, runtime, without } = self;
        let service: Arc<str> = options.name.as_str().into();
        let (reporter, reports) = mpsc::unbounded_channel();
        let (binding_tx, binding) = watch::channel(Binding::default());
        let (status_tx, status) = watch::channel(ServiceStatus::at_start(service.clone()));
        let events = event::channel();
        let (reach_tx, reach) = watch::channel(Vec::new());
        let starving = Arc::new(AtomicBool::new(false));
        let latecomers = Latecomers::new(runtime);
        let lookout = options.primary_only.then(|| Lookout::new(reporter.clone()));
        let shared = Arc::new(CallShared {
            options: options.clone(),
            methods,
            picker: Picker::new(options.policy, lots),
            admission: Admission::new(&options.traffic),
            lookout: lookout.clone(),
            retry: Retry::new(options.budget(), without),
            binding,
            reach,
            status,
            reports: reporter.clone(),
            starving: starving.clone(),
            latecomers: latecomers.clone(),
            without,
        });
        let weak_events = events.downgrade();
        let lifetime = Arc::new(Lifetime { _guard: closed.clone().drop_guard(), _fallback: fallback });
        let ends = Parts {
            connector,
            settings,
            sources,
            publisher: Publisher::new(service, binding_tx, status_tx, events),
            options,
            reporter,
            reports,
            reach: reach_tx,
            starving,
            lookout,
        };
        let ticker = closed.clone().run_until_cancelled_owned(latecomers.run());
        let worker = async move { Worker::new(ends).run(closed).await };
        (Running { shared, events: weak_events, lifetime }, worker, ticker)
    }
}
