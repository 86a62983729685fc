//! Which of two answers is the newer, when two questions were under way at once.

/// Remembers the answer that was last taken.
#[derive(Debug, Default)]
pub(super) struct Order {
    clock: u64,
    taken: Option<Taken>,
}

#[derive(Debug)]
struct Taken {
    index: Option<u64>,
    at: u64,
}

/// When a question was asked, in relation to the answers taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked(u64);

// === impl Order ===

impl Order {
    /// Whether no question has been asked.
    pub(super) fn is_new(&self) -> bool {
        self.clock == 0
    }

    /// A question is asked now.
    pub(super) fn ask(&mut self) -> Asked {
        self.clock += 1;
        Asked(self.clock)
    }

    /// Whether an answer with `index` tells an older state than the one last taken, as
    /// long as the registry has not begun anew.
    pub(super) fn is_older(&self, index: Option<u64>) -> bool {
        let taken = self.taken.as_ref().and_then(|it| it.index);
        index.zip(taken).is_some_and(|(new, taken)| new < taken)
    }

    /// Whether the answer with `index` to the question of `asked` is to be taken.
    ///
    /// A higher index wins, also where its question is the older. A lower one is
    /// the registry beginning anew if the question was asked after the last taken
    /// answer had come; otherwise it has been overtaken on the way.
    pub(super) fn takes(&mut self, asked: Asked, index: Option<u64>) -> bool {
        if let Some(taken) = &self.taken {
            let asked_later = asked.0 > taken.at;
            let higher = index.zip(taken.index).is_some_and(|(new, old)| new >= old);
            if !asked_later && !higher {
                return false;
            }
        }
        self.clock += 1;
        self.taken = Some(Taken { index, at: self.clock });
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Questions are asked, answered by the registry and heard of in any order,
        /// while the registry's index grows.
        #[test]
        fn what_is_taken_never_grows_older_and_the_last_question_is_always_taken(
            steps in prop::collection::vec((0..4_u8, any::<prop::sample::Index>()), 0..60),
        ) {
            let (mut order, mut index, mut newest) = (Order::default(), 1, 0);
            let (mut asked, mut answered) = (Vec::new(), Vec::new());
            for (step, which) in steps {
                match step {
                    0 => index += 1,
                    1 => asked.push(order.ask()),
                    2 if !asked.is_empty() => answered.push((asked.swap_remove(which.index(asked.len())), index)),
                    3 if !answered.is_empty() => {
                        let (question, index) = answered.swap_remove(which.index(answered.len()));
                        if order.takes(question, Some(index)) {
                            prop_assert!(index >= newest);
                            newest = index;
                        } else {
                            prop_assert!(index < newest);
                        }
                    }
                    _ => {}
                }
            }
            let last = order.ask();
            prop_assert!(order.takes(last, Some(1)));
        }
    }

    #[test]
    fn an_answer_that_was_overtaken_is_not_taken() {
        let mut order = Order::default();
        let (blocking, refresh) = (order.ask(), order.ask());
        assert!(order.takes(refresh, Some(7)));
        assert!(!order.takes(blocking, Some(5)));
    }

    #[test]
    fn a_newer_index_is_taken_also_from_an_older_question() {
        let mut order = Order::default();
        let (blocking, refresh) = (order.ask(), order.ask());
        assert!(order.takes(refresh, Some(7)));
        assert!(order.takes(blocking, Some(9)));
    }

    #[test]
    fn a_lower_index_of_a_later_question_is_a_new_beginning() {
        let mut order = Order::default();
        let before = order.ask();
        assert!(order.takes(before, Some(42)));
        let after = order.ask();
        assert!(order.takes(after, Some(12)));
        let again = order.ask();
        assert!(order.takes(again, Some(13)));
    }

    #[test]
    fn without_an_index_the_later_question_has_the_newer_answer() {
        let mut order = Order::default();
        let (first, second) = (order.ask(), order.ask());
        assert!(order.takes(second, None));
        assert!(!order.takes(first, None));
        assert!(!order.takes(first, Some(3)));
        let third = order.ask();
        assert!(order.takes(third, None));
    }
}
