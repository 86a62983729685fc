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
    outcome::{self, Proof, Verdict},
};

/// After so long a wait a call starts to listen for its instance being given
/// up. Nearly all calls are over by then and are spared the registration.
const LISTEN_AFTER: Duration = Duration::from_millis(50);

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
    bounds: Bounds,
) -> Attempt<'a> {
    let exchange = Exchange::Waits { channel: endpoint.lend(), request: Some(request) };
    Attempt { wait: Wait { endpoint, given_up, bounds, asked: None, timer: None }, exchange, whole }
}

pin_project! {
    /// See [`attempt`].
    pub(crate) struct Attempt<'a> {
        exchange: Exchange,
        whole: Option<usize>,
        #[pin]
        wait: Wait<'a>,
    }
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

pin_project! {
    /// The wait for it.
    struct Wait<'a> {
        endpoint: &'a Arc<Endpoint>,
        given_up: &'a CancellationToken,
        bounds: Bounds,
        // Made when it has been waited for a while.
        asked: Option<Asked<'a>>,
        #[pin]
        timer: Option<Sleep>,
    }
}

/// A wait that has become long.
struct Asked<'a> {
    given_up: Pin<Box<WaitForCancellationFuture<'a>>>,
    patience: Duration,
    /// Since when it has been listened for a word of the instance.
    window: Instant,
}

// === impl Attempt ===

impl Future for Attempt<'_> {
    type Output = Ended;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        let this = self.project();
        if let Poll::Ready(result) = this.exchange.poll(this.wait.endpoint, *this.whole, cx) {
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

impl Wait<'_> {
    /// What ends the wait other than an answer.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended> {
        let mut this = self.project();
        let Bounds { suspect_after, limit, deadline } = *this.bounds;
        if this.timer.is_none() {
            let soon = Instant::now() + LISTEN_AFTER.min(suspect_after);
            this.timer.set(Some(sleep_until(soon.min(limit))));
        }
        loop {
            if let Some(asked) = &mut *this.asked
                && asked.given_up.as_mut().poll(cx).is_ready()
            {
                return Poll::Ready(Ended::Abandoned);
            }
            let Some(mut timer) = this.timer.as_mut().as_pin_mut() else { return Poll::Pending };
            ready!(timer.as_mut().poll(cx));
            let now = Instant::now();
            if now >= deadline {
                return Poll::Ready(Ended::DeadlinePassed);
            }
            if now >= limit {
                return Poll::Ready(Ended::TimedOut);
            }
            let link = this.endpoint.link();
            let asked = this.asked.get_or_insert_with(|| Asked {
                given_up: Box::pin(this.given_up.cancelled()),
                patience: suspect_after,
                window: timer.deadline() - LISTEN_AFTER.min(suspect_after),
            });
            if now >= asked.window + asked.patience {
                if !link.heard_since(asked.window) {
                    this.endpoint.suspect();
                    asked.patience = (asked.patience * 2).min(LONGEST_PATIENCE);
                }
                asked.window = now;
            }
            timer.reset(limit.min(asked.window + asked.patience));
        }
    }
}
