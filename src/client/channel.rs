//! The channel that generated clients take.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use tonic::body::Body;
use tower::Service;

use super::{
    call::{self, CallFuture, CallShared, Line},
    error::CallError,
    services::Lifetime,
};

/// A channel that follows its service. Any generated tonic client takes it:
/// `CounterClient::new(counter.channel())`.
///
/// Cheap to clone; clones share everything. It is always ready: `poll_ready`
/// never fails and reserves nothing, and calls made before the first instance
/// is found wait for it, within their deadline. Where an instance is ready a request is sent as soon as
/// its call is made, as with tonic's own channel; dropping the future cancels the call. Any executor may poll
/// the calls, as long as the runtime lives that the service was built on.
///
/// It keeps its service running, and so does a call until its response begins:
/// discovery ends when the last channel, [`GrpcClient`](super::GrpcClient) and
/// [`ConsulService`](super::ConsulService) are gone.
#[derive(Clone)]
pub struct FailoverChannel {
    line: Arc<Line>,
}

impl FailoverChannel {
    pub(crate) fn new(shared: Arc<CallShared>, lifetime: Arc<Lifetime>) -> Self {
        Self { line: Arc::new(Line::new(shared, lifetime)) }
    }
}

impl Service<Request<Body>> for FailoverChannel {
    type Response = Response<Body>;
    type Error = CallError;
    type Future = CallFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> CallFuture {
        call::start(&self.line, request)
    }
}

impl fmt::Debug for FailoverChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailoverChannel")
            .field("service", &self.line.shared.options.name)
            .finish_non_exhaustive()
    }
}
