//! What a response says, looked for once.

use http::{HeaderMap, HeaderValue};

/// What is looked for in every response's headers and in its trailers.
#[derive(Clone, Copy, Default)]
pub(crate) struct Said<'a> {
    pub(crate) status: Option<&'a HeaderValue>,
    pub(crate) content_type: Option<&'a HeaderValue>,
    /// There are details of a status.
    pub(crate) details: bool,
}

/// All of it in one look.
#[inline]
pub(crate) fn said(headers: &HeaderMap) -> Said<'_> {
    let mut said = Said::default();
    for (name, value) in headers {
        match name.as_str() {
            "grpc-status" => said.status = said.status.or(Some(value)),
            "content-type" => said.content_type = said.content_type.or(Some(value)),
            "grpc-status-details-bin" => said.details = true,
            _ => {}
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_look_sees_the_first_of_each() {
        let mut headers = HeaderMap::new();
        assert!(said(&headers).status.is_none() && !said(&headers).details);
        for n in 0..2 {
            for name in ["grpc-status", "content-type", "other", "grpc-status-details-bin"] {
                headers.append(name, HeaderValue::from(n));
            }
        }
        let Said { status, content_type, details } = said(&headers);
        assert_eq!([status, content_type], [Some(&HeaderValue::from(0)); 2]);
        assert!(details);
    }
}
