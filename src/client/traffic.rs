//! Settings of one service, continued: how much of its traffic there may be, and
//! what becomes of it when instances answer badly or leave.

use std::time::Duration;

use super::{
    deadline::FOR_EVER,
    error::BuildError,
    hook::{Drain, DrainHook},
    options::ServiceOptions,
};

/// As [`ServiceOptions`] has them.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    pub(crate) wait_for_ready: bool,
    pub(crate) max_in_flight: usize,
    pub(crate) max_waiting: usize,
    pub(crate) panic_threshold: u8,
    pub(crate) health_watch: Option<String>,
    pub(crate) drain_after: Option<Duration>,
    pub(crate) on_drain: Option<DrainHook>,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            wait_for_ready: false,
            max_in_flight: 100_000,
            max_waiting: 20_000,
            panic_threshold: 50,
            health_watch: None,
            drain_after: None,
            on_drain: None,
        }
    }
}

impl ServiceOptions {
    /// Lets calls wait for a usable instance as long as their deadline allows, instead
    /// of failing after [`fail_fast_after`](Self::fail_fast_after): gRPC's "wait for
    /// ready". [`CallOptions`](super::CallOptions) says otherwise for one call. Default: no.
    pub fn wait_for_ready(mut self, yes: bool) -> Self {
        self.traffic.wait_for_ready = yes;
        self
    }

    /// How many calls may be under way at once, from their start to the end of the
    /// response's body. One more fails at once with RESOURCE_EXHAUSTED and
    /// [`CallErrorKind::TooMany`](super::CallErrorKind::TooMany). Default: 100,000 (our
    /// choice: a bound for memory, a hundred times Envoy's `max_requests`).
    pub fn max_in_flight(mut self, calls: usize) -> Self {
        self.traffic.max_in_flight = calls;
        self
    }

    /// How many calls may wait at once for a usable instance. One more fails at once
    /// with RESOURCE_EXHAUSTED; with 0, each call that finds none. Default: 20,000 (our choice:
    /// twenty times Envoy's `max_pending_requests`).
    pub fn max_waiting(mut self, calls: usize) -> Self {
        self.traffic.max_waiting = calls;
        self
    }

    /// Instances that answer, but badly, are ejected only as long as this share of
    /// their datacenter's known instances is left without them, in percent. Below
    /// that they stay in use, so that the load of many does not fall on a few. With 0 the
    /// last good one takes it all. What does not answer at all is ejected in any case.
    /// Default: 50 (Envoy's panic threshold).
    pub fn panic_threshold(mut self, percent: u8) -> Self {
        self.traffic.panic_threshold = percent;
        self
    }

    /// Watches the health of each connected instance (`grpc.health.v1` Watch, gRFC
    /// A17), one stream a connection: what says that `service` is not serving gets
    /// no new calls, before the registry knows, and gets them again when it says that
    /// it is. `""` stands for the server as a whole. Servers without the health
    /// service count as serving. A stream that breaks is begun again after 1 s, and, where it
    /// brings no word, ever later up to 120 s (gRPC's connection back-off); until then the
    /// last word holds.
    ///
    /// Where none says that it is serving, all stay in use (gRFC A17 would fail the
    /// calls): the server itself knows best what it can still answer. A name that is nearly that of a
    /// service in the [descriptors](Self::descriptors) is refused. Default: off.
    pub fn health_watch(mut self, service: impl Into<String>) -> Self {
        self.traffic.health_watch = Some(service.into());
        self
    }

    /// Ends streams (responses and requests that are still coming) so long after their instance has left the
    /// registry, with UNAVAILABLE and [`CallErrorKind::Drained`](super::CallErrorKind::Drained).
    /// [`on_drain`](Self::on_drain) and [`FailoverEvent::Draining`](super::FailoverEvent::Draining) tell
    /// of it when the instance leaves, so that they can be opened anew in time; if it is listed
    /// again by then, they go on. Default: never.
    pub fn drain_after(mut self, wait: impl Into<Option<Duration>>) -> Self {
        self.traffic.drain_after = wait.into().map(|wait| wait.min(FOR_EVER));
        self
    }

    /// Calls `hook` when an instance has left the registry and streams on it will be ended after
    /// [`drain_after`](Self::drain_after), which is to be set too: time to open them anew. It runs in the
    /// service's own task and must not block. Default: none.
    pub fn on_drain(mut self, hook: impl Fn(&Drain<'_>) + Send + Sync + 'static) -> Self {
        self.traffic.on_drain = Some(DrainHook::new(hook));
        self
    }

    pub(crate) fn check_traffic(&self) -> Result<(), BuildError> {
        if self.traffic.max_in_flight == 0 {
            return Err(self.wrong("max_in_flight", 0, "1 or more"));
        }
        if self.traffic.panic_threshold > 100 {
            return Err(self.wrong("panic_threshold", self.traffic.panic_threshold, "0 to 100 percent"));
        }
        if self.traffic.on_drain.is_some() && self.traffic.drain_after.is_none() {
            return Err(self.wrong(
                "on_drain",
                "a hook",
                "drain_after beside it: without that nothing is drained",
            ));
        }
        Ok(())
    }
}
