//! The store's troubles, one line an episode.

use std::{error::Error, time::Duration};

use tokio::time::Instant;

use crate::server::store::StoreError;

/// From the first step that fails to when none has for a while.
#[derive(Debug, Default)]
pub(super) struct Episode {
    /// When the last step failed.
    failed: Option<Instant>,
}

impl Episode {
    /// A step has been answered, or failed: "no" is an answer.
    pub(super) fn step(
        &mut self,
        instance: &str,
        failure: Option<&StoreError>,
        quiet: Duration,
        now: Instant,
    ) {
        match (failure, self.failed) {
            (Some(error), None) => {
                let cause = chain(error);
                tracing::warn!(instance, %cause, "the lease's store does not answer");
                self.failed = Some(now);
            }
            (Some(_), Some(_)) => self.failed = Some(now),
            (None, Some(failed)) if now.saturating_duration_since(failed) >= quiet => {
                tracing::info!(instance, "the lease's store answers again");
                self.failed = None;
            }
            (None, _) => {}
        }
    }
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}
