//! The fence around a service: only a primary runs its calls.
//!
//! ```text
//! call --> FenceLayer --(primary: its token in the extensions)--> handler --> response
//!              |                                                                |
//!              +--(else)--> NOT_PRIMARY, before the handler    PRIMARY_LOST <---+ a stream, once the role is lost
//! ```
//!
//! | what | whose it is |
//! |---|---|
//! | a call that comes to a standby, a deposed primary, or one that does not know | the fence refuses it |
//! | a stream that has begun when the role is lost | the fence ends it |
//! | a handler that runs when the role is lost | its answer is passed on: whether its write counts is for the write itself to say, in a transaction that fails once another holds the lease (`FencedState`) |

mod body;
mod gate;

use std::{
    error::Error,
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tonic::{Status, body::Body, server::NamedService};
use tower::{Layer, Service};

use self::{
    body::FencedBody,
    gate::{Gate, Passage},
};
use super::role_source::RoleSource;

/// Services that a standby answers as well: it lives, and says what it is.
const UNFENCED: [&str; 2] = ["/grpc.health.v1.Health/", "/grpc.reflection."];

/// Lets calls through to the service that it is put around while this instance is the primary.
///
/// Every other call is answered with UNAVAILABLE and [`NotPrimary`](crate::NotPrimary) before the
/// handler runs, so that the caller may always send it elsewhere; a client with
/// [`primary_only`](crate::client::ServiceOptions::primary_only) does so by itself. The role is looked at
/// for each call, and so is the time until which it holds: a primary that has not been able to
/// renew its lease refuses from that instant on, whether or not there was any news.
///
/// A call that is let through finds the [`FencingToken`](crate::FencingToken) of the term in the
/// extensions of its request. Its answer is passed on whatever becomes of the role; a response that is
/// more than one message ends with UNAVAILABLE and [`PrimaryLost`](crate::PrimaryLost) as soon as the role
/// is lost, before its next message.
///
/// It goes around one service, or around all of a server: `grpc.health.v1.Health` and
/// `grpc.reflection.*` are let through by their paths. Clones share one gate.
///
/// ```
/// use tonic_failover::{Role, server::{Fence, FenceLayer}};
/// use tower::Layer;
///
/// /// For `Server::builder().add_service(..)`.
/// fn fenced<S>(role: tokio::sync::watch::Receiver<Role>, counter: S) -> Fence<S> {
///     FenceLayer::new(role).layer(counter)
/// }
/// ```
#[derive(Clone)]
pub struct FenceLayer {
    gate: Gate,
}

/// A service behind a fence: see [`FenceLayer`].
#[derive(Clone)]
pub struct Fence<S> {
    inner: S,
    gate: Gate,
}

pin_project! {
    /// The answer of a [`Fence`].
    pub struct FenceFuture<F> {
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<F> {
        Refused { response: Option<Response<Body>> },
        // The passage is gone with the answer's headers.
        Passed { #[pin] answer: F, passage: Option<Passage> },
        Unfenced { #[pin] answer: F },
    }
}

// === impl FenceLayer ===

impl FenceLayer {
    /// A fence that goes by this role: a `&Lease`, whose [hand-over](super::Lease::hand_over) waits for the
    /// calls that are let through here, or a receiver of a role.
    pub fn new(role: impl Into<RoleSource>) -> Self {
        Self { gate: Gate::new(role.into()) }
    }

    /// Refuses new calls from now on, and ends streams, as a standby would: for the rest of this term.
    /// The next term of this instance begins open. Nothing happens where it is not the primary.
    ///
    /// It is the first step of leaving in order: close, wait for [`idle`](Self::idle), release the
    /// lease. Clients that go to the primary only have refused calls wait for the successor.
    pub fn close(&self) {
        self.gate.close();
    }

    /// Takes back [`close`](Self::close): for a hand-over that is given up before the lease is.
    pub fn open(&self) {
        self.gate.open();
    }

    /// Waits until every call that was let through has ended: its handler, and its response up to the last
    /// message. A handler may take as long as it likes, so bound the wait.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn idle(&self) {
        self.gate.idle().await;
    }

    /// How many calls are let through and have not ended.
    pub fn in_flight(&self) -> usize {
        self.gate.in_flight()
    }
}

impl<S> Layer<S> for FenceLayer {
    type Service = Fence<S>;

    fn layer(&self, inner: S) -> Fence<S> {
        Fence { inner, gate: self.gate.clone() }
    }
}

impl fmt::Debug for FenceLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceLayer").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

// === impl Fence ===

impl<S, B, R> Service<Request<B>> for Fence<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: HttpBody<Data = Bytes> + Send + 'static,
    R::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = FenceFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> FenceFuture<S::Future> {
        let path = request.uri().path();
        if UNFENCED.iter().any(|unfenced| path.starts_with(unfenced)) {
            return FenceFuture { state: State::Unfenced { answer: self.inner.call(request) } };
        }
        let state = match self.gate.pass(Instant::now()) {
            Ok(passage) => {
                request.extensions_mut().insert(passage.token());
                State::Passed { answer: self.inner.call(request), passage: Some(passage) }
            }
            Err(refusal) => {
                let primary = refusal.primary.as_ref().map(|it| &*it.instance);
                tracing::debug!(path, primary, "refused: not the primary");
                State::Refused { response: Some(Status::from(refusal).into_http()) }
            }
        };
        FenceFuture { state }
    }
}

impl<S: NamedService> NamedService for Fence<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> fmt::Debug for Fence<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").finish_non_exhaustive()
    }
}

// === impl FenceFuture ===

impl<F, R, E> Future for FenceFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: HttpBody<Data = Bytes> + Send + 'static,
    R::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match self.project().state.project() {
            StateProjection::Refused { response } => {
                Ok(response.take().expect("polled until it is ready, which it is at once"))
            }
            StateProjection::Unfenced { answer } => ready!(answer.poll(cx)).map(|it| it.map(Body::new)),
            StateProjection::Passed { answer, passage } => {
                let response = ready!(answer.poll(cx))?;
                let passage = passage.take().expect("polled until it is ready");
                Ok(response.map(|body| Body::new(FencedBody::new(Body::new(body), passage))))
            }
        })
    }
}

impl<F> fmt::Debug for FenceFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceFuture").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
