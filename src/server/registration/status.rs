//! How a registration stands.

use std::fmt;

use crate::{
    consul::{AgentService, RegistryError},
    instance::Shown,
};

/// How a registration stands, as far as this process knows. It is of the last turn, up to
/// a heartbeat old, and tells what the local agent said: the catalog follows it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RegistrationStatus {
    /// Not yet registered: the probe has not succeeded, or the agent not answered, for the first time.
    Pending,
    /// The agent has it, as it is to be.
    Registered,
    /// The probe fails, so the agent gets no heartbeat: the check turns critical, if it has not yet.
    Silent,
    /// The agent cannot be told. It is tried on.
    Lost {
        /// What the first failure of this episode was.
        error: RegistryError,
    },
    /// Another process has registered itself under this id. It is left alone until it is gone.
    Displaced {
        /// What is there instead.
        by: AgentService,
    },
    /// It has left: the agent has it no more, or never had.
    Left {
        /// What another process has registered under this id meanwhile, and was left alone.
        instead: Option<AgentService>,
    },
    /// It has ended without having been able to say so to the agent in time. The check turns
    /// critical by itself, and the agent takes the instance out later.
    LeftBehind {
        /// What the last try met with.
        error: RegistryError,
    },
}

// === impl RegistrationStatus ===

impl RegistrationStatus {
    /// Whether the agent has it, as it is to be, and is told that it lives.
    pub fn is_registered(&self) -> bool {
        matches!(self, Self::Registered)
    }

    /// Whether it has ended, one way or the other.
    pub fn has_ended(&self) -> bool {
        matches!(self, Self::Left { .. } | Self::LeftBehind { .. })
    }

    /// Whether `next` begins another episode.
    pub(super) fn is_other_than(&self, next: &Self) -> bool {
        match (self, next) {
            (Self::Displaced { by }, Self::Displaced { by: next }) => by != next,
            _ => std::mem::discriminant(self) != std::mem::discriminant(next),
        }
    }
}

/// One line: `registered`, `the agent cannot be told: ...`.
impl fmt::Display for RegistrationStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pending => f.write_str("not registered yet"),
            Self::Registered => f.write_str("registered"),
            Self::Silent => f.write_str("without a heartbeat, for the probe fails"),
            Self::Lost { error } => write!(f, "the agent cannot be told, trying on: {error}"),
            Self::Displaced { by } => {
                let (address, port) = (Shown(&by.address), by.port);
                write!(f, "displaced by another process, which serves at {address}:{port}")
            }
            Self::Left { instead: None } => f.write_str("left"),
            Self::Left { instead: Some(by) } => {
                let (address, port) = (Shown(&by.address), by.port);
                write!(f, "left, and let another process's entry be, which serves at {address}:{port}")
            }
            Self::LeftBehind { error } => write!(f, "ended, and still in the registry: {error}"),
        }
    }
}
