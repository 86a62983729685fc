//! Where a service's instances are listed: a question that every registry can
//! answer, and the registries that come with this crate.
//!
//! A registry only answers. What follows from an answer, from none, or from an
//! empty one is the same for all of them and is not theirs to decide: the
//! last list that held instances stays in use, marked stale with its age, while
//! the registry fails or says that there are none; one flight of questions serves
//! everybody; failures are asked again with growing, jittered delays.
//!
//! ```text
//!  ConsulClient --+
//!  StaticList   --+-- Registry::ask --> resolver (the rules) --> worker
//!  Dns          --+
//!  yours        --+
//! ```
//!
//! A registry of one's own: a file with an address on each line, read every 5 s.
//!
//! ```
//! use std::{path::PathBuf, time::Duration};
//! use tonic_failover::{Instance, client::registry::{Asking, Listing, Question, Registry, RegistryError}};
//!
//! struct Files(PathBuf);
//!
//! impl Registry for Files {
//!     fn ask(&self, question: Question) -> Asking {
//!         let file = self.0.join(&*question.service);
//!         Box::pin(async move {
//!             let text = tokio::fs::read_to_string(file).await.map_err(RegistryError::other)?;
//!             let hosts = text.lines().map(|host| Instance::new(host, host, 50051, "files"));
//!             Ok(Listing::new(hosts).again_in(Duration::from_secs(5)))
//!         })
//!     }
//! }
//! ```
//!
//! It is used as `Services::builder(Files("/etc/services.d".into()))`; see
//! [`Services`](super::Services).

mod consul;
#[cfg(feature = "dns")]
mod dns;
mod fixed;
mod guard;

use std::{collections::HashSet, future::Future, pin::Pin, sync::Arc, time::Duration};

#[cfg(feature = "dns")]
pub use self::dns::{Dns, DnsBuilder, InvalidDns};
pub use self::fixed::StaticList;
pub(crate) use self::{consul::ConsulQuery, guard::Guarded};
use super::deadline::FOR_EVER;
pub use crate::consul::RegistryError;
use crate::{
    consul::HealthAnswer,
    instance::{Instance, Snapshot},
};

/// Lists the instances of services.
///
/// One question for each service is asked again and again: with what was seen
/// last, so that the registry may wait for news, and besides, with nothing seen,
/// when somebody wants to know now. A registry that cannot wait for news
/// answers at once and says when to be asked again ([`Listing::again_in`]).
pub trait Registry: Send + Sync + 'static {
    /// Answers the question.
    ///
    /// Every error means that nothing is known, never that there are no
    /// instances; that is an empty listing. The future may be dropped at any
    /// point. One that takes 10 s longer than it may wait for news, or panics,
    /// is given up and counts as failed.
    fn ask(&self, question: Question) -> Asking;

    /// Where it was asked last. It is read as soon as a question has failed, and told
    /// beside the error in the status and the events. Default: nothing to tell.
    fn address(&self) -> Option<Arc<str>> {
        None
    }
}

/// The answer to come.
pub type Asking = Pin<Box<dyn Future<Output = Result<Listing, RegistryError>> + Send>>;

/// What a registry is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Question {
    /// The service's name.
    pub service: Arc<str>,
    /// `None`: answer with the present state, at once. Else the
    /// [version](Listing::version) seen last: answer when there is another one,
    /// and after [`wait`](Self::wait) in any case. A registry that gives no
    /// versions is never asked to wait.
    pub seen: Option<u64>,
    /// How long to wait for news at most.
    pub wait: Duration,
    /// The first one of whoever asks.
    pub(crate) begins: bool,
}

/// What a registry answers: all usable instances of one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    pub(crate) answer: HealthAnswer,
    pub(crate) again_in: Duration,
    /// How long news was waited for, where that is less than was asked for.
    pub(crate) waited_for: Option<Duration>,
}

// === impl Listing ===

impl Listing {
    /// These instances and no others. Of several with one address the first is kept.
    pub fn new(instances: impl IntoIterator<Item = Instance>) -> Self {
        let mut known = HashSet::new();
        let instances =
            instances.into_iter().filter(|it| known.insert(it.id.clone())).map(Arc::new).collect();
        HealthAnswer::of(Snapshot { instances }).into()
    }

    /// The version of this state, which the next question names as seen. It
    /// grows with each change; one that falls is the registry beginning anew.
    /// 0 is none. Default: none.
    #[must_use]
    pub fn version(mut self, version: u64) -> Self {
        self.answer.index = Some(version).filter(|&it| it > 0);
        self
    }

    /// When to ask again, where the registry does not wait for news itself.
    /// A time longer than a year counts as a year. Default: at once, but no more
    /// than four times a second.
    #[must_use]
    pub fn again_in(mut self, time: Duration) -> Self {
        self.again_in = time.min(FOR_EVER);
        self
    }

    /// The instances.
    pub fn instances(&self) -> &[Arc<Instance>] {
        &self.answer.snapshot.instances
    }
}

impl From<HealthAnswer> for Listing {
    fn from(answer: HealthAnswer) -> Self {
        Self { answer, again_in: Duration::ZERO, waited_for: None }
    }
}

/// Object safe.
const _: fn(&dyn Registry) = |_| {};
