//! What callers were told, and whether one counter that loses nothing could have said it. Pure.

use std::{collections::BTreeMap, time::Duration};

/// What a caller asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// With a request key, sent again until it was acknowledged.
    Add,
    /// Sent once.
    Increment,
}

/// One request and all its attempts. Times are since the run's start, by the caller's clock.
#[derive(Clone, Debug)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) began: Duration,
    pub(crate) ended: Duration,
    /// `None`: no answer, so it may have been counted.
    pub(crate) ack: Option<Ack>,
}

#[derive(Clone, Debug)]
pub(crate) struct Ack {
    pub(crate) value: u64,
    pub(crate) instance: String,
    pub(crate) token: u64,
}

/// A promise that was not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Fewer counted than were acknowledged.
    Lost { counted: u64, acknowledged: u64 },
    /// More counted than were asked for.
    CountedTwice { counted: u64, asked: u64 },
    /// Two requests got the same value.
    SameValue { value: u64, times: usize },
    /// A request that began after another had ended got a value that is not greater.
    Backwards { first: u64, then: u64 },
    /// The same of the token: an answer of a term that was over.
    OldTerm { first: u64, then: u64 },
    /// Two instances answered in one term.
    TwoPrimaries { token: u64, instances: Vec<String> },
}

/// Everything that is wrong with it. `counted` is what the counter says in the end.
pub(crate) fn judge(ops: &[Op], counted: u64) -> Vec<Broken> {
    let mut broken = Vec::new();
    let acks = || ops.iter().filter_map(|op| op.ack.as_ref());
    let acknowledged = acks().count() as u64;
    if counted < acknowledged {
        broken.push(Broken::Lost { counted, acknowledged });
    }
    if counted > ops.len() as u64 {
        broken.push(Broken::CountedTwice { counted, asked: ops.len() as u64 });
    }
    let mut values: BTreeMap<u64, usize> = BTreeMap::new();
    let mut terms: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for ack in acks() {
        *values.entry(ack.value).or_default() += 1;
        let instances = terms.entry(ack.token).or_default();
        if !instances.contains(&ack.instance) {
            instances.push(ack.instance.clone());
        }
    }
    let twice = values.into_iter().filter(|(_, times)| *times > 1);
    broken.extend(twice.map(|(value, times)| Broken::SameValue { value, times }));
    let shared = terms.into_iter().filter(|(_, instances)| instances.len() > 1);
    broken.extend(shared.map(|(token, instances)| Broken::TwoPrimaries { token, instances }));
    broken.extend(out_of_order(ops));
    broken
}

/// In the order of real time: what ended before another began must have come before it.
fn out_of_order(ops: &[Op]) -> Vec<Broken> {
    let answered: Vec<_> = ops.iter().filter_map(|op| Some((op, op.ack.as_ref()?))).collect();
    let (mut ends, mut begins) = (answered.clone(), answered);
    ends.sort_by_key(|(op, _)| op.ended);
    begins.sort_by_key(|(op, _)| op.began);
    let mut broken = Vec::new();
    let (mut ended, mut value, mut token) = (0, 0, 0);
    for (op, ack) in begins {
        while let Some((_, before)) = ends.get(ended).filter(|(before, _)| before.ended < op.began) {
            (value, token) = (value.max(before.value), token.max(before.token));
            ended += 1;
        }
        if ack.value <= value {
            broken.push(Broken::Backwards { first: value, then: ack.value });
        }
        if ack.token < token {
            broken.push(Broken::OldTerm { first: token, then: ack.token });
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(kind: Kind, began: u64, ended: u64, ack: Option<(u64, &str, u64)>) -> Op {
        let ms = Duration::from_millis;
        let ack = ack.map(|(value, instance, token)| Ack { value, instance: instance.to_owned(), token });
        Op { kind, began: ms(began), ended: ms(ended), ack }
    }

    #[test]
    fn a_history_without_a_fault_is_believed() {
        let ops = [
            op(Kind::Add, 0, 10, Some((1, "a", 1))),
            op(Kind::Increment, 5, 12, None),
            op(Kind::Add, 5, 40, Some((2, "b", 2))),
            op(Kind::Add, 20, 45, Some((3, "b", 2))),
        ];
        assert_eq!(judge(&ops, 3), []);
        assert_eq!(judge(&ops, 4), [], "the one without an answer may have been counted");
    }

    #[test]
    fn each_fault_is_seen() {
        let good = op(Kind::Add, 0, 10, Some((1, "a", 1)));
        assert_eq!(judge(std::slice::from_ref(&good), 0), [Broken::Lost { counted: 0, acknowledged: 1 }]);
        assert_eq!(judge(std::slice::from_ref(&good), 2), [Broken::CountedTwice { counted: 2, asked: 1 }]);
        let again = op(Kind::Add, 5, 10, Some((1, "a", 1)));
        assert_eq!(judge(&[good.clone(), again], 2), [Broken::SameValue { value: 1, times: 2 }]);
        let other = op(Kind::Add, 5, 10, Some((2, "b", 1)));
        let instances = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(judge(&[good, other], 2), [Broken::TwoPrimaries { token: 1, instances }]);
        let first = op(Kind::Add, 0, 10, Some((2, "b", 2)));
        let then = op(Kind::Add, 20, 30, Some((1, "a", 1)));
        let wrong = judge(&[first, then], 2);
        let expected = [Broken::Backwards { first: 2, then: 1 }, Broken::OldTerm { first: 2, then: 1 }];
        assert_eq!(wrong, expected);
    }
}
