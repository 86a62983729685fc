//! The keys and values of one datacenter.

use std::collections::BTreeMap;

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use serde_json::{Value, json};

/// All keys. Their indexes come from outside, since all of a datacenter's changes are counted as one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pairs {
    all: BTreeMap<String, Pair>,
    /// When keys that are gone were deleted.
    tombstones: BTreeMap<String, u64>,
    /// The last change of any; 0 before the first.
    index: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) value: Bytes,
    pub(crate) flags: u64,
    created: u64,
    modified: u64,
}

// === impl Pairs ===

impl Pairs {
    pub(crate) fn get(&self, key: &str) -> Option<&Pair> {
        self.all.get(key)
    }

    pub(crate) fn below<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a String, &'a Pair)> {
        self.all.range(prefix.to_owned()..).take_while(move |(key, _)| key.starts_with(prefix))
    }

    /// The index of an answer about one key: never 0.
    pub(crate) fn index_of(&self, key: &str) -> u64 {
        self.all.get(key).map_or(self.index, |it| it.modified).max(1)
    }

    /// The index of an answer about all keys that begin with `prefix`: never 0.
    pub(crate) fn index_below(&self, prefix: &str) -> u64 {
        let gone = self.tombstones.range(prefix.to_owned()..).take_while(|(key, _)| key.starts_with(prefix));
        let last = self.below(prefix).map(|(_, it)| it.modified).chain(gone.map(|(_, index)| *index)).max();
        last.filter(|_| !prefix.is_empty()).unwrap_or(self.index).max(1)
    }

    /// Writes a key at `index`. The very same once more moves no index.
    pub(crate) fn set(&mut self, key: &str, value: Bytes, flags: u64, index: u64) {
        let known = self.all.get(key);
        if known.is_some_and(|it| it.value == value && it.flags == flags) {
            return;
        }
        let created = known.map_or(index, |it| it.created);
        self.all.insert(key.to_owned(), Pair { value, flags, created, modified: index });
        self.index = index;
    }

    /// Writes a key that was last written at `expected`, or is not there where that is 0;
    /// false where it is otherwise.
    pub(crate) fn set_if(&mut self, key: &str, value: Bytes, flags: u64, expected: u64, index: u64) -> bool {
        let as_expected = self.modified(key) == expected;
        if as_expected {
            self.set(key, value, flags, index);
        }
        as_expected
    }

    pub(crate) fn delete(&mut self, key: &str, index: u64) {
        if self.all.remove(key).is_some() {
            self.tombstones.insert(key.to_owned(), index);
            self.index = index;
        }
    }

    /// Deletes a key that was last written at `expected`, or is gone; false where it is otherwise.
    pub(crate) fn delete_if(&mut self, key: &str, expected: u64, index: u64) -> bool {
        let as_expected = self.all.get(key).is_none_or(|it| it.modified == expected);
        if as_expected {
            self.delete(key, index);
        }
        as_expected
    }

    pub(crate) fn delete_below(&mut self, prefix: &str, index: u64) {
        let keys: Vec<_> = self.below(prefix).map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.delete(&key, index);
        }
    }

    /// When a key was last written; 0 where there is none.
    pub(crate) fn modified(&self, key: &str) -> u64 {
        self.all.get(key).map_or(0, |it| it.modified)
    }

    /// Lets every index fall to `index`.
    pub(crate) fn fall(&mut self, index: u64) {
        self.index = self.index.min(index);
        self.tombstones.clear();
        for pair in self.all.values_mut() {
            (pair.created, pair.modified) = (index, index);
        }
    }
}

// === impl Pair ===

impl Pair {
    pub(crate) fn json(&self, key: &str) -> Value {
        let mut json = self.without_value(key);
        if !self.value.is_empty() {
            json["Value"] = BASE64_STANDARD.encode(&self.value).into();
        }
        json
    }

    /// As a transaction tells what it has written.
    pub(crate) fn without_value(&self, key: &str) -> Value {
        json!({
            "LockIndex": 0, "Key": key, "Flags": self.flags, "Value": null,
            "CreateIndex": self.created, "ModifyIndex": self.modified,
        })
    }
}
