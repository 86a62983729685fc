//! How far a list of datacenters is believed. Pure: told what came, and when.
//!
//! An agent lists the datacenters whose servers it has met. One that was restarted a
//! moment ago lists its own alone, without an error: it knows nothing of the others,
//! and not that there are none. So a datacenter that is missing stays until lists have
//! gone on missing it for [`LIST_AGE`] without an error in between, and as long as it
//! serves calls. Meanwhile, and while no other is listed at all, the list is asked for
//! again after waits that double, from [`FIRST_WAIT`] up to [`LIST_AGE`].

use std::time::Duration;

use tokio::time::Instant;

/// How long a list is believed before a new need asks again, and how long a datacenter
/// must have been missing. A server that does not find the others at its start tries again
/// every 30 s, the default of `retry_interval_wan`
/// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#retry_interval_wan>);
/// this is twice that.
pub(super) const LIST_AGE: Duration = Duration::from_secs(60);

/// How soon the list is asked for again after a failure, or after the first that misses
/// something. Our choice.
const FIRST_WAIT: Duration = Duration::from_secs(1);

/// How the lists have been so far.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// When it is to be asked for next; `None` until it has been asked for.
    next: Option<Instant>,
    /// Whether there has been one.
    told: bool,
    /// How long the last one is believed, where it was not to be relied on.
    doubtful: Option<Duration>,
    /// Which datacenters it misses, and since when.
    missing: Vec<(String, Instant)>,
}

// === impl Listing ===

impl Listing {
    /// When to ask for the list. `None`: what is known will do. Where one is missing
    /// that is asked whether it is `needed` or not.
    pub(super) fn due(&self, needed: bool, now: Instant) -> Option<Instant> {
        if !needed && self.missing.is_empty() {
            return None;
        }
        let at = self.next.unwrap_or(now);
        (at <= now || self.doubtful.is_some()).then_some(at)
    }

    pub(super) fn is_told(&self) -> bool {
        self.told
    }

    /// There was no list. Whoever does not tell confirms nothing.
    pub(super) fn failed(&mut self, now: Instant) {
        self.missing.clear();
        self.doubtful = Some(FIRST_WAIT);
        self.next = Some(now + FIRST_WAIT);
    }

    /// The list does not matter but for the own datacenter's name, which has been told or not.
    pub(super) fn given(&mut self, told: bool, now: Instant) {
        self.told |= told;
        if told {
            (self.doubtful, self.next) = (None, Some(now + LIST_AGE));
        } else {
            self.failed(now);
        }
    }

    /// Takes a list of at least the own datacenter. Returns which of those `known` it misses
    /// that are to stay.
    pub(super) fn taken(
        &mut self,
        names: &[String],
        known: &[String],
        serving: &[&String],
        now: Instant,
    ) -> Vec<String> {
        self.told = true;
        let before = std::mem::take(&mut self.missing);
        for name in known.iter().filter(|name| !names.contains(name)) {
            let since = before.iter().find(|it| it.0 == *name).map_or(now, |it| it.1);
            if now.saturating_duration_since(since) < LIST_AGE || serving.contains(&name) {
                self.missing.push((name.clone(), since));
            }
        }
        let doubtful = names.len() < 2 || !self.missing.is_empty();
        let wait = self.doubtful.map_or(FIRST_WAIT, |last| (2 * last).min(LIST_AGE));
        self.doubtful = doubtful.then_some(wait);
        self.next = Some(now + self.doubtful.unwrap_or(LIST_AGE));
        self.missing.iter().map(|it| it.0.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_datacenter_that_is_missing_stays_until_lists_have_missed_it_for_a_minute() {
        let (mut listing, start) = (Listing::default(), Instant::now());
        let known = names(&["dc2", "dc3"]);
        assert_eq!(listing.due(false, start), None);
        assert_eq!(listing.due(true, start), Some(start));
        assert!(listing.taken(&names(&["dc1", "dc2", "dc3"]), &known, &[], start).is_empty());
        assert_eq!(listing.due(true, start + LIST_AGE / 2), None, "it is believed");
        let mut now = start + LIST_AGE;
        assert_eq!(listing.due(true, now), Some(now));
        let (began, mut asked) = (now, Vec::new());
        while listing.taken(&names(&["dc1", "dc2"]), &known, &[], now) == ["dc3"] {
            asked.push((now - began).as_secs());
            now = listing.due(false, now).expect("it is asked for although nobody needs it");
        }
        assert_eq!(asked, [0, 1, 3, 7, 15, 31]);
        assert_eq!(now - began, Duration::from_secs(63));
        assert_eq!(listing.due(false, now), None);
    }

    #[test]
    fn a_failure_confirms_nothing() {
        let (mut listing, now) = (Listing::default(), Instant::now());
        let known = names(&["dc2"]);
        assert_eq!(listing.taken(&names(&["dc1"]), &known, &[], now), known);
        listing.failed(now + LIST_AGE);
        assert_eq!(listing.taken(&names(&["dc1"]), &known, &[], now + 2 * LIST_AGE), known);
        assert!(listing.taken(&names(&["dc1"]), &known, &[], now + 3 * LIST_AGE).is_empty());
    }

    #[test]
    fn an_agent_that_lists_itself_alone_is_asked_again_soon_and_ever_more_seldom() {
        let (mut listing, mut now) = (Listing::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..9 {
            listing.taken(&names(&["dc1"]), &[], &[], now);
            assert_eq!(listing.due(false, now), None, "nobody needs it");
            let due = listing.due(true, now).unwrap();
            waits.push((due - now).as_secs());
            now = due;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }

    proptest! {
        /// Whatever lists and failures come: what goes was missed by every list of the last
        /// minute, and did not serve.
        #[test]
        fn what_goes_has_been_missed_for_a_minute_without_a_failure_and_serves_nobody(
            steps in prop::collection::vec((0..40_u64, 0..8_u8, any::<bool>()), 1..60),
        ) {
            let (mut listing, mut now) = (Listing::default(), Instant::now());
            let dc2 = names(&["dc2"]);
            let mut missed_since = None;
            for (later, what, serves) in steps {
                now += Duration::from_secs(later);
                match what {
                    0 => {
                        listing.failed(now);
                        missed_since = None;
                    }
                    1 => {
                        prop_assert!(listing.taken(&names(&["dc1", "dc2"]), &dc2, &[], now).is_empty());
                        missed_since = None;
                    }
                    _ => {
                        let since = *missed_since.get_or_insert(now);
                        let serving: Vec<_> = dc2.iter().filter(|_| serves).collect();
                        let stays = !listing.taken(&names(&["dc1"]), &dc2, &serving, now).is_empty();
                        prop_assert_eq!(stays, serves || now - since < LIST_AGE);
                        if !stays {
                            missed_since = None;
                        }
                    }
                }
            }
        }
    }
}
