//! A request's body, kept so that it can be sent again.
//!
//! A unary request is there at once: it is drained with two polls and resent
//! from memory, as often as need be. It also leaves as one DATA frame with
//! END_STREAM, which spares the peer's small-frame accounting (a burst of
//! thousands of two-frame requests makes h2 servers close the connection).
//!
//! What is not there at once, or is larger than the limit, is *leased*: the
//! transport takes it at its first poll. A request that never left was never
//! polled, so even a client stream moves to another connection whole.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use http_body_util::StreamBody;
use parking_lot::Mutex;
use tonic::{Status, body::Body};

use super::{
    frames::{Frames, Kept},
    recording::Recording,
    together::polls_a_callers_own,
};

/// A request's body between attempts.
pub(crate) enum ReplayBody {
    /// All of it, in memory: nearly always a single frame.
    Whole(Kept),
    /// All of it, after the frame itself has left with the first attempt.
    Small(Small),
    /// What was ready, and the rest; gone once an attempt has polled it.
    Leased(Arc<Mutex<Option<Frames>>>),
    /// The same, kept while it is sent.
    Recorded(Recording),
}

impl ReplayBody {
    /// Takes what is ready, without waiting, up to `limit` bytes. What is not there at once is
    /// kept while it is sent, if it is to be recorded.
    #[inline]
    pub(crate) fn capture(mut body: Body, limit: usize, record: bool, cx: &mut Context<'_>) -> Self {
        let mut ready = Kept::default();
        let mut size = 0;
        loop {
            if body.is_end_stream() {
                return Self::Whole(ready);
            }
            match Pin::new(&mut body).poll_frame(cx) {
                Poll::Ready(None) => return Self::Whole(ready),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        size += data.len();
                        ready.push(data);
                        if size > limit {
                            break;
                        }
                    }
                    // gRPC requests have no trailers; what has is not replayed.
                    Err(_) => break,
                },
                Poll::Ready(Some(Err(status))) => {
                    // The caller's own stream failed: hand the error on as the body's.
                    body = Body::new(StreamBody::new(tokio_stream::once(Err(status))));
                    break;
                }
                Poll::Pending => break,
            }
        }
        Self::partly(ready, body, limit, record)
    }

    #[inline(never)]
    fn partly(ready: Kept, body: Body, limit: usize, record: bool) -> Self {
        let frames = Frames::before(ready, body);
        if record {
            return Self::Recorded(Recording::new(frames, limit));
        }
        Self::Leased(Arc::new(Mutex::new(Some(frames))))
    }

    /// Whether all of it is kept: then several attempts may be made at once.
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self, Self::Whole(_) | Self::Small(_))
    }

    /// The body of the first attempt, where it is the only one for now. `None` as for others.
    #[inline]
    pub(crate) fn first_attempt(&mut self) -> Option<Body> {
        let Self::Whole(kept) = self else { return self.attempt() };
        let Some(copy) = kept.single().and_then(Small::of) else { return self.attempt() };
        let whole = std::mem::replace(self, Self::Small(copy));
        if let Self::Whole(kept) = whole { Some(Body::new(kept)) } else { None }
    }

    /// The body of one attempt. `None` when it has been consumed.
    pub(crate) fn attempt(&self) -> Option<Body> {
        match self {
            Self::Whole(frames) => Some(Body::new(frames.clone())),
            Self::Small(small) => Some(Body::new(small.frame())),
            Self::Leased(rest) if rest.lock().is_some() => {
                Some(Body::new(Lease { rest: rest.clone(), taken: None }))
            }
            Self::Leased(_) => None,
            Self::Recorded(recording) => recording.attempt(),
        }
    }

    /// Takes the body back from an attempt that has ended, which can then no
    /// longer begin to send it. False where it has begun: no other attempt can
    /// be made.
    pub(crate) fn reclaim(&mut self) -> bool {
        let place = match self {
            Self::Whole(_) | Self::Small(_) => return true,
            Self::Recorded(recording) => return recording.reclaim(),
            Self::Leased(place) => place,
        };
        let rest = place.lock().take();
        let is_whole = rest.is_some();
        *place = Arc::new(Mutex::new(rest));
        is_whole
    }
}

/// A copy of a frame of few bytes: cheaper to make than to share the frame itself, which takes an allocation.
pub(crate) struct Small {
    len: usize,
    bytes: [u8; SMALL],
}

/// Up to so many bytes. Our choice: two cache lines.
const SMALL: usize = 128;

impl Small {
    #[inline]
    fn of(data: &Bytes) -> Option<Self> {
        let mut bytes = [0; SMALL];
        bytes.get_mut(..data.len())?.copy_from_slice(data);
        Some(Self { len: data.len(), bytes })
    }

    fn frame(&self) -> Kept {
        let mut kept = Kept::default();
        kept.push(Bytes::copy_from_slice(&self.bytes[..self.len]));
        kept
    }
}

/// Takes the body out of the shared place at its first poll.
struct Lease {
    rest: Arc<Mutex<Option<Frames>>>,
    taken: Option<Frames>,
}

