//! What the files of a lease are called, and what their names say together.

use std::collections::{BTreeMap, BTreeSet};

use crate::server::store::key::is_key;

/// The names in the directory at one moment.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Terms of which there is anything that counts.
    terms: BTreeSet<u64>,
    /// Claims that were given up before their term began.
    void: BTreeSet<u64>,
    /// Terms that have begun: all of their state is there.
    started: BTreeSet<u64>,
    /// Terms that were given up.
    released: BTreeSet<u64>,
    /// The values of each term.
    states: BTreeMap<u64, BTreeSet<String>>,
    /// Every file with its term, unfinished ones apart.
    files: Vec<(u64, String)>,
    unfinished: Vec<(u64, String)>,
}

/// The last number that a term may have: none is in force from the greatest on, and each has one above it.
pub(super) const LAST: u64 = u64::MAX - 1;

/// The claim to a term: who holds it. Never changes.
pub(super) fn claim(token: u64) -> String {
    format!("term-{token:020}")
}

/// Says that the claim was given up before the term began.
pub(super) fn void(token: u64) -> String {
    format!("void-{token:020}")
}

/// Says that the term has begun, and with which values. Never changes.
pub(super) fn start(token: u64) -> String {
    format!("start-{token:020}")
}

/// The last renewal of a term.
pub(super) fn heartbeat(token: u64) -> String {
    format!("heartbeat-{token:020}")
}

/// Says that the term was given up. Never changes.
pub(super) fn released(token: u64) -> String {
    format!("released-{token:020}")
}

/// A value as it is in a term.
pub(super) fn state(token: u64, key: &str) -> String {
    format!("state-{token:020}-{key}")
}

/// A file that is being written for a term.
pub(super) fn unfinished(token: u64, random: u64) -> String {
    format!("unfinished-{token:020}-{random:016x}")
}

// === impl Listing ===

impl Listing {
    /// What `names` say. Names of other kinds are passed over.
    pub(super) fn of(names: impl IntoIterator<Item = String>) -> Self {
        let mut listing = Self::default();
        for name in names {
            listing.add(name);
        }
        listing
    }

    fn add(&mut self, name: String) {
        let Some((kind, rest)) = name.split_once('-') else { return };
        let (number, key) = rest.split_once('-').map_or((rest, None), |(number, key)| (number, Some(key)));
        if number.len() != 20 || !number.bytes().all(|b| b.is_ascii_digit()) {
            return;
        }
        let Ok(token) = number.parse::<u64>() else { return };
        match (kind, key) {
            ("void", None) => {
                self.void.insert(token);
            }
            ("unfinished", Some(_)) => {
                self.unfinished.push((token, name));
                return;
            }
            ("term" | "heartbeat", None) => {
                self.terms.insert(token);
            }
            ("start", None) => {
                self.terms.insert(token);
                self.started.insert(token);
            }
            ("released", None) => {
                self.terms.insert(token);
                self.released.insert(token);
            }
            ("state", Some(key)) if is_key(key) => {
                self.terms.insert(token);
                self.states.entry(token).or_default().insert(key.to_owned());
            }
            _ => return,
        }
        self.files.push((token, name));
    }

    /// The term that is in force: the last one of which there is anything, but for claims that
    /// were given up. A term whose claim alone has been deleted stays in force, so that an
    /// earlier term's holder does not take itself for the present one.
    pub(super) fn in_force(&self) -> Option<u64> {
        self.in_force_below(u64::MAX)
    }

    /// The term that would be, were there none from `token` on.
    pub(super) fn in_force_below(&self, token: u64) -> Option<u64> {
        self.terms.range(..token).rev().find(|term| !self.void.contains(term)).copied()
    }

    /// The terms before `token`, the last one first, without claims that were given up.
    pub(super) fn terms_below(&self, token: u64) -> impl Iterator<Item = u64> {
        self.terms.range(..token).rev().copied().filter(|term| !self.void.contains(term))
    }

    /// The last term before `token` that has begun, as names alone tell.
    pub(super) fn started_below(&self, token: u64) -> Option<u64> {
        self.started.range(..token).next_back().copied()
    }

    /// Whether the term has begun.
    pub(super) fn has_started(&self, token: u64) -> bool {
        self.started.contains(&token)
    }

    /// Whether the term was given up.
    pub(super) fn is_released(&self, token: u64) -> bool {
        self.released.contains(&token)
    }

    /// What values the term has.
    pub(super) fn keys(&self, token: u64) -> impl Iterator<Item = &str> {
        self.states.get(&token).into_iter().flatten().map(String::as_str)
    }

    /// The highest number of a term, given up ones too; 0 where there is none.
    pub(super) fn highest(&self) -> u64 {
        let last = |of: &BTreeSet<u64>| of.last().copied().unwrap_or(0);
        last(&self.terms).max(last(&self.void))
    }

    /// What the holder of `token`, which went on from `base`, needs no more, and nobody does who may
    /// still become primary: files of terms before `base`, and unfinished ones of terms before its own.
    pub(super) fn outlived(&self, token: u64, base: u64) -> impl Iterator<Item = &str> {
        let files = self.files.iter().filter(move |(term, _)| *term < base);
        files
            .chain(self.unfinished.iter().filter(move |(term, _)| *term < token))
            .map(|(_, name)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_of_any_kind_are_read_without_a_panic(names in prop::collection::vec("(term|start|state|void|unfinished|released|heartbeat|.{0,4})-?[0-9]{0,22}-?.{0,5}", 0..20)) {
            let listing = Listing::of(names);
            let _ = (listing.in_force(), listing.highest(), listing.outlived(5, 3).count());
        }

        #[test]
        fn a_key_that_is_taken_is_found_again(key in "[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,63}", token in any::<u64>()) {
            prop_assert!(is_key(&key));
            let listing = Listing::of([state(token, &key)]);
            prop_assert_eq!(listing.keys(token).collect::<Vec<_>>(), vec![key.as_str()]);
        }
    }

    #[test]
    fn a_claim_given_up_is_not_in_force_and_its_number_is_not_used_again() {
        let listing = Listing::of([claim(3), start(3), claim(4), void(4)]);
        assert_eq!((listing.in_force(), listing.highest()), (Some(3), 4));
    }

    #[test]
    fn a_term_stays_in_force_when_its_claim_is_deleted() {
        let listing = Listing::of([claim(3), start(3), start(7), heartbeat(7)]);
        assert_eq!((listing.in_force(), listing.started_below(8)), (Some(7), Some(7)));
    }

    #[test]
    fn only_what_has_been_outlived_is_cleared_away() {
        let all =
            [claim(3), state(3, "a"), start(5), state(5, "a"), claim(6), unfinished(6, 1), unfinished(7, 2)];
        let listing = Listing::of(all);
        let outlived: Vec<_> = listing.outlived(7, 5).collect();
        assert_eq!(outlived, [claim(3), state(3, "a"), unfinished(6, 1)]);
    }
}
