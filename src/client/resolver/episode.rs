//! When a registry counts as lost, and when as back. Pure: told what came, and when.
//!
//! One loss is one episode. The server that is asked after another one has died may
//! answer well for a moment, until it notices that the leader has died too; and one
//! that has led says so for a while after its followers have gone. So the first good
//! answer ends nothing. It is followed at once, as every list is; but only an answer
//! of a server that has heard of its leader [`SETTLING`] later, with nothing else in
//! between, tells that the registry is back.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::RegistryDoubt;
use crate::consul::{HealthAnswer, RegistryError};

/// For how long answers must have been good. A leader without followers takes itself
/// for one for 2.5 s with the default settings: raft's `LeaderLeaseTimeout` of 500 ms
/// (<https://pkg.go.dev/github.com/hashicorp/raft#Config>) times `raft_multiplier`, 5
/// (<https://developer.hashicorp.com/consul/docs/install/performance>).
const SETTLING: Duration = Duration::from_secs(3);

/// A time in which what is known is not confirmed.
#[derive(Clone, Debug)]
pub(crate) struct Episode {
    pub(crate) since: Instant,
    /// What it began with.
    pub(crate) cause: Cause,
}

#[derive(Clone, Debug)]
pub(crate) enum Cause {
    Lost(Failure),
    /// A server answers that had not heard of its leader for so long.
    Behind(Duration),
}

/// A question that failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) error: RegistryError,
    /// Where it was asked, if the registry says so.
    pub(crate) asked: Option<Arc<str>>,
}

/// Whether what is known is confirmed.
#[derive(Debug, Default)]
pub(super) struct Standing {
    episode: Option<Arc<Episode>>,
    /// Since when all answers have been good while an episode lasts.
    good_since: Option<Instant>,
}

// === impl Standing ===

impl Standing {
    pub(super) fn failed(&mut self, failure: &Failure, now: Instant) {
        self.good_since = None;
        self.episode
            .get_or_insert_with(|| Arc::new(Episode { since: now, cause: Cause::Lost(failure.clone()) }));
    }

    /// Takes an answer. Returns the episode that it ends.
    pub(super) fn answered(&mut self, answer: &HealthAnswer, now: Instant) -> Option<Arc<Episode>> {
        if let Some(RegistryDoubt::Behind { last_contact }) = RegistryDoubt::of(answer) {
            self.good_since = None;
            let since = now.checked_sub(last_contact).unwrap_or(now);
            self.episode
                .get_or_insert_with(|| Arc::new(Episode { since, cause: Cause::Behind(last_contact) }));
            return None;
        }
        self.episode.as_ref()?;
        let good_since = *self.good_since.get_or_insert(now);
        // Where nobody speaks of leaders, there is none to be lost.
        let settled = answer.known_leader.is_none()
            || now.checked_sub(answer.last_contact.unwrap_or_default()) >= Some(good_since + SETTLING);
        if !settled {
            return None;
        }
        self.good_since = None;
        self.episode.take()
    }

    pub(super) fn episode(&self) -> Option<&Arc<Episode>> {
        self.episode.as_ref()
    }

    /// It answers again, and whether it stays is to be seen.
    pub(super) fn is_settling(&self) -> bool {
        self.good_since.is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::instance::Snapshot;

    const SECOND: Duration = Duration::from_secs(1);

    fn answer(known_leader: Option<bool>, last_contact: Duration) -> HealthAnswer {
        HealthAnswer {
            known_leader,
            last_contact: Some(last_contact),
            ..HealthAnswer::of(Snapshot::default())
        }
    }

    fn good() -> HealthAnswer {
        answer(Some(true), Duration::ZERO)
    }

    fn failure() -> Failure {
        Failure { error: RegistryError::NoServers, asked: None }
    }

    #[test]
    fn a_good_answer_before_the_next_trouble_ends_nothing() {
        let (mut standing, start) = (Standing::default(), Instant::now());
        standing.failed(&failure(), start);
        assert!(standing.answered(&good(), start + SECOND).is_none());
        assert!(standing.is_settling());
        // The next server has noticed that the leader is gone.
        assert!(standing.answered(&answer(Some(false), SECOND), start + 2 * SECOND).is_none());
        assert!(!standing.is_settling());
        let back = start + 10 * SECOND;
        assert!(standing.answered(&good(), back).is_none());
        assert!(standing.answered(&good(), back + SETTLING - SECOND).is_none());
        let ended = standing.answered(&good(), back + SETTLING).expect("it has settled");
        assert_eq!(ended.since, start);
        assert!(matches!(ended.cause, Cause::Lost(_)));
        assert!(standing.episode().is_none() && !standing.is_settling());
    }

    #[test]
    fn a_follower_that_has_not_heard_of_its_leader_since_confirms_nothing() {
        let (mut standing, back) = (Standing::default(), Instant::now() + 100 * SECOND);
        standing.failed(&failure(), back - SECOND);
        // The leader has been gone for as long as they answer well.
        for seconds in 0..9 {
            let answer = answer(Some(true), seconds * SECOND);
            assert!(standing.answered(&answer, back + seconds * SECOND).is_none());
        }
        assert!(standing.answered(&answer(Some(true), SECOND), back + 9 * SECOND).is_some());
    }

    #[test]
    fn one_that_was_cut_off_began_when_it_last_heard_of_its_leader() {
        let (mut standing, now) = (Standing::default(), Instant::now() + 100 * SECOND);
        assert!(standing.answered(&answer(Some(false), 5 * SECOND), now).is_none());
        let episode = standing.episode().expect("it has begun");
        assert_eq!(episode.since, now - 5 * SECOND);
        assert!(matches!(episode.cause, Cause::Behind(it) if it == 5 * SECOND));
    }

    #[test]
    fn a_registry_that_does_not_speak_of_leaders_is_back_at_once() {
        let (mut standing, now) = (Standing::default(), Instant::now());
        standing.failed(&failure(), now);
        assert!(standing.answered(&answer(None, Duration::ZERO), now).is_some());
    }

    proptest! {
        /// Whatever comes in whatever order: who is asked once a second is told within
        /// the time to settle, and a moment of it is never enough.
        #[test]
        fn an_episode_ends_after_good_answers_for_the_time_to_settle_and_not_before(
            signs in prop::collection::vec(0..3_u8, 0..60),
        ) {
            let (mut standing, mut now) = (Standing::default(), Instant::now() + 1000 * SECOND);
            let mut good_for = 0;
            for sign in signs {
                now += SECOND;
                let was = standing.episode().is_some();
                let ended = match sign {
                    0 => {
                        standing.failed(&failure(), now);
                        None
                    }
                    1 => standing.answered(&answer(Some(false), Duration::ZERO), now),
                    _ => standing.answered(&good(), now),
                };
                good_for = if sign == 2 { good_for + 1 } else { 0 };
                prop_assert_eq!(ended.is_some(), was && good_for == SETTLING.as_secs() + 1);
                prop_assert_eq!(standing.episode().is_some(), sign != 2 || (was && ended.is_none()));
            }
        }
    }
}
