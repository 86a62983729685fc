//! Watches one service in one datacenter.
//!
//! One task asks, whatever the number of those who listen; everything it holds
//! is its own, so there is no lock. Two kinds of questions may be under way at
//! once: the blocking one, and a refresh that somebody asked for.
//!
//! ```text
//!  refresh() --mpsc--> +------ task ------+
//!                      | blocking query   | --> Registry
//!                      | refresh (at most | --> Registry
//!  watch() <--watch--- |  one at a time)  |
//!                      +------------------+
//! ```

mod doubt;
mod episode;
mod lines;
mod order;
mod pace;
mod resolved;
mod seats;
mod task;
#[cfg(test)]
mod tests;
mod turns;

use std::{future::Future, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::AbortOnDropHandle;
use tower::util::rng::{HasherRng, Rng};
use tracing::Instrument;

use super::mechanisms::Without;
use crate::{client::registry::Registry, consul::RegistryError, instance::Shown};
pub use doubt::RegistryDoubt;
pub(crate) use episode::{Cause, Episode, Failure};
pub(crate) use resolved::Resolved;
use task::Task;
pub(crate) use turns::Turns;

/// How many refreshes may wait to be heard; more wait at the door.
const DOOR: usize = 64;

/// The watch on one service in one datacenter. Dropping it ends the task and
/// aborts its requests.
#[derive(Debug)]
pub(crate) struct Resolver {
    requests: mpsc::Sender<Reply>,
    resolved: watch::Receiver<Resolved>,
    _task: AbortOnDropHandle<()>,
}

type Reply = oneshot::Sender<Result<Resolved, RegistryError>>;

/// How to ask.
#[derive(Clone, Debug)]
pub(crate) struct ResolverSettings {
    /// How long a blocking query waits for news. Default: 60 s, because news
    /// missed by a fallen index stays unseen so long.
    pub(crate) wait: Duration,
    /// The bound of the first delay after a failure. Default: 200 ms.
    pub(crate) backoff_min: Duration,
    /// The bound of any delay after a failure that the registry did not ask for.
    /// Default: 5 s: it is the own host's agent that is spared.
    pub(crate) backoff_max: Duration,
    /// Under churn one question is asked in this time, after a burst of two.
    /// Consul's page on blocking queries asks for such a limit and leaves the rate
    /// open. Default: 250 ms.
    pub(crate) spacing: Duration,
    /// What a test has switched off.
    pub(crate) without: Without,
    /// Who may wait when there are many. Shared by all resolvers that are made with
    /// clones of these settings. Default: 64 at once, the others read every 10 s.
    pub(crate) turns: Turns,
}

// === impl ResolverSettings ===

impl Default for ResolverSettings {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(60),
            backoff_min: Duration::from_millis(200),
            backoff_max: Duration::from_secs(5),
            spacing: Duration::from_millis(250),
            without: Without::default(),
            turns: Turns::for_all(),
        }
    }
}

// === impl Resolver ===

impl Resolver {
    /// Begins to watch. Must be called within a tokio runtime.
    pub(crate) fn spawn(
        registry: Arc<dyn Registry>,
        service: Arc<str>,
        datacenter: &str,
        settings: ResolverSettings,
    ) -> Self {
        let span = tracing::info_span!("resolver", %service, datacenter = %Shown(datacenter));
        Self::run(registry, service, settings, HasherRng::new(), span)
    }

    fn run(
        registry: Arc<dyn Registry>,
        service: Arc<str>,
        settings: ResolverSettings,
        rng: impl Rng + Send + 'static,
        span: tracing::Span,
    ) -> Self {
        let (requests, incoming) = mpsc::channel(DOOR);
        let (published, resolved) = watch::channel(Resolved::default());
        let task = Task::new(registry, service, settings, incoming, published, rng);
        let task = AbortOnDropHandle::new(tokio::spawn(task.run().instrument(span)));
        Self { requests, resolved, _task: task }
    }

    /// What is known, and news of it: a change of the list, its emptiness, what the
    /// token may read, or the registry being lost, in other trouble, or back. An answer that says the same
    /// again is no news; it moves `answered_at` and `answers` silently.
    pub(crate) fn watch(&self) -> watch::Receiver<Resolved> {
        self.resolved.clone()
    }

    /// Asks afresh, without waiting for a change, and publishes what comes. Those
    /// who call while a refresh is under way share it. The future is lazy and may
    /// be dropped; the question, once asked, is answered for the others all the
    /// same.
    ///
    /// # Errors
    /// What the question failed with, which is published too;
    /// [`RegistryError::RateLimited`] without asking while the registry wants to be
    /// left alone; [`RegistryError::Closed`] when the resolver has been dropped.
    pub(crate) fn refresh(
        &self,
    ) -> impl Future<Output = Result<Resolved, RegistryError>> + Send + 'static + use<> {
        let requests = self.requests.clone();
        async move {
            let (reply, answer) = oneshot::channel();
            requests.send(reply).await.map_err(|_| RegistryError::Closed)?;
            answer.await.unwrap_or(Err(RegistryError::Closed))
        }
    }
}
