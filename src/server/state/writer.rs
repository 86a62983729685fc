//! The one task that reads and writes a state.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    sync::{mpsc, watch},
    task::yield_now,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use super::{
    contained::{Contained, contained, dispose},
    error::StateError,
    job::{Job, Update},
};
use crate::server::store::{LeaseStore, StoreError, Stored, Term, Version, Write};

/// How many updates and reads one answer of the store is for, at the most. Our choice: a batch
/// that waits for nothing has its turn in a few milliseconds.
const BATCH: usize = 1024;

/// So long updates are applied before what there is goes to the store; at least one is. Our choice: those of a
/// long value take a while each, and the runtime has others to serve, a probe's question among them.
const BATCH_FOR: Duration = Duration::from_millis(20);

/// How long the store is left alone after it gave no answer. Our choice: several tries fit into
/// what is left of a lease.
const PAUSE: Duration = Duration::from_millis(50);

/// Numbers writes: no two of a process are alike, so that a store never takes one for another that
/// was sent again.
static WRITES: AtomicU64 = AtomicU64::new(1);

/// Takes jobs from the queue, and what has become of them to their callers.
pub(super) struct Writer<T> {
    store: Arc<dyn LeaseStore>,
    terms: watch::Receiver<Option<Arc<Term>>>,
    key: String,
    jobs: mpsc::Receiver<Job<T>>,
    known: Arc<Mutex<Option<Arc<T>>>>,
    loaded: Option<Loaded<T>>,
    /// It has been told that the state is of no use.
    spoilt: bool,
}

/// What the store has, as far as this term is concerned.
struct Loaded<T> {
    term: Arc<Term>,
    version: Version,
    value: Contained<Arc<T>>,
    encoded: Bytes,
}

/// What a value has become, and the same encoded.
type Next<T> = (Contained<Arc<T>>, Bytes);

/// A panic of the value's own `Clone`, `Default`, `Serialize` or `Deserialize`.
#[derive(Debug, thiserror::Error)]
#[error("its code panicked")]
struct Panicked;

/// Whether the store is in an episode of giving no answers.
#[derive(Default)]
struct Episode {
    begun: bool,
}

/// The term, as long as it lasts.
pub(super) fn current(terms: &watch::Receiver<Option<Arc<Term>>>) -> Option<Arc<Term>> {
    // A lease that is gone has no term, whatever it said last.
    if terms.has_changed().is_err() { None } else { terms.borrow().clone() }
}

// === impl Writer ===

impl<T: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static> Writer<T> {
    pub(super) fn new(
        store: Arc<dyn LeaseStore>,
        terms: watch::Receiver<Option<Arc<Term>>>,
        key: String,
        jobs: mpsc::Receiver<Job<T>>,
        known: Arc<Mutex<Option<Arc<T>>>>,
    ) -> Self {
        Self { store, terms, key, jobs, known, loaded: None, spoilt: false }
    }

    /// Ends with the last handle.
    pub(super) async fn run(mut self) {
        let mut batch = Vec::new();
        let mut leased = true;
        // A term may have begun before this.
        self.terms.mark_changed();
        loop {
            tokio::select! {
                taken = self.jobs.recv_many(&mut batch, BATCH) => {
                    if taken == 0 {
                        return;
                    }
                    self.serve(std::mem::take(&mut batch)).await;
                }
                changed = self.terms.changed(), if leased => {
                    leased = changed.is_ok();
                    if let Some(term) = current(&self.terms) {
                        // Whoever asks first is told by the next try.
                        match self.load(&term).await {
                            Ok(loaded) => drop(self.keep(loaded)),
                            Err(error) => self.tell(Some(&error)),
                        }
                    }
                }
            }
        }
    }

    async fn serve(&mut self, mut waiting: Vec<Job<T>>) {
        loop {
            waiting.retain(Job::is_awaited);
            if waiting.is_empty() {
                return;
            }
            let Some(term) = current(&self.terms) else {
                return waiting.into_iter().for_each(|job| job.answer(Err(StateError::NotPrimary)));
            };
            let (taken, done) = match self.load(&term).await {
                Ok(loaded) => {
                    let (taken, next) = self.apply_in_turn(&loaded, &mut waiting);
                    (taken, self.settle(loaded, next).await)
                }
                Err(error) => (waiting.len(), Err(error)),
            };
            self.tell(done.as_ref().err());
            let value = done.map(|loaded| self.keep(loaded));
            for job in waiting.drain(..taken) {
                job.answer(value.clone());
            }
            yield_now().await;
        }
    }

