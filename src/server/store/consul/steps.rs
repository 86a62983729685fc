//! The steps of a lease, each of them a transaction.

use std::{sync::atomic::Ordering, time::Duration};

use async_trait::async_trait;
use tokio::time::{Instant, sleep_until};

use super::{ConsulLeaseStore, outcome, record};
use crate::{
    consul::{
        BlockingIndex, KvAnswer, KvEntry, Objection, RegistryError, Txn, TxnAnswer, TxnError, Unanswered,
    },
    role::FencingToken,
    server::store::{Claim, LeaseRecord, LeaseStore, StoreError, Stored, Term, Version, Write},
};

/// What Consul takes of a transaction is 512 KiB of JSON; in Base64 this is 507 KiB of it, and the rest, with keys of
/// the longest, has less than 2.
const VALUE_LIMIT: usize = 380 << 10;
/// How long questions that wait for news and bring none are apart at the least. Our choice, for
/// what answers at once, whatever it is asked.
const SPACING: Duration = Duration::from_millis(50);
/// How many operations hold the lease against the term.
const FENCES: usize = 2;
/// How often a value is looked for that is being written meanwhile.
const LOOKS: usize = 3;

// === impl ConsulLeaseStore ===

impl ConsulLeaseStore {
    /// What an answer about the keys of the lease says.
    async fn record(&self, answer: &KvAnswer) -> Result<LeaseRecord, StoreError> {
        if answer.entries.is_empty() {
            // A list tells nobody what it hides; a key does.
            let holder = self.consul.kv_get(&self.keys.holder(), self.try_timeout).await;
            holder.map_err(outcome::unread)?;
        }
        let read = record::read(&self.keys, &answer.entries);
        self.meet(read.highest);
        *self.last.lock() = read.last;
        Ok(read.record)
    }

    /// A token above all that are known.
    async fn next_token(&self, seen: &LeaseRecord) -> Result<FencingToken, StoreError> {
        if let Some(key) = &*self.last.lock() {
            return Err(no_token_above(key));
        }
        match self.consul.kv_list(&self.keys.states(), None, self.try_timeout).await {
            Ok(answer) => {
                if let Some(key) = record::last(&answer.entries) {
                    return Err(no_token_above(&key));
                }
                self.meet(record::highest(&answer.entries));
            }
            Err(error) => {
                // Each write of the state was fenced by the token of a holder, and those grew.
                let Some(holder) = &seen.holder else { return Err(outcome::unread(error)) };
                tracing::debug!(%error, token = %holder.primary.token, "the state is not read; the holder's token counts");
            }
        }
        if let Some(holder) = &seen.holder {
            self.meet(holder.primary.token.get());
        }
        let highest = self.token.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |it| it.checked_add(1));
        highest.map(|highest| FencingToken::new(highest + 1)).map_err(|_| no_token_above(&self.prefix()))
    }

    /// Something that the heartbeat has never held.
    fn beat(&self, nonce: &str) -> Vec<u8> {
        format!("{nonce} {}", self.beats.fetch_add(1, Ordering::Relaxed)).into_bytes()
    }

    /// What goes before all that is done in a term: [`FENCES`] operations.
    fn fenced(&self, term: &Term) -> Txn {
        let Term { token, holder_version, nonce } = term;
        Txn::default()
            .check_index(self.keys.holder(), holder_version.get())
            .get(self.keys.term(*token, nonce))
    }

    /// Does a transaction, the first so many of whose operations hold the lease against the record.
    async fn done(
        &self,
        txn: Txn,
        unanswered: Unanswered,
        of_the_lease: usize,
    ) -> Result<Vec<KvEntry>, StoreError> {
        match self.consul.transact(txn, unanswered, self.try_timeout).await {
            Ok(TxnAnswer::Done(entries)) => Ok(entries),
            Ok(TxnAnswer::Refused(errors)) => Err(outcome::refused(&errors, of_the_lease)),
            Err(failure) => Err(outcome::failed(failure)),
        }
    }
}

fn no_token_above(key: &str) -> StoreError {
    StoreError::Refused {
        reason: format!(
            "{key} has the greatest number, {}, as its token or its flags, and no token is above it; no lease comes so \
             far by itself: repair it by hand (a lease's key may be deleted; a value is to be written again with the flags of \
             a term that was, `consul kv put -flags=7 {key} @file`), and it goes on without a restart",
            u64::MAX
        ),
    }
}

fn written(entries: &[KvEntry], key: &str) -> Result<Version, StoreError> {
    let entry = entries.iter().find(|it| it.key == key);
    entry.map(|it| Version::new(it.modify_index)).ok_or_else(|| outcome::lacking(key))
}

#[async_trait]
impl LeaseStore for ConsulLeaseStore {
    async fn read(&self) -> Result<LeaseRecord, StoreError> {
        let answer = self.consul.kv_list(&self.keys.lease(), None, self.try_timeout).await;
        self.record(&answer.map_err(outcome::unread)?).await
    }

