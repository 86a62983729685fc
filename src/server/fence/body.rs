//! A response's body behind the fence: it ends when the role does.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Instant;
use tonic::{Status, body::Body};

use super::gate::Passage;
use crate::not_primary::PrimaryLost;

/// What the handler answers, as long as its term goes on.
///
/// Nothing tells a single message from the first of a stream, and a single one is passed on whatever
/// becomes of the role. So the first frame and the trailers always are, as long as they are there when
/// they are asked for; what is to be waited for, or comes after the first, is the primary's alone.
pub(super) struct FencedBody {
    /// `None` once it has ended.
    live: Option<(Body, Passage)>,
    /// A message has been passed on.
    begun: bool,
    /// Made at the first wait: a single message is there at once.
    over: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl FencedBody {
    pub(super) fn new(inner: Body, passage: Passage) -> Self {
        Self { live: Some((inner, passage)), begun: false, over: None }
    }

    /// The handler's own end.
    fn end(&mut self) {
        (self.live, self.over) = (None, None);
    }

    /// Ours in its place.
    fn cut(&mut self) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let primary = self.live.take().and_then(|(_, passage)| passage.primary());
        self.over = None;
        let (status, mut trailers) = (Status::from(PrimaryLost::new(primary)), HeaderMap::new());
        let written = status.add_header(&mut trailers);
        Poll::Ready(Some(written.map(|()| Frame::trailers(trailers))))
    }
}

impl HttpBody for FencedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Some((inner, passage)) = &mut this.live else { return Poll::Ready(None) };
        match Pin::new(inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) if frame.is_data() => {
                if this.begun && !passage.holds(Instant::now()) {
                    return this.cut();
                }
                this.begun = true;
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(last) => {
                this.end();
                Poll::Ready(last)
            }
            Poll::Pending => {
                let over = this.over.get_or_insert_with(|| Box::pin(passage.over()));
                ready!(over.as_mut().poll(cx));
                this.cut()
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.live.as_ref().is_none_or(|(inner, _)| inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.live.as_ref().map_or_else(|| SizeHint::with_exact(0), |(inner, _)| inner.size_hint())
    }
}
