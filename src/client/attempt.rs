//! One attempt: a request on one connection, until its answer or until there is
//! no more use in waiting.

use std::{error::Error, future::poll_fn, pin::pin, sync::Arc, time::Duration};

use http::Request;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tower::Service;

use super::{
    answer::{Answer, as_grpc},
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
pub(crate) async fn attempt(
    endpoint: &Arc<Endpoint>,
    request: Request<Body>,
    whole: Option<usize>,
    given_up: &CancellationToken,
    Bounds { suspect_after, limit, deadline }: Bounds,
) -> Ended {
    let link = endpoint.link();
    // A clone, polled and called: a channel that was not polled itself panics.
    let mut channel = endpoint.channel().clone();
    let mut send = pin!(async move {
        let sent = async {
            poll_fn(|cx| channel.poll_ready(cx)).await?;
            channel.call(request).await
        };
        let mut response = sent.await.map_err(Failure::unanswered)?;
        details::drop_malformed(response.headers_mut());
        let response = as_grpc(response);
        match whole {
            Some(limit) => Answer::whole(response, limit).await.map_err(Failure::cut),
            None => Ok(Answer::Begun(response)),
        }
    });
    let started = Instant::now();
    let mut patience = suspect_after;
    let mut window = started;
    let mut listening = false;
    let mut timer = pin!(sleep_until(limit.min(started + LISTEN_AFTER.min(patience))));
    loop {
        tokio::select! {
            biased;
            result = &mut send => {
                return match result {
                    Ok(answer) => Ended::Answered(answer),
                    Err(failure) => Ended::Failed(failure),
                };
            }
            () = given_up.cancelled(), if listening => return Ended::Abandoned,
            () = &mut timer => {
                let now = Instant::now();
                if now >= deadline {
                    return Ended::DeadlinePassed;
                }
                if now >= limit {
                    return Ended::TimedOut;
                }
                listening = true;
                if now >= window + patience {
                    if !link.heard_since(window) {
                        endpoint.suspect();
                        patience = (patience * 2).min(LONGEST_PATIENCE);
                    }
                    window = now;
                }
                timer.as_mut().reset(limit.min(window + patience));
            }
        }
    }
}
