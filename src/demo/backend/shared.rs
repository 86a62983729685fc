//! The counter that primary and standbys share: kept beside the lease, written by its
//! holder alone.

use std::{collections::VecDeque, sync::Arc};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tonic::Status;

use super::{
    counter::{check_key, sum},
    unfenced::Unfenced,
};
use crate::{
    NotPrimary,
    server::{FencedState, Lease, StateError, UpdateError},
};

/// How many request keys are remembered. Our choice: the value is written whole each time, and with
/// these it has some 20 KB. A key that comes again after so many others counts again.
const KEYS: usize = 1024;

/// What is stored: the number and the keys already added, in one value, so that no failure can come
/// between the two.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Count {
    value: u64,
    /// Each with the value it gave, the oldest first to go.
    keys: VecDeque<(String, u64)>,
}

/// The primary's hand on it. Cheap to clone.
#[derive(Clone)]
pub(super) struct SharedCounter {
    state: FencedState<Count>,
    lease: Lease,
    seen: watch::Sender<u64>,
    /// For tests: in place of `state`.
    unfenced: Option<Unfenced>,
}

// === impl Count ===

impl Count {
    fn increment(&mut self, by: u64) -> Result<u64, Status> {
        self.value = sum(self.value, by)?;
        Ok(self.value)
    }

    fn add(&mut self, key: String, by: u64) -> Result<u64, Status> {
        // The newest are at the end: a repetition is mostly of one of them.
        if let Some((_, value)) = self.keys.iter().rev().find(|(known, _)| *known == key) {
            return Ok(*value);
        }
        let value = self.increment(by)?;
        if self.keys.len() >= KEYS {
            self.keys.pop_front();
        }
        self.keys.push_back((key, value));
        Ok(value)
    }
}

// === impl SharedCounter ===

impl SharedCounter {
    pub(super) fn new(state: FencedState<Count>, lease: Lease, unfenced: Option<Unfenced>) -> Self {
        Self { state, lease, seen: watch::Sender::new(0), unfenced }
    }

    pub(super) async fn get(&self) -> Result<u64, Status> {
        if let Some(unfenced) = &self.unfenced {
            return unfenced.update(|count| Ok(count.value)).await;
        }
        let count = self.state.read().await.map_err(|error| self.refuse(error))?;
        Ok(self.see(count.value))
    }

    pub(super) async fn increment(&self, by: u64) -> Result<u64, Status> {
        self.update(move |count| count.increment(by)).await
    }

    pub(super) async fn add(&self, key: &str, by: u64) -> Result<u64, Status> {
        check_key(key)?;
        let key = key.to_owned();
        self.update(move |count| count.add(key, by)).await
    }

    /// The value now and after changes.
    pub(super) async fn watch(&self) -> Result<watch::Receiver<u64>, Status> {
        self.get().await?;
        Ok(self.seen.subscribe())
    }

    async fn update(
        &self,
        change: impl FnOnce(&mut Count) -> Result<u64, Status> + Send + 'static,
    ) -> Result<u64, Status> {
        if let Some(unfenced) = &self.unfenced {
            return unfenced.update(change).await;
        }
        match self.state.try_update(change).await {
            Ok(value) => Ok(self.see(value)),
            Err(UpdateError::Refused(status)) => Err(status),
            Err(UpdateError::State(error)) => Err(self.refuse(error)),
        }
    }

    /// The store said that nothing was written: then the caller may go to the primary, whatever
    /// its method.
    fn refuse(&self, error: StateError) -> Status {
        match error {
            StateError::NotPrimary => NotPrimary::new(self.lease.primary()).into(),
            error => error.into(),
        }
    }

    /// Answers may come out of order; the count only grows.
    fn see(&self, value: u64) -> u64 {
        self.seen.send_if_modified(|seen| {
            let newer = value > *seen;
            *seen = value.max(*seen);
            newer
        });
        value
    }
}

/// Which counter an instance has.
#[derive(Clone)]
pub(super) enum Number {
    /// Its own.
    Own(Arc<super::counter::Counter>),
    /// The primary's.
    Shared(SharedCounter),
}

// === impl Number ===

impl Number {
    pub(super) async fn get(&self) -> Result<u64, Status> {
        match self {
            Self::Own(counter) => Ok(counter.get()),
            Self::Shared(counter) => counter.get().await,
        }
    }

    pub(super) async fn increment(&self, by: u64) -> Result<u64, Status> {
        match self {
            Self::Own(counter) => counter.increment(by),
            Self::Shared(counter) => counter.increment(by).await,
        }
    }

    pub(super) async fn add(&self, key: &str, by: u64) -> Result<u64, Status> {
        match self {
            Self::Own(counter) => counter.add(key, by),
            Self::Shared(counter) => counter.add(key, by).await,
        }
    }

    pub(super) async fn watch(&self) -> Result<watch::Receiver<u64>, Status> {
        match self {
            Self::Own(counter) => Ok(counter.watch()),
            Self::Shared(counter) => counter.watch().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_counts_once_and_the_oldest_are_forgotten_first() {
        let mut count = Count::default();
        for n in 0..=KEYS {
            assert_eq!(count.add(n.to_string(), 1).unwrap(), n as u64 + 1);
        }
        assert_eq!(count.keys.len(), KEYS);
        assert_eq!(count.add(KEYS.to_string(), 1).unwrap(), KEYS as u64 + 1, "known, and answered as before");
        assert_eq!(count.add("0".into(), 1).unwrap(), KEYS as u64 + 2, "forgotten");
    }

    #[test]
    fn a_sum_that_does_not_fit_is_refused_and_its_key_stays_free() {
        let mut count = Count { value: u64::MAX, ..Count::default() };
        assert_eq!(count.add("k".into(), 1).unwrap_err().code(), tonic::Code::OutOfRange);
        assert!(count.keys.is_empty());
    }

    #[test]
    fn the_keys_of_longest_names_fit_into_every_store() {
        let mut count = Count { value: u64::MAX - KEYS as u64, ..Count::default() };
        for n in 0..KEYS {
            count.add(format!("{n:0>256}"), 1).unwrap();
        }
        // Consul's limit is the lowest: 380 KiB.
        assert!(serde_json::to_vec(&count).unwrap().len() < 380 << 10);
    }
}
