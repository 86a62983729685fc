//! What the call path tells the worker. The loop between the two closes here,
//! through a channel: neither waits for the other.

use std::{fmt, sync::Arc};

use tokio::sync::oneshot;

use super::{binding::Binding, choice::Aim, endpoint::Endpoint, error::UpdateError};

/// A message to the worker of one service.
pub(crate) enum Report {
    /// A connection has ended, or takes no more calls.
    Lost { serial: u64, cause: LossCause },
    /// A call has been out too long and nothing else was heard from there.
    Suspect { endpoint: Arc<Endpoint> },
    /// Too many failures in a row.
    Failing { serial: u64 },
    /// A caller found nothing usable.
    Starved,
    /// A call wants to go there, and found nothing. Answered once something there
    /// is published, or with why that is of no hope; a `patient` one is told only the former.
    Wanted { aim: Aim, patient: bool, reply: oneshot::Sender<Result<(), String>> },
    /// Calls have found out something about who is primary.
    Primary,
    /// A subscriber's own use of the channel of this generation failed.
    BindingFailed { generation: u64 },
    /// `update_grpc_client` was called.
    Update { reply: oneshot::Sender<Result<Binding, UpdateError>> },
}

/// Why a connection is out of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LossCause {
    /// The socket closed, or a call found it broken.
    Closed,
    /// The server said that it takes no more calls on it (GOAWAY).
    GoingAway,
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "connection lost",
            Self::GoingAway => "server is going away",
        })
    }
}
