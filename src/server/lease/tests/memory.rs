//! The model as a `LeaseStore`, with faults to switch on.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::{sync::watch, time::timeout};

use super::super::election::tests::model::Model;
use crate::server::store::{Claim, LeaseRecord, LeaseStore, StoreError, Stored, Term, Version, Write};

/// What a store does instead of answering.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Fault {
    #[default]
    None,
    /// It never answers, and does nothing.
    Hangs,
    /// It does what it is asked, and never answers.
    HangsAfterwards,
    Panics,
    Fails,
}

/// One record, shared by the stores of all instances.
#[derive(Clone, Debug)]
pub(super) struct Memory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    model: Mutex<Model>,
    news: watch::Sender<()>,
}

/// One instance's way to it.
#[derive(Clone, Debug)]
pub(super) struct MemoryStore {
    memory: Memory,
    pub(super) faults: Arc<Mutex<Faults>>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    pub(super) read: Fault,
    pub(super) changed: Fault,
    pub(super) acquire: Fault,
    pub(super) renew: Fault,
    pub(super) release: Fault,
}

impl Memory {
    /// Of a lease that `before` held and has released.
    pub(super) fn released() -> Self {
        let mut model = Model::new();
        model.acquire(&LeaseRecord::empty(), &super::claim("before")).unwrap();
        model.record.released = true;
        Self(Arc::new(Inner { model: Mutex::new(model), news: watch::Sender::new(()) }))
    }

    pub(super) fn store(&self) -> MemoryStore {
        MemoryStore { memory: self.clone(), faults: Arc::default() }
    }

    pub(super) fn record(&self) -> LeaseRecord {
        self.0.model.lock().record.clone()
    }

    /// Who holds it, unless it is released.
    pub(super) fn holder(&self) -> Option<String> {
        let record = self.record();
        record.holder.filter(|_| !record.released).map(|it| it.primary.instance)
    }
}

impl MemoryStore {
    async fn step<T>(
        &self,
        fault: Fault,
        step: impl FnOnce(&mut Model) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match fault {
            Fault::Hangs => std::future::pending().await,
            Fault::Panics => panic!("as the test wants it"),
            Fault::Fails => {
                return Err(StoreError::Unavailable { source: Arc::new(std::io::Error::other("away")) });
            }
            Fault::None | Fault::HangsAfterwards => {}
        }
        let before = self.memory.record();
        let answer = step(&mut self.memory.0.model.lock());
        if before != self.memory.record() {
            self.memory.0.news.send_replace(());
        }
        match fault {
            Fault::HangsAfterwards => std::future::pending().await,
            _ => answer,
        }
    }
}

#[async_trait]
impl LeaseStore for MemoryStore {
    async fn read(&self) -> Result<LeaseRecord, StoreError> {
        let fault = self.faults.lock().read;
        self.step(fault, |model| Ok(model.record.clone())).await
    }

    async fn changed(&self, seen: &LeaseRecord, wait: Duration) -> Result<LeaseRecord, StoreError> {
        let fault = self.faults.lock().changed;
        let mut news = self.memory.0.news.subscribe();
        let _ = timeout(wait, async {
            while self.memory.record() == *seen {
                news.changed().await.unwrap();
            }
        })
        .await;
        self.step(fault, |model| Ok(model.record.clone())).await
    }

    async fn acquire(&self, seen: &LeaseRecord, claim: &Claim) -> Result<Term, StoreError> {
        let fault = self.faults.lock().acquire;
        self.step(fault, |model| model.acquire(seen, claim)).await
    }

    async fn renew(&self, term: &Term) -> Result<(), StoreError> {
        let fault = self.faults.lock().renew;
        self.step(fault, |model| model.renew(term)).await
    }

    async fn release(&self, term: &Term, successor: Option<&str>) -> Result<(), StoreError> {
        let fault = self.faults.lock().release;
        self.step(fault, |model| model.release(term, successor)).await
    }

    async fn load(&self, _: &Term, _: &str) -> Result<Option<Stored>, StoreError> {
        unimplemented!("no test here asks for it")
    }

    async fn write(&self, _: &Term, _: &Write) -> Result<Version, StoreError> {
        unimplemented!("no test here asks for it")
    }

    fn value_limit(&self) -> usize {
        0
    }
}
