//! The socket under a connection: tells when it closes, hears the peer out, and writes what comes together together.

use std::{
    future::Future,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::{task::yield_now, time::Instant};

use super::{endpoint::Link, report::LossCause, together::Together};

/// A write that is smaller waits for more, once. The bound of grpc-go, whose writer lets others run
/// before it flushes less (`minBatchSize` in internal/transport/controlbuf.go).
const SMALL: usize = 1000;

/// What is as large leaves at once. The size of h2's own buffer of frames.
const FULL: usize = 16 * 1024;

/// Where fewer calls are under way, there is nobody to wait for. Our choice.
const FEW: usize = 4;

/// Where a write had to wait for longer, the runtime is too busy for this. Our choice.
const LONG: Duration = Duration::from_millis(1);

/// And no write waits then for so many times as long: so a runtime that is always busy, or whose threads
/// are blocked time and again, loses a hundredth of its time at most. Our choice.
const TIMES: u32 = 100;

/// The least and the most of that, so that what was busy once is soon as good as before. Our choice.
const BUSY_FOR: Duration = Duration::from_secs(1);
const BUSY_AT_MOST: Duration = Duration::from_secs(60);

/// A socket that tells its link when it is closed: within a millisecond of a
/// peer's death, without any call, and long before the registry knows.
///
/// A server that drains says last of all which streams it has not processed
/// (the second GOAWAY), and closes. Requests that cross this on the way make
/// the kernel answer with a reset, and the next write fails while those words
/// lie unread; h2 then gives the connection up, and nobody learns that the
/// calls never ran. So a write to a closed peer counts as done, for it makes no
/// difference, and the reads, which end soon, decide what became of the calls.
///
/// A write costs a client more than the rest of a small call, so two things make one of several:
///
/// * h2 lets a request's message come only when it is about to write the headers, and would write these by
///   themselves. A write waits until the connection's other tasks have done what they can, which takes no
///   turn of the runtime.
/// * Where many calls are under way, their next requests come a moment apart, as their answers do. A small
///   write is then put off until the runtime has looked at its sockets once more: no time passes but that of
///   those who have something to do. Where they have much to do, none is put off.
pub(crate) struct WatchedIo<I> {
    io: I,
    link: Arc<Link>,
    calls: Together,
    /// A write waits until the connection's tasks have done what they can.
    joins: bool,
    /// Since when a write is put off for a turn of the runtime.
    put_off: Option<Instant>,
    /// Until when none is.
    busy: Option<Instant>,
    /// The peer has closed: what is written goes nowhere.
    deaf: bool,
}

impl<I> WatchedIo<I> {
    /// `calls` runs those of this connection.
    pub(crate) fn new(io: I, link: Arc<Link>, calls: Together) -> Self {
        Self { io, link, calls, joins: false, put_off: None, busy: None, deaf: false }
    }

    /// Whether a write of `len` bytes is put off: until the connection's tasks are done, and then perhaps
    /// for one turn of the runtime.
    fn waits(&mut self, len: usize, cx: &mut Context<'_>) -> bool {
        if self.joins {
            // Mostly because a message has followed its headers.
            self.joins = false;
            self.calls.forget_last();
        } else if self.put_off.is_none() && len < FULL && self.calls.wake_last(cx.waker()) {
            self.joins = true;
            return true;
        }
        if let Some(since) = self.put_off.take() {
            let now = Instant::now();
            let waited = now - since;
            if waited > LONG {
                self.busy = Some(now + waited.saturating_mul(TIMES).clamp(BUSY_FOR, BUSY_AT_MOST));
            }
            return false;
        }
        if len >= SMALL || self.calls.calls() < FEW {
            return false;
        }
        let now = Instant::now();
        if self.busy.is_none_or(|until| until <= now) && pin!(yield_now()).poll(cx).is_pending() {
            self.put_off = Some(now);
        }
        self.put_off.is_some()
    }

    /// Lets a write of `len` bytes to a closed peer count as done.
    fn written(&mut self, result: Poll<io::Result<usize>>, len: usize) -> Poll<io::Result<usize>> {
        match result {
            Poll::Ready(Err(error)) if is_closed(&error) => {
                self.deaf = true;
                Poll::Ready(Ok(len))
            }
            other => other,
        }
    }
}

/// The peer's socket is gone.
fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset)
}

impl<I> Drop for WatchedIo<I> {
    fn drop(&mut self) {
        self.link.lose(LossCause::Closed);
    }
}

