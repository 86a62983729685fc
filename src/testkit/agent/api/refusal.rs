//! Answers that refuse.

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode};

/// A refusal in Consul's words.
#[derive(Debug)]
pub(crate) struct Refusal {
    status: StatusCode,
    text: String,
    /// It comes from the servers, and so has their headers: the index 1 among
    /// them, which means nothing.
    from_servers: bool,
}

// === impl Refusal ===

impl Refusal {
    pub(crate) fn bad_request(text: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, text: text.into(), from_servers: false }
    }

    pub(crate) fn unauthorized(text: impl Into<String>) -> Self {
        Self { status: StatusCode::UNAUTHORIZED, text: text.into(), from_servers: false }
    }

    pub(crate) fn not_found(text: impl Into<String>) -> Self {
        Self { status: StatusCode::NOT_FOUND, text: text.into(), from_servers: false }
    }

    pub(crate) fn too_large(text: impl Into<String>) -> Self {
        Self { status: StatusCode::PAYLOAD_TOO_LARGE, text: text.into(), from_servers: false }
    }

    /// The agent itself could not.
    pub(crate) fn agent(text: impl Into<String>) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, text: text.into(), from_servers: false }
    }

    /// The same without the servers' headers, as of questions about keys.
    pub(crate) fn bare(self) -> Self {
        Self { from_servers: false, ..self }
    }

    /// The servers could not, or could not be asked.
    pub(crate) fn servers(text: impl Into<String>) -> Self {
        Self { from_servers: true, ..Self::agent(text) }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut answer = (self.status, self.text).into_response();
        if self.from_servers {
            let headers = answer.headers_mut();
            headers.insert("x-consul-index", HeaderValue::from(1));
            headers.insert("x-consul-knownleader", HeaderValue::from_static("false"));
            headers.insert("x-consul-lastcontact", HeaderValue::from(0));
        }
        answer
    }
}
