//! The socket under a connection: tells when it closes, and hears the peer out.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use hyper::rt::{Read, ReadBufCursor, Write};

use super::{endpoint::Link, report::LossCause};

/// A socket that tells its link when it is closed: within a millisecond of a
/// peer's death, without any call, and long before the registry knows.
///
/// A server that drains says last of all which streams it has not processed
/// (the second GOAWAY), and closes. Requests that cross this on the way make
/// the kernel answer with a reset, and the next write fails while those words
/// lie unread; h2 then gives the connection up, and nobody learns that the
/// calls never ran. So a write to a closed peer counts as done, for it makes no
/// difference, and the reads, which end soon, decide what became of the calls.
pub(crate) struct WatchedIo<I> {
    io: I,
    link: Arc<Link>,
    /// The peer has closed: what is written goes nowhere.
    deaf: bool,
}

impl<I> WatchedIo<I> {
    pub(crate) fn new(io: I, link: Arc<Link>) -> Self {
        Self { io, link, deaf: false }
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
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.written(result, len)
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, time::Duration};

    use hyper_util::rt::TokioIo;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
        sync::mpsc,
        time::timeout,
    };

    use super::*;

    async fn write(io: &mut TokioIo<WatchedIo<TokioIo<TcpStream>>>) {
        timeout(Duration::from_secs(20), io.write_all(b"more"))
            .await
            .expect("never blocks")
            .expect("counts as done");
    }

    #[tokio::test]
    async fn the_last_words_of_a_peer_that_has_reset_the_connection_are_heard() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let (reports, mut heard) = mpsc::unbounded_channel();
        let watched = WatchedIo::new(TokioIo::new(client), Link::new(1, reports));
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
