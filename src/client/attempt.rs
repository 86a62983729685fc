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
use tonic::{
    body::Body,
    transport::{Channel, channel::ResponseFuture},
};
use tower::Service;

use super::{
    answer::{Answer, Intake, as_grpc},
    details,
    endpoint::Endpoint,
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
    fn unanswered(error: impl Error + Send + Sync + 'static) -> Self {
        Self { verdict: outcome::judge(&error), cut: false, error: Arc::new(error) }
    }

    /// After them nothing does, not even a refusal.
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
    let exchange = Exchange::Waits { channel: endpoint.lend(), request: Some(request) };
    let wait = Wait { endpoint, given_up, bounds, latecomers, state: Waits::Not };
    Attempt { exchange, whole, wait }
}

/// See [`attempt`].
pub(crate) struct Attempt<'a> {
    exchange: Exchange,
    whole: Option<usize>,
    wait: Wait<'a>,
}

/// The request on its way, and its answer.
enum Exchange {
    /// For room on the connection.
    Waits { channel: Channel, request: Option<Request<Body>> },
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
        timer: Sleep,
        patience: Duration,
        // Since when it has been listened for a word of the instance.
        window: Instant,
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
    fn poll(
        &mut self,
        endpoint: &Endpoint,
        whole: Option<usize>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Answer, Failure>> {
        loop {
            match self {
                Self::Waits { channel, request } => {
                    ready!(channel.poll_ready(cx)).map_err(Failure::unanswered)?;
                    let request = request.take().expect("sent once: then it waits no more");
                    let sent = channel.call(request);
                    if let Self::Waits { channel, .. } = std::mem::replace(self, Self::Sent(sent)) {
                        endpoint.give_back(channel);
                    }
                }
                Self::Sent(response) => {
                    let response = ready!(Pin::new(response).poll(cx));
                    let mut response = response.map_err(Failure::unanswered)?;
                    details::drop_malformed(response.headers_mut());
                    let response = as_grpc(response);
                    match whole {
                        Some(limit) => *self = Self::Begun(Intake::new(response, limit)),
                        None => return Poll::Ready(Ok(Answer::Begun(response))),
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
            self.state = match self.is_far().then(|| self.latecomers.enter(cx)).flatten() {
                Some(place) => Waits::Among(place),
                None => self.long(self.bounds.began),
            };
        }
        if let Waits::Among(place) = &mut self.state {
            if !place.is_late(cx) {
                return Poll::Pending;
            }
            self.state = self.long(Instant::now() - latecomers::AT_LEAST);
        }
        let Waits::Long(long) = &mut self.state else { return Poll::Pending };
        long.as_mut().poll(self.endpoint, self.bounds, cx)
    }

    /// Whether there is nothing to be done before the answer is late.
    fn is_far(&self) -> bool {
        let Bounds { began, suspect_after, limit, .. } = self.bounds;
        // Twice: what wakes the late ones may be late itself.
        suspect_after >= latecomers::LATE && limit >= began + 2 * latecomers::LATE
    }

    /// `window` as in [`Long`].
    fn long(&self, window: Instant) -> Waits<'a> {
        let Bounds { suspect_after, limit, .. } = self.bounds;
        Waits::Long(Box::pin(Long {
            given_up: self.given_up.cancelled(),
            timer: sleep_until(limit.min(window + suspect_after)),
            patience: suspect_after,
            window,
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
                if !endpoint.link().heard_since(*this.window) {
                    endpoint.suspect();
                    *this.patience = (*this.patience * 2).min(LONGEST_PATIENCE);
                }
                *this.window = now;
            }
            this.timer.as_mut().reset(bounds.limit.min(*this.window + *this.patience));
        }
    }
}
