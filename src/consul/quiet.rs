//! A wish to be left alone, which holds for all who ask through one client.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The longest that it is heeded. Our bound: a faulty header must not blind us for a day.
const LONGEST: Duration = Duration::from_secs(300);

/// Who wants to be left alone with questions about which datacenter. An agent passes on
/// what another datacenter's servers say, which is nothing about its own.
#[derive(Debug, Default)]
pub(super) struct Quiet(Mutex<Vec<Wish>>);

#[derive(Debug)]
struct Wish {
    agent: usize,
    datacenter: Option<String>,
    until: Instant,
}

// === impl Quiet ===

impl Quiet {
    /// Which agent wants to be left alone, and for how long yet.
    pub(super) fn left(&self, datacenter: Option<&str>, now: Instant) -> Option<(usize, Duration)> {
        let wishes = self.0.lock();
        let wish = wishes.iter().find(|it| it.datacenter.as_deref() == datacenter && it.until > now)?;
        Some((wish.agent, wish.until - now))
    }

    /// The agent asked to be left alone for so long. The longest wish holds.
    pub(super) fn note(&self, agent: usize, datacenter: Option<&str>, time: Duration, now: Instant) {
        let until = now + time.min(LONGEST);
        let mut wishes = self.0.lock();
        wishes.retain(|it| it.until > now);
        match wishes.iter_mut().find(|it| it.datacenter.as_deref() == datacenter) {
            Some(wish) if wish.until >= until => {}
            Some(wish) => (wish.agent, wish.until) = (agent, until),
            None => wishes.push(Wish { agent, datacenter: datacenter.map(str::to_owned), until }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_longest_wish_holds_for_its_datacenter_and_is_bounded() {
        let (quiet, now) = (Quiet::default(), Instant::now());
        assert_eq!(quiet.left(None, now), None);
        quiet.note(0, None, 8 * SECOND, now);
        quiet.note(1, None, SECOND, now + SECOND);
        assert_eq!(quiet.left(None, now + 2 * SECOND), Some((0, 6 * SECOND)));
        assert_eq!(quiet.left(Some("dc2"), now), None);
        assert_eq!(quiet.left(None, now + 8 * SECOND), None);
        quiet.note(1, Some("dc2"), Duration::MAX, now);
        assert_eq!(quiet.left(Some("dc2"), now), Some((1, LONGEST)));
        quiet.note(0, None, SECOND, now + LONGEST);
        assert_eq!(quiet.0.lock().len(), 1, "what is over is forgotten");
    }
}
