//! Why a registration cannot begin.

use std::io;

use crate::consul::ConfigError;

/// Why a registration cannot begin. Consul's absence is no reason: it is waited for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// A setting cannot be used.
    #[error("{setting} cannot be {value:?}: {problem}")]
    Setting {
        /// The argument or setter.
        setting: &'static str,
        /// What it was given.
        value: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// The way to Consul cannot be used.
    #[error("the registry's client cannot be made")]
    Consul(#[from] ConfigError),
    /// The probe cannot run.
    #[error(transparent)]
    Probe(#[from] crate::server::ProbeError),
    /// The thread of the heartbeats cannot be started.
    #[error("the thread of the heartbeats cannot be started")]
    Thread(#[source] io::Error),
}
