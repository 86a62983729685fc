//! How terms begin, go on and end. Everything here blocks.

use std::{
    collections::HashMap,
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;

use super::{
    contents::{self, LONGEST, Released, Start, Written},
    directory::Directory,
    error::FileError,
    names::{self, Listing},
};
use crate::{
    role::FencingToken,
    server::store::{Claim, LeaseRecord, StoreError, Term},
};

/// One process's part in a lease.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) directory: Directory,
    /// The highest number of a term that was ever seen.
    highest: AtomicU64,
    /// Tells renewals apart.
    beats: AtomicU64,
    /// A term that this process has claimed, while it has not begun. Held while it begins.
    claimed: Mutex<Option<Claimed>>,
    /// The last write of each value that may have been done.
    pub(super) attempted: Mutex<HashMap<String, Written>>,
    /// In which term each value was last seen to be there.
    pub(super) present: Mutex<HashMap<String, u64>>,
    #[cfg(test)]
    pub(super) without: Option<Rule>,
}

#[derive(Debug)]
struct Claimed {
    token: u64,
    /// The lease as it was when the claim was made.
    over: LeaseRecord,
}

/// What keeps two from being primary, and writes from being lost. A test of these proves
/// something only where it fails without them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// A writer looks for a newer term after writing.
    LookAfterWriting,
    /// A holder looks for a newer term after renewing.
    LookAfterRenewing,
    /// A claimant looks for a renewal after claiming.
    LookAfterClaiming,
    /// A term goes on from the last that has begun, not from the last claimed.
    GoOnFromBegun,
    /// A write that a later term may have taken over is not called undone.
    AskTheLaterTerm,
    /// A claim is linked, not renamed, to its place.
    ClaimByLink,
}

// === impl Terms ===

impl Terms {
    pub(super) fn new(directory: Directory) -> Self {
        Self {
            directory,
            highest: AtomicU64::new(0),
            beats: AtomicU64::new(0),
            claimed: Mutex::new(None),
            attempted: Mutex::new(HashMap::new()),
            present: Mutex::new(HashMap::new()),
            #[cfg(test)]
            without: None,
        }
    }

    #[cfg(not(test))]
    pub(super) fn keeps(&self, _: Rule) -> bool {
        true
    }

