//! Whether a history of a counter's calls is linearizable: as if each had happened at one moment between
//! its call and its return.
//!
//! For a counter whose increments answer with the new value this can be checked directly. Say that
//! every increment that counts has a value of its own, from 1 on without gaps, and order all calls by
//! value, a get after the increment of its value. That order is the counter's own. It is a
//! linearization if no call comes before one that had returned when it was made, so:
//!
//! 1. no two increments have the same value;
//! 2. an increment's value is above, a get's not below, everything that had been answered when it was
//!    called;
//! 3. each value that was seen, and each below, is some increment's: one that was answered with it, or
//!    one of those without an answer, each for one value, and for none that had been passed
//!    when it was called. (One without an answer may take effect at any later time, so nothing else
//!    binds it.)
//!
//! Conversely a linearization gives each increment that counts its place as its value, and 1 to 3 hold.

/// One call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// When it was made. Of one clock for all, as is `returned`.
    pub(crate) called: u64,
    pub(crate) kind: Kind,
    pub(crate) outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Increment,
    Get,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The counter's value, after it.
    Answered { returned: u64, value: u64 },
    /// Not done, nor will it ever be.
    Undone,
    /// No answer, or one that leaves it open.
    Open,
}

/// What is wrong with a history; `Ok` has how many increments were answered.
pub(crate) fn check(history: &[Call]) -> Result<usize, String> {
    let answered: Vec<(&Call, u64, u64)> = history
        .iter()
        .filter_map(|call| match call.outcome {
            Outcome::Answered { returned, value } => Some((call, returned, value)),
            _ => None,
        })
        .collect();
    let mut taken = std::collections::BTreeMap::new();
    for (call, _, value) in answered.iter().filter(|(call, ..)| call.kind == Kind::Increment) {
        if let Some(other) = taken.insert(*value, *call) {
            return Err(format!("value {value} was given to two: {other:?} and {call:?}"));
        }
    }
    // What had been answered when a call was made.
    let mut returns: Vec<_> = answered.iter().map(|(_, returned, value)| (*returned, *value)).collect();
    returns.sort_unstable();
    let mut highest = 0;
    for (_, value) in &mut returns {
        highest = highest.max(*value);
        *value = highest;
    }
    let passed = |called: u64| match returns.partition_point(|(returned, _)| *returned < called) {
        0 => 0,
        before => returns[before - 1].1,
    };
    for (call, _, value) in &answered {
        let passed = passed(call.called);
        let least = passed + u64::from(call.kind == Kind::Increment);
        if *value < least {
            return Err(format!("{call:?} comes after {passed} had been answered"));
        }
    }
    let mut open: Vec<_> = history
        .iter()
        .filter(|call| call.kind == Kind::Increment && call.outcome == Outcome::Open)
        .map(|call| passed(call.called))
        .collect();
    open.sort_unstable();
    let gaps = (1..=highest).filter(|value| !taken.contains_key(value));
    for (before, gap) in gaps.enumerate() {
        // Those that are for this gap may be for any above, so the lowest gaps are filled first.
        if open.partition_point(|passed| *passed < gap) <= before {
            return Err(format!("value {gap} of {highest} is nobody's: {} calls are open", open.len()));
        }
    }
    Ok(taken.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn increment(called: u64, returned: u64, value: u64) -> Call {
        Call { called, kind: Kind::Increment, outcome: Outcome::Answered { returned, value } }
    }

    fn get(called: u64, returned: u64, value: u64) -> Call {
        Call { called, kind: Kind::Get, outcome: Outcome::Answered { returned, value } }
    }

    fn open(called: u64) -> Call {
        Call { called, kind: Kind::Increment, outcome: Outcome::Open }
    }

    fn undone(called: u64) -> Call {
        Call { called, kind: Kind::Increment, outcome: Outcome::Undone }
    }

    #[test]
    fn a_history_is_taken_or_refused_by_what_a_counter_may_do() {
        let taken: [&[Call]; 7] = [
            &[],
            &[increment(0, 1, 1), increment(2, 3, 2), get(4, 5, 2)],
            // Side by side, in either order.
            &[increment(0, 9, 2), increment(1, 8, 1), get(2, 7, 0), get(3, 6, 2)],
            // The open one has counted, early or late, or not at all.
            &[increment(0, 1, 1), open(2), increment(3, 4, 3)],
            &[open(0), increment(1, 2, 1), increment(3, 4, 2), get(5, 6, 3)],
            &[open(0), increment(1, 2, 1), get(3, 4, 1)],
            &[undone(0), increment(1, 2, 1)],
        ];
        for history in taken {
            assert!(check(history).is_ok(), "{history:?}: {:?}", check(history));
        }
        let refused: [(&str, &[Call]); 8] = [
            ("lost", &[increment(0, 1, 1), increment(2, 3, 1)]),
            ("lost at the end", &[increment(0, 1, 1), get(2, 3, 0)]),
            ("rolled back", &[increment(0, 1, 5), open(0), open(0), open(0), open(0), increment(2, 3, 4)]),
            ("doubled", &[increment(0, 1, 1), get(2, 3, 2)]),
            ("done though undone", &[undone(0), get(2, 3, 1)]),
            ("stale", &[increment(0, 1, 1), increment(2, 3, 2), get(4, 5, 1)]),
            ("from the future", &[get(0, 1, 1), increment(2, 3, 1)]),
            ("open, and called too late", &[increment(0, 1, 2), open(2)]),
        ];
        for (what, history) in refused {
            assert!(check(history).is_err(), "{what}: {history:?}");
        }
    }

    /// Tries every order.
    fn is_linearizable(history: &[Call], value: u64) -> bool {
        let returned = |call: &Call| match call.outcome {
            Outcome::Answered { returned, .. } => Some(returned),
            _ => None,
        };
        if history.iter().all(|call| returned(call).is_none()) {
            return true;
        }
        let earliest = history.iter().filter_map(returned).min().unwrap_or(u64::MAX);
        (0..history.len()).any(|next| {
            let call = &history[next];
            let after = value + u64::from(call.kind == Kind::Increment);
            let fits = match call.outcome {
                Outcome::Answered { value, .. } => value == after,
                Outcome::Open => true,
                Outcome::Undone => false,
            };
            let mut rest = history.to_vec();
            rest.remove(next);
            call.called <= earliest && fits && is_linearizable(&rest, after)
        })
    }

    #[test]
    fn the_check_says_what_trying_every_order_says() {
        let mut random = 1_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let (mut good, mut bad) = (0, 0);
        for _ in 0..20_000 {
            let history: Vec<_> = (0..1 + draw(5))
                .map(|_| {
                    let called = draw(12);
                    let outcome = match draw(8) {
                        0 => Outcome::Undone,
                        1 | 2 => Outcome::Open,
                        _ => Outcome::Answered { returned: called + 1 + draw(6), value: draw(4) },
                    };
                    let kind = if draw(3) == 0 { Kind::Get } else { Kind::Increment };
                    Call { called, kind, outcome }
                })
                .collect();
            let expected = is_linearizable(&history, 0);
            assert_eq!(check(&history).is_ok(), expected, "{history:?}: {:?}", check(&history));
            *if expected { &mut good } else { &mut bad } += 1;
        }
        assert!(good > 500 && bad > 500, "{good} {bad}");
    }
}
