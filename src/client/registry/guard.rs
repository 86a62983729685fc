//! Bounds for registries that are not our own: none of them may stop the asking.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::time::timeout;

use super::{Asking, Question, Registry, RegistryError};

/// How much longer than it may wait for news a registry may take. Ours: as long
/// as Consul is given.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gives up questions that never end, and outlives those that panic.
pub(crate) struct Guarded(pub(crate) Arc<dyn Registry>);

impl Registry for Guarded {
    fn address(&self) -> Option<Arc<str>> {
        self.0.address()
    }

    fn ask(&self, question: Question) -> Asking {
        let registry = self.0.clone();
        let after = question.seen.map_or(PATIENCE, |_| question.wait.saturating_add(PATIENCE));
        Box::pin(async move {
            // Called in here, so that a panic before the first await is caught too.
            let asking = AssertUnwindSafe(async { registry.ask(question).await }).catch_unwind();
            match timeout(after, asking).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(_)) => Err(RegistryError::other("the registry's code panicked")),
                Err(_) => Err(RegistryError::TimedOut { after }),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::registry::Listing;

    /// Does what the service is called.
    struct Faulty;

    impl Registry for Faulty {
        fn ask(&self, question: Question) -> Asking {
            match &*question.service {
                "early" => panic!("before the future"),
                "late" => Box::pin(async { panic!("within it") }),
                "never" => Box::pin(std::future::pending()),
                _ => Box::pin(async { Ok(Listing::new([])) }),
            }
        }
    }

    async fn ask(service: &str, seen: Option<u64>) -> Result<Listing, RegistryError> {
        let wait = Duration::from_secs(60);
        let question = Question { service: service.into(), seen, wait, begins: false };
        Guarded(Arc::new(Faulty)).ask(question).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_registry_that_panics_has_failed() {
        for service in ["early", "late"] {
            let error = ask(service, None).await.unwrap_err();
            assert!(matches!(error, RegistryError::Other { .. }), "{error:?}");
        }
        assert!(ask("fine", None).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_that_never_ends_is_given_up() {
        for (seen, limit) in [(None, 10), (Some(7), 70)] {
            let error = ask("never", seen).await.unwrap_err();
            let limit = Duration::from_secs(limit);
            assert!(matches!(error, RegistryError::TimedOut { after } if after == limit), "{error:?}");
        }
    }
}
