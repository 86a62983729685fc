//! A call's first attempt. Nearly all calls are over with it, and are spared what only the others need:
//! the larger future that judges failures, waits, and sends again.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response, request::Parts};
use pin_project_lite::pin_project;
use tonic::body::Body;

use super::{
    Answered, Call, Line, Outgoing, go_on,
    serial::{self, SoFar, Started},
};
use crate::client::{
    answer::Answer,
    attempt::{Bounds, Ended, Exchange, Failure},
    balance::Chosen,
    error::CallError,
    latecomers::Latecomers,
    retry::Tries,
};

/// A call under way. Dropping it cancels the call, here and on the server.
#[must_use = "futures do nothing unless polled"]
pub struct CallFuture(State);

enum State {
    Refused(CallError),
    First(Box<First>),
    /// Something was unusual.
    Rest(Pin<Box<dyn Future<Output = Result<Response<Body>, CallError>> + Send>>),
    Over,
}

pin_project! {
    /// What is left to be done for a call, on whatever executor it is polled.
    struct Rest<F> {
        #[pin]
        future: F,
        timers: Arc<Latecomers>,
    }
}

/// The first attempt, while nothing is unusual.
struct First {
    call: Call,
    endpoint: Chosen,
    exchange: Exchange,
    bounds: Bounds,
    stay: Stay,
}

/// A call's hold on its service, and its place among those that wait for their answer.
pub(super) struct Stay {
    line: Arc<Line>,
    place: Option<usize>,
}

// === impl CallFuture ===

impl CallFuture {
    pub(super) fn refused(error: CallError) -> Self {
        Self(State::Refused(error))
    }

    /// Sends the first attempt, where that can be at once.
    #[inline]
    pub(super) fn of(mut call: Call, parts: Parts, stay: Stay) -> Self {
        let endpoint = if call.is_plain() { call.context.pick_now(&[]) } else { None };
        Self(match endpoint {
            Some(endpoint) => {
                let (exchange, bounds) = call.send(parts, &endpoint);
                State::First(Box::new(First { call, endpoint, exchange, bounds, stay }))
            }
            None => State::Rest(Box::pin(Rest::of(call, None, stay))),
        })
    }
}

impl Future for CallFuture {
    type Output = Result<Response<Body>, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let State::First(first) = &mut self.0 {
            let whole = first.call.context.whole();
            let polled = first.exchange.poll(&first.endpoint, whole, cx);
            let is_over = match &polled {
                Poll::Ready(Ok(answer)) => first.call.context.is_good(answer, &first.endpoint),
                Poll::Ready(Err(_)) => false,
                Poll::Pending if first.waits(cx) => return Poll::Pending,
                Poll::Pending => false,
            };
            if let State::First(first) = mem::replace(&mut self.0, State::Over) {
                if is_over && let Poll::Ready(Ok(answer)) = polled {
                    return Poll::Ready(Ok(first.hand_over(answer)));
                }
                self.0 = State::Rest(first.unusual(polled));
            }
        }
        self.poll_rest(cx)
    }
}

impl CallFuture {
    #[inline(never)]
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Result<Response<Body>, CallError>> {
        match mem::replace(&mut self.0, State::Over) {
            State::Refused(error) => Poll::Ready(Err(error)),
            State::Rest(mut rest) => {
                let polled = rest.as_mut().poll(cx);
                if polled.is_pending() {
                    self.0 = State::Rest(rest);
                }
                polled
            }
            // Whoever polls once more has had his answer.
            State::First(_) | State::Over => Poll::Pending,
        }
    }
}

impl fmt::Debug for CallFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture").finish_non_exhaustive()
    }
}

// === impl Rest ===

impl Rest<()> {
    fn of(
        call: Call,
        started: Option<Started>,
        stay: Stay,
    ) -> Rest<impl Future<Output = Result<Response<Body>, CallError>> + Send> {
        let timers = stay.line.shared.latecomers.clone();
        Rest { future: go_on(Box::new(call), started, stay), timers }
    }
}

impl<F: Future> Future for Rest<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let _timers = this.timers.timers();
        this.future.poll(cx)
    }
}

// === impl First ===

impl First {
    /// Whether there is nothing to do but wait for the answer.
    #[inline]
    fn waits(&mut self, cx: &Context<'_>) -> bool {
        let latecomers = self.call.context.latecomers();
        match self.stay.place {
            Some(place) => !latecomers.is_late(place, cx),
            None => {
                self.stay.place = if self.bounds.are_far() { latecomers.enter(cx) } else { None };
                self.stay.place.is_some()
            }
        }
    }

    #[inline]
    fn hand_over(self: Box<Self>, answer: Answer) -> Response<Body> {
        let Self { call, endpoint, .. } = *self;
        Answered { answer, endpoint, attempts: 1 }.hand_over(call)
    }

    /// What is left to be done for the call.
    #[cold]
    fn unusual(
        self: Box<Self>,
        polled: Poll<Result<Answer, Failure>>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Body>, CallError>> + Send>> {
        let Self { call, endpoint, exchange, bounds, mut stay } = *self;
        stay.leave();
        let so_far = match polled {
            Poll::Ready(Ok(answer)) => SoFar::Ended(Ended::Answered(answer)),
            Poll::Ready(Err(failure)) => SoFar::Ended(Ended::Failed(failure)),
            Poll::Pending => SoFar::Late(exchange),
        };
        Box::pin(Rest::of(call, Some(Started { endpoint, bounds, so_far }), stay))
    }
}

impl Call {
    /// Its first attempt is sent at once, and alone, to whichever instance is ready.
    #[inline]
    fn is_plain(&self) -> bool {
        self.context.lookout().is_none() && self.context.hedging().is_none()
    }

    /// Its first attempt.
    #[inline]
    fn send(&mut self, parts: Parts, endpoint: &Chosen) -> (Exchange, Bounds) {
        let tries = Tries::first();
        let body = self.body.first_attempt().expect("nothing has taken it before the first attempt");
        let outgoing = Outgoing::new(&self.head, self.since, self.deadline, self.untold);
        let bounds = serial::bounds(&self.context, &self.body, &outgoing, &tries);
        let request = outgoing.tell(Request::from_parts(parts, body), &tries);
        (Exchange::begin(endpoint, request), bounds)
    }
}

// === impl Stay ===

impl Stay {
    #[inline]
    pub(super) fn on(line: &Arc<Line>) -> Self {
        Self { line: line.clone(), place: None }
    }

    #[inline]
    fn leave(&mut self) {
        if let Some(place) = self.place.take() {
            self.line.shared.latecomers.leave(place);
        }
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.leave();
    }
}
