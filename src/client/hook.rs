//! Hooks: what an application may watch of every failed attempt, and of instances that leave.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use tonic::Status;

use crate::Instance;

pub(crate) type Hook = Arc<dyn Fn(&CallFailure<'_>) + Send + Sync>;

/// One failed attempt of a call.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct CallFailure<'a> {
    /// The service's name in Consul.
    pub service: &'a str,
    /// The method, as `/package.Service/Method`.
    pub method: &'a str,
    /// Where it was sent; `None` when it never got so far.
    pub instance: Option<&'a Instance>,
    /// The attempt's number, from 1; 0 when it never got so far.
    pub attempt: u32,
    /// The status as it came over the wire, or ours where none came.
    pub status: &'a Status,
    /// True when the call is sent again: the caller does not see this failure.
    pub resent: bool,
}

/// An instance that has left the registry while streams on it go on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Drain<'a> {
    /// The service's name in the registry.
    pub service: &'a str,
    /// The instance.
    pub instance: &'a Instance,
    /// When its streams are ended, unless it is listed again by then.
    pub ends_in: Duration,
}

/// Told of each drain.
#[derive(Clone)]
pub(crate) struct DrainHook(Arc<dyn Fn(&Drain<'_>) + Send + Sync>);

impl DrainHook {
    pub(crate) fn new(hook: impl Fn(&Drain<'_>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    /// A hook that panics is its own trouble: whoever calls it goes on.
    pub(crate) fn tell(&self, drain: &Drain<'_>) {
        if catch_unwind(AssertUnwindSafe(|| (self.0)(drain))).is_err() {
            tracing::error!(service = drain.service, "the hook for drains has panicked");
        }
    }
}

impl fmt::Debug for DrainHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DrainHook")
    }
}

impl fmt::Debug for CallFailure<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFailure")
            .field("service", &self.service)
            .field("method", &self.method)
            .field("instance", &self.instance.map(|i| &i.name))
            .field("attempt", &self.attempt)
            .field("code", &self.status.code())
            .field("resent", &self.resent)
            .finish()
    }
}
