//! What subscribers see: the ready connections of the datacenter in use.

use std::{fmt, sync::Arc};

use tonic::transport::Channel;

use super::{endpoint::Endpoint, weights::Weights};
use crate::Instance;

/// The set of ready endpoints of the datacenter in use, at one generation.
///
/// Every connection in it has answered a call before it was published. The
/// first is the preferred one. A binding is a snapshot: a connection may have
/// died since, in which case a newer binding follows as soon as there is
/// anything better. Empty ones are the one before the first connection and the
/// one after shutdown.
#[derive(Clone, Default)]
pub struct Binding {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    generation: u64,
    endpoints: Vec<Arc<Endpoint>>,
    /// Where they differ.
    weights: Option<Weights>,
}

impl Binding {
    pub(crate) fn new(generation: u64, endpoints: Vec<Arc<Endpoint>>) -> Self {
        let weights = Weights::of(&endpoints);
        Self { inner: Arc::new(Inner { generation, endpoints, weights }) }
    }

    /// Counts publications: 0 is the empty binding that every watch starts
    /// with, and each change has a higher one.
    pub fn generation(&self) -> u64 {
        self.inner.generation
    }

    /// True when there is no connection in it.
    pub fn is_empty(&self) -> bool {
        self.inner.endpoints.is_empty()
    }

    /// A tonic channel to the preferred instance, or `None` when empty.
    ///
    /// It rides on one connection and never makes another: once that is lost
    /// its calls fail with UNAVAILABLE, and the next binding holds a new one.
    /// Those who use it should report failures with
    /// [`GrpcClient::report_failure`](super::GrpcClient::report_failure).
    ///
    /// All tasks of the connection run as one, those of a request's stream among them: a stream that takes its time
    /// over a message, by computing or by blocking, holds up every call of the connection, those of
    /// [`FailoverChannel`](super::FailoverChannel) too. That one's own streams have tasks of their own.
    pub fn channel(&self) -> Option<Channel> {
        self.preferred().map(|e| e.channel().clone())
    }

    /// The preferred instance.
    pub fn instance(&self) -> Option<&Arc<Instance>> {
        self.preferred().map(|e| e.instance())
    }

    /// The datacenter in use.
    pub fn datacenter(&self) -> Option<&str> {
        self.instance().map(|i| i.datacenter.as_str())
    }

    /// The instances behind it, the preferred one first.
    pub fn instances(&self) -> impl Iterator<Item = &Arc<Instance>> {
        self.inner.endpoints.iter().map(|e| e.instance())
    }

    #[inline]
    pub(crate) fn endpoints(&self) -> &[Arc<Endpoint>] {
        &self.inner.endpoints
    }

    #[inline]
    pub(crate) fn weights(&self) -> Option<&Weights> {
        self.inner.weights.as_ref()
    }

    pub(crate) fn preferred(&self) -> Option<&Arc<Endpoint>> {
        self.inner.endpoints.first()
    }

    /// True while one of its connections takes calls.
    pub fn is_usable(&self) -> bool {
        self.inner.endpoints.iter().any(|e| e.is_usable())
    }
}

impl fmt::Debug for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Binding")
            .field("generation", &self.inner.generation)
            .field("endpoints", &self.inner.endpoints)
            .finish()
    }
}
