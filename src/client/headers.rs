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
}
