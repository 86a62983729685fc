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

/// Data in memory, frame by frame. Nearly always there is one, and it takes no allocation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    first: Option<Bytes>,
    // Nearly no call copies and drops a queue.
    more: Option<VecDeque<Bytes>>,
}

impl Kept {
    #[inline]
    pub(crate) fn push(&mut self, data: Bytes) {
        if self.is_empty() {
            self.first = Some(data);
        } else {
            self.more.get_or_insert_default().push_back(data);
        }
    }

    /// The one frame, where there is one alone.
    #[inline]
    pub(crate) fn single(&self) -> Option<&Bytes> {
        self.first.as_ref().filter(|_| self.more.is_none())
    }

    #[inline]
    fn pop(&mut self) -> Option<Bytes> {
        self.first.take().or_else(|| self.more.as_mut()?.pop_front())
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.first.is_none() && self.more.as_ref().is_none_or(|it| it.is_empty())
    }
}

/// Frames in memory, then the rest. It says that it has ended together with its
/// last frame, and leaves the length unsaid: gRPC bodies carry no `content-length`.
pub(crate) struct Frames {
    kept: Kept,
    then: Then,
}

/// What comes after the kept frames.
enum Then {
    End,
    Trailers(HeaderMap),
    Body(Body),
}

impl Frames {
    /// These frames and what the body still holds.
    pub(crate) fn before(kept: Kept, body: Body) -> Self {
        Self { kept, then: Then::Body(body) }
    }

    /// These frames, and trailers where there are any.
    #[inline]
    pub(crate) fn ending(kept: Kept, trailers: Option<HeaderMap>) -> Self {
        Self { kept, then: trailers.map_or(Then::End, Then::Trailers) }
    }

    /// The next frame is one that is in memory.
    pub(crate) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    #[inline]
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
        if let Some(data) = self.kept.pop() {
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

/// These frames and nothing else.
impl HttpBody for Kept {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.pop().map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_empty()
    }
}
