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
mod episodes;
mod order;
mod pace;
mod task;
#[cfg(test)]
mod tests;
mod turns;

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};
use tokio_util::task::AbortOnDropHandle;
use tower::util::rng::{HasherRng, Rng};
use tracing::Instrument;

use super::mechanisms::Without;
use crate::{
    client::registry::Registry,
    consul::{Denied, RegistryError},
    instance::Snapshot,
};
pub use doubt::RegistryDoubt;
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

/// What is known of the service.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub(crate) struct Resolved {
    /// The last list that had instances, or an empty one where there never were
    /// any. `None`: the registry has never answered.
    pub(crate) snapshot: Option<Snapshot>,
    /// When the last good answer came.
    pub(crate) answered_at: Option<Instant>,
    /// What the last question failed with; `None` once one has been answered.
    pub(crate) error: Option<RegistryError>,
    /// What is wrong with the answers, though they come.
    pub(crate) doubt: Option<RegistryDoubt>,
    /// Since when what is known has not been confirmed: questions fail, or are
    /// answered by a server that is cut off.
    pub(crate) failing_since: Option<Instant>,
    /// Since when the registry has said that there are no instances.
    pub(crate) empty_since: Option<Instant>,
    /// What the token may not read, by the last good answer.
    pub(crate) denied: Option<Denied>,
    /// Since when the list has been hidden from the token: it comes empty, and
    /// that says nothing.
    pub(crate) hidden_since: Option<Instant>,
    /// The address of the agent that gave the last good answer.
    pub(crate) agent: Option<Arc<str>>,
    /// How many good answers there have been.
    pub(crate) answers: u64,
}

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
            turns: Turns::new(64, Duration::from_secs(10)),
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
        let span = tracing::info_span!("resolver", %service, datacenter);
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
