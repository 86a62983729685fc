//! The error hook: what an application may watch of every failed attempt.

use std::{fmt, sync::Arc};

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
