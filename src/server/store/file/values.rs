//! How values are read and written in a term. Everything here blocks.

use std::{io, ops::ControlFlow, sync::Arc};

use super::{
    contents::{self, LONGEST, LONGEST_HEAD, Start, Written},
    error::{FileError, Unsettled},
    names,
    terms::{Rule, Terms},
};
use crate::server::store::{StoreError, Stored, Term, Version, Write, key};

/// The longest value, in bytes. Our choice: each write writes it whole.
pub(super) const LONGEST_VALUE: usize = 16 * 1024 * 1024;

// === impl Terms ===

impl Terms {
    /// The value of the term.
    pub(super) fn load(&self, term: &Term, key: &str) -> Result<Option<Stored>, StoreError> {
        self.check_key(key)?;
        let listing = self.look().map_err(FileError::undone)?;
        if !self.goes_on(&listing, term).map_err(FileError::undone)? {
            return Err(StoreError::Superseded);
        }
        self.has_begun(&listing, term)?;
        let stored = self.value(term.token.get(), key);
        // Only now: nobody else had begun a term when it was read.
        let listing = self.look().map_err(FileError::undone)?;
        match self.goes_on(&listing, term).map_err(FileError::undone)? {
            true => stored,
            false => Err(StoreError::Superseded),
        }
    }

    fn check_key(&self, name: &str) -> Result<(), StoreError> {
        if key::is_key(name) {
            return Ok(());
        }
        Err(StoreError::Refused { reason: format!("{name:?} cannot be a key: {}", key::RULE) })
    }

    fn value(&self, token: u64, key: &str) -> Result<Option<Stored>, StoreError> {
        let name = names::state(token, key);
        let content =
            self.directory.read(&name, LONGEST_VALUE + LONGEST_HEAD + 1).map_err(FileError::undone)?;
        let Some(content) = content else { return self.never_written(token, key).map(|()| None) };
        self.present.lock().insert(key.to_owned(), token);
        let stored = contents::stored(content).map_err(|reason| StoreError::NotUnderstood {
            place: self.directory.place(&name).display().to_string(),
            reason: reason.to_owned(),
        })?;
        Ok(Some(stored))
    }

    /// That a value which is not there never was: somebody may have deleted it.
    fn never_written(&self, token: u64, key: &str) -> Result<(), StoreError> {
        let start = self.started_with(token, FileError::undone)?;
        let began_with = start.is_some_and(|start| start.values.contains_key(key));
        if began_with || self.present.lock().get(key) == Some(&token) {
            let name = names::state(token, key);
            return Err(self.spoilt(&name, &format!("it is missing, though term {token} has it")));
        }
        Ok(())
    }

    /// Writes the value of the term.
    pub(super) fn write(&self, term: &Term, write: &Write) -> Result<Version, StoreError> {
        let written = Written { token: term.token.get(), sequence: write.sequence };
        let again = self.was_attempted(&write.key, written);
        self.put(term, write, written).map_err(|error| match error {
            StoreError::Superseded | StoreError::Conflict | StoreError::Unanswered { .. } => error,
            // It says that this sending has written nothing, and nothing of the one before.
            _ if again => StoreError::Unanswered { source: Arc::new(error) },
            _ => error,
        })
    }

    /// What was found of a value, unless it was cleared away by a later term's holder.
    fn unless_over(
        &self,
        term: &Term,
        write: &Write,
        written: Written,
        error: StoreError,
    ) -> Result<Version, StoreError> {
        let listing = self.look().map_err(FileError::undone)?;
        match self.goes_on(&listing, term).map_err(FileError::undone)? {
            true => Err(error),
            false if self.was_attempted(&write.key, written) => self.settle(term, &write.key, written),
            false => Err(StoreError::Superseded),
        }
    }

    fn was_attempted(&self, key: &str, written: Written) -> bool {
        self.attempted.lock().get(key) == Some(&written)
    }

