//! Looking for a header.

use http::{HeaderMap, HeaderName, HeaderValue};

/// In maps up to this size every entry is looked at.
const FEW: usize = 8;

/// `grpc-status`.
pub(crate) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// The first value under `name`, as [`HeaderMap::get`] finds it. gRPC's maps have
/// two or three entries, and comparing names takes a fifth of the instructions
/// that hashing one does; a call looks for half a dozen.
pub(crate) fn find<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    if headers.len() > FEW {
        return headers.get(name);
    }
    headers.iter().find_map(|(other, value)| (other == name).then_some(value))
}

/// What is looked for in every response's headers and in its trailers.
#[derive(Clone, Copy, Default)]
pub(crate) struct Said<'a> {
    pub(crate) status: Option<&'a HeaderValue>,
    pub(crate) content_type: Option<&'a HeaderValue>,
    /// There are details of a status.
    pub(crate) details: bool,
}

/// All of it in one look.
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
    fn it_finds_what_the_map_finds() {
        for others in [0, 3, FEW, 40] {
            let mut headers = HeaderMap::new();
            for n in 0..others {
                headers.append(HeaderName::try_from(format!("other-{n}")).unwrap(), HeaderValue::from(n));
            }
            assert_eq!(find(&headers, &GRPC_STATUS), None);
            headers.append(GRPC_STATUS, HeaderValue::from(14));
            headers.append(GRPC_STATUS, HeaderValue::from(0));
            assert_eq!(find(&headers, &GRPC_STATUS), headers.get(GRPC_STATUS));
            assert_eq!(find(&headers, &GRPC_STATUS), Some(&HeaderValue::from(14)));
        }
    }

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