impl HttpBody for Lease {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.taken.is_none() {
            let rest = self.rest.lock().take();
            self.taken = rest;
        }
        let Some(rest) = &mut self.taken else {
            return Poll::Ready(Some(Err(Status::internal(
                "the request's body was taken by another attempt",
            ))));
        };
        polls_a_callers_own();
        Pin::new(rest).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.taken.as_ref().is_some_and(HttpBody::is_end_stream)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http_body_util::BodyExt;
    use tokio_stream::StreamExt;

    use super::*;

    fn capture(body: Body, limit: usize) -> ReplayBody {
        ReplayBody::capture(body, limit, false, &mut Context::from_waker(std::task::Waker::noop()))
    }

    fn stream(frames: &[&'static str]) -> Body {
        let frames: Vec<_> =
            frames.iter().map(|s| Ok::<_, Status>(Frame::data(Bytes::from_static(s.as_bytes())))).collect();
        Body::new(StreamBody::new(tokio_stream::iter(frames)))
    }

    fn pending() -> Body {
        let never = tokio_stream::pending::<Result<Frame<Bytes>, Status>>();
        let first = tokio_stream::once(Ok(Frame::data(Bytes::from_static(b"first"))));
        Body::new(StreamBody::new(first.chain(never)))
    }

    fn text(body: Body) -> String {
        let all = body.collect().now_or_never().expect("ready").expect("no error").to_bytes();
        String::from_utf8(all.to_vec()).unwrap()
    }

    #[test]
    fn a_unary_body_is_sent_again_and_again_from_memory() {
        let mut body = capture(stream(&["message"]), 1024);
        for _ in 0..3 {
            assert!(body.reclaim());
            assert_eq!(text(body.attempt().unwrap()), "message");
        }
    }

    #[test]
    fn the_first_attempt_takes_a_small_frame_along_and_the_next_send_its_copy() {
        for message in ["", "small", &"x".repeat(SMALL), &"x".repeat(SMALL + 1)] {
            let frame = Bytes::copy_from_slice(message.as_bytes());
            let mut body = capture(
                Body::new(StreamBody::new(tokio_stream::once(Ok::<_, Status>(Frame::data(frame))))),
                1024,
            );
            assert_eq!(text(body.first_attempt().unwrap()), message);
            for _ in 0..2 {
                assert!(body.reclaim() && body.is_whole());
                assert_eq!(text(body.attempt().unwrap()), message);
            }
        }
        let mut body = capture(stream(&["one", "two"]), 1024);
        assert_eq!(text(body.first_attempt().unwrap()), "onetwo");
        assert_eq!(text(body.attempt().unwrap()), "onetwo");
        assert!(capture(Body::empty(), 1024).first_attempt().unwrap().is_end_stream());
    }

    #[test]
    fn the_last_frame_ends_the_stream_and_no_length_is_said() {
        let body = capture(stream(&["message"]), 1024);
        let mut attempt = body.attempt().unwrap();
        assert_eq!(attempt.size_hint().exact(), None);
        assert!(!attempt.is_end_stream());
        attempt.frame().now_or_never().expect("ready").expect("a frame").unwrap();
        assert!(attempt.is_end_stream(), "so the frame leaves with END_STREAM");
    }

    #[test]
    fn an_empty_body_has_ended_before_its_first_frame() {
        assert!(capture(Body::empty(), 1024).attempt().unwrap().is_end_stream());
    }

    #[test]
    fn a_stream_that_was_not_polled_moves_whole_and_one_that_was_is_gone() {
        let mut body = capture(pending(), 1024);
        drop(body.attempt().expect("first attempt"));
        assert!(body.reclaim(), "never polled");
        let mut second = body.attempt().expect("second attempt");
        second.frame().now_or_never().expect("ready").expect("a frame").unwrap();
        assert!(!body.reclaim());
        assert!(body.attempt().is_none());
    }

    #[test]
    fn an_attempt_that_was_given_up_cannot_take_the_body_from_the_next() {
        let mut body = capture(pending(), 1024);
        let mut first = body.attempt().expect("first attempt");
        assert!(body.reclaim());
        let mut second = body.attempt().expect("second attempt");
        first.frame().now_or_never().expect("ready").expect("a frame").unwrap_err();
        second.frame().now_or_never().expect("ready").expect("a frame").unwrap();
    }

    #[test]
    fn beyond_the_limit_it_is_sent_once_and_whole() {
        let body = capture(stream(&["12345", "67890", "abc"]), 7);
        let attempt = body.attempt().unwrap();
        assert_eq!(text(attempt), "1234567890abc");
        assert!(body.attempt().is_none());
    }

    #[test]
    fn an_error_of_the_callers_own_stream_reaches_the_transport() {
        let bad = vec![Err::<Frame<Bytes>, _>(Status::data_loss("mine"))];
        let body = capture(Body::new(StreamBody::new(tokio_stream::iter(bad))), 1024);
        let error = body.attempt().unwrap().collect().now_or_never().expect("ready").unwrap_err();
        assert_eq!(error.message(), "mine");
    }
}
