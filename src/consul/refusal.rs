//! What an answer says that is no success.

use std::time::Duration;

use http02::header::RETRY_AFTER;

use super::{RegistryError, secrets::Answer};

/// What an answer that is no success means. Consul says most things with 500 and
/// a sentence.
pub(super) fn refusal(answer: &Answer, datacenter: Option<&str>) -> RegistryError {
    let body = answer.text();
    let retry_after = answer.number(RETRY_AFTER.as_str()).map(Duration::from_secs);
    match answer.status() {
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
