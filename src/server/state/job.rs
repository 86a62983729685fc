//! What waits in the queue, and what becomes of it.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use tokio::sync::oneshot;

use super::{
    contained::{Contained, contained},
    error::{StateError, UpdateError},
};

/// An update or a read, applied in its turn and answered when the store has spoken.
pub(super) enum Job<T> {
    Read(oneshot::Sender<Result<Arc<T>, StateError>>),
    Update(Box<dyn Update<T>>),
}

/// An update whose answer's type is forgotten.
pub(super) trait Update<T>: Send {
    /// Whether anybody waits for it still.
    fn is_awaited(&self) -> bool;

    /// Changes `value`; false where it did not want to or broke off: `value` is of no use then.
    fn apply(&mut self, value: &mut T) -> bool;

    /// Undone by us: it would not fit.
    fn undo(&mut self, error: StateError);

    /// Tells the caller: what became of it goes by the store's answer.
    fn answer(self: Box<Self>, stored: Result<(), StateError>);
}

/// How an update went, before the store has confirmed what it went by.
enum Applied<R, E> {
    Done(R),
    Refused(E),
    Undone(StateError),
    Panicked(Box<dyn Any + Send>),
}

/// What a caller gets: a panic of its own closure goes on in its own task.
pub(super) type Answer<R, E> = Result<Result<R, UpdateError<E>>, Box<dyn Any + Send>>;

pub(super) struct Closure<F, R, E> {
    closure: Option<Contained<F>>,
    applied: Option<Contained<Applied<R, E>>>,
    caller: oneshot::Sender<Answer<R, E>>,
}

// === impl Job ===

impl<T> Job<T> {
    /// Whether anybody waits for it still.
    pub(super) fn is_awaited(&self) -> bool {
        match self {
            Self::Read(caller) => !caller.is_closed(),
            Self::Update(update) => update.is_awaited(),
        }
    }

    /// Tells the caller: `stored` is the value that the store has confirmed.
    pub(super) fn answer(self, stored: Result<Arc<T>, StateError>) {
        match self {
            // Nobody may wait for it any longer.
            Self::Read(caller) => contained(|| drop(caller.send(stored))),
            Self::Update(update) => update.answer(stored.map(drop)),
        }
    }
}

// === impl Closure ===

impl<F, R, E> Closure<F, R, E> {
    pub(super) fn new(closure: F, caller: oneshot::Sender<Answer<R, E>>) -> Self {
        Self { closure: Some(Contained::new(closure)), applied: None, caller }
    }
}

impl<T, F, R, E> Update<T> for Closure<F, R, E>
where
    F: FnOnce(&mut T) -> Result<R, E> + Send,
    R: Send,
    E: Send,
{
    fn is_awaited(&self) -> bool {
        !self.caller.is_closed()
    }

    fn apply(&mut self, value: &mut T) -> bool {
        let Some(closure) = self.closure.take().map(Contained::into_inner) else { return false };
        // The value that a panic leaves behind is thrown away.
        let applied = match catch_unwind(AssertUnwindSafe(|| closure(value))) {
            Ok(Ok(result)) => Applied::Done(result),
            Ok(Err(error)) => Applied::Refused(error),
            Err(panic) => Applied::Panicked(panic),
        };
        let done = matches!(applied, Applied::Done(_));
        self.applied = Some(Contained::new(applied));
        done
    }

    fn undo(&mut self, error: StateError) {
        self.applied = Some(Contained::new(Applied::Undone(error)));
    }

    fn answer(self: Box<Self>, stored: Result<(), StateError>) {
        let mut left = None;
        let answer = match (self.applied.map(Contained::into_inner), stored) {
            (Some(Applied::Panicked(panic)), _) => Err(panic),
            // It has no part in what may be stored.
            (Some(Applied::Undone(error)), _) => Ok(Err(UpdateError::State(error))),
            (Some(Applied::Refused(error)), Ok(())) => Ok(Err(UpdateError::Refused(error))),
            (Some(Applied::Done(result)), Ok(())) => Ok(Ok(result)),
            (applied, Err(error)) => {
                // Dropped when the caller has its answer.
                left = applied.map(Contained::new);
                Ok(Err(UpdateError::State(error)))
            }
            (None, Ok(())) => Ok(Err(UpdateError::State(StateError::Overtaken))),
        };
        let caller = self.caller;
        // Nobody may wait for it any longer.
        contained(|| drop(caller.send(answer)));
        drop(left);
    }
}
