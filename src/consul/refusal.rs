//! What an answer says that is no success.

use std::time::Duration;

use http02::header::RETRY_AFTER;

use super::{RegistryError, transport::Answer};

/// How much of a refusal's text an error shows.
const EXCERPT: usize = 300;

/// What an answer that is no success means. Consul says most things with 500 and
/// a sentence.
pub(super) fn refusal(
    answer: &Answer,
    datacenter: Option<&str>,
    without_secrets: impl Fn(&str) -> String,
) -> RegistryError {
    let body = excerpt(&without_secrets(&String::from_utf8_lossy(&answer.body)));
    let retry_after = answer.number(RETRY_AFTER.as_str()).map(Duration::from_secs);
    match answer.status {
        403 => RegistryError::Forbidden { message: body },
        404 => RegistryError::NotFound,
        429 => RegistryError::RateLimited { retry_after },
        503 if retry_after.is_some() => RegistryError::RateLimited { retry_after },
        500 if body.contains("No cluster leader") => RegistryError::NoLeader,
        500 if body.contains("No known Consul servers") => RegistryError::NoServers,
        500 if body.contains("No path to datacenter") => {
            RegistryError::NoPath { datacenter: datacenter.unwrap_or_default().to_owned() }
        }
        code => RegistryError::Status { code, body },
    }
}

/// The beginning of `text`, fit for one line.
pub(super) fn excerpt(text: &str) -> String {
    let text = text.trim();
    let mut short: String =
        text.chars().take(EXCERPT).map(|it| if it.is_control() { ' ' } else { it }).collect();
    if text.chars().nth(EXCERPT).is_some() {
        short.push('…');
    }
    short
}
