//! Per call: where it is to go, and whether it waits.

use std::fmt;

use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use super::{balance::Chosen, binding::Binding, call::CallShared, error::CallErrorKind, report::Report};
use crate::InstanceId;

/// What one call wants otherwise than its service's settings have it: put into
/// the extensions of its request.
///
/// ```
/// use tonic_failover::client::CallOptions;
///
/// let mut request = tonic::Request::new(());
/// request.extensions_mut().insert(CallOptions::new().datacenter("dc2").wait_for_ready(true));
/// ```
///
/// A call that is to go to one instance, or to another datacenter than the one
/// in use, finds a connection there, or has one made and waits for it as any call
/// waits that finds nothing usable. What is connected for that reason is kept for a
/// minute after it was last used. Where it is clear that waiting is of no use (no such instance or
/// datacenter is known, it has just failed, nothing there answers), the call fails
/// at once with UNAVAILABLE and [`CallErrorKind::NotAsChosen`], unless it waits
/// until it is ready. A resent call keeps to its choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallOptions {
    aim: Option<Aim>,
    wait_for_ready: Option<bool>,
}

/// Where a call is to go.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Aim {
    pub(crate) instance: Option<InstanceId>,
    pub(crate) datacenter: Option<String>,
}

/// The ready connections of one datacenter, by the name that the status gives it,
/// for calls that ask for them.
pub(crate) type Reach = Vec<(String, Binding)>;

/// Why a call gets no endpoint.
pub(crate) enum Unreached {
    /// Nothing was found in time.
    TimedOut,
    Kind(CallErrorKind),
}

// === impl CallOptions ===

impl CallOptions {
    /// Options that change nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// To this instance and no other, as [`Served`](super::Served) or a [`Binding`] names it. It
    /// must be one that is known: of the own datacenter, of the one in use, or of the one
    /// that [`datacenter`](Self::datacenter) names. Default: any.
    pub fn instance(mut self, id: InstanceId) -> Self {
        self.aim.get_or_insert_with(Aim::anywhere).instance = Some(id);
        self
    }

    /// To this datacenter and no other, as [`ServiceStatus`](super::ServiceStatus) names it: the own
    /// one, or one that the service may fall back to. Default: the one in use.
    pub fn datacenter(mut self, name: impl Into<String>) -> Self {
        self.aim.get_or_insert_with(Aim::anywhere).datacenter = Some(name.into());
        self
    }

    /// Whether it waits for an instance until its deadline instead of failing fast.
    /// Default: [`ServiceOptions::wait_for_ready`](super::ServiceOptions::wait_for_ready).
    pub fn wait_for_ready(mut self, yes: bool) -> Self {
        self.wait_for_ready = Some(yes);
        self
    }

    /// A copy for a call.
    #[cold]
    pub(crate) fn boxed(&self) -> Box<Self> {
        Box::new(self.clone())
    }

    pub(crate) fn aim(&self) -> Option<&Aim> {
        self.aim.as_ref()
    }

    pub(crate) fn waits(&self) -> Option<bool> {
        self.wait_for_ready
    }
}

// === impl Aim ===

impl Aim {
    const fn anywhere() -> Self {
        Self { instance: None, datacenter: None }
    }

    /// An endpoint there, of those that are published.
    pub(crate) fn find(&self, shared: &CallShared, tried: &[u64]) -> Option<Chosen> {
        let find = |name: Option<&str>, binding: &Binding| {
            if self.datacenter.as_deref().is_some_and(|wanted| name != Some(wanted)) {
                return None;
            }
            match &self.instance {
                None => shared.picker.pick(binding, tried),
                Some(id) => {
                    let mut endpoints = binding.endpoints().iter();
                    let found = endpoints.find(|e| e.instance().id == *id && e.is_usable());
                    found.map(|endpoint| shared.picker.choose(endpoint))
                }
            }
        };
        let binding = shared.binding.borrow();
        if let Some(found) = find(binding.datacenter(), &binding) {
            return Some(found);
        }
        drop(binding);
        shared.reach.borrow().iter().find_map(|(name, binding)| find(Some(name), binding))
    }

    /// An endpoint there, which the worker gets ready by `limit`.
    /// A call that is `patient` waits where that does not look as if it were of use.
    pub(crate) async fn reach(
        &self,
        shared: &CallShared,
        tried: &[u64],
        limit: Instant,
        patient: bool,
    ) -> Result<Chosen, Unreached> {
        let closed = |_| Unreached::Kind(CallErrorKind::Closed);
        loop {
            let (reply, answer) = oneshot::channel();
            let aim = self.clone();
            shared.reports.send(Report::Wanted { aim, patient, reply }).map_err(|_| closed(()))?;
            let answer = timeout_at(limit, answer).await.map_err(|_| Unreached::TimedOut)?;
            if let Err(reason) = answer.map_err(|_| closed(()))? {
                let choice = self.to_string();
                return Err(Unreached::Kind(CallErrorKind::NotAsChosen { choice, reason }));
            }
            // Published by then; where it has been lost again, so has this been reported.
            if let Some(found) = self.find(shared, tried) {
                return Ok(found);
            }
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.instance, &self.datacenter) {
            (Some(id), None) => write!(f, "instance {id}"),
            (Some(id), Some(name)) => write!(f, "instance {id} in datacenter {name}"),
            (None, Some(name)) => write!(f, "datacenter {name}"),
            (None, None) => f.write_str("any instance"),
        }
    }
}
