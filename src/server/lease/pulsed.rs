//! A store all of whose work is done on the lease's thread.

use std::{future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio_util::task::AbortOnDropHandle;

use crate::server::{
    pulse::Pulse,
    store::{Claim, LeaseRecord, LeaseStore, StoreError, Stored, Term, Version, Write},
};

/// What is asked from another runtime would leave connections behind that this runtime drives, and a
/// renewal may be given one of them: when the runtime is busy, it would hang.
#[derive(Clone, Debug)]
pub(super) struct Pulsed {
    store: Arc<dyn LeaseStore>,
    pulse: Pulse,
}

/// The thread has ended, or the store panicked.
#[derive(Debug, thiserror::Error)]
#[error("the lease's thread did not do it")]
struct NotDone(#[source] tokio::task::JoinError);

impl Pulsed {
    pub(super) fn new(store: Arc<dyn LeaseStore>, pulse: Pulse) -> Self {
        Self { store, pulse }
    }

    async fn run<T, F>(&self, step: impl FnOnce(Arc<dyn LeaseStore>) -> F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let task = AbortOnDropHandle::new(self.pulse.spawn(step(self.store.clone())));
        task.await.unwrap_or_else(|error| Err(StoreError::Unanswered { source: Arc::new(NotDone(error)) }))
    }
}

#[async_trait]
impl LeaseStore for Pulsed {
    async fn read(&self) -> Result<LeaseRecord, StoreError> {
        self.run(|store| async move { store.read().await }).await
    }

    async fn changed(&self, seen: &LeaseRecord, wait: Duration) -> Result<LeaseRecord, StoreError> {
        let seen = seen.clone();
        self.run(move |store| async move { store.changed(&seen, wait).await }).await
    }

    async fn acquire(&self, seen: &LeaseRecord, claim: &Claim) -> Result<Term, StoreError> {
        let (seen, claim) = (seen.clone(), claim.clone());
        self.run(move |store| async move { store.acquire(&seen, &claim).await }).await
    }

    async fn renew(&self, term: &Term) -> Result<(), StoreError> {
        let term = term.clone();
        self.run(move |store| async move { store.renew(&term).await }).await
    }

    async fn release(&self, term: &Term, successor: Option<&str>) -> Result<(), StoreError> {
        let (term, successor) = (term.clone(), successor.map(str::to_owned));
        self.run(move |store| async move { store.release(&term, successor.as_deref()).await }).await
    }

    async fn load(&self, term: &Term, key: &str) -> Result<Option<Stored>, StoreError> {
        let (term, key) = (term.clone(), key.to_owned());
        self.run(move |store| async move { store.load(&term, &key).await }).await
    }

    async fn write(&self, term: &Term, write: &Write) -> Result<Version, StoreError> {
        let (term, write) = (term.clone(), write.clone());
        self.run(move |store| async move { store.write(&term, &write).await }).await
    }

    fn value_limit(&self) -> usize {
        self.store.value_limit()
    }
}