    #[cfg(test)]
    pub(super) fn keeps(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    pub(super) fn look(&self) -> Result<Listing, FileError> {
        let seen = self.highest.load(Ordering::Relaxed);
        let listing = self.directory.list()?;
        if listing.highest() < seen {
            // An empty directory in the place of the one with the state must not look like a lease
            // that nobody has ever held.
            self.directory.replaced(seen)?;
        }
        // A number above which there is none is nobody's: without its files it is as if it had never been.
        if listing.highest() < names::LAST {
            self.highest.fetch_max(listing.highest(), Ordering::Relaxed);
        }
        Ok(listing)
    }

    /// The lease as it is.
    pub(super) fn read(&self) -> Result<LeaseRecord, StoreError> {
        let mut listing = self.look().map_err(FileError::undone)?;
        loop {
            let in_force = listing.in_force();
            let record = self.record(&listing, in_force).map_err(FileError::undone)?;
            if record.holder.is_some() || in_force.is_none() {
                return Ok(record);
            }
            // Perhaps its files were cleared away because later terms have begun meanwhile.
            listing = self.look().map_err(FileError::undone)?;
            if listing.in_force() == in_force {
                return Ok(record);
            }
        }
    }

    /// The lease as the files of one term say.
    fn record(&self, listing: &Listing, token: Option<u64>) -> Result<LeaseRecord, FileError> {
        let mut record = LeaseRecord::empty();
        let Some(token) = token else { return Ok(record) };
        let claim = self.directory.read(&names::claim(token), LONGEST)?;
        let released = match listing.is_released(token) {
            true => self.directory.read(&names::released(token), LONGEST)?,
            false => None,
        };
        let heartbeat = self.directory.read(&names::heartbeat(token), LONGEST)?;
        record.holder = claim.as_deref().and_then(|content| contents::holder(token, content));
        record.holder_version = contents::version(token, [claim.as_deref(), released.as_deref()]);
        if let Some(heartbeat) = heartbeat {
            record.heartbeat_version = contents::version(token, [Some(&heartbeat), None]);
        }
        // One that cannot be read gives nothing up.
        if let Some(Released { successor }) = released.and_then(|content| contents::read(&content)) {
            record.released = true;
            record.successor = successor;
        }
        Ok(record)
    }

    /// Begins a new term.
    pub(super) fn acquire(&self, seen: &LeaseRecord, claim: &Claim) -> Result<Term, StoreError> {
        let mut claimed = self.claimed.lock();
        let listing = self.look().map_err(FileError::undone)?;
        let now = self.record(&listing, listing.in_force()).map_err(FileError::undone)?;
        if !same(&now, seen) {
            return Err(StoreError::Superseded);
        }
        let highest = self.highest.load(Ordering::Relaxed).max(listing.highest());
        if highest >= names::LAST {
            let directory = self.directory.path();
            return Err(StoreError::Refused {
                reason: format!(
                    "{directory:?} has a file with the number {highest}, above which there is none for a next term; no \
                     lease comes so far by itself: remove the files of that number by hand, and it goes on without a restart"
                ),
            });
        }
        let token = highest + 1;
        // Nothing to go on from is found out before anything is claimed, so that tries leave no files.
        self.base(&listing, token, FileError::undone)?;
        let content = contents::claim(token, claim);
        let file = self.directory.lasting(token, &content).map_err(FileError::undone)?;
        let name = names::claim(token);
        // Kept from now on, so that a claim that was made after all can be gone on with.
        let waiting = claimed.insert(Claimed { token, over: seen.clone() });
        let first =
            if self.keeps(Rule::ClaimByLink) { file.link(&name) } else { file.rename(&name).map(|()| true) };
        let begun = match first {
            Ok(true) => self.begin(waiting),
            Ok(false) => Err(StoreError::Superseded),
            // A later term's holder has cleared the finished file away.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.why_cleared(token, error)),
            Err(error) => Err(error.of_the_deed()),
        };
        if !matches!(begun, Err(StoreError::Unanswered { .. })) {
            *claimed = None;
        }
        begun?;
        let version = contents::version(token, [Some(&content), None]);
        Ok(Term::new(FencingToken::new(token), version, claim.nonce.clone()))
    }

    /// Why a file of the term of `token` is away: nobody clears any away but a later term's holder.
    pub(super) fn why_cleared(&self, token: u64, error: FileError) -> StoreError {
        match self.look() {
            Ok(listing) if listing.in_force() > Some(token) => StoreError::Superseded,
            _ => error.undone(),
        }
    }

    /// Begins the term that was claimed, with the state of the last that has begun. If it fails
    /// unanswered it can be gone on with.
    fn begin(&self, Claimed { token, over }: &Claimed) -> Result<(), StoreError> {
        let token = *token;
        let listing = self.look().map_err(FileError::perhaps_done)?;
        if listing.in_force() != Some(token) {
            return Err(StoreError::Superseded);
        }
        // Whoever renews from now on sees the claim before it is told that it has. Whoever has been
        // told so has left a heartbeat that the claim did not go by.
        let below = self.record(&listing, listing.in_force_below(token)).map_err(FileError::perhaps_done)?;
        if self.keeps(Rule::LookAfterClaiming) && !same(&below, over) {
            let file = self.directory.passing(token, b"").map_err(FileError::perhaps_done)?;
            file.link(&names::void(token)).map_err(FileError::perhaps_done)?;
            return Err(StoreError::Superseded);
        }
        let base = self.adopt(token, &listing)?;
        let beat = contents::heartbeat(token, self.beat(), false);
        let file = self.directory.passing(token, &beat).map_err(FileError::perhaps_done)?;
        file.rename(&names::heartbeat(token)).map_err(FileError::perhaps_done)?;
        let values = self.adopted(token)?;
        let start = contents::start(&Start { base, values });
        let file = self.directory.lasting(token, &start).map_err(FileError::perhaps_done)?;
        file.link(&names::start(token)).map_err(FileError::perhaps_done)?;
        self.directory.sync().map_err(FileError::perhaps_done)?;
        let listing = self.look().map_err(FileError::perhaps_done)?;
        if listing.in_force() != Some(token) {
            return Err(StoreError::Superseded);
        }
        self.clear_away(&listing, token, base);
        Ok(())
    }

    fn clear_away(&self, listing: &Listing, token: u64, base: Option<u64>) {
        for name in listing.outlived(token, base.unwrap_or(0)) {
            // What stays is tried by the next term's holder again.
            let _ = self.directory.remove(name);
        }
    }

    fn beat(&self) -> u64 {
        self.beats.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether the claim in force is the term's, given up or not.
    pub(super) fn is_in_force(&self, listing: &Listing, term: &Term) -> Result<bool, FileError> {
        let token = term.token.get();
        if listing.in_force() != Some(token) {
            return Ok(false);
        }
        let claim = self.directory.read(&names::claim(token), LONGEST)?;
        Ok(contents::version(token, [claim.as_deref(), None]) == term.holder_version)
    }

    /// Whether the term goes on: it is in force and has not been given up.
    pub(super) fn goes_on(&self, listing: &Listing, term: &Term) -> Result<bool, FileError> {
        Ok(!listing.is_released(term.token.get()) && self.is_in_force(listing, term)?)
    }

    /// Lets nobody act in a term that has not begun: where this process has claimed it and
    /// could not finish, it begins now.
    pub(super) fn has_begun(&self, listing: &Listing, term: &Term) -> Result<(), StoreError> {
        let token = term.token.get();
        if listing.has_started(token) {
            return Ok(());
        }
        let mut claimed = self.claimed.lock();
        // Perhaps it has just begun, in another thread.
        if self.look().map_err(FileError::undone)?.has_started(token) {
            return Ok(());
        }
        let Some(waiting) = claimed.take_if(|claimed| claimed.token == token) else {
            return Err(StoreError::Superseded);
        };
        let begun = self.begin(&waiting);
        if matches!(begun, Err(StoreError::Unanswered { .. })) {
            *claimed = Some(waiting);
        }
        begun
    }

    /// Writes the heartbeat.
    pub(super) fn renew(&self, term: &Term) -> Result<(), StoreError> {
        let token = term.token.get();
        let listing = self.look().map_err(FileError::undone)?;
        if !self.goes_on(&listing, term).map_err(FileError::undone)? {
            return Err(StoreError::Superseded);
        }
        self.has_begun(&listing, term)?;
        let beat = contents::heartbeat(token, self.beat(), true);
        let file = self.directory.passing(token, &beat).map_err(FileError::undone)?;
        match file.rename(&names::heartbeat(token)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(self.why_cleared(token, error));
            }
            Err(error) => return Err(error.of_the_deed()),
        }
        if !self.keeps(Rule::LookAfterRenewing) {
            return Ok(());
        }
        let listing = self.look().map_err(FileError::perhaps_done)?;
        match self.goes_on(&listing, term).map_err(FileError::perhaps_done)? {
            true => Ok(()),
            // The heartbeat of a term that is not in force is nobody's.
            false => Err(StoreError::Superseded),
        }
    }

    /// Gives the term up.
    pub(super) fn release(&self, term: &Term, successor: Option<&str>) -> Result<(), StoreError> {
        let token = term.token.get();
        let listing = self.look().map_err(FileError::undone)?;
        if !self.goes_on(&listing, term).map_err(FileError::undone)? {
            return Err(StoreError::Superseded);
        }
        self.has_begun(&listing, term)?;
        let file =
            self.directory.passing(token, &contents::released(successor)).map_err(FileError::undone)?;
        match file.link(&names::released(token)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::Superseded),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.why_cleared(token, error)),
            Err(error) => Err(error.of_the_deed()),
        }
    }
}

/// Whether a claim that goes by `seen` may be made on `now`. A lease that was given up is renewed
/// no more.
fn same(now: &LeaseRecord, seen: &LeaseRecord) -> bool {
    now.holder_version == seen.holder_version
        && (now.released || now.heartbeat_version == seen.heartbeat_version)
}
