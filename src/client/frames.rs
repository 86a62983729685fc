//! A body of which part is in memory: kept frames, and what comes after them.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame};
use tonic::{Status, body::Body};

/// Frames in memory, then the rest. It says that it has ended together with its
/// last frame, and leaves the length unsaid: gRPC bodies carry no `content-length`.
pub(crate) struct Frames {
    kept: VecDeque<Bytes>,
    then: Then,
}

/// What comes after the kept frames.
enum Then {
    End,
    Trailers(HeaderMap),
    Body(Body),
}

impl Frames {
    /// These frames and nothing else.
    pub(crate) fn only(kept: VecDeque<Bytes>) -> Self {
        Self { kept, then: Then::End }
    }

    /// These frames and what the body still holds.
    pub(crate) fn before(kept: VecDeque<Bytes>, body: Body) -> Self {
        Self { kept, then: Then::Body(body) }
    }

    /// These frames, and trailers where there are any.
    pub(crate) fn ending(kept: VecDeque<Bytes>, trailers: Option<HeaderMap>) -> Self {
        Self { kept, then: trailers.map_or(Then::End, Then::Trailers) }
    }

    pub(crate) fn trailers(&self) -> Option<&HeaderMap> {
        match &self.then {
            Then::Trailers(trailers) => Some(trailers),
            Then::End | Then::Body(_) => None,
        }
    }
}

impl HttpBody for Frames {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(data) = self.kept.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if let Then::Body(body) = &mut self.then {
            return Pin::new(body).poll_frame(cx);
        }
        Poll::Ready(match std::mem::replace(&mut self.then, Then::End) {
            Then::Trailers(trailers) => Some(Ok(Frame::trailers(trailers))),
            Then::End | Then::Body(_) => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.kept.is_empty()
            && match &self.then {
                Then::End => true,
                Then::Trailers(_) => false,
                Then::Body(body) => body.is_end_stream(),
            }
    }
}
