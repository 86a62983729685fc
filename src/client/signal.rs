//! A word that is said once, to all who wait for it.

use std::sync::OnceLock;

use tokio_util::sync::CancellationToken;

/// Nothing is allocated before somebody waits for it or it is said: most connections live without.
#[derive(Debug, Default)]
pub(crate) struct Signal(OnceLock<CancellationToken>);

// === impl Signal ===

impl Signal {
    /// Says it, to those who wait and to those who will.
    pub(crate) fn say(&self) {
        self.token().cancel();
    }

    pub(crate) fn is_said(&self) -> bool {
        self.0.get().is_some_and(CancellationToken::is_cancelled)
    }

    /// To wait for it: cancelled once it has been said.
    pub(crate) fn token(&self) -> &CancellationToken {
        self.0.get_or_init(CancellationToken::new)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn who_waited_before_and_who_asks_later_hear_the_same() {
        let signal = Signal::default();
        assert!(!signal.is_said());
        let waits = signal.token().clone().cancelled_owned();
        assert!(!signal.is_said(), "somebody waits");
        signal.say();
        assert!(signal.is_said());
        assert!(waits.now_or_never().is_some());
        assert!(signal.token().is_cancelled());
        let unheard = Signal::default();
        unheard.say();
        assert!(unheard.is_said() && unheard.token().is_cancelled());
    }
}
