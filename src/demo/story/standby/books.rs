//! What the callers were told, and what that proves. Pure; asked with instants.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use crate::demo::{
    story::verdict::Check,
    text::{count, duration},
};

/// An acknowledged Add.
#[derive(Clone, Debug)]
pub(super) struct Ack {
    pub(super) began: Instant,
    pub(super) ended: Instant,
    pub(super) value: u64,
    pub(super) instance: String,
    pub(super) token: u64,
}

/// All of them, and what each act was about.
#[derive(Debug, Default)]
pub(super) struct Books {
    acks: Vec<Ack>,
    /// Attempts that failed and were sent again.
    pub(super) again: u64,
    acts: Vec<Act>,
}

#[derive(Clone, Debug)]
pub(super) struct Act {
    title: String,
    began: Instant,
    /// Who answered first after it, and when; an act may depose nobody.
    answered: Option<(String, u64, Duration)>,
}

// === impl Books ===

impl Books {
    pub(super) fn acknowledge(&mut self, ack: Ack) {
        self.acks.push(ack);
    }

    pub(super) fn acknowledged(&self) -> usize {
        self.acks.len()
    }

    /// Who answered last.
    pub(super) fn latest(&self) -> Option<&Ack> {
        self.acks.iter().max_by_key(|ack| (ack.token, ack.ended))
    }

    pub(super) fn open(&mut self, title: &str, began: Instant) {
        self.acts.push(Act { title: title.to_owned(), began, answered: None });
    }

    /// What the act came to: the first answer of its heir.
    pub(super) fn close(&mut self, ack: &Ack, took: Duration) {
        if let Some(act) = self.acts.last_mut() {
            act.answered = Some((ack.instance.clone(), ack.token, took));
        }
    }

    /// The first answer that came after `since`, in a term after `token`.
    pub(super) fn first_after(&self, since: Instant, token: u64) -> Option<&Ack> {
        let later = self.acks.iter().filter(|ack| ack.ended >= since && ack.token > token);
        later.min_by_key(|ack| ack.ended)
    }

    /// A line for each act.
    pub(super) fn table(&self) -> Vec<String> {
        let ends = self.acts.iter().skip(1).map(|act| Some(act.began)).chain([None]);
        let rows = self.acts.iter().zip(ends).map(|(act, end)| {
            let of_act = self
                .acks
                .iter()
                .filter(|ack| ack.ended >= act.began && end.is_none_or(|end| ack.ended < end));
            let longest = of_act.clone().map(|ack| ack.ended - ack.began).max().unwrap_or_default();
            let answered = act.answered.clone();
            let (who, took) = answered.map_or(("-".to_owned(), "-".to_owned()), |(who, token, took)| {
                (format!("{who}, term {token}"), duration(took))
            });
            let (acks, longest) = (of_act.count(), duration(longest));
            format!("{:<28} {acks:>6}  {who:<20}  {took:>10}  {longest:>10}", act.title)
        });
        let head = format!(
            "{:<28} {:>6}  {:<20}  {:>10}  {:>10}",
            "act", "counted", "primary then", "after", "longest"
        );
        [head].into_iter().chain(rows).collect()
    }

    /// Holds the acknowledgements against `counted`, what the counter says in the end.
    pub(super) fn judge(&self, counted: u64) -> Vec<Check> {
        let acknowledged = self.acks.len() as u64;
        let mut checks = vec![Check {
            held: counted == acknowledged && acknowledged > 0,
            text: format!("{} acknowledged, {counted} counted", count(acknowledged, "Add")),
        }];
        let values: BTreeSet<_> = self.acks.iter().map(|ack| ack.value).collect();
        let twice = self.acks.len() - values.len();
        checks.push(Check {
            held: twice == 0,
            text: format!("{} given to two requests", count(twice as u64, "value")),
        });
        let mut primaries: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
        for ack in &self.acks {
            primaries.entry(ack.token).or_default().insert(&ack.instance);
        }
        let shared = primaries.values().filter(|all| all.len() > 1).count();
        let terms = count(primaries.len() as u64, "term");
        checks
            .push(Check { held: shared == 0, text: format!("{terms}, {shared} of them with two primaries") });
        let back = self.out_of_order();
        checks.push(Check {
            held: back == 0,
            text: format!(
                "{} of a term that was over, or with a value that was",
                count(back as u64, "answer")
            ),
        });
        checks
    }

    /// Answers to requests that began after another had ended, of an older term or with no greater value.
    fn out_of_order(&self) -> usize {
        let (mut ends, mut begins): (Vec<_>, Vec<_>) =
            (self.acks.iter().collect(), self.acks.iter().collect());
        ends.sort_by_key(|ack| ack.ended);
        begins.sort_by_key(|ack| ack.began);
        let (mut ended, mut token, mut value, mut wrong) = (0, 0, 0, 0);
        for ack in begins {
            while let Some(before) = ends.get(ended).filter(|before| before.ended < ack.began) {
                (token, value) = (token.max(before.token), value.max(before.value));
                ended += 1;
            }
            wrong += usize::from(ack.token < token || ack.value <= value);
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn books(acks: &[(u64, u64, u64, &str, u64)]) -> Books {
        let now = Instant::now();
        let ms = |ms| now + Duration::from_millis(ms);
        let mut books = Books::default();
        for (began, ended, value, instance, token) in acks {
            let (began, ended) = (ms(*began), ms(*ended));
            let instance = (*instance).to_owned();
            books.acknowledge(Ack { began, ended, value: *value, instance, token: *token });
        }
        books
    }

    fn broken(books: &Books, counted: u64) -> Vec<String> {
        books.judge(counted).into_iter().filter(|check| !check.held).map(|check| check.text).collect()
    }

    #[test]
    fn a_takeover_without_a_loss_is_believed() {
        let books = books(&[(0, 10, 1, "a", 1), (5, 3000, 2, "b", 2), (20, 3001, 3, "b", 2)]);
        assert_eq!(broken(&books, 3), [""; 0]);
    }

    #[test]
    fn each_broken_promise_is_named() {
        let good = (0, 10, 1, "a", 1);
        assert_eq!(broken(&books(&[good]), 0), ["1 Add acknowledged, 0 counted"]);
        assert_eq!(broken(&books(&[good, (5, 10, 1, "a", 1)]), 2), ["1 value given to two requests"]);
        assert_eq!(broken(&books(&[good, (5, 10, 2, "b", 1)]), 2), ["1 term, 1 of them with two primaries"]);
        let back = books(&[(0, 10, 2, "b", 2), (20, 30, 1, "a", 1)]);
        assert_eq!(broken(&back, 2), ["1 answer of a term that was over, or with a value that was"]);
        assert_eq!(
            broken(&Books::default(), 0),
            ["0 Adds acknowledged, 0 counted"],
            "silence proves nothing"
        );
    }
}
