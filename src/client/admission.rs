//! How many calls there may be: one counter for those under way, one for those
//! that wait for an instance.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{error::CallErrorKind, traffic::Traffic};

/// The bounds of one service. Every clone of a channel shares them.
#[derive(Debug)]
pub(crate) struct Admission {
    in_flight: Bound,
    waiting: Bound,
}

#[derive(Debug)]
struct Bound {
    setting: &'static str,
    limit: usize,
    taken: AtomicUsize,
}

/// A call that waits: until this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting<'a>(&'a Bound);

// === impl Admission ===

impl Admission {
    pub(crate) fn new(traffic: &Traffic) -> Self {
        let bound = |setting, limit| Bound { setting, limit, taken: AtomicUsize::new(0) };
        Self {
            in_flight: bound("max_in_flight", traffic.max_in_flight),
            waiting: bound("max_waiting", traffic.max_waiting),
        }
    }

    /// A call begins, and is to [end](Self::end).
    ///
    /// # Errors
    /// As many are under way as may be.
    #[inline]
    pub(crate) fn begin(&self) -> Result<(), CallErrorKind> {
        self.in_flight.take()
    }

    /// A call that had begun has ended.
    #[inline]
    pub(crate) fn end(&self) {
        self.in_flight.give_back();
    }

    /// A call begins to wait for an instance.
    ///
    /// # Errors
    /// As many wait as may.
    pub(crate) fn wait(&self) -> Result<Waiting<'_>, CallErrorKind> {
        self.waiting.take()?;
        Ok(Waiting(&self.waiting))
    }
}

// === impl Bound ===

impl Bound {
    #[inline]
    fn take(&self) -> Result<(), CallErrorKind> {
        // Counted first and looked at then: of many at once none more than the limit get in.
        if self.taken.fetch_add(1, Ordering::Relaxed) >= self.limit {
            self.give_back();
            return Err(CallErrorKind::TooMany { setting: self.setting, limit: self.limit });
        }
        Ok(())
    }

    #[inline]
    fn give_back(&self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_given_back_is_taken_again_and_no_more_than_there_are() {
        let traffic = Traffic { max_in_flight: 2, max_waiting: 0, ..Traffic::default() };
        let admission = Admission::new(&traffic);
        admission.begin().unwrap();
        admission.begin().unwrap();
        let refused = admission.begin().unwrap_err();
        assert_eq!(refused, CallErrorKind::TooMany { setting: "max_in_flight", limit: 2 });
        admission.end();
        admission.begin().unwrap();
        assert!(admission.begin().is_err());
        assert_eq!(
            admission.wait().unwrap_err(),
            CallErrorKind::TooMany { setting: "max_waiting", limit: 0 }
        );
    }
}
