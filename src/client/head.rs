//! What a request says besides its body, kept so that it can be said again.

use http::{
    HeaderName, HeaderValue, Method, Request, Version,
    header::{CONTENT_TYPE, TE},
    request::Parts,
    uri::PathAndQuery,
};
use tonic::body::Body;

/// What every request of a gRPC client says.
const TRAILERS: HeaderValue = HeaderValue::from_static("trailers");
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// A request's head between attempts, without its path.
///
/// Nearly every call has one attempt alone, so that the request's own map leaves
/// with it, and what stays is a list: copying a `HeaderMap` costs two allocations
/// and its index. Extensions stay behind: nothing below reads them.
pub(crate) struct Head {
    method: Method,
    version: Version,
    te: bool,
    content_type: bool,
    others: Vec<(HeaderName, HeaderValue)>,
}

impl Head {
    /// Keeps what a request says. Its time-out is looked for on the way.
    #[inline]
    pub(crate) fn of(parts: &Parts) -> (Self, Option<&HeaderValue>) {
        let Parts { method, version, headers, .. } = parts;
        let (mut te, mut content_type, mut timeout, mut others) = (false, false, None, Vec::new());
        for (name, value) in headers {
            match name.as_str() {
                "te" if !te && *value == TRAILERS => {
                    te = true;
                    continue;
                }
                "content-type" if !content_type && *value == GRPC => {
                    content_type = true;
                    continue;
                }
                "grpc-timeout" => timeout = timeout.or(Some(value)),
                _ => {}
            }
            other(&mut others, name, value);
        }
        (Self { method: method.clone(), version: *version, te, content_type, others }, timeout)
    }

    /// The request once more.
    pub(crate) fn request(&self, path: PathAndQuery, body: Body) -> Request<Body> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = path.into();
        *request.version_mut() = self.version;
        let headers = request.headers_mut();
        headers.reserve(2 + self.others.len());
        let usual = [(self.te, TE, TRAILERS), (self.content_type, CONTENT_TYPE, GRPC)];
        headers.extend(usual.into_iter().filter(|it| it.0).map(|(_, name, value)| (name, value)));
        for (name, value) in &self.others {
            headers.append(name, value.clone());
        }
        request
    }
}

/// Apart, for most calls have none.
#[inline(never)]
fn other(others: &mut Vec<(HeaderName, HeaderValue)>, name: &HeaderName, value: &HeaderValue) {
    others.push((name.clone(), value.clone()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attempt_says_the_same() {
        let mut request = Request::new(Body::empty());
        *request.method_mut() = Method::POST;
        *request.version_mut() = Version::HTTP_2;
        for (name, value) in [("te", TRAILERS), ("content-type", GRPC)] {
            request.headers_mut().append(name, value);
        }
        for n in 0..3 {
            for name in ["te", "custom", "grpc-timeout", "content-type"] {
                request.headers_mut().append(name, HeaderValue::from(n));
            }
        }
        let (parts, _) = request.into_parts();
        let headers = parts.headers.clone();
        let (head, timeout) = Head::of(&parts);
        assert_eq!(timeout, Some(&HeaderValue::from(0)), "the first of them");
        for _ in 0..2 {
            let attempt = head.request(PathAndQuery::from_static("/counter.v1.Counter/Get"), Body::empty());
            assert_eq!(attempt.headers(), &headers);
            assert_eq!(attempt.method(), Method::POST);
            assert_eq!(attempt.uri(), "/counter.v1.Counter/Get");
            assert_eq!(attempt.version(), Version::HTTP_2);
        }
    }
}
