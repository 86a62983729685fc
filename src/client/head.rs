//! What a request says besides its body, kept so that it can be said again.

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version, request::Parts};
use tonic::body::Body;

/// So many headers are kept in place. tonic's generated clients send two, and a third with a deadline.
const IN_PLACE: usize = 4;

/// A request's head between attempts.
///
/// Nearly every call has one attempt alone, so that the map itself leaves with
/// it, and what stays is a list: copying a `HeaderMap` costs two allocations
/// and its index. Extensions stay behind: nothing below reads them.
pub(crate) struct Head {
    method: Method,
    uri: Uri,
    version: Version,
    headers: Headers,
}

#[expect(
    clippy::large_enum_variant,
    reason = "every call becomes the large one, and a box is an allocation a call"
)]
enum Headers {
    /// As they came.
    Map(HeaderMap),
    /// Their copy, after the map has left.
    List([Option<(HeaderName, HeaderValue)>; IN_PLACE], Vec<(HeaderName, HeaderValue)>),
}

impl Head {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { method, uri, version, headers, .. } = parts;
        Self { method, uri, version, headers: Headers::Map(headers) }
    }

    pub(crate) fn uri(&self) -> &Uri {
        &self.uri
    }

    /// The request of one attempt.
    pub(crate) fn request(&mut self, body: Body) -> Request<Body> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.version_mut() = self.version;
        *request.headers_mut() = self.headers.next();
        request
    }
}

impl Headers {
    /// The headers of the next attempt.
    fn next(&mut self) -> HeaderMap {
        match self {
            Self::Map(map) => {
                let map = std::mem::take(map);
                let mut all = map.iter().map(|(name, value)| (name.clone(), value.clone()));
                *self = Self::List(std::array::from_fn(|_| all.next()), all.collect());
                map
            }
            Self::List(first, more) => {
                let mut map = HeaderMap::with_capacity(IN_PLACE + more.len());
                for (name, value) in first.iter().flatten().chain(more.iter()) {
                    map.append(name.clone(), value.clone());
                }
                map
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attempt_says_the_same() {
        let mut request = Request::new(Body::empty());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static("/counter.v1.Counter/Get");
        *request.version_mut() = Version::HTTP_2;
        for n in 0..3 {
            for name in ["te", "custom", "grpc-timeout"] {
                request.headers_mut().append(name, HeaderValue::from(n));
            }
        }
        let headers = request.headers().clone();
        let mut head = Head::new(request.into_parts().0);
        for _ in 0..3 {
            let attempt = head.request(Body::empty());
            assert_eq!(attempt.headers(), &headers);
            assert_eq!(attempt.method(), Method::POST);
            assert_eq!(attempt.uri(), "/counter.v1.Counter/Get");
            assert_eq!(attempt.version(), Version::HTTP_2);
        }
    }
}
