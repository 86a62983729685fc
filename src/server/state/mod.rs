//! A small state that only the primary writes, and of which no acknowledged write is lost.
//!
//! ```text
//!  update(f) ---+                        +-- store.write: the holder is ours, and
//!  update(g) ---+--> queue --> Writer ---+   the value is the one we know
//!  read() ------+     one copy: f, g     +-- answers all of them
//! ```
//!
//! What waits while one write is under way makes up the next: so a thousand callers cost few
//! writes, and each is answered only when the store has what it did.

mod contained;
mod error;
mod job;
#[cfg(test)]
mod tests;
mod writer;

use std::{convert::Infallible, fmt, panic::resume_unwind, sync::Arc};

use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    runtime::Handle,
    sync::{
        mpsc::{self, error::TrySendError},
        oneshot, watch,
    },
};
use tokio_util::task::AbortOnDropHandle;

use self::{
    job::{Closure, Job},
    writer::{Writer, current},
};
use super::{
    lease::Lease,
    store::{LeaseStore, Term, key::is_key},
};

pub use self::error::{InvalidState, StateError, UpdateError};

/// The most that [`FencedStateBuilder::queue`] takes. Our choice.
const LONGEST_QUEUE: usize = 1 << 20;

/// One value beside a lease, which only the lease's holder writes.
///
/// An update is acknowledged when the store has it, in a transaction that fails once another holds
/// the lease. A new term loads the value afresh before anything is answered. What has never been
/// stored is `T::default()`. It is kept as JSON, so `T` may grow fields (with `#[serde(default)]`).
///
/// `T` is cloned, encoded and, to be certain that it can be, decoded for each update: meant for counters, positions and small tables, not for
/// a database. How long it may become is the store's affair ([`LeaseStore::value_limit`]). One `FencedState` a
/// key and process; clones are handles of the same.
///
/// Work is done in one task of the runtime that it was made in. It ends with the last handle.
///
/// # Cancel safety
/// A dropped `update` or `read` that is still in the queue is passed over. A dropped update that
/// has been taken up may be stored, as one whose answer was lost on the way to a client.
pub struct FencedState<T> {
    jobs: mpsc::Sender<Job<T>>,
    queue: usize,
    terms: watch::Receiver<Option<Arc<Term>>>,
    known: Arc<Mutex<Option<Arc<T>>>>,
    _writer: Arc<AbortOnDropHandle<()>>,
}

/// Settings of a [`FencedState`].
#[derive(Debug)]
pub struct FencedStateBuilder {
    store: Arc<dyn LeaseStore>,
    terms: watch::Receiver<Option<Arc<Term>>>,
    key: String,
    queue: usize,
}

// === impl FencedState ===

impl<T: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static> FencedState<T> {
    /// The state called `key` beside `lease`. It does not keep the lease going: hold a clone of that.
    ///
    /// # Errors
    /// As [`FencedStateBuilder::build`].
    pub fn new(lease: &Lease, key: impl Into<String>) -> Result<Self, InvalidState> {
        FencedState::builder(lease.store(), lease.term(), key).build()
    }

    /// Applies `change` to the value, and answers with what it gave when the new value is stored.
    ///
    /// Updates are applied in the order in which they were asked for, to the same copy; no other sees one
    /// that is not stored in the end. `change` runs within the state's task: it must not block.
    /// A panic in it goes on in the caller; one in the drop of what it holds or gives ends there. Neither harms others.
    ///
    /// It waits for the store as long as the term lasts; give the call a deadline of your own.
    ///
    /// # Errors
    /// [`StateError`]; its [`may_be_stored`](StateError::may_be_stored) says whether the update can still count.
    pub async fn update<R, F>(&self, change: F) -> Result<R, StateError>
    where
        F: FnOnce(&mut T) -> R + Send + 'static,
        R: Send + 'static,
    {
        match self.try_update(|value| Ok::<_, Infallible>(change(value))).await {
            Ok(result) => Ok(result),
            Err(UpdateError::State(error)) => Err(error),
            Err(UpdateError::Refused(never)) => match never {},
        }
    }

