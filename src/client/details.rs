//! Status details as they come over the wire.
//!
//! tonic panics on a `grpc-status-details-bin` that is no base64. A peer must
//! not be able to do that to a caller, or to the task that looks after it.

use std::task::{Context, Poll};

use http::{HeaderMap, HeaderName, Request, Response};
use http_body_util::BodyExt;
use tonic::{
    body::Body,
    metadata::MetadataMap,
    transport::{self, Channel},
};
use tower::Service;

use super::connector::BoxFuture;

const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// Removes details that tonic could not decode; code and message stay.
#[cold]
pub(crate) fn drop_malformed(headers: &mut HeaderMap) {
    let Some(value) = headers.get(&DETAILS) else { return };
    let alone = MetadataMap::from_headers(HeaderMap::from_iter([(DETAILS, value.clone())]));
    if alone.get_bin(DETAILS.as_str()).is_none_or(|value| value.to_bytes().is_err()) {
        tracing::warn!("dropped {DETAILS}: no base64");
        headers.remove(DETAILS);
    }
}

/// A channel for our own calls, whose answers have been through [`drop_malformed`].
#[derive(Clone)]
pub(crate) struct Checked(pub(crate) Channel);

impl Service<Request<Body>> for Checked {
    type Response = Response<Body>;
    type Error = transport::Error;
    type Future = BoxFuture<Result<Response<Body>, transport::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), transport::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move {
            let mut response = answer.await?;
            drop_malformed(response.headers_mut());
            Ok(response.map(|body| {
                Body::new(body.map_frame(|mut frame| {
                    frame.trailers_mut().map(drop_malformed);
                    frame
                }))
            }))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_base64_stays_and_what_is_not_goes() {
        for (value, stays) in [("YSBtZXNzYWdl", true), ("YQ", true), ("YQ==", true), ("", true), ("!", false)]
        {
            let mut headers = HeaderMap::new();
            headers.insert(DETAILS, value.parse().unwrap());
            drop_malformed(&mut headers);
            assert_eq!(headers.contains_key(DETAILS), stays, "{value:?}");
        }
    }
}
