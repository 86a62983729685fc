//! A request's body that is kept while it is sent, so that it can be sent again when the server has refused
//! the call: what [`Leased`](super::replay::ReplayBody) bodies cannot, which are gone at their first poll.
//!
//! It belongs to one attempt at a time. Taking it back ends the attempt that had it: its body fails, so that
//! the transport gives the old stream up.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame};
use parking_lot::Mutex;
use tonic::{Status, body::Body};

use super::{frames::Frames, replay::poll_own, together::CallersOwn};

/// The body between attempts. Clones are the same body.
#[derive(Clone)]
pub(crate) struct Recording(Arc<Mutex<Tape>>);

struct Tape {
    /// What has not been asked for yet; `None` while an attempt asks for it: a caller's stream may take its time,
    /// and nobody else is to wait for that.
    rest: Option<Frames>,
    ended: bool,
    /// What it came to by itself.
    failed: Option<Status>,
    /// What has; `None` once that is more than may be kept.
    sent: Option<Vec<Bytes>>,
    /// In bytes.
    size: usize,
    limit: usize,
    /// Whose it is: the how manieth attempt's.
    turn: u64,
    /// Of the attempt that has it and waits.
    waker: Option<Waker>,
}

/// The body of one attempt.
struct Play {
    tape: Arc<Mutex<Tape>>,
    turn: u64,
    /// How much of what was sent it has sent again.
    place: usize,
    own: CallersOwn,
}

// === impl Recording ===

impl Recording {
    /// Keeps up to `limit` bytes of it.
    pub(crate) fn new(rest: Frames, limit: usize) -> Self {
        Self(Arc::new(Mutex::new(Tape {
            rest: Some(rest),
            ended: false,
            failed: None,
            sent: Some(Vec::new()),
            size: 0,
            limit,
            turn: 0,
            waker: None,
        })))
    }

    /// The body of one attempt. `None` where it cannot be sent from its beginning any more.
    pub(crate) fn attempt(&self) -> Option<Body> {
        let turn = {
            let tape = self.0.lock();
            tape.sent.is_some().then_some(tape.turn)?
        };
        // Asks it at once whether it has ended, which takes the lock.
        Some(Body::new(Play { tape: self.0.clone(), turn, place: 0, own: CallersOwn::default() }))
    }

    /// What it came to by itself.
    pub(crate) fn own_error(&self) -> Option<Status> {
        self.0.lock().failed.clone()
    }

    /// Takes it back. False where it cannot be sent again.
    pub(crate) fn reclaim(&self) -> bool {
        let (is_whole, waker) = {
            let mut tape = self.0.lock();
            tape.turn += 1;
            (tape.sent.is_some(), tape.waker.take())
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        is_whole
    }
}

// === impl Tape ===

impl Tape {
    /// Its attempt waits.
    fn wait(&mut self, cx: &Context<'_>) {
        self.waker = Some(cx.waker().clone());
    }

    /// Data that came for an attempt that has lost it is kept in any case: the next one has it from here alone.
    fn record(&mut self, data: &Bytes, lost: bool) {
        self.size += data.len();
        if self.size > self.limit && !lost {
            self.sent = None;
        } else if let Some(sent) = &mut self.sent {
            sent.push(data.clone());
        }
    }
}

/// What an attempt gets that has lost it.
fn elsewhere() -> Poll<Option<Result<Frame<Bytes>, Status>>> {
    Poll::Ready(Some(Err(Status::cancelled("the request is sent elsewhere"))))
}

impl HttpBody for Play {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let mut tape = this.tape.lock();
        if tape.turn != this.turn {
            return elsewhere();
        }
        if let Some(data) = tape.sent.as_ref().and_then(|sent| sent.get(this.place)) {
            let data = data.clone();
            this.place += 1;
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if let Some(status) = &tape.failed {
            return Poll::Ready(Some(Err(status.clone())));
        }
        if tape.ended {
            return Poll::Ready(None);
        }
        let Some(mut rest) = tape.rest.take() else {
            // By the attempt before, which wakes this one.
            tape.wait(cx);
            return Poll::Pending;
        };
        if !rest.has_kept() && this.own.poll(cx).is_pending() {
            tape.rest = Some(rest);
            return Poll::Pending;
        }
        drop(tape);
        let polled = poll_own(&mut rest, cx);
        let mut tape = this.tape.lock();
        tape.rest = Some(rest);
        let lost = tape.turn != this.turn;
        match &polled {
            Poll::Pending if lost => {}
            Poll::Pending => tape.wait(cx),
            Poll::Ready(None) => tape.ended = true,
            Poll::Ready(Some(Ok(frame))) => match frame.data_ref() {
                Some(data) => {
                    tape.record(data, lost);
                    this.place += 1;
                }
                // gRPC requests have no trailers; what has is not sent again.
                None => {
                    tape.sent = None;
                    tape.failed = lost
                        .then(|| Status::internal("the request's trailers were taken by another attempt"));
                }
            },
            Poll::Ready(Some(Err(status))) => {
                (tape.sent, tape.failed) = (None, Some(status.clone()));
            }
        }
        if !lost {
            return polled;
        }
        let waker = tape.waker.take();
        drop(tape);
        if let Some(waker) = waker {
            waker.wake();
        }
        elsewhere()
    }