    /// Logs, once until it is well again, what somebody has to repair: callers are told no more than that it is so.
    fn tell(&mut self, error: Option<&StateError>) {
        let state = &self.key;
        match error {
            Some(error @ (StateError::Store { .. } | StateError::NotDecodable { .. })) => {
                if !std::mem::replace(&mut self.spoilt, true) {
                    let source = std::error::Error::source(error).map(ToString::to_string);
                    warn!(%state, %error, source, "the state is of no use until somebody has repaired this");
                }
            }
            Some(_) => {}
            None => {
                if std::mem::take(&mut self.spoilt) {
                    info!(%state, "the state can be used again");
                }
            }
        }
    }

    fn keep(&mut self, loaded: Loaded<T>) -> Arc<T> {
        let value = Arc::clone(&loaded.value);
        let before = self.known.lock().replace(value.clone());
        // Not under the lock: it may be the last that has it.
        contained(|| drop(before));
        self.loaded = Some(loaded);
        value
    }

    /// The value as this term knows it, taken from `loaded` until it is confirmed again.
    async fn load(&mut self, term: &Arc<Term>) -> Result<Loaded<T>, StateError> {
        if let Some(loaded) = self.loaded.take_if(|loaded| loaded.term == *term) {
            return Ok(loaded);
        }
        self.loaded = None;
        let stored = self.ask(term).await?;
        let version = stored.as_ref().map_or(Version::ABSENT, |stored| stored.version);
        let encoded = stored.map(|stored| stored.value);
        let value = match &encoded {
            Some(encoded) => guarded(|| serde_json::from_slice(encoded)),
            None => guarded(|| Ok(T::default())),
        };
        let not_decodable = |source| StateError::NotDecodable { key: self.key.clone(), source };
        let value = Contained::new(Arc::new(value.map_err(not_decodable)?));
        Ok(Loaded { term: term.clone(), version, value, encoded: encoded.unwrap_or_default() })
    }

    /// What the store has, asked until it answers or the term ends.
    async fn ask(&mut self, term: &Arc<Term>) -> Result<Option<Stored>, StateError> {
        let mut episode = Episode::default();
        loop {
            match self.store.load(term, &self.key).await {
                Ok(stored) => {
                    episode.end(&self.key);
                    return Ok(stored);
                }
                Err(StoreError::Superseded) => return Err(StateError::NotPrimary),
                Err(error @ (StoreError::Unanswered { .. } | StoreError::Unavailable { .. })) => {
                    episode.begin(&self.key, &error);
                }
                Err(source) => return Err(StateError::Store { source }),
            }
            if !self.outlasts_a_pause(term).await {
                return Err(StateError::NotPrimary);
            }
        }
    }

    /// Waits before the store is asked again; false where the term has ended.
    async fn outlasts_a_pause(&mut self, term: &Arc<Term>) -> bool {
        let pause = sleep(PAUSE);
        tokio::pin!(pause);
        loop {
            if current(&self.terms).as_ref() != Some(term) {
                return false;
            }
            tokio::select! {
                () = &mut pause => return true,
                changed = self.terms.changed() => if changed.is_err() { return false },
            }
        }
    }

    /// Applies jobs in order, as many as there is time for: how many, and what comes of them.
    fn apply_in_turn(&self, loaded: &Loaded<T>, jobs: &mut [Job<T>]) -> (usize, Next<T>) {
        let begun = Instant::now();
        let mut next = (Contained::new(Arc::clone(&loaded.value)), loaded.encoded.clone());
        let mut taken = 0;
        for job in jobs {
            if taken > 0 && begun.elapsed() >= BATCH_FOR {
                break;
            }
            taken += 1;
            if let Job::Update(update) = job
                && let Some(applied) = self.apply(&next.0, update.as_mut())
            {
                next = applied;
            }
        }
        (taken, next)
    }

    /// Has the store confirm all that was applied at once.
    async fn settle(
        &mut self,
        loaded: Loaded<T>,
        (value, encoded): Next<T>,
    ) -> Result<Loaded<T>, StateError> {
        let Loaded { term, version, encoded: before, .. } = loaded;
        let version = if encoded == before {
            self.confirm(&term, version).await?
        } else {
            self.write(&term, version, encoded.clone()).await?
        };
        Ok(Loaded { term, version, value, encoded })
    }

