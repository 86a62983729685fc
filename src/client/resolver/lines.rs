//! One line in the log for the beginning and one for the end of each trouble.

use std::{collections::BTreeSet, time::Duration};

use super::RegistryDoubt;
use crate::consul::{HealthAnswer, RegistryError, SkippedEntry};

/// The troubles that have been told of and last.
#[derive(Debug, Default)]
pub(super) struct Lines {
    lost: bool,
    behind: bool,
    idle: bool,
    skipped: BTreeSet<SkippedEntry>,
}

// === impl Lines ===

impl Lines {
    pub(super) fn failed(&mut self, error: &RegistryError) {
        if !std::mem::replace(&mut self.lost, true) {
            let error: &dyn std::error::Error = error;
            tracing::warn!(error, "the registry is lost; what it last said stays in use");
        }
    }

    /// `ended`: how long the episode was that this answer ends.
    pub(super) fn answered(
        &mut self,
        answer: &HealthAnswer,
        doubt: Option<RegistryDoubt>,
        ended: Option<Duration>,
    ) {
        let idle = doubt == Some(RegistryDoubt::NotBlocking);
        if idle && !self.idle {
            tracing::warn!(
                "the registry answers blocking queries at once, or without an index; it is asked once a second"
            );
        }
        self.idle = idle;
        if let Some(RegistryDoubt::Behind { last_contact }) = doubt
            && !std::mem::replace(&mut self.behind, true)
        {
            tracing::warn!(?last_contact, "the registry is cut off from its leader; what it says may be old");
        }
        if let Some(after) = ended {
            if std::mem::take(&mut self.lost) {
                tracing::info!(?after, "the registry is back");
            }
            if std::mem::take(&mut self.behind) {
                tracing::info!(?after, "the registry is in touch with its leader again");
            }
        }
        let skipped: BTreeSet<_> = answer.skipped.iter().cloned().collect();
        for entry in skipped.difference(&self.skipped) {
            tracing::warn!(%entry, "an entry of the registry names nothing to connect to");
        }
        self.skipped = skipped;
    }
}
