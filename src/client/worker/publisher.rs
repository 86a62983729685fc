//! What a worker tells the world: bindings, status, events.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, time::Instant};

use crate::{
    Instance, InstanceId,
    client::{
        binding::Binding,
        endpoint::Endpoint,
        event::{EventSender, FailoverEvent, RebindCause},
        status::ServiceStatus,
    },
    consul::Denied,
};

/// The ends that a worker publishes through.
pub(crate) struct Publisher {
    service: Arc<str>,
    binding: watch::Sender<Binding>,
    status: watch::Sender<ServiceStatus>,
    events: EventSender,
    /// The datacenter of the last binding: its place and name.
    datacenter: Option<(usize, String)>,
    preferred: Option<Arc<Instance>>,
    /// Why and since when the preferred instance is out of use.
    loss: Option<(RebindCause, Instant)>,
    started: Instant,
    /// An `Unusable` has been published, and nothing usable since.
    unusable: bool,
}

impl Publisher {
    pub(crate) fn new(
        service: Arc<str>,
        binding: watch::Sender<Binding>,
        status: watch::Sender<ServiceStatus>,
        events: EventSender,
    ) -> Self {
        Self {
            service,
            binding,
            status,
            events,
            datacenter: None,
            preferred: None,
            loss: None,
            started: Instant::now(),
            unusable: false,
        }
    }

    pub(crate) fn current(&self) -> Binding {
        self.binding.borrow().clone()
    }

    pub(crate) fn event(&self, event: FailoverEvent) {
        // One line an episode; the events are the episodes.
        if event.is_trouble() {
            tracing::warn!(service = %self.service, "{event}");
        } else {
            tracing::info!(service = %self.service, "{event}");
        }
        // Nobody need be listening.
        let _ = self.events.send(event);
    }

    pub(crate) fn service(&self) -> Arc<str> {
        self.service.clone()
    }

    /// An endpoint is out of use, for `cause`, noticed at `at`. Remembered for
    /// the rebind that follows, if it was the preferred one.
    pub(crate) fn lost(&mut self, endpoint: &Endpoint, cause: RebindCause, at: Instant) {
        let preferred = self.binding.borrow().preferred().is_some_and(|e| e.serial() == endpoint.serial());
        if preferred && self.loss.is_none() {
            self.loss = Some((cause, at));
        }
    }

    /// What was out of use for `cause` is in use again.
    pub(crate) fn found_again(&mut self, cause: RebindCause) {
        self.loss = self.loss.take().filter(|(why, _)| *why != cause);
    }

    /// The other datacenters are in another order: for each, its place before.
    pub(crate) fn renumber(&mut self, from: &[Option<usize>]) {
        self.datacenter = self.datacenter.take().and_then(|(place, name)| match place {
            0 => Some((0, name)),
            _ => Some((from.iter().position(|&old| old == Some(place))? + 1, name)),
        });
    }

    /// Publishes these endpoints unless they are what is published already. `lists` tells what the registry
    /// still has.
    pub(crate) fn bind(
        &mut self,
        place: usize,
        endpoints: Vec<Arc<Endpoint>>,
        lists: impl Fn(&InstanceId) -> bool,
        now: Instant,
    ) {
        let Some(to) = endpoints.first().map(|e| e.instance().clone()) else { return };
        let current = self.current();
        let same = |(a, b): (&Arc<Endpoint>, &Arc<Endpoint>)| {
            a.serial() == b.serial() && Arc::ptr_eq(a.instance(), b.instance())
        };
        if current.endpoints().len() == endpoints.len()
            && current.endpoints().iter().zip(&endpoints).all(same)
        {
            return;
        }
        self.binding.send_replace(Binding::new(current.generation() + 1, endpoints));

        let from = self.preferred.replace(to.clone());
        let before = self.datacenter.replace((place, to.datacenter.clone()));
        let moved = before.as_ref().filter(|(old, _)| *old != place);
        let gap = std::mem::take(&mut self.unusable);
        let loss = self.loss.take();
        if from.as_ref().is_none_or(|from| from.id != to.id) || moved.is_some() || gap {
            let (cause, since) = match (loss, &from) {
                (Some(loss), _) => loss,
                (None, None) => (RebindCause::Found, self.started),
                _ if moved.is_some_and(|(old, _)| *old > place) => (RebindCause::FailedBack, now),
                (None, Some(from)) if lists(&from.id) => (RebindCause::Outranked, now),
                _ => (RebindCause::LeftRegistry, now),
            };
            let service = self.service();
            let took = now.saturating_duration_since(since);
            if let Some((old, from)) = moved {
                let (service, from, to) = (service.clone(), from.clone(), to.datacenter.clone());
                self.event(if *old < place {
                    FailoverEvent::FellBack { service, from, to }
                } else {
                    FailoverEvent::FailedBack { service, from, to }
                });
            }
            self.event(FailoverEvent::Rebound { service, from, to, cause, took });
        }
    }