    fn is_end_stream(&self) -> bool {
        let tape = self.tape.lock();
        let replayed = tape.sent.as_ref().is_none_or(|sent| sent.len() <= self.place);
        tape.turn == self.turn
            && replayed
            && (tape.ended || tape.rest.as_ref().is_some_and(HttpBody::is_end_stream))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use http_body_util::{BodyExt, StreamBody};
    use tokio_stream::{StreamExt, wrappers::ReceiverStream};

    use super::*;
    use crate::client::frames::Kept;

    fn recording(limit: usize) -> (tokio::sync::mpsc::Sender<&'static str>, Recording) {
        let (sender, receiver) = tokio::sync::mpsc::channel(8);
        let frames = ReceiverStream::new(receiver)
            .map(|text: &'static str| Ok::<_, Status>(Frame::data(Bytes::from_static(text.as_bytes()))));
        (sender, Recording::new(Frames::before(Kept::default(), Body::new(StreamBody::new(frames))), limit))
    }

    async fn frame(body: &mut Body) -> String {
        let data = body.frame().await.expect("a frame").expect("no error").into_data().expect("data");
        String::from_utf8(data.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn what_was_sent_is_sent_again_and_then_the_rest() {
        let (sender, recording) = recording(100);
        let mut first = recording.attempt().unwrap();
        for text in ["one", "two"] {
            sender.send(text).await.unwrap();
            assert_eq!(frame(&mut first).await, text);
        }
        assert!(recording.reclaim());
        let mut second = recording.attempt().unwrap();
        sender.send("three").await.unwrap();
        drop(sender);
        for text in ["one", "two", "three"] {
            assert!(!second.is_end_stream());
            assert_eq!(frame(&mut second).await, text);
        }
        assert!(second.frame().await.is_none());
        assert!(recording.reclaim());
        let third = recording.attempt().unwrap().collect().await.unwrap().to_bytes();
        assert_eq!(third, "onetwothree", "also after its end");
    }

    #[tokio::test]
    async fn an_attempt_that_lost_it_is_woken_and_fails_and_takes_nothing() {
        let (sender, recording) = recording(100);
        let mut first = recording.attempt().unwrap();
        let waiting = tokio::spawn(async move { first.frame().await });
        tokio::task::yield_now().await;
        assert!(recording.reclaim());
        assert!(waiting.await.unwrap().expect("it ends").is_err());
        sender.send("one").await.unwrap();
        assert_eq!(frame(&mut recording.attempt().unwrap()).await, "one");
    }

    #[tokio::test]
    async fn beyond_the_limit_it_goes_on_and_is_sent_once() {
        let (sender, recording) = recording(5);
        let mut only = recording.attempt().unwrap();
        for text in ["one", "two", "three"] {
            sender.send(text).await.unwrap();
            assert_eq!(frame(&mut only).await, text);
        }
        drop(sender);
        assert!(only.frame().now_or_never().expect("ended").is_none());
        assert!(only.is_end_stream());
        assert!(!recording.reclaim());
        assert!(recording.attempt().is_none());
    }

    /// A caller's stream may take its time over a message, and whoever ends the attempt must not wait for that.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_stream_that_blocks_keeps_nobody_from_taking_it_back_and_loses_nothing() {
        let (go, gone) = std::sync::mpsc::channel();
        let (blocks, blocked) = tokio::sync::oneshot::channel();
        let mut blocks = Some(blocks);
        let frames = tokio_stream::iter(["one", "two"]).map(move |text| {
            if let Some(blocks) = blocks.take() {
                blocks.send(()).unwrap();
                gone.recv_timeout(std::time::Duration::from_secs(20)).expect("nobody waits for it");
            }
            Ok::<_, Status>(Frame::data(Bytes::from_static(text.as_bytes())))
        });
        let recording =
            Recording::new(Frames::before(Kept::default(), Body::new(StreamBody::new(frames))), 100);
        let mut first = recording.attempt().unwrap();
        let first = tokio::spawn(async move { first.frame().await });
        blocked.await.unwrap();
        assert!(recording.own_error().is_none());
        assert!(recording.reclaim());
        let mut second = recording.attempt().unwrap();
        let second = tokio::spawn(async move { (frame(&mut second).await, frame(&mut second).await) });
        go.send(()).unwrap();
        assert!(first.await.unwrap().expect("it ends").is_err());
        assert_eq!(second.await.unwrap(), ("one".to_owned(), "two".to_owned()));
    }
}
