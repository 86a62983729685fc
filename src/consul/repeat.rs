//! Whether a question that was cut off before it was answered is put once more.
//!
//! One that waits for news is cut off by whatever stands between and will not wait as long:
//! that tells nothing of the registry, so a read is put in its place. For reads:
//!
//! An end that closes a connection while a request is on its way there has not
//! failed: whoever keeps connections has to expect it, and may repeat what changes
//! nothing (<https://www.rfc-editor.org/rfc/rfc9112#section-9.3.1>). The connections are
//! kept by hyper, which does not tell whether a request went out on a new one. So one
//! counts as kept where the agent has answered within the time that one is kept for.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{RegistryError, config::KEPT_FOR};

/// A question that was cut off later than this after it was sent had arrived. Our choice.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

/// Whether a question that waited for news was ended by somebody else than the agent: its
/// connection was closed, or a proxy between gave it up. One that hangs is not: it has
/// had all the time there is.
pub(super) fn was_cut_off(error: &RegistryError) -> bool {
    matches!(error, RegistryError::Reset { .. } | RegistryError::Status { code: 502..=504, .. })
}

/// When each agent last answered.
pub(super) struct Kept(Mutex<Vec<Option<Instant>>>);

// === impl Kept ===

impl Kept {
    pub(super) fn new(agents: usize) -> Self {
        Self(Mutex::new(vec![None; agents]))
    }

    /// The agent has answered: its connection may be kept.
    pub(super) fn answered(&self, agent: usize, now: Instant) {
        self.0.lock()[agent] = Some(now);
    }

    /// Whether what was `sent` to the agent and is cut off now may be put once more.
    pub(super) fn repeats(&self, agent: usize, sent: Instant, now: Instant) -> bool {
        let answered = self.0.lock()[agent];
        let kept = answered.is_some_and(|at| sent.saturating_duration_since(at) <= KEPT_FOR);
        kept && now.saturating_duration_since(sent) <= ON_ITS_WAY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_cut_off_at_once_and_on_what_may_have_been_kept_is_repeated() {
        let (kept, start, second) = (Kept::new(2), Instant::now(), Duration::from_secs(1));
        assert!(!kept.repeats(0, start, start), "it has never answered");
        kept.answered(0, start);
        assert!(!kept.repeats(1, start, start), "the other one has");
        let sent = start + KEPT_FOR;
        assert!(kept.repeats(0, sent, sent + ON_ITS_WAY));
        assert!(!kept.repeats(0, sent, sent + ON_ITS_WAY + second), "it had arrived, and waited");
        assert!(!kept.repeats(0, sent + second, sent + second), "none is kept so long");
    }
}
