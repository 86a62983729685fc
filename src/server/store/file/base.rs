//! What a new term goes on from. Everything here blocks.
//!
//! It is the last term that has begun. Its `start` says so; where somebody has deleted that, so does what
//! is written in terms that have begun alone. Nothing goes on from an older state than the last
//! that can be acknowledged: where files are missing that must have been there, that is an error.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    contents::{self, LONGEST, LONGEST_HEAD, Start, Written},
    error::FileError,
    names::{self, Listing},
    terms::{Rule, Terms},
};
use crate::server::store::StoreError;

/// What a failed system call says about the step that it belongs to.
type Failed = fn(FileError) -> StoreError;

/// The term to go on from, and the values that it must have.
#[derive(Debug)]
pub(super) struct Base {
    pub(super) token: u64,
    keys: BTreeSet<String>,
}

/// A value of a term of which nothing says that it has begun.
struct Loose {
    name: String,
    key: String,
    written: Written,
}

// === impl Terms ===

impl Terms {
    /// What the term of `token` goes on from. `None`: nothing has been written before it.
    ///
    /// # Errors
    /// [`StoreError::NotUnderstood`] where a later state was there than can be gone on from.
    pub(super) fn base(
        &self,
        listing: &Listing,
        token: u64,
        failed: Failed,
    ) -> Result<Option<Base>, StoreError> {
        match self.look_for_base(listing, token, failed) {
            // Perhaps its files were cleared away because later terms have begun meanwhile.
            Err(StoreError::NotUnderstood { place, reason }) => {
                match self.look().map_err(failed)?.in_force() == listing.in_force() {
                    true => Err(StoreError::NotUnderstood { place, reason }),
                    false => Err(StoreError::Superseded),
                }
            }
            other => other,
        }
    }

    fn look_for_base(
        &self,
        listing: &Listing,
        token: u64,
        failed: Failed,
    ) -> Result<Option<Base>, StoreError> {
        let (mut found, mut loose) = (None, Vec::new());
        for term in listing.terms_below(token) {
            let go_on = !self.keeps(Rule::GoOnFromBegun) || listing.has_started(term);
            if go_on || self.has_proof(listing, term, &mut loose, failed)? {
                found = Some(term);
                break;
            }
        }
        if !self.keeps(Rule::GoOnFromBegun) {
            return Ok(found.map(|token| Base { token, keys: BTreeSet::new() }));
        }
        for Loose { name, key, written } in loose {
            let from = written.token;
            match found {
                // A claim that came to nothing has links to values of terms before it.
                Some(found) if from <= found => {
                    self.must_be_there(found, &key, &format!("{name} is from the same term"), failed)?;
                }
                _ => {
                    let missing = names::start(from);
                    return Err(
                        self.spoilt(&name, &format!("it is from term {from}, but {missing} is missing"))
                    );
                }
            }
        }
        let Some(token) = found else { return Ok(None) };
        let keys = match self.started_with(token, failed)? {
            Some(start) => start.values.into_keys().collect(),
            None => {
                let before = listing.started_below(token).into_iter();
                before.flat_map(|before| listing.keys(before)).map(str::to_owned).collect::<BTreeSet<_>>()
            }
        };
        for key in &keys {
            self.must_be_there(token, key, &format!("term {token} began with it"), failed)?;
        }
        Ok(Some(Base { token, keys }))
    }

    /// Whether there is anything of the term that is written only once it has begun. Its values
    /// are added to `loose` where not.
    fn has_proof(
        &self,
        listing: &Listing,
        term: u64,
        loose: &mut Vec<Loose>,
        failed: Failed,
    ) -> Result<bool, StoreError> {
        let heartbeat = self.directory.read(&names::heartbeat(term), LONGEST).map_err(failed)?;
        if listing.is_released(term)
            || heartbeat.is_some_and(|content| contents::proves_begun(term, &content))
        {
            return Ok(true);
        }
        let mut values = Vec::new();
        for key in listing.keys(term) {
            let name = names::state(term, key);
            let Some(head) = self.directory.read(&name, LONGEST_HEAD).map_err(failed)? else { continue };
            let written = contents::written(&head).map_err(|reason| {
                let missing = names::start(term);
                self.spoilt(
                    &name,
                    &format!("{reason}, and {missing} is missing, so it may be the last state"),
                )
            })?;
            if written.token == term {
                return Ok(true);
            }
            values.push(Loose { name, key: key.to_owned(), written });
        }
        loose.extend(values);
        Ok(false)
    }

    fn must_be_there(&self, term: u64, key: &str, why: &str, failed: Failed) -> Result<(), StoreError> {
        let name = names::state(term, key);
        match self.directory.read(&name, LONGEST_HEAD).map_err(failed)? {
            Some(_) => Ok(()),
            None => Err(self.spoilt(&name, &format!("it is missing, though {why}"))),
        }
    }

    /// How the term began, where that can be read.
    pub(super) fn started_with(&self, token: u64, failed: Failed) -> Result<Option<Start>, StoreError> {
        let content = self.directory.read(&names::start(token), LONGEST).map_err(failed)?;
        Ok(content.and_then(|content| contents::read(&content)))
    }

    pub(super) fn spoilt(&self, name: &str, what: &str) -> StoreError {
        StoreError::NotUnderstood {
            place: self.directory.place(name).display().to_string(),
            reason: format!(
                "{what}; put back what was deleted, or, to begin anew without the state, end all processes \
                 and empty the directory"
            ),
        }
    }

    /// Makes the values of the last term that has begun the values of this one, too, and says
    /// which term that was. A file never changes, so another name is as good as a copy.
    pub(super) fn adopt(&self, token: u64, first: &Listing) -> Result<Option<u64>, StoreError> {
        // A file that is replaced while names are read may be missed in one reading. Each process of
        // an earlier term replaces one more file at the most after the claim.
        let second = self.look().map_err(FileError::perhaps_done)?;
        let Some(base) = self.base(&second, token, FileError::perhaps_done)? else { return Ok(None) };
        let listed = first.keys(base.token).chain(second.keys(base.token));
        let keys: BTreeSet<_> = listed.chain(base.keys.iter().map(String::as_str)).collect();
        for key in keys {
            let (from, to) = (names::state(base.token, key), names::state(token, key));
            self.directory.link(&from, &to).map_err(FileError::perhaps_done)?;
        }
        self.directory.sync().map_err(FileError::perhaps_done)?;
        Ok(Some(base.token))
    }

    /// Which writes the values are from that the term begins with.
    pub(super) fn adopted(&self, token: u64) -> Result<BTreeMap<String, Written>, StoreError> {
        let listing = self.look().map_err(FileError::perhaps_done)?;
        let mut values = BTreeMap::new();
        for key in listing.keys(token) {
            let head = self.directory.read(&names::state(token, key), LONGEST_HEAD);
            let head = head.map_err(FileError::perhaps_done)?.unwrap_or_default();
            if let Ok(written) = contents::written(&head) {
                values.insert(key.to_owned(), written);
            }
        }
        Ok(values)
    }
}