    /// As [`update`](Self::update), of a change that may refuse: then nothing is changed, and others are not
    /// held up.
    ///
    /// # Errors
    /// What `change` refused with, once the store has confirmed that it went by the stored value; or as
    /// [`update`](Self::update).
    pub async fn try_update<R, E, F>(&self, change: F) -> Result<R, UpdateError<E>>
    where
        F: FnOnce(&mut T) -> Result<R, E> + Send + 'static,
        R: Send + 'static,
        E: Send + 'static,
    {
        let (caller, answer) = oneshot::channel();
        self.ask(Job::Update(Box::new(Closure::new(change, caller))))?;
        match answer.await {
            Ok(Ok(answer)) => answer,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(_) => Err(StateError::Ended.into()),
        }
    }

    /// The value as it is stored: no update that was acknowledged before this was asked for is missing,
    /// on whichever instance. The store confirms, after the value was known, that this instance still
    /// holds the lease; reads that wait at the same time, and updates, share one confirmation.
    ///
    /// # Errors
    /// [`StateError`].
    pub async fn read(&self) -> Result<Arc<T>, StateError> {
        let (caller, answer) = oneshot::channel();
        self.ask(Job::Read(caller))?;
        answer.await.unwrap_or(Err(StateError::Ended))
    }

    /// The value that this instance has known last, without asking anyone: perhaps of a term long
    /// past. `None` where it has known none.
    pub fn possibly_stale(&self) -> Option<Arc<T>> {
        self.known.lock().clone()
    }

    fn ask(&self, job: Job<T>) -> Result<(), StateError> {
        if current(&self.terms).is_none() {
            return Err(StateError::NotPrimary);
        }
        self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => StateError::QueueFull { limit: self.queue },
            TrySendError::Closed(_) => StateError::Ended,
        })
    }
}

impl FencedState<()> {
    /// A state called `key` in `store`, for an election of one's own: `terms` has the term as long as this
    /// process holds the lease.
    pub fn builder(
        store: Arc<dyn LeaseStore>,
        terms: watch::Receiver<Option<Arc<Term>>>,
        key: impl Into<String>,
    ) -> FencedStateBuilder {
        FencedStateBuilder { store, terms, key: key.into(), queue: 4096 }
    }
}

impl<T> Clone for FencedState<T> {
    fn clone(&self) -> Self {
        Self {
            jobs: self.jobs.clone(),
            queue: self.queue,
            terms: self.terms.clone(),
            known: self.known.clone(),
            _writer: self._writer.clone(),
        }
    }
}

impl<T> fmt::Debug for FencedState<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedState").field("term", &*self.terms.borrow()).finish_non_exhaustive()
    }
}

// === impl FencedStateBuilder ===

impl FencedStateBuilder {
    /// How many updates and reads may wait; from 1 to 1,048,576. More get
    /// [`StateError::QueueFull`].
    ///
    /// Default: 4096.
    #[must_use]
    pub fn queue(mut self, places: usize) -> Self {
        self.queue = places;
        self
    }

    /// Starts the state's task.
    ///
    /// # Errors
    /// [`InvalidState`]: the key or a setting is wrong, or there is no runtime.
    pub fn build<T>(self) -> Result<FencedState<T>, InvalidState>
    where
        T: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        let Self { store, terms, key, queue } = self;
        if !is_key(&key) {
            return Err(InvalidState::Key { key });
        }
        if !(1..=LONGEST_QUEUE).contains(&queue) {
            return Err(InvalidState::Queue { value: queue, most: LONGEST_QUEUE });
        }
        let runtime = Handle::try_current().map_err(|_| InvalidState::NoRuntime)?;
        let (jobs, waiting) = mpsc::channel(queue);
        let known = Arc::new(Mutex::new(None));
        let writer = Writer::new(store, terms.clone(), key, waiting, known.clone());
        let writer = Arc::new(AbortOnDropHandle::new(runtime.spawn(writer.run())));
        Ok(FencedState { jobs, queue, terms, known, _writer: writer })
    }
}
