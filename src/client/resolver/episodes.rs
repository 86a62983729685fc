//! One line in the log for the beginning and one for the end of each trouble.

use std::{collections::BTreeSet, time::Duration};

use super::RegistryDoubt;
use crate::consul::{HealthAnswer, RegistryError, SkippedEntry};

/// The troubles that have been told of and last.
#[derive(Debug, Default)]
pub(super) struct Episodes {
    lost: bool,
    leaderless: bool,
    idle: bool,
    skipped: BTreeSet<SkippedEntry>,
}

// === impl Episodes ===

impl Episodes {
    pub(super) fn failed(&mut self, error: &RegistryError) {
        if !std::mem::replace(&mut self.lost, true) {
            let error: &dyn std::error::Error = error;
            tracing::warn!(error, "the registry is lost; what it last said stays in use");
        }
    }

    pub(super) fn answered(
        &mut self,
        answer: &HealthAnswer,
        doubt: Option<RegistryDoubt>,
        failing_for: Option<Duration>,
    ) {
        let idle = doubt == Some(RegistryDoubt::NotBlocking);
        if idle && !self.idle {
            tracing::warn!("the registry answers blocking queries at once; it is asked once a second");
        }
        self.idle = idle;
        if std::mem::take(&mut self.lost) {
            tracing::info!(after = ?failing_for.unwrap_or_default(), "the registry is back");
        }
        let leaderless = answer.known_leader == Some(false);
        match (std::mem::replace(&mut self.leaderless, leaderless), leaderless) {
            (false, true) => tracing::warn!(
                last_contact = ?answer.last_contact.unwrap_or_default(),
                "the registry has no leader; what it says may be old"
            ),
            (true, false) => tracing::info!("the registry has a leader again"),
            _ => {}
        }
        let skipped: BTreeSet<_> = answer.skipped.iter().cloned().collect();
        for entry in skipped.difference(&self.skipped) {
            tracing::warn!(%entry, "an entry of the registry names nothing to connect to");
        }
        self.skipped = skipped;
    }
}