    /// The value after an update, unless that refused or cannot be stored.
    fn apply(&self, value: &T, update: &mut dyn Update<T>) -> Option<Next<T>> {
        let applied = guarded(|| {
            let mut next = Contained::new(value.clone());
            if !update.apply(&mut next) {
                return Ok(None);
            }
            let encoded = serde_json::to_vec(&*next)?;
            // What cannot be read back would be the end of the state: JSON writes NaN as null, for
            // example, and is read to a depth of 128 alone.
            drop(Contained::new(serde_json::from_slice::<T>(&encoded)?));
            Ok(Some((encoded, Contained::new(Arc::new(next.into_inner())))))
        });
        let limit = self.store.value_limit();
        match applied {
            Ok(Some((encoded, _))) if encoded.len() > limit => {
                update.undo(StateError::TooLarge { size: encoded.len(), limit });
                None
            }
            Ok(Some((encoded, next))) => Some((next, encoded.into())),
            Ok(None) => None,
            Err(source) => {
                update.undo(StateError::NotEncodable { source });
                None
            }
        }
    }

    /// Nothing is to be written: the holder must still be ours, and the value the one known.
    async fn confirm(&mut self, term: &Arc<Term>, version: Version) -> Result<Version, StateError> {
        let stored = self.ask(term).await?;
        match stored.map_or(Version::ABSENT, |stored| stored.version) == version {
            true => Ok(version),
            false => Err(StateError::Overtaken),
        }
    }

    /// Sends one write until it is known what has become of it, or the term ends.
    async fn write(
        &mut self,
        term: &Arc<Term>,
        expected: Version,
        value: Bytes,
    ) -> Result<Version, StateError> {
        let sequence = WRITES.fetch_add(1, Ordering::Relaxed);
        let write = Write::new(&self.key, expected, sequence, value);
        let mut unanswered: Option<StoreError> = None;
        let mut episode = Episode::default();
        loop {
            let error = match self.store.write(term, &write).await {
                Ok(version) => {
                    episode.end(&self.key);
                    return Ok(version);
                }
                Err(error) => error,
            };
            match (error, &unanswered) {
                (error @ StoreError::Unanswered { .. }, _) => {
                    episode.begin(&self.key, &error);
                    unanswered = Some(error);
                }
                (error @ StoreError::Unavailable { .. }, _) => episode.begin(&self.key, &error),
                // Another one is in the way: it may be this very write.
                (StoreError::Conflict, Some(source)) => match self.store.load(term, &self.key).await {
                    Ok(Some(stored)) if stored.token == term.token && stored.sequence == sequence => {
                        return Ok(stored.version);
                    }
                    Ok(_) => return Err(StateError::Overtaken),
                    Err(StoreError::Superseded) => {
                        return Err(StateError::MayBeStored { source: source.clone() });
                    }
                    Err(_) => {}
                },
                (StoreError::Conflict, None) => return Err(StateError::Overtaken),
                // Of this sending it says that nothing was written, of those before it nothing.
                (_, Some(source)) => return Err(StateError::MayBeStored { source: source.clone() }),
                (StoreError::Superseded, None) => return Err(StateError::NotPrimary),
                (StoreError::TooLarge { size, limit }, None) => {
                    return Err(StateError::TooLarge { size, limit });
                }
                (source, None) => return Err(StateError::Store { source }),
            }
            if !self.outlasts_a_pause(term).await {
                return Err(match unanswered {
                    Some(source) => StateError::MayBeStored { source },
                    None => StateError::NotPrimary,
                });
            }
        }
    }
}

/// What the value's own code makes, were it to panic too.
fn guarded<T>(
    make: impl FnOnce() -> Result<T, serde_json::Error>,
) -> Result<T, Arc<dyn std::error::Error + Send + Sync>> {
    match catch_unwind(AssertUnwindSafe(make)) {
        Ok(Ok(made)) => Ok(made),
        Ok(Err(error)) => Err(Arc::new(error)),
        Err(panic) => {
            dispose(panic);
            Err(Arc::new(Panicked))
        }
    }
}

// === impl Episode ===

impl Episode {
    fn begin(&mut self, key: &str, error: &StoreError) {
        if !std::mem::replace(&mut self.begun, true) {
            let source = std::error::Error::source(error).map(ToString::to_string);
            warn!(state = key, %error, source, "the store gives no answer about the state; it is asked again");
        }
    }

    fn end(&mut self, key: &str) {
        if std::mem::take(&mut self.begun) {
            info!(state = key, "the store answers about the state again");
        }
    }
}