    /// Nothing is usable, and nothing is about to be. What is published stays:
    /// a subscriber has nothing better.
    pub(crate) fn unusable(&mut self, reason: impl FnOnce() -> String) {
        if !std::mem::replace(&mut self.unusable, true) {
            let service = self.service();
            self.event(FailoverEvent::Unusable { service, reason: reason() });
        }
    }

    pub(crate) fn registry_lost(&self, datacenter: &str, error: String) {
        let (service, datacenter) = (self.service(), datacenter.to_owned());
        self.event(FailoverEvent::RegistryLost { service, datacenter, error });
    }

    pub(crate) fn registry_behind(&self, datacenter: &str, last_contact: Duration) {
        let (service, datacenter) = (self.service(), datacenter.to_owned());
        self.event(FailoverEvent::RegistryBehind { service, datacenter, last_contact });
    }

    pub(crate) fn registry_back(&self, datacenter: &str, after: Duration) {
        let (service, datacenter) = (self.service(), datacenter.to_owned());
        self.event(FailoverEvent::RegistryBack { service, datacenter, after });
    }

    pub(crate) fn list_empty(&self, datacenter: &str) {
        let (service, datacenter) = (self.service(), datacenter.to_owned());
        self.event(FailoverEvent::ListEmpty { service, datacenter });
    }

    pub(crate) fn list_filled(&self, datacenter: &str, after: Duration) {
        let (service, datacenter) = (self.service(), datacenter.to_owned());
        self.event(FailoverEvent::ListFilled { service, datacenter, after });
    }

    /// Whether the registry lets blocking queries wait has changed.
    pub(crate) fn blocking(&self, datacenter: &str, blocks: bool) {
        let (service, datacenter) = (self.service(), datacenter.to_owned());
        self.event(match blocks {
            true => FailoverEvent::BlockingAgain { service, datacenter },
            false => FailoverEvent::NotBlocking { service, datacenter },
        });
    }

    /// What the token may not read of a datacenter has changed.
    pub(crate) fn access(&self, datacenter: &str, denied: Option<Denied>) {
        let (service, datacenter) = (self.service(), datacenter.to_owned());
        self.event(match denied {
            Some(denied) => FailoverEvent::AccessDenied { service, datacenter, denied },
            None => FailoverEvent::AccessGranted { service, datacenter },
        });
    }

    pub(crate) fn status(&self, status: ServiceStatus) {
        self.status.send_replace(status);
    }

    /// The end: subscribers see an empty binding, then a closed channel, and the
    /// status says so.
    pub(crate) fn close(&mut self) {
        if self.status.borrow().closed {
            return;
        }
        let (generation, service) = (self.current().generation() + 1, self.service());
        self.status(ServiceStatus { service, generation, closed: true, ..ServiceStatus::default() });
        self.binding.send_replace(Binding::new(generation, Vec::new()));
    }
}

/// Also where the worker's runtime ends under it.
impl Drop for Publisher {
    fn drop(&mut self) {
        self.close();
    }
}
