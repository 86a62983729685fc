//! Other people's code in the state's task: a panic in it ends where it began.

use std::{
    any::Any,
    mem::forget,
    ops::{Deref, DerefMut},
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs what may panic.
pub(super) fn contained(run: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
        dispose(panic);
    }
}

/// What a panic carries may panic as it is dropped, too; what that carries is left alone.
pub(super) fn dispose(panic: Box<dyn Any + Send>) {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        forget(second);
    }
}

/// Something whose drop may panic: then it is gone, and nothing else is.
pub(super) struct Contained<T>(Option<T>);

const THERE: &str = "it is taken out by what ends it alone";

// === impl Contained ===

impl<T> Contained<T> {
    pub(super) fn new(value: T) -> Self {
        Self(Some(value))
    }

    pub(super) fn into_inner(mut self) -> T {
        self.0.take().expect(THERE)
    }
}

impl<T> Deref for Contained<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect(THERE)
    }
}

impl<T> DerefMut for Contained<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect(THERE)
    }
}

impl<T> Drop for Contained<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            contained(|| drop(value));
        }
    }
}
