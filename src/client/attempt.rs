//! One attempt: a request on one connection, until its answer or until there is
//! no more use in waiting.
//!
//! Written out as futures, not as `async` blocks, whose nesting keeps a copy of
//! the request at each level: all of a call is in one allocation, and that is to
//! be a small one.

use std::{
    error::Error,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::Request;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tonic::{body::Body, transport::channel::ResponseFuture};
use tower::Service;

use super::{
    answer::{self, Answer, Intake},
    endpoint::{self, Endpoint, Words},
    latecomers::{self, Latecomers, Place},
    outcome::{self, Proof, Verdict},
};

/// The longest time between two suspicions of one long call.
const LONGEST_PATIENCE: Duration = Duration::from_secs(5);

/// How an attempt ended.
#[expect(
    clippy::large_enum_variant,
    reason = "the common one is the large one, and a box is an allocation a call"
)]
pub(crate) enum Ended {
    Answered(Answer),
    /// No answer, or only part of one.
    Failed(Failure),
    /// The instance was given up while the call waited for it.
    Abandoned,
    /// The instance left long ago, and the request was still coming.
    Drained,
    /// It took longer than one attempt may.
    TimedOut,
    DeadlinePassed,
}

/// An attempt without a (whole) answer.
pub(crate) struct Failure {
    pub(crate) verdict: Verdict,
    /// The response had begun.
    pub(crate) cut: bool,
    pub(crate) error: Arc<dyn Error + Send + Sync>,
}

impl Failure {
    /// Before the response's headers: the error may prove that nothing ran.
    #[cold]
    fn unanswered(error: impl Error + Send + Sync + 'static) -> Self {
        Self { verdict: outcome::judge(&error), cut: false, error: Arc::new(error) }
    }

    /// After them nothing does, not even a refusal.
    #[cold]
    fn cut(error: Box<dyn Error + Send + Sync>) -> Self {
        let verdict = Verdict { proof: Proof::MayHaveRun, ..outcome::judge(&*error) };
        Self { verdict, cut: true, error: error.into() }
    }
}

/// How long an attempt waits, and for what.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// When the attempt began, or somewhat before.
    pub(crate) began: Instant,
    /// So long without a word from the instance makes it suspect.
    pub(crate) suspect_after: Duration,
    /// The attempt's own end; no later than the call's.
    pub(crate) limit: Instant,
    pub(crate) deadline: Instant,
    /// It ends where the streams of its instance are ended.
    pub(crate) drains: bool,
}

impl Bounds {
    /// Whether there is nothing to be done before the answer is late.
    #[inline]
    pub(crate) fn are_far(&self) -> bool {
        // Twice: what wakes the late ones may be late itself.
        self.suspect_after >= latecomers::LATE && self.limit >= self.began + 2 * latecomers::LATE
    }

    /// Since when an attempt has waited of which it is only known that it is late.
    fn late(&self) -> Instant {
        self.began.max(Instant::now() - latecomers::AT_LEAST)
    }
}

/// Sends `request` on `endpoint` and waits for its answer: for all of it, up to
/// `whole` bytes, where that is given, else for its headers. Says so when it has
/// waited for longer than `suspect_after` without a word from the instance, and
/// ends when that leads to `given_up` being cancelled.
///
/// Dropping the future cancels the request, here and on the server.
pub(crate) fn attempt<'a>(
    endpoint: &'a Arc<Endpoint>,
    request: Request<Body>,
    whole: Option<usize>,
    given_up: &'a CancellationToken,
    latecomers: &'a Latecomers,
    bounds: Bounds,
) -> Attempt<'a> {
    let exchange = Exchange::new(endpoint, request);
    let wait = Wait { endpoint, given_up, bounds, latecomers, state: Waits::Not };
    Attempt { exchange, whole, wait }
}

/// The same for an exchange that has begun and is late.
pub(crate) fn go_on<'a>(
    endpoint: &'a Arc<Endpoint>,
    exchange: Exchange,
    whole: Option<usize>,
    given_up: &'a CancellationToken,
    latecomers: &'a Latecomers,
    bounds: Bounds,
) -> Attempt<'a> {
    let mut wait = Wait { endpoint, given_up, bounds, latecomers, state: Waits::Not };
    wait.state = wait.long(bounds.late());
    Attempt { exchange, whole, wait }
}

/// See [`attempt`].
pub(crate) struct Attempt<'a> {
    exchange: Exchange,
    whole: Option<usize>,
    wait: Wait<'a>,
}

/// The request on its way, and its answer.
#[expect(
    clippy::large_enum_variant,
    reason = "answers to safe methods become the large one, and a box is an allocation a call"
)]
pub(crate) enum Exchange {
    /// For room on the connection.
    Waits(Box<endpoint::Waits>),
    /// It is being sent.
    Between,
    /// The response's headers are awaited.
    Sent(ResponseFuture),
    /// All of the response is awaited.
    Begun(Intake),
}

/// The wait for it.
struct Wait<'a> {
    endpoint: &'a Arc<Endpoint>,
    given_up: &'a CancellationToken,
    bounds: Bounds,
    latecomers: &'a Latecomers,
    state: Waits<'a>,
}

