//! What may be wrong with a registry that answers. Pure.

use std::{fmt, time::Duration};

use crate::consul::HealthAnswer;

/// An answer to a blocking query that comes sooner than this, with the index it
/// was asked with, has not blocked. Our choice.
const AT_ONCE: Duration = Duration::from_secs(1);

/// So many of them in a row are no accident. Our choice.
const MANY: u32 = 8;

/// What is wrong with a registry that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegistryDoubt {
    /// It is cut off from its leader: what it says is as old as their last
    /// contact, or older. It stays in use.
    Behind {
        /// How long ago the server that answered had last heard from the leader,
        /// when it answered.
        last_contact: Duration,
    },
    /// It answers well again after it was lost or cut off. It counts as back once
    /// that has lasted for 3 s.
    Settling,
    /// Blocking queries are answered at once and without news, or its answers have no
    /// index to wait beyond, as those of a proxy that drops it. It is asked once a second
    /// instead.
    NotBlocking,
}

/// Whether blocking queries block.
#[derive(Debug, Default)]
pub(super) struct Stir {
    in_a_row: u32,
}

// === impl RegistryDoubt ===

impl RegistryDoubt {
    /// What `answer` itself gives away.
    pub(super) fn of(answer: &HealthAnswer) -> Option<Self> {
        answer.behind().map(|last_contact| Self::Behind { last_contact })
    }
}

impl fmt::Display for RegistryDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Behind { last_contact } => write!(
                f,
                "its server is cut off from the leader, last heard of {:.1} s before it answered",
                last_contact.as_secs_f64()
            ),
            Self::Settling => f.write_str("it answers again, only just"),
            Self::NotBlocking => {
                f.write_str("it answers blocking queries at once and without news, or gives no index")
            }
        }
    }
}

// === impl Stir ===

impl Stir {
    /// A question that was to wait `at_least` so long for news was answered after
    /// `waited`, with `news` or without.
    pub(super) fn answered(&mut self, waited: Duration, at_least: Duration, news: bool) {
        if waited >= AT_ONCE.min(at_least) {
            self.in_a_row = 0;
        } else if !news {
            self.in_a_row = self.in_a_row.saturating_add(1);
        }
    }

    /// A registry that gives indexes gave none: nobody can wait beyond it.
    pub(super) fn without_index(&mut self) {
        self.in_a_row = self.in_a_row.saturating_add(1);
    }

    /// Whether answers pour in while the index stays, or there is none.
    pub(super) fn is_idle(&self) -> bool {
        self.in_a_row >= MANY
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::instance::Snapshot;

    const WAIT: Duration = Duration::from_secs(60);

    proptest! {
        #[test]
        fn they_pour_in_where_many_without_news_have_come_since_one_last_blocked(
            answers in prop::collection::vec((any::<bool>(), any::<bool>()), 0..60),
        ) {
            let mut stir = Stir::default();
            for (blocked, news) in &answers {
                stir.answered(if *blocked { AT_ONCE } else { AT_ONCE / 2 }, WAIT, *news);
            }
            let since = answers.iter().rposition(|it| it.0).map_or(0, |it| it + 1);
            let without_news = answers[since..].iter().filter(|it| !it.1).count();
            prop_assert_eq!(stir.is_idle(), without_news >= MANY as usize);
        }

        #[test]
        fn a_server_is_behind_without_a_leader_or_long_after_its_last_word(
            known_leader: Option<bool>,
            last_contact in prop::option::of(prop_oneof![0..20_000_u64, any::<u64>()]),
        ) {
            let mut answer = HealthAnswer::of(Snapshot::default());
            answer.known_leader = known_leader;
            answer.last_contact = last_contact.map(Duration::from_millis);
            let doubt = RegistryDoubt::of(&answer);
            let silent = last_contact.is_some_and(|it| it >= 10_000);
            prop_assert_eq!(doubt.is_some(), silent || known_leader == Some(false));
            let brief = |it: RegistryDoubt| matches!(it, RegistryDoubt::Behind { .. }) && it.to_string().len() < 120;
            prop_assert!(doubt.is_none_or(brief), "{:?}", doubt);
        }
    }

    #[test]
    fn answers_that_pour_in_without_news_are_named_until_one_has_blocked() {
        let mut stir = Stir::default();
        for _ in 0..MANY - 1 {
            stir.answered(Duration::ZERO, WAIT, false);
        }
        // Churn is no fault, and proves nothing.
        stir.answered(Duration::ZERO, WAIT, true);
        assert!(!stir.is_idle());
        stir.answered(Duration::ZERO, WAIT, false);
        assert!(stir.is_idle());
        stir.answered(Duration::ZERO, WAIT, true);
        assert!(stir.is_idle());
        stir.answered(AT_ONCE, WAIT, false);
        assert!(!stir.is_idle());
    }

    #[test]
    fn who_waits_as_long_as_it_was_asked_to_blocks() {
        let (mut stir, short) = (Stir::default(), AT_ONCE / 2);
        for _ in 0..2 * MANY {
            stir.answered(short, short, false);
        }
        assert!(!stir.is_idle());
    }
}
