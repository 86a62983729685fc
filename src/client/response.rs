//! The response's body on its way to the caller: watched, never buffered.
//!
//! It sees how the call ends (trailers, an error, the deadline, an instance
//! that was given up) and says so to the instance's record and to the hook.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{Code, Status, body::Body};

use super::{
    answer::NoEnd,
    call::CallContext,
    endpoint::Endpoint,
    error::{CallError, CallErrorKind},
    outcome,
};

/// A response's body under watch. Every field is `Unpin`.
pub(crate) struct WatchedBody {
    inner: Body,
    context: Arc<CallContext>,
    endpoint: Arc<Endpoint>,
    attempts: u32,
    /// The headers told the status: no trailers need follow.
    has_status: bool,
    ended: bool,
    // Timer and cancellation are made at the first wait: most bodies are there at once.
    deadline: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
    abandoned: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl WatchedBody {
    pub(crate) fn new(
        inner: Body,
        has_status: bool,
        context: Arc<CallContext>,
        endpoint: Arc<Endpoint>,
        attempts: u32,
        deadline: Option<Instant>,
    ) -> Self {
        Self {
            inner,
            context,
            endpoint,
            attempts,
            has_status,
            ended: false,
            deadline,
            timer: None,
            abandoned: None,
        }
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        self.ended = true;
        let code = trailers.get("grpc-status").map_or(Code::Unknown, |v| Code::from_bytes(v.as_bytes()));
        if outcome::counts_against(code) {
            self.endpoint.link().failed(self.context.failures_to_eject());
        } else {
            self.endpoint.link().succeeded();
        }
        if code != Code::Ok
            && let Some(status) = Status::from_header_map(trailers)
        {
            self.context.failed(Some(self.endpoint.instance()), self.attempts, &status, false);
        }
    }

    fn fail(&mut self, kind: CallErrorKind) -> CallError {
        self.ended = true;
        CallError::new(kind, Some(self.endpoint.instance().clone()), self.attempts)
    }

    /// Ends the call with an error of our own making.
    fn end(&mut self, error: CallError) -> Poll<Option<Result<Frame<Bytes>, CallError>>> {
        // The transport's side of the stream is reset at once, not when the caller drops it.
        self.inner = Body::empty();
        self.context.failed(Some(self.endpoint.instance()), self.attempts, error.status(), false);
        Poll::Ready(Some(Err(error)))
    }

    /// What ends a wait other than the body itself.
    fn poll_bounds(&mut self, cx: &mut Context<'_>) -> Poll<CallErrorKind> {
        let abandoned = self
            .abandoned
            .get_or_insert_with(|| Box::pin(self.endpoint.link().abandoned().clone().cancelled_owned()));
        if abandoned.as_mut().poll(cx).is_ready() {
            return Poll::Ready(CallErrorKind::ResponseCut);
        }
        if let Some(at) = self.deadline {
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at)));
            ready!(timer.as_mut().poll(cx));
            return Poll::Ready(CallErrorKind::DeadlineExceeded);
        }
        Poll::Pending
    }
}

impl HttpBody for WatchedBody {
    type Data = Bytes;
    type Error = CallError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CallError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        match Pin::new(&mut self.inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                match frame.trailers_ref() {
                    Some(trailers) => self.trailers(trailers),
                    None => self.endpoint.link().heard_now(),
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(status))) => {
                // Part of the response may have reached the caller: reported, never resent.
                if let Some(cause) = outcome::judge(&status).lost {
                    self.endpoint.link().lose(cause);
                }
                let error = self.fail(CallErrorKind::ResponseCut).caused_by(Arc::new(status));
                self.end(error)
            }
            Poll::Ready(None) if self.has_status => {
                self.ended = true;
                Poll::Ready(None)
            }
            // hyper takes a stream that was reset with NO_ERROR for one that ended well.
            Poll::Ready(None) => {
                let error = self.fail(CallErrorKind::ResponseCut).caused_by(Arc::new(NoEnd));
                self.end(error)
            }
            Poll::Pending => {
                let kind = ready!(self.poll_bounds(cx));
                let error = self.fail(kind);
                self.end(error)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