enum Waits<'a> {
    /// It has not had to yet.
    Not,
    /// Not for long yet.
    Among(Place<'a>),
    /// By itself. Nearly all calls are over before, and are spared this.
    Long(Pin<Box<Long<'a>>>),
}

pin_project! {
    /// A wait that has become long.
    struct Long<'a> {
        #[pin]
        given_up: WaitForCancellationFuture<'a>,
        #[pin]
        drained: Option<WaitForCancellationFuture<'a>>,
        #[pin]
        timer: Sleep,
        patience: Duration,
        // Since when it has been listened for a word of the instance.
        window: Instant,
        // What had been heard by then.
        words: Words,
    }
}

// === impl Attempt ===

impl Future for Attempt<'_> {
    type Output = Ended;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        let this = self.get_mut();
        if let Poll::Ready(result) = this.exchange.poll(this.wait.endpoint, this.whole, cx) {
            return Poll::Ready(match result {
                Ok(answer) => Ended::Answered(answer),
                Err(failure) => Ended::Failed(failure),
            });
        }
        this.wait.poll(cx)
    }
}

// === impl Exchange ===

impl Exchange {
    /// Nothing is sent before it is polled.
    fn new(endpoint: &Endpoint, request: Request<Body>) -> Self {
        Self::Waits(Box::new((endpoint.channel().clone(), request)))
    }

    /// Sends at once, where there is room on the connection.
    #[inline]
    pub(crate) fn begin(endpoint: &Endpoint, request: Request<Body>) -> Self {
        match endpoint.try_send(request) {
            Ok(sent) => Self::Sent(sent),
            Err(waits) => Self::Waits(waits),
        }
    }

    #[inline(never)]
    fn send(&mut self, endpoint: &Endpoint, cx: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        let Self::Waits(waits) = self else { return Poll::Pending };
        ready!(waits.0.poll_ready(cx)).map_err(Failure::unanswered)?;
        if let Self::Waits(waits) = std::mem::replace(self, Self::Between) {
            let (mut channel, request) = *waits;
            *self = Self::Sent(channel.call(request));
            endpoint.keep(channel);
        }
        Poll::Ready(Ok(()))
    }

    /// Is not to be polled again once it is ready.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        endpoint: &Endpoint,
        whole: Option<usize>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Answer, Failure>> {
        loop {
            match self {
                Self::Waits(_) | Self::Between => ready!(self.send(endpoint, cx))?,
                Self::Sent(response) => {
                    let response = ready!(Pin::new(response).poll(cx));
                    let (response, has_status) = answer::begun(response.map_err(Failure::unanswered)?);
                    match whole {
                        Some(limit) => *self = Self::Begun(Intake::new(response, has_status, limit)),
                        None => return Poll::Ready(Ok(Answer::Begun { response, has_status })),
                    }
                }
                Self::Begun(intake) => return intake.poll(cx).map_err(Failure::cut),
            }
        }
    }
}

// === impl Wait ===

impl<'a> Wait<'a> {
    /// What ends the wait other than an answer.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Ended> {
        if let Waits::Not = self.state {
            self.state = match self.bounds.are_far().then(|| self.latecomers.place(cx)).flatten() {
                Some(place) => {
                    self.state = Waits::Among(place);
                    return Poll::Pending;
                }
                None => self.long(self.bounds.began),
            };
        }
        if let Waits::Among(place) = &mut self.state {
            if !place.is_late(cx) {
                return Poll::Pending;
            }
            self.state = self.long(self.bounds.late());
        }
        let Waits::Long(long) = &mut self.state else { return Poll::Pending };
        long.as_mut().poll(self.endpoint, self.bounds, cx)
    }

    /// `window` as in [`Long`].
    fn long(&self, window: Instant) -> Waits<'a> {
        let Bounds { suspect_after, limit, drains, .. } = self.bounds;
        let drained = || self.endpoint.link().drained().token().cancelled();
        Waits::Long(Box::pin(Long {
            given_up: self.given_up.cancelled(),
            drained: drains.then(drained),
            timer: sleep_until(limit.min(window + suspect_after)),
            patience: suspect_after,
            window,
            words: self.endpoint.link().words(),
        }))
    }
}

impl Long<'_> {
    fn poll(
        self: Pin<&mut Self>,
        endpoint: &Arc<Endpoint>,
        bounds: Bounds,
        cx: &mut Context<'_>,
    ) -> Poll<Ended> {
        let mut this = self.project();
        if this.given_up.poll(cx).is_ready() {
            return Poll::Ready(Ended::Abandoned);
        }
        if this.drained.as_pin_mut().is_some_and(|drained| drained.poll(cx).is_ready()) {
            return Poll::Ready(Ended::Drained);
        }
        loop {
            ready!(this.timer.as_mut().poll(cx));
            let now = Instant::now();
            if now >= bounds.deadline {
                return Poll::Ready(Ended::DeadlinePassed);
            }
            if now >= bounds.limit {
                return Poll::Ready(Ended::TimedOut);
            }
            if now >= *this.window + *this.patience {
                if !endpoint.link().heard_since(*this.words) {
                    endpoint.suspect();
                    *this.patience = (*this.patience * 2).min(LONGEST_PATIENCE);
                }
                (*this.window, *this.words) = (now, endpoint.link().words());
            }
            this.timer.as_mut().reset(bounds.limit.min(*this.window + *this.patience));
        }
    }
}
