//! The response's body on its way to the caller: watched, never buffered.
//!
//! It sees how the call ends (trailers, an error, the deadline, an instance
//! that was given up) and says so to the instance's record and to the hook.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{Code, Status, body::Body};

use super::{
    answer::NoEnd,
    balance::Chosen,
    call::CallContext,
    details,
    endpoint::Words,
    error::{CallError, CallErrorKind},
    headers::{Said, said},
    mechanisms::CallMechanism,
    outcome,
    replay::OwnError,
};
use crate::NotPrimary;

/// How long a body may be silent, with nothing else heard from its instance,
/// before that is probed: a stream may live long without a word, and must still
/// end when its instance is dead.
const PATIENCE: Duration = Duration::from_secs(5);

/// A response's body under watch. Every field is `Unpin`.
pub(crate) struct WatchedBody {
    inner: Body,
    /// `None` once the response has ended: a caller that keeps the rest of it
    /// must not keep the connection, nor a place among the calls under way.
    live: Option<Live>,
    attempts: u32,
    deadline: Option<Instant>,
    /// Where the request may still be under way.
    request: Option<OwnError>,
    /// The headers told the status: no trailers need follow.
    has_status: bool,
    // Timer and cancellation are made at the first wait: most bodies are there at once.
    wait: Option<Wait>,
}

/// What a response that goes on holds on to.
struct Live {
    context: CallContext,
    endpoint: Chosen,
}

type Cause = Arc<dyn std::error::Error + Send + Sync>;

/// What a wait for the next frame listens to besides.
struct Wait {
    abandoned: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Where streams are ended on instances that have left.
    drained: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    timer: Pin<Box<Sleep>>,
    /// Since when it has been listened for a word of the instance, and what had been heard by then.
    since: Instant,
    words: Words,
}

impl Live {
    #[inline]
    fn is_drained(&self) -> bool {
        self.context.drains() && self.endpoint.link().drained().is_said()
    }
}

impl WatchedBody {
    #[inline]
    pub(crate) fn new(
        inner: Body,
        has_status: bool,
        context: CallContext,
        endpoint: Chosen,
        attempts: u32,
        deadline: Option<Instant>,
        request: Option<OwnError>,
    ) -> Self {
        let live = Some(Live { context, endpoint });
        Self { inner, live, attempts, deadline, request, has_status, wait: None }
    }

    /// The response has ended.
    #[inline]
    fn end(&mut self) -> Option<Live> {
        // The transport's side of the stream is reset at once, not when the caller drops it.
        self.inner = Body::empty();
        self.wait = None;
        self.live.take()
    }

    /// The response ends with these.
    #[inline]
    fn trailers(&mut self, code: Code, trailers: &HeaderMap) {
        let Some(Live { context, endpoint }) = self.end() else { return };
        if code == Code::Ok {
            endpoint.link().succeeded();
            return;
        }
        Self::failed(Live { context, endpoint }, code, trailers, self.attempts);
    }

    #[cold]
    fn failed(Live { context, endpoint }: Live, code: Code, trailers: &HeaderMap, attempts: u32) {
        let status = Status::from_header_map(trailers);
        if !outcome::counts_against(code) {
            endpoint.link().succeeded();
        } else if status.as_ref().is_some_and(NotPrimary::or_no_longer) {
            endpoint.link().heard();
        } else {
            endpoint.link().failed(context.failures_to_eject());
        }
        if let Some(status) = status {
            context.failed(Some(endpoint.instance()), attempts, &status, false);
        }
    }

    /// Ends the call with an error of our own making.
    #[cold]
    fn fail(
        &mut self,
        kind: CallErrorKind,
        cause: Option<Cause>,
    ) -> Poll<Option<Result<Frame<Bytes>, CallError>>> {
        let Some(Live { context, endpoint }) = self.end() else { return Poll::Ready(None) };
        let instance = Some(endpoint.instance().clone());
        let own = self.request.take().filter(|_| kind == CallErrorKind::RequestFailed);
        let mut error = match own.and_then(|request| request.get()) {
            Some(status) => CallError::of_request(status, instance, self.attempts),
            None => CallError::new(kind, instance, self.attempts),
        };
        if let Some(cause) = cause {
            error = error.caused_by(cause);
        }
        context.failed(Some(endpoint.instance()), self.attempts, error.status(), false);
        Poll::Ready(Some(Err(error)))
    }