    fn put(&self, term: &Term, write: &Write, written: Written) -> Result<Version, StoreError> {
        self.check_key(&write.key)?;
        if write.value.len() > LONGEST_VALUE {
            return Err(StoreError::TooLarge { size: write.value.len(), limit: LONGEST_VALUE });
        }
        let token = written.token;
        let listing = self.look().map_err(FileError::undone)?;
        if !self.goes_on(&listing, term).map_err(FileError::undone)? {
            if !self.was_attempted(&write.key, written) {
                return Err(StoreError::Superseded);
            }
            self.directory.sync().map_err(FileError::perhaps_done)?;
            return self.settle(term, &write.key, written);
        }
        self.has_begun(&listing, term)?;
        let version = match self.value(token, &write.key) {
            Ok(Some(stored)) => stored.version,
            Ok(None) => Version::ABSENT,
            Err(error) => return self.unless_over(term, write, written, error),
        };
        if version != write.expected {
            // Perhaps it is this very write, sent before: its name must outlast the machine before
            // anybody goes by it.
            self.directory.sync().map_err(FileError::perhaps_done)?;
            return Err(StoreError::Conflict);
        }
        let file = self.directory.lasting(token, &contents::value(written, &write.value));
        let file = file.map_err(FileError::undone)?;
        self.attempted.lock().insert(write.key.clone(), written);
        match file.rename(&names::state(token, &write.key)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(self.why_cleared(token, error));
            }
            Err(error) => return Err(error.of_the_deed()),
        }
        self.present.lock().insert(write.key.clone(), token);
        self.directory.sync().map_err(FileError::perhaps_done)?;
        if !self.keeps(Rule::LookAfterWriting) {
            return Ok(contents::value_version(written));
        }
        self.settle(term, &write.key, written)
    }

    /// Whether a write that may have been done counts: it does where no later term has begun
    /// without it, and none can.
    fn settle(&self, term: &Term, key: &str, written: Written) -> Result<Version, StoreError> {
        let token = term.token.get();
        let listing = self.look().map_err(FileError::perhaps_done)?;
        // One that was given up may be taken over from now on, with this write.
        if self.is_in_force(&listing, term).map_err(FileError::perhaps_done)? {
            return match self.value_is(token, key, written).map_err(FileError::perhaps_done)? {
                true => Ok(contents::value_version(written)),
                false => Err(StoreError::Superseded),
            };
        }
        if !self.keeps(Rule::AskTheLaterTerm) {
            return Err(StoreError::Superseded);
        }
        // The one in force has begun, so that each later one goes on from it. Those between it
        // and this one that have not will never count.
        let mut later = listing.in_force().filter(|later| listing.has_started(*later));
        while let Some(token) = later {
            match self.base_of(token, key, written)? {
                ControlFlow::Break(true) => return Ok(contents::value_version(written)),
                ControlFlow::Break(false) => return Err(StoreError::Superseded),
                ControlFlow::Continue(base) => later = base,
            }
        }
        Err(StoreError::Unanswered { source: Arc::new(Unsettled) })
    }

    fn value_is(&self, token: u64, key: &str, written: Written) -> Result<bool, FileError> {
        let beginning = self.directory.read(&names::state(token, key), LONGEST_HEAD)?;
        Ok(beginning.is_some_and(|beginning| contents::written(&beginning) == Ok(written)))
    }

    /// Whether the term of `later` began with a write; or which term to ask instead.
    fn base_of(
        &self,
        later: u64,
        key: &str,
        written: Written,
    ) -> Result<ControlFlow<bool, Option<u64>>, StoreError> {
        let content = self.directory.read(&names::start(later), LONGEST).map_err(FileError::perhaps_done)?;
        let start: Option<Start> = content.and_then(|content| contents::read(&content));
        let Some(Start { base: Some(base), values }) = start else { return Ok(ControlFlow::Continue(None)) };
        Ok(if base == written.token {
            ControlFlow::Break(values.get(key) == Some(&written))
        } else {
            ControlFlow::Continue(Some(base).filter(|base| *base > written.token))
        })
    }
}
