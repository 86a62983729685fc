//! The index of blocking queries.

use std::num::NonZeroU64;

/// The index to wait beyond: none at first, and again after everything that
/// makes the old one worthless.
///
/// The rules are those of Consul's page on blocking queries
/// (<https://developer.hashicorp.com/consul/api-docs/features/blocking>): it is
/// reset when it goes backwards, and it is never zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockingIndex(Option<NonZeroU64>);

/// What an answer did to a [`BlockingIndex`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexStep {
    /// Forward, or from none: something may have changed.
    Advanced,
    /// The same: nothing has changed.
    Same,
    /// Backwards, or the answer had none: there is no index any more, the next
    /// question must not wait.
    Reset,
}

// === impl BlockingIndex ===

impl BlockingIndex {
    /// No index: the question is answered at once.
    pub const NONE: Self = Self(None);

    /// The index, at least 1.
    pub fn get(self) -> Option<u64> {
        self.0.map(NonZeroU64::get)
    }

    /// Takes the index of a *good* answer. Answers with an error status carry one
    /// too, which means nothing: [`reset`](Self::reset) after those.
    pub fn answered(&mut self, index: Option<u64>) -> IndexStep {
        let index = index.and_then(NonZeroU64::new);
        let step = match (self.0, index) {
            (_, None) => IndexStep::Reset,
            (Some(old), Some(new)) if new < old => IndexStep::Reset,
            (Some(old), Some(new)) if new == old => IndexStep::Same,
            _ => IndexStep::Advanced,
        };
        self.0 = if step == IndexStep::Reset { None } else { index };
        step
    }

    /// Forgets the index.
    pub fn reset(&mut self) {
        self.0 = None;
    }
}

/// 0 is no index.
impl From<u64> for BlockingIndex {
    fn from(index: u64) -> Self {
        Self(NonZeroU64::new(index))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_the_last_answers_or_none_and_none_only_where_that_was_lower_or_had_none(
            answers in prop::collection::vec(prop::option::of(0..5_u64), 0..20),
        ) {
            let mut index = BlockingIndex::NONE;
            for answer in answers {
                let before = index.get();
                let step = index.answered(answer);
                let worthless = answer.is_none_or(|it| it == 0 || before.is_some_and(|old| it < old));
                prop_assert_eq!(step == IndexStep::Reset, worthless);
                prop_assert_eq!(index.get(), answer.filter(|_| !worthless));
                prop_assert_eq!(step == IndexStep::Same, !worthless && before == answer);
            }
        }
    }

    #[test]
    fn the_first_answer_gives_the_index() {
        let mut index = BlockingIndex::NONE;
        assert_eq!(index.answered(Some(7)), IndexStep::Advanced);
        assert_eq!(index.get(), Some(7));
    }

    #[test]
    fn an_index_that_falls_is_forgotten() {
        let mut index = BlockingIndex::from(42);
        assert_eq!(index.answered(Some(12)), IndexStep::Reset);
        assert_eq!(index.get(), None);
        assert_eq!(index.answered(Some(12)), IndexStep::Advanced);
    }

    #[test]
    fn the_same_index_is_no_news() {
        let mut index = BlockingIndex::from(42);
        assert_eq!(index.answered(Some(42)), IndexStep::Same);
        assert_eq!(index.get(), Some(42));
    }

    #[test]
    fn zero_and_absence_are_no_index() {
        assert_eq!(BlockingIndex::from(0), BlockingIndex::NONE);
        for nothing in [None, Some(0)] {
            let mut index = BlockingIndex::from(42);
            assert_eq!(index.answered(nothing), IndexStep::Reset);
            assert_eq!(index.get(), None);
        }
    }
}
