//! A setting that cannot be used.

use std::{error::Error, sync::Arc};

/// A setting that cannot be used: which one, what it holds (never a token, a
/// password or a key) and what would be right.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{setting}{}: {problem}", shown(value))]
#[non_exhaustive]
pub struct ConfigError {
    /// The environment variable, or the setter of [`ConsulConfig`](super::ConsulConfig).
    pub setting: String,
    /// Its value, unless that is a secret.
    pub value: Option<String>,
    /// What is wrong and what would be right.
    pub problem: String,
    /// What lies behind it.
    pub source: Option<Arc<dyn Error + Send + Sync>>,
}

// === impl ConfigError ===

impl ConfigError {
    pub(super) fn new(setting: &str, value: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { setting: setting.to_owned(), value: Some(value.into()), problem: problem.into(), source: None }
    }

    /// Of a value that must not be shown.
    pub(super) fn secret(setting: &str, problem: impl Into<String>) -> Self {
        Self { setting: setting.to_owned(), value: None, problem: problem.into(), source: None }
    }

    pub(super) fn because(mut self, source: impl Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }
}

fn shown(value: &Option<String>) -> String {
    value.as_ref().map(|it| format!(" is {it:?}")).unwrap_or_default()
}
