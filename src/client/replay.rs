//! A request's body, kept so that it can be sent again.
//!
//! A unary request is there at once: it is drained with two polls and resent
//! from memory, as often as need be. It also leaves as one DATA frame with
//! END_STREAM, which spares the peer's small-frame accounting (a burst of
//! thousands of two-frame requests makes h2 servers close the connection).
//! That holds as long as the peer's window for the connection does (1 MiB where
//! it is tonic's): of requests that are more together, hyper claims a byte for each
//! that waits, and h2 sends that byte as a frame of its own.
//!
//! What is not there at once, or is larger than the limit, is *leased*: the
//! transport takes it at its first poll. A request that never left was never
//! polled, so even a client stream moves to another connection whole.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use parking_lot::Mutex;
use tonic::{Status, body::Body};

use super::{
    frames::{Frames, Kept},
    recording::Recording,
    together::CallersOwn,
};

/// A request's body between attempts.
pub(crate) enum ReplayBody {
    /// All of it, in memory: nearly always a single frame.
    Whole(Kept),
    /// All of it, after the frame itself has left with the first attempt.
    Small(Small),
    /// What was ready, and the rest; gone once an attempt has polled it.
    Leased(Arc<Mutex<Place>>),
    /// The same, kept while it is sent.
    Recorded(Recording),
}

/// Where a leased body is.
pub(crate) enum Place {
    Here(Frames),
    Taken,
    /// It has been taken, and came to an error of its own.
    Failed(Status),
}

/// How the request of a call that is being answered fails, should it.
pub(crate) struct OwnError(Arc<Mutex<Place>>);

impl ReplayBody {
    /// Takes what is ready, without waiting, up to `limit` bytes. What is not there at once is
    /// kept while it is sent, if it is to be recorded.
    ///
    /// # Errors
    /// The body's own: a message is too large for the client that encodes it, or the caller has cancelled.
    #[inline]
    pub(crate) fn capture(
        mut body: Body,
        limit: usize,
        record: bool,
        cx: &mut Context<'_>,
    ) -> Result<Self, Status> {
        let mut ready = Kept::default();
        let mut size = 0;
        loop {
            if body.is_end_stream() {
                return Ok(Self::Whole(ready));
            }
            match Pin::new(&mut body).poll_frame(cx) {
                Poll::Ready(None) => return Ok(Self::Whole(ready)),
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
                Poll::Ready(Some(Err(status))) => return Err(status),
                Poll::Pending => break,
            }
        }
        Ok(Self::partly(ready, body, limit, record))
    }

    #[inline(never)]
    fn partly(ready: Kept, body: Body, limit: usize, record: bool) -> Self {
        let frames = Frames::before(ready, body);
        if record {
            return Self::Recorded(Recording::new(frames, limit));
        }
        Self::Leased(Arc::new(Mutex::new(Place::Here(frames))))
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
            Self::Leased(place) if matches!(*place.lock(), Place::Here(_)) => {
                Some(Body::new(Lease { place: place.clone(), taken: None, own: CallersOwn::default() }))
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
        let rest = std::mem::replace(&mut *place.lock(), Place::Taken);
        let is_whole = matches!(rest, Place::Here(_));
        *place = Arc::new(Mutex::new(rest));
        is_whole
    }

    /// What the body itself came to while it was sent.
    pub(crate) fn own_error(&self) -> Option<Status> {
        match self {
            Self::Whole(_) | Self::Small(_) => None,
            Self::Leased(place) => failed(place),
            Self::Recorded(recording) => recording.own_error(),
        }
    }

    /// For a response that comes while the request is still being sent.
    #[inline]
    pub(crate) fn goes_on(self) -> Option<OwnError> {
        // What is recorded is not kept for as long as the response lasts.
        if let Self::Leased(place) = self { Some(OwnError(place)) } else { None }
    }
}

impl OwnError {
    pub(crate) fn get(&self) -> Option<Status> {
        failed(&self.0)
    }
}

fn failed(place: &Mutex<Place>) -> Option<Status> {
    match &*place.lock() {
        Place::Failed(status) => Some(status.clone()),
        Place::Here(_) | Place::Taken => None,
    }
}

/// Polls a caller's own stream. One that panics has failed: the call is over, and needs not wait for its
/// deadline.
pub(crate) fn poll_own(
    frames: &mut Frames,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
    let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(frames).poll_frame(cx)));
    polled.unwrap_or_else(|_| Poll::Ready(Some(Err(Status::internal("the request's stream panicked")))))
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
    place: Arc<Mutex<Place>>,
    taken: Option<Frames>,
    own: CallersOwn,
}

impl HttpBody for Lease {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { place, taken, own } = &mut *self;
        if taken.is_none() {
            let mut place = place.lock();
            match std::mem::replace(&mut *place, Place::Taken) {
                Place::Here(rest) => *taken = Some(rest),
                failed => *place = failed,
            }
        }
        let Some(rest) = taken else {
            return Poll::Ready(Some(Err(Status::internal(
                "the request's body was taken by another attempt",
            ))));
        };
        if rest.has_kept() {
            return Pin::new(rest).poll_frame(cx);
        }
        ready!(own.poll(cx));
        let polled = poll_own(rest, cx);
        if let Poll::Ready(Some(Err(status))) = &polled {
            *place.lock() = Place::Failed(status.clone());
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.taken.as_ref().is_some_and(HttpBody::is_end_stream)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http_body_util::{BodyExt, StreamBody};
    use tokio_stream::StreamExt;

    use super::*;

    fn capture(body: Body, limit: usize) -> ReplayBody {
        ReplayBody::capture(body, limit, false, &mut Context::from_waker(std::task::Waker::noop())).unwrap()
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
        // A caller's own stream is not polled at once.
        let mut all = Box::pin(body.collect());
        let collected = (&mut all).now_or_never().or_else(|| all.now_or_never());
        let all = collected.expect("ready").expect("no error").to_bytes();
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
    fn an_error_of_the_callers_own_stream_ends_the_call_before_it_is_sent() {
        let bad = vec![Ok(Frame::data(Bytes::from_static(b"good"))), Err(Status::data_loss("mine"))];
        let bad = Body::new(StreamBody::new(tokio_stream::iter(bad)));
        let cx = &mut Context::from_waker(std::task::Waker::noop());
        let error = ReplayBody::capture(bad, 1024, false, cx).err().expect("its own");
        assert_eq!(error.message(), "mine");
    }

    #[test]
    fn one_that_comes_later_and_a_panic_reach_the_transport_and_the_call() {
        for panics in [false, true] {
            let mut polls = 0;
            let later = futures_util::stream::poll_fn(move |_| {
                polls += 1;
                match polls {
                    1 => Poll::Pending,
                    _ if panics => panic!("as it should"),
                    _ => Poll::Ready(Some(Err::<Frame<Bytes>, _>(Status::data_loss("mine")))),
                }
            });
            let body = capture(Body::new(StreamBody::new(later)), 1024);
            let mut attempt = body.attempt().unwrap();
            assert!(
                attempt.frame().now_or_never().is_none(),
                "not where all requests of a connection are sent"
            );
            assert!(body.own_error().is_none());
            let error = attempt.frame().now_or_never().expect("ready").expect("a frame").unwrap_err();
            assert_eq!(error.message(), if panics { "the request's stream panicked" } else { "mine" });
            assert_eq!(body.own_error().map(|it| it.code()), Some(error.code()));
            assert_eq!(body.goes_on().and_then(|it| it.get()).map(|it| it.code()), Some(error.code()));
        }
    }
}
