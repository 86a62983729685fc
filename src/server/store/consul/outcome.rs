//! What Consul's answers mean for a step. Pure.

use std::{error::Error, sync::Arc};

use crate::{
    consul::{Objection, RegistryError, TxnError, TxnFailure},
    server::store::StoreError,
};

/// A question that brought no answer to go by. Nothing was written.
pub(super) fn unread(error: RegistryError) -> StoreError {
    match error {
        RegistryError::Forbidden { .. }
        | RegistryError::Unsendable { .. }
        | RegistryError::Status { code: 400..=499, .. } => StoreError::Refused { reason: error.to_string() },
        _ => StoreError::Unavailable { source: Arc::new(error) },
    }
}

/// A transaction that there is no word on.
pub(super) fn failed(failure: TxnFailure) -> StoreError {
    if failure.undone {
        unread(failure.error)
    } else {
        StoreError::Unanswered { source: Arc::new(failure.error) }
    }
}

/// The same of one that writes nothing.
pub(super) fn of_a_read(error: StoreError) -> StoreError {
    match error {
        StoreError::Unanswered { source } => StoreError::Unavailable { source },
        other => other,
    }
}

/// A transaction that was done, and whose answer lacks what it wrote.
pub(super) fn lacking(what: &str) -> StoreError {
    let source: Box<dyn Error + Send + Sync> = format!("the answer lacks {what}").into();
    StoreError::Unanswered { source: source.into() }
}

/// A transaction that was not done, the first so many of whose operations hold the lease
/// against what was read of it.
pub(super) fn refused(errors: &[TxnError], of_the_lease: usize) -> StoreError {
    let refusal = errors.iter().find_map(|error| match &error.what {
        Objection::Denied => Some("the token may not read and write these keys".to_owned()),
        Objection::Other(what) => Some(what.clone()),
        Objection::Stale | Objection::Missing => None,
    });
    match refusal {
        Some(reason) => StoreError::Refused { reason },
        None if errors.iter().any(|it| it.operation < of_the_lease) => StoreError::Superseded,
        None => StoreError::Conflict,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(operation: usize, what: Objection) -> TxnError {
        TxnError { operation, what }
    }

    #[test]
    fn no_is_told_from_may_not_and_from_could_not_find_out() {
        let superseded = |errors: &[TxnError]| matches!(refused(errors, 2), StoreError::Superseded);
        assert!(superseded(&[error(0, Objection::Stale)]));
        assert!(superseded(&[error(1, Objection::Missing), error(2, Objection::Stale)]));
        assert!(matches!(refused(&[error(2, Objection::Stale)], 2), StoreError::Conflict));
        for what in [Objection::Denied, Objection::Other("?".to_owned())] {
            let errors = [error(0, Objection::Stale), error(2, what)];
            assert!(matches!(refused(&errors, 2), StoreError::Refused { .. }));
        }
        let status = |code| RegistryError::Status { code, body: String::new() };
        assert!(matches!(unread(status(400)), StoreError::Refused { .. }));
        assert!(matches!(unread(status(500)), StoreError::Unavailable { .. }));
        assert!(matches!(unread(RegistryError::NotFound), StoreError::Unavailable { .. }));
        let failure = |undone| failed(TxnFailure { error: RegistryError::NoLeader, undone });
        assert!(matches!(failure(true), StoreError::Unavailable { .. }));
        assert!(failure(false).may_have_happened() && !failure(true).may_have_happened());
    }
}
