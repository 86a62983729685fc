//! `GrpcClient`: the handle of one service.

use std::{fmt, sync::Arc, time::Duration};

use tokio::{sync::watch, time::timeout};

use super::{
    binding::Binding,
    channel::FailoverChannel,
    error::NotReady,
    event::{self, EventStream},
    options::ServiceOptions,
    report::Report,
    service::ConsulService,
    services::{Running, Services},
    status::ServiceStatus,
};
use crate::consul::ConsulClient;

/// How long [`GrpcClient::ready`] waits.
const READY_WITHIN: Duration = Duration::from_secs(10);

/// The handle of one service of one [`ConsulService`], or of other [`Services`]
/// where the parameter says so. Cheap to clone.
///
/// Nearly everybody needs [`channel`](Self::channel) alone. Who handles tonic
/// channels himself takes them from [`subscribe`](Self::subscribe), and says
/// with [`report_failure`](Self::report_failure) when one fails.
#[derive(Clone)]
pub struct GrpcClient<O = ConsulService> {
    owner: O,
    options: Arc<ServiceOptions>,
    running: Running,
}

impl<O> GrpcClient<O> {
    pub(crate) fn new(owner: O, options: Arc<ServiceOptions>, running: Running) -> Self {
        Self { owner, options, running }
    }

    /// A channel that follows the service; any generated tonic client takes it.
    pub fn channel(&self) -> FailoverChannel {
        FailoverChannel::new(self.running.shared.clone(), self.running.lifetime.clone())
    }

    /// The bindings: the present one at once, then always the newest. It starts
    /// with an empty one, and ends with an empty one when the service is shut
    /// down. While nothing is usable the last binding stays.
    pub fn subscribe(&self) -> watch::Receiver<Binding> {
        self.running.shared.binding.clone()
    }

    /// The present binding.
    pub fn binding(&self) -> Binding {
        self.running.shared.binding.borrow().clone()
    }

    /// Says that a call on the preferred channel of this generation failed: its
    /// instance is probed, and Consul is asked afresh. Reports on an older
    /// generation than the present one are old news and cause nothing.
    pub fn report_failure(&self, generation: u64) {
        // The call path's own check, so that late reports cost no message.
        if generation == self.running.shared.binding.borrow().generation() {
            let _ = self.running.shared.reports.send(Report::BindingFailed { generation });
        }
    }

    /// Waits up to 10 s for a usable instance.
    ///
    /// # Errors
    /// Says why there is none.
    pub async fn ready(&self) -> Result<Binding, NotReady> {
        self.ready_within(READY_WITHIN).await
    }

    /// Waits for a usable instance. Dropping the future costs nothing.
    ///
    /// # Errors
    /// Says why there is none after `wait`, or that the service is shut down.
    pub async fn ready_within(&self, wait: Duration) -> Result<Binding, NotReady> {
        let (mut bindings, mut status) = (self.subscribe(), self.running.shared.status.clone());
        let found = timeout(wait, async {
            let binding = bindings.wait_for(Binding::is_usable).await?.clone();
            // It is published a moment later: whoever asks for it now must see what is bound.
            status.wait_for(|s| s.generation >= binding.generation()).await?;
            Ok::<_, watch::error::RecvError>(binding)
        });
        match found.await {
            Ok(Ok(binding)) => Ok(binding),
            // Shut down: there is nothing to wait for.
            Ok(Err(_)) => Err(NotReady { waited: Duration::ZERO, status: Box::new(self.status()) }),
            Err(_) => Err(NotReady { waited: wait, status: Box::new(self.status()) }),
        }
    }

    /// What happens to the service from now on.
    pub fn events(&self) -> EventStream {
        // Where the worker has ended, a stream that has ended too.
        let events = self.running.events.upgrade().unwrap_or_else(event::channel);
        EventStream::new(events.subscribe())
    }

    /// What the service is bound to, and why not where it is not.
    pub fn status(&self) -> ServiceStatus {
        self.running.shared.status.borrow().clone()
    }

    /// The service's name in Consul, or in whatever registry lists it.
    pub fn service_name(&self) -> &str {
        self.options.name()
    }
}

/// Of services found in Consul.
impl GrpcClient {
    /// What the Consul is called that it is found in.
    pub fn consul_name(&self) -> &str {
        self.owner.name()
    }

    /// The client which that Consul is asked with.
    pub fn consul_client(&self) -> &ConsulClient {
        self.owner.consul_client()
    }

    /// The `ConsulService` it belongs to.
    pub fn consul_service(&self) -> &ConsulService {
        &self.owner
    }
}

/// Of services found in any other registry.
impl GrpcClient<Services> {
    /// The `Services` it belongs to.
    pub fn services(&self) -> &Services {
        &self.owner
    }
}

impl<O: fmt::Debug> fmt::Debug for GrpcClient<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrpcClient")
            .field("owner", &self.owner)
            .field("service", &self.service_name())
            .finish_non_exhaustive()
    }
}