impl<I: Read + Unpin> Read for WatchedIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<I: Write + Unpin> Write for WatchedIo<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.deaf {
            return Poll::Ready(Ok(buf.len()));
        }
        if self.waits(buf.len(), cx) {
            return Poll::Pending;
        }
        let result = Pin::new(&mut self.io).poll_write(cx, buf);
        self.written(result, buf.len())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.deaf { Poll::Ready(Ok(())) } else { Pin::new(&mut self.io).poll_flush(cx) }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.deaf { Poll::Ready(Ok(())) } else { Pin::new(&mut self.io).poll_shutdown(cx) }
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let len = bufs.iter().map(|buf| buf.len()).sum();
        if self.deaf {
            return Poll::Ready(Ok(len));
        }
        if self.waits(len, cx) {
            return Poll::Pending;
        }
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.written(result, len)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use hyper::rt::Executor;
    use hyper_util::rt::TokioIo;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
        sync::mpsc,
        time::{advance, timeout},
    };

    use super::{super::together::OWN, *};

    async fn write(io: &mut TokioIo<WatchedIo<TokioIo<TcpStream>>>) {
        timeout(Duration::from_secs(20), io.write_all(b"more"))
            .await
            .expect("never blocks")
            .expect("counts as done");
    }

    /// Reports nobody listens to, a socket that takes everything, and so many calls that never end.
    async fn watched(calls: usize) -> WatchedIo<TokioIo<tokio::io::Sink>> {
        let together = Together::default();
        for _ in 0..calls + OWN {
            together.execute(Box::pin(std::future::pending()));
        }
        yield_now().await;
        // The task counts when it begins.
        together.execute(Box::pin(std::future::ready(())));
        yield_now().await;
        WatchedIo::new(TokioIo::new(tokio::io::sink()), Link::new(1, mpsc::unbounded_channel().0), together)
    }

    /// How often a write was put off.
    async fn waits(io: &mut WatchedIo<TokioIo<tokio::io::Sink>>, len: usize, vectored: bool) -> usize {
        let (bytes, mut waits) = (vec![0; len], 0);
        let written = poll_fn(|cx| {
            let written = match vectored {
                true => Pin::new(&mut *io).poll_write_vectored(cx, &[io::IoSlice::new(&bytes)]),
                false => Pin::new(&mut *io).poll_write(cx, &bytes),
            };
            waits += usize::from(written.is_pending());
            written
        });
        assert_eq!(written.await.unwrap(), len);
        waits
    }

    #[tokio::test]
    async fn a_write_waits_for_the_connections_tasks_and_a_small_one_of_many_calls_once_more() {
        for vectored in [false, true] {
            let mut many = watched(FEW).await;
            assert_eq!(waits(&mut many, SMALL - 1, vectored).await, 2);
            assert_eq!(waits(&mut many, SMALL, vectored).await, 1);
            assert_eq!(waits(&mut many, FULL, vectored).await, 0);
            assert_eq!(waits(&mut many, 1, vectored).await, 2, "each small one");
            assert_eq!(waits(&mut watched(FEW - 1).await, 1, vectored).await, 1);
            let link = Link::new(1, mpsc::unbounded_channel().0);
            let mut alone = WatchedIo::new(TokioIo::new(tokio::io::sink()), link, Together::default());
            assert_eq!(waits(&mut alone, 1, vectored).await, 0, "nothing runs");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_a_turn_takes_long_no_write_waits_for_a_while() {
        let blocked = Duration::from_millis(300);
        for (waited, not_for) in [
            (2 * LONG, BUSY_FOR),
            // All calls have waited for that: not once a second.
            (blocked, TIMES * blocked),
            (10 * BUSY_FOR, BUSY_AT_MOST),
        ] {
            let mut io = watched(FEW).await;
            // For the connection's tasks, and then for a turn.
            poll_fn(|cx| {
                assert!(Pin::new(&mut io).poll_write(cx, b"small").is_pending());
                assert!(Pin::new(&mut io).poll_write(cx, b"small").is_pending());
                Poll::Ready(())
            })
            .await;
            advance(waited).await;
            assert_eq!(waits(&mut io, 1, false).await, 0, "the one that was put off");
            advance(not_for - LONG).await;
            assert_eq!(waits(&mut io, 1, false).await, 1);
            advance(LONG).await;
            assert_eq!(waits(&mut io, 1, false).await, 2);
        }
    }

    #[tokio::test]
    async fn the_last_words_of_a_peer_that_has_reset_the_connection_are_heard() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let (reports, mut heard) = mpsc::unbounded_channel();
        let watched = WatchedIo::new(TokioIo::new(client), Link::new(1, reports), Together::default());
        let mut io = TokioIo::new(watched);

        write(&mut io).await;
        poll_fn(|cx| server.poll_peek(cx, &mut tokio::io::ReadBuf::new(&mut [0; 4]))).await.unwrap();
        server.write_all(b"last words").await.unwrap();
        // Closed with something unread: the kernel answers with a reset.
        drop(server);
        while !io.inner().deaf {
            write(&mut io).await;
            tokio::task::yield_now().await;
        }
        write(&mut io).await;
        let mut words = Vec::new();
        // The end is a reset or none, as the kernel has it.
        let _ = timeout(Duration::from_secs(20), io.read_to_end(&mut words)).await.expect("the reads end");
        assert_eq!(words, b"last words");
        drop(io);
        assert!(heard.try_recv().is_ok(), "the worker is told");
    }
}