    async fn changed(&self, seen: &LeaseRecord, wait: Duration) -> Result<LeaseRecord, StoreError> {
        let until = Instant::now() + wait;
        let watched = self.watched.lock().clone();
        let mut index = watched.filter(|it| it.0 == *seen).map_or(BlockingIndex::NONE, |it| it.1);
        loop {
            let (asked, waits) = (Instant::now(), index.get().is_some());
            let block = Some((index, until.saturating_duration_since(asked)));
            let answer = self.consul.kv_list(&self.keys.lease(), block, self.try_timeout).await;
            let answer = answer.map_err(outcome::unread)?;
            let record = self.record(&answer).await?;
            index.answered(answer.index);
            *self.watched.lock() = Some((record.clone(), index));
            if record != *seen || Instant::now() >= until {
                return Ok(record);
            }
            if waits || index.get().is_none() {
                sleep_until((asked + SPACING).min(until)).await;
            }
        }
    }

    async fn acquire(&self, seen: &LeaseRecord, claim: &Claim) -> Result<Term, StoreError> {
        let Claim { instance, nonce, .. } = claim;
        let token = self.next_token(seen).await?;
        let (holder, flags) = (self.keys.holder(), token.get());
        let value = record::held(&claim.holder(token));
        let beat = self.beat(nonce.as_str());
        let mut txn = Txn::default().cas(&holder, seen.holder_version.get(), flags, &value).cas(
            self.keys.heartbeat(),
            seen.heartbeat_version.get(),
            flags,
            &beat,
        );
        if let Some(seen) = &seen.holder {
            txn = txn.get(self.keys.term(seen.primary.token, &seen.nonce));
        }
        let term = self.keys.term(token, nonce);
        let txn = txn.delete_tree(self.keys.terms()).set(term, flags, instance.as_bytes());
        let entries = self.done(txn, Unanswered::IsTold, usize::MAX).await?;
        Ok(Term::new(token, written(&entries, &holder)?, nonce.clone()))
    }

    async fn renew(&self, term: &Term) -> Result<(), StoreError> {
        let beat = self.beat(term.nonce.as_str());
        let key = self.keys.heartbeat();
        let txn = self.fenced(term).set(&key, term.token.get(), &beat);
        let entries = self.done(txn, Unanswered::GoesOn, usize::MAX).await?;
        written(&entries, &key).map(drop)
    }

    async fn release(&self, term: &Term, successor: Option<&str>) -> Result<(), StoreError> {
        // The holder's key says who the holder is, which a term does not.
        let (key, asked) = (self.keys.holder(), self.fenced(term).get(self.keys.holder()));
        let entries = self.done(asked, Unanswered::GoesOn, usize::MAX).await.map_err(outcome::of_a_read)?;
        // Checking its index has left an entry, too, without the value.
        let holder = entries.iter().rev().find(|it| it.key == key).and_then(record::holder);
        let holder = holder.ok_or(StoreError::Superseded)?;
        let value = record::released(&holder, successor);
        let txn = self.fenced(term).cas(key, term.holder_version.get(), term.token.get(), &value);
        self.done(txn, Unanswered::GoesOn, usize::MAX).await.map(drop)
    }

    async fn load(&self, term: &Term, key: &str) -> Result<Option<Stored>, StoreError> {
        let key = self.keys.state(key)?;
        for _ in 0..LOOKS {
            let txn = self.fenced(term).get(&key);
            let answer = self.consul.transact(txn, Unanswered::GoesOn, self.try_timeout).await;
            // Nothing is written by it.
            match answer.map_err(|failure| outcome::unread(failure.error))? {
                TxnAnswer::Done(entries) => {
                    if let Some(entry) = entries.iter().find(|it| it.key == key) {
                        self.meet(entry.flags);
                        return record::stored(entry).map(Some);
                    }
                }
                TxnAnswer::Refused(errors) => match errors[..] {
                    [TxnError { operation: FENCES, what: Objection::Missing }] => {}
                    _ => return Err(outcome::refused(&errors, usize::MAX)),
                },
            }
            // It is not there, or the token may not read it, which only a plain question tells.
            if self.consul.kv_get(&key, self.try_timeout).await.map_err(outcome::unread)?.is_none() {
                return Ok(None);
            }
        }
        let source = format!("{key} was written again and again meanwhile");
        Err(outcome::unread(RegistryError::other(source)))
    }

    async fn write(&self, term: &Term, write: &Write) -> Result<Version, StoreError> {
        let Write { key, expected, sequence, value } = write;
        let key = self.keys.state(key)?;
        if value.len() > VALUE_LIMIT {
            return Err(StoreError::TooLarge { size: value.len(), limit: VALUE_LIMIT });
        }
        let value = record::wrapped(*sequence, value);
        let txn = self.fenced(term).cas(&key, expected.get(), term.token.get(), &value);
        let entries = self.done(txn, Unanswered::IsTold, FENCES).await?;
        written(&entries, &key)
    }

    fn value_limit(&self) -> usize {
        VALUE_LIMIT
    }
}
