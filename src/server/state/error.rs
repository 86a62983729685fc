//! Why an update or a read of the state has no answer.

use std::{error::Error, sync::Arc};

use crate::server::store::StoreError;

/// Why the state was not read or written, or may not have been.
///
/// As a [`tonic::Status`], by what a client may do then:
///
/// | error | status | may be sent again |
/// |---|---|---|
/// | [`NotPrimary`](Self::NotPrimary) | UNAVAILABLE, `NOT_PRIMARY` | always, to the primary |
/// | [`MayBeStored`](Self::MayBeStored) | UNAVAILABLE | only where a second time does no harm |
/// | [`Store`](Self::Store) | UNAVAILABLE | the update was not stored; a client cannot see that |
/// | [`Overtaken`](Self::Overtaken) | ABORTED | yes |
/// | [`QueueFull`](Self::QueueFull) | RESOURCE_EXHAUSTED | yes, later |
/// | [`TooLarge`](Self::TooLarge) | RESOURCE_EXHAUSTED | no |
/// | [`NotEncodable`](Self::NotEncodable), [`NotDecodable`](Self::NotDecodable), [`Ended`](Self::Ended) | INTERNAL | no |
///
/// UNAVAILABLE without a reason is what gRPC calls a transient failure that is "not always safe to retry"
/// (<https://grpc.github.io/grpc/core/md_doc_statuscodes.html>), and what clients resend for methods that
/// are declared safe, and for no others.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// This instance is not the primary. Nothing was stored, nor ever will be.
    #[error("this instance is not the primary")]
    NotPrimary,
    /// The store gave no answer as long as the term lasted, or the term ended meanwhile.
    #[error("the update may have been stored: this instance ceased to be primary before the store said")]
    MayBeStored {
        /// What the store said last.
        source: StoreError,
    },
    /// The store refuses, or has something that it should not have. Nothing was stored.
    #[error("the state cannot be read or written")]
    Store {
        /// What it said.
        source: StoreError,
    },
    /// The value was written by somebody else in this instance's name: a second `FencedState` of the
    /// same key, or a write of this one that was late. Nothing was stored.
    #[error("the state was written meanwhile; this update was not stored")]
    Overtaken,
    /// So many updates and reads wait already. Nothing was stored.
    #[error("{limit} updates and reads of the state are waiting already")]
    QueueFull {
        /// The queue's.
        limit: usize,
    },
    /// The update would make the value too long for the store. Nothing was stored.
    #[error("the update makes the state {size} bytes long, more than the {limit} that the store takes")]
    TooLarge {
        /// Of the value, as JSON.
        size: usize,
        /// The store's.
        limit: usize,
    },
    /// The update made a value that JSON cannot say, or that could not be read back from it: NaN, for
    /// example. Nothing was stored.
    #[error("the update makes a state that cannot be written as JSON and read back")]
    NotEncodable {
        /// What serde says.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// What is stored is not this state. It stays as it is until somebody repairs it.
    #[error("the stored state {key:?} cannot be read as what it should be")]
    NotDecodable {
        /// Of the value.
        key: String,
        /// What serde says.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The runtime that the state was made in has ended. The update may have been stored.
    #[error("the runtime that the state was made in has ended")]
    Ended,
}

/// Why an update that may refuse was not done.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError<E> {
    /// It refused, going by a state that was still the stored one afterwards.
    #[error(transparent)]
    Refused(E),
    /// It was not stored, or may not have been.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Why a [`FencedState`](super::FencedState) cannot be made.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidState {
    /// The key cannot be a value's name.
    #[error(
        "the key is {key:?}; it must have 1 to 64 letters, digits, `-`, `_` or `.`, and not begin with `.`"
    )]
    Key {
        /// What was given.
        key: String,
    },
    /// The queue has no place or too many.
    #[error("queue is {value}; it must be from 1 to {most}")]
    Queue {
        /// What was given.
        value: usize,
        /// The most that is taken.
        most: usize,
    },
    /// There is no tokio runtime to run on.
    #[error("a state needs a running tokio runtime: make it within `#[tokio::main]` or `Runtime::enter`")]
    NoRuntime,
}

// === impl StateError ===

impl StateError {
    /// Whether an update that got this may be stored, or may yet come to be.
    pub fn may_be_stored(&self) -> bool {
        matches!(self, Self::MayBeStored { .. } | Self::Ended)
    }
}

impl From<StateError> for tonic::Status {
    fn from(error: StateError) -> Self {
        use tonic::Code;
        if let StateError::NotPrimary = error {
            let mut status = Self::from(crate::not_primary::NotPrimary::default());
            status.set_source(Arc::new(error));
            return status;
        }
        let code = match error {
            StateError::NotPrimary | StateError::MayBeStored { .. } | StateError::Store { .. } => {
                Code::Unavailable
            }
            StateError::Overtaken => Code::Aborted,
            StateError::QueueFull { .. } | StateError::TooLarge { .. } => Code::ResourceExhausted,
            StateError::NotEncodable { .. } | StateError::NotDecodable { .. } | StateError::Ended => {
                Code::Internal
            }
        };
        let mut status = Self::new(code, error.to_string());
        status.set_source(Arc::new(error));
        status
    }
}

impl<E: Into<tonic::Status>> From<UpdateError<E>> for tonic::Status {
    fn from(error: UpdateError<E>) -> Self {
        match error {
            UpdateError::Refused(error) => error.into(),
            UpdateError::State(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;
    use crate::not_primary::NotPrimary;

    #[test]
    fn a_client_is_told_not_primary_only_of_what_was_never_stored() {
        let status = Status::from(StateError::NotPrimary);
        assert_eq!(NotPrimary::of(&status), Some(NotPrimary::default()));
        let unanswered = StoreError::Unanswered { source: Arc::new(std::io::Error::other("cut")) };
        for error in [
            StateError::MayBeStored { source: unanswered.clone() },
            StateError::Store { source: unanswered },
            StateError::Overtaken,
            StateError::Ended,
        ] {
            assert_eq!(NotPrimary::of(&Status::from(error.clone())), None, "{error}");
        }
    }
}
