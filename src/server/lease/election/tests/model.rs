//! A store in memory that keeps the contract of `LeaseStore`, one step at a time.

use crate::{
    role::FencingToken,
    server::store::{Claim, LeaseRecord, StoreError, Term, Version},
};

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) record: LeaseRecord,
    /// The rule that a test breaks: compare before writing.
    pub(crate) compares: bool,
    /// The rule that a test breaks: each token is greater.
    pub(crate) counts: bool,
    versions: u64,
    tokens: u64,
}

impl Model {
    pub(crate) fn new() -> Self {
        Self { record: LeaseRecord::empty(), compares: true, counts: true, versions: 0, tokens: 0 }
    }

    pub(crate) fn version(&mut self) -> Version {
        self.versions += 1;
        Version::new(self.versions)
    }

    fn check(&self, is_so: bool) -> Result<(), StoreError> {
        if is_so || !self.compares { Ok(()) } else { Err(StoreError::Superseded) }
    }

    pub(crate) fn acquire(&mut self, seen: &LeaseRecord, claim: &Claim) -> Result<Term, StoreError> {
        let versions = |record: &LeaseRecord| (record.holder_version, record.heartbeat_version);
        self.check(versions(seen) == versions(&self.record))?;
        let held = self.record.holder.as_ref().map_or(0, |it| it.primary.token.get());
        self.tokens = if self.counts { self.tokens.max(held) + 1 } else { 1 };
        let token = FencingToken::new(self.tokens);
        let holder_version = self.version();
        self.record = LeaseRecord {
            holder: Some(claim.holder(token)),
            released: false,
            successor: None,
            holder_version,
            heartbeat_version: self.version(),
        };
        Ok(Term::new(token, holder_version, claim.nonce.clone()))
    }

    pub(crate) fn renew(&mut self, term: &Term) -> Result<(), StoreError> {
        self.check(self.record.holder_version == term.holder_version)?;
        self.record.heartbeat_version = self.version();
        Ok(())
    }

    pub(crate) fn release(&mut self, term: &Term, successor: Option<&str>) -> Result<(), StoreError> {
        self.check(self.record.holder_version == term.holder_version)?;
        self.record.released = true;
        self.record.successor = successor.map(str::to_owned);
        self.record.holder_version = self.version();
        Ok(())
    }

    /// Somebody deletes the keys by hand.
    pub(crate) fn lose(&mut self) {
        self.record = LeaseRecord::empty();
    }
}