    /// What ends a wait other than the body itself.
    #[inline(never)]
    fn poll_bounds(&mut self, cx: &mut Context<'_>) -> Poll<CallErrorKind> {
        let Some(Live { context, endpoint }) = &self.live else { return Poll::Pending };
        let deadline = self.deadline;
        let wake = |now: Instant| deadline.map_or(now + PATIENCE, |at| at.min(now + PATIENCE));
        let wait = self.wait.get_or_insert_with(|| {
            let _timers = context.latecomers().timers();
            let since = Instant::now();
            let drained = || Box::pin(endpoint.link().drained().token().clone().cancelled_owned());
            Wait {
                abandoned: Box::pin(endpoint.link().abandoned().clone().cancelled_owned()),
                drained: context.drains().then(drained),
                timer: Box::pin(sleep_until(wake(since))),
                since,
                words: endpoint.link().words(),
            }
        });
        if wait.abandoned.as_mut().poll(cx).is_ready() {
            return Poll::Ready(CallErrorKind::ResponseCut);
        }
        if wait.drained.as_mut().is_some_and(|drained| drained.as_mut().poll(cx).is_ready()) {
            return Poll::Ready(CallErrorKind::Drained);
        }
        loop {
            ready!(wait.timer.as_mut().poll(cx));
            let now = Instant::now();
            if deadline.is_some_and(|at| at <= now) {
                return Poll::Ready(CallErrorKind::DeadlineExceeded);
            }
            if now >= wait.since + PATIENCE {
                if !endpoint.link().heard_since(wait.words) {
                    endpoint.suspect();
                }
                (wait.since, wait.words) = (now, endpoint.link().words());
            }
            wait.timer.as_mut().reset(wake(wait.since));
        }
    }
}

impl HttpBody for WatchedBody {
    type Data = Bytes;
    type Error = CallError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CallError>>> {
        let this = &mut *self;
        let Some(live) = &this.live else { return Poll::Ready(None) };
        // Also where the next frame is there: a slow reader has a deadline too. A single message has
        // none: all of it is there soon or late, and to read the clock is dear beside the rest.
        let may_be_long = !live.context.has_unary_response();
        if may_be_long && this.deadline.is_some_and(|at| at <= Instant::now()) {
            return this.fail(CallErrorKind::DeadlineExceeded, None);
        }
        if live.is_drained() {
            return this.fail(CallErrorKind::Drained, None);
        }
        match Pin::new(&mut this.inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(mut frame))) => {
                if let Some(trailers) = frame.trailers_mut() {
                    let Said { status, details, .. } = said(trailers);
                    if !this.has_status && status.is_none() {
                        return this.fail(CallErrorKind::ResponseCut, Some(Arc::new(NoEnd)));
                    }
                    let code = status.map_or(Code::Ok, |it| Code::from_bytes(it.as_bytes()));
                    if details {
                        details::drop_malformed(trailers);
                    }
                    this.trailers(code, trailers);
                } else {
                    live.context.heard(&live.endpoint);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(status))) => {
                // Part of the response may have reached the caller: reported, never resent.
                let verdict = outcome::judge(&status);
                if let Some(cause) = verdict.lost {
                    live.endpoint.link().lose(cause);
                }
                let own = verdict.own;
                let kind = if own { CallErrorKind::RequestFailed } else { CallErrorKind::ResponseCut };
                this.fail(kind, Some(Arc::new(status)))
            }
            Poll::Ready(None) if !this.has_status && !live.context.lacks(CallMechanism::Ending) => {
                // hyper takes a stream that was reset with NO_ERROR or CANCEL for one that ended well.
                this.fail(CallErrorKind::ResponseCut, Some(Arc::new(NoEnd)))
            }
            Poll::Ready(None) => {
                this.end();
                Poll::Ready(None)
            }
            Poll::Pending => {
                let kind = ready!(this.poll_bounds(cx));
                this.fail(kind, None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.live.is_none() || (self.inner.is_end_stream() && self.has_status)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
