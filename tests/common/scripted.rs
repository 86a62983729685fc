//! An HTTP/2 server that is told, request by request, how to misbehave.
//!
//! Health checks are answered well unless it is told otherwise, so that it is
//! published; everything else is asked of the script and written down.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt, stream::FuturesUnordered};
use h2::{Reason, RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::broadcast,
    task::JoinSet,
};

/// One request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    /// Among all requests but health checks, from 1.
    pub(crate) number: usize,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    /// On which connection, from 1.
    pub(crate) connection: usize,
    pub(crate) stream: u32,
}

impl Ask {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|v| v.to_str().unwrap())
    }
}

impl Act {
    pub(crate) fn after(self, wait: Duration) -> Self {
        Self::After(wait, Box::new(self))
    }
}

/// What to do with a request.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Reads the request to its end and answers with one empty message.
    Answer,
    /// This, after a while.
    After(Duration, Box<Act>),
    /// A status in the headers ("trailers-only"), with more headers beside it.
    Status(i32, &'static str, Vec<(&'static str, &'static str)>),
    /// A `grpc-status` that may be no number, in the headers.
    StatusText(&'static str),
    /// The same as a status, once the whole request has been read.
    ReadThenStatus(i32, &'static str),
    /// An HTTP status without any grpc-status, as a proxy gives it.
    Http(u16),
    /// An HTTP status, a content type, and a page for people.
    Page(u16, &'static str),
    /// RST_STREAM before any header.
    Reset(Reason),
    /// The same, once the whole request has been read.
    ReadThenReset(Reason),
    /// GOAWAY with this last stream id. Streams up to it go on; the request itself hangs.
    GoAway(u32),
    /// The same for another reason.
    GoAwayFor(u32, Reason),
    /// No answer.
    Hang,
    /// The connection is closed.
    Close,
    /// Headers and so many messages, and then this end.
    Begin(usize, End),
}

/// The end of a response that has begun.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Hang,
    Reset(Reason),
    Status(i32),
    /// END_STREAM where trailers should be.
    NoTrailers,
    /// A `grpc-status` that may be no number, in the trailers.
    StatusText(&'static str),
    /// Trailers that hold no `grpc-status`.
    NoStatus,
    /// A status, with a `grpc-retry-pushback-ms` beside it.
    Pushback(i32, &'static str),
    /// A status, with these `grpc-status-details-bin` beside it.
    Details(i32, &'static str),
    /// Trailers that say INVALID_ARGUMENT, with details that are no base64.
    BadDetails,
    /// One message that says NOT_SERVING, and a good end: for health checks.
    NotServing,
}

/// To all open connections.
#[derive(Clone, Copy, Debug)]
enum Command {
    GoAway,
    Cut,
    Reset,
}

type Script = dyn Fn(&Ask) -> Act + Send + Sync;

struct Shared {
    script: Box<Script>,
    streams: u32,
    health: Mutex<Act>,
    asks: Mutex<Vec<Ask>>,
    checks: AtomicUsize,
    connections: AtomicUsize,
    open: AtomicUsize,
    /// Bytes of the requests' bodies.
    received: AtomicUsize,
    /// Requests left unanswered that the client has given up.
    cancelled: AtomicUsize,
}

/// The running server; dropping it closes everything.
pub(crate) struct Scripted {
    pub(crate) port: u16,
    shared: Arc<Shared>,
    commands: broadcast::Sender<Command>,
    _tasks: JoinSet<()>,
}

impl Scripted {
    pub(crate) async fn start(script: impl Fn(&Ask) -> Act + Send + Sync + 'static) -> Self {
        Self::limited(u32::MAX, script).await
    }

    /// Allows so many streams at once on a connection.
    pub(crate) async fn limited(streams: u32, script: impl Fn(&Ask) -> Act + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            script: Box::new(script),
            streams,
            health: Mutex::new(Act::Answer),
            asks: Mutex::default(),
            checks: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            received: AtomicUsize::new(0),
            cancelled: AtomicUsize::new(0),
        });
        let (commands, _) = broadcast::channel(16);
        let mut tasks = JoinSet::new();
        let (all, orders) = (shared.clone(), commands.clone());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((stream, _)) = listener.accept() => {
                        let number = all.connections.fetch_add(1, Ordering::SeqCst) + 1;
                        let (all, orders) = (all.clone(), orders.subscribe());
                        connections.spawn(async move {
                            let _open = Open::new(&all);
                            serve(stream, number, &all, orders).await;
                        });
                    }
                    Some(_) = connections.join_next() => {}
                }
            }
        });
        Self { port, shared, commands, _tasks: tasks }
    }

    /// A server that answers everything.
    pub(crate) async fn good() -> Self {
        Self::start(|_| Act::Answer).await
    }

    /// What becomes of health checks from now on.
    pub(crate) fn health(&self, act: Act) {
        *self.shared.health.lock() = act;
    }

    /// The requests so far, without health checks.
    pub(crate) fn asks(&self) -> Vec<Ask> {
        self.shared.asks.lock().clone()
    }

    /// The health checks so far.
    pub(crate) fn checks(&self) -> usize {
        self.shared.checks.load(Ordering::SeqCst)
    }

    /// The connections ever accepted.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// The connections that are open.
    pub(crate) fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// How many bytes of requests' bodies have come.
    pub(crate) fn received(&self) -> usize {
        self.shared.received.load(Ordering::SeqCst)
    }

    /// How many requests that were to hang the client has reset with CANCEL.
    pub(crate) fn cancelled(&self) -> usize {
        self.shared.cancelled.load(Ordering::SeqCst)
    }

    /// GOAWAY on every connection, as a server sends it that drains.
    pub(crate) fn go_away(&self) {
        let _ = self.commands.send(Command::GoAway);
    }

    /// Resets every connection: TCP's RST in place of a good end.
    pub(crate) fn reset(&self) {
        let _ = self.commands.send(Command::Reset);
    }

    /// Closes every connection.
    pub(crate) fn cut(&self) {
        let _ = self.commands.send(Command::Cut);
    }
}

/// Counts a connection while it is open.
struct Open<'a>(&'a Shared);

impl<'a> Open<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.open.fetch_add(1, Ordering::SeqCst);
        Self(shared)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn serve(stream: TcpStream, number: usize, shared: &Shared, mut orders: broadcast::Receiver<Command>) {
    stream.set_nodelay(true).unwrap();
    let io = Shareable(Arc::new(stream));
    let raw = io.clone();
    let mut builder = h2::server::Builder::new();
    if shared.streams < u32::MAX {
        builder.max_concurrent_streams(shared.streams);
    }
    let Ok(mut connection) = builder.handshake(io).await else { return };
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            order = orders.recv() => match order {
                Ok(Command::GoAway) => connection.graceful_shutdown(),
                Ok(Command::Reset) => return raw.0.set_zero_linger().unwrap(),
                _ => return,
            },
            accepted = connection.accept() => {
                let Some(Ok((request, respond))) = accepted else { return };
                let act = asked(&request, number, respond.stream_id().as_u32(), shared);
                match act {
                    Act::Close => return,
                    // Between two frames: this task alone writes, and what h2 had to say is out.
                    Act::GoAway(last) => go_away(&raw.0, last, Reason::NO_ERROR),
                    Act::GoAwayFor(last, reason) => go_away(&raw.0, last, reason),
                    _ => {}
                }
                running.push(perform(act, request, respond, shared));
            }
            Some(()) = running.next(), if !running.is_empty() => {}
        }
    }
}

fn asked(request: &Request<RecvStream>, connection: usize, stream: u32, shared: &Shared) -> Act {
    let path = request.uri().path().to_owned();
    if path.starts_with("/grpc.health.v1.Health/") {
        shared.checks.fetch_add(1, Ordering::SeqCst);
        return shared.health.lock().clone();
    }
    let ask = {
        let mut asks = shared.asks.lock();
        let ask =
            Ask { number: asks.len() + 1, path, headers: request.headers().clone(), connection, stream };
        asks.push(ask.clone());
        ask
    };
    (shared.script)(&ask)
}

async fn perform(
    mut act: Act,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    shared: &Shared,
) {
    // A caller that is gone need not be answered: results are not looked at.
    let health = request.uri().path().starts_with("/grpc.health.v1.Health/");
    let mut body = request.into_body();
    while let Act::After(wait, then) = act {
        tokio::time::sleep(wait).await;
        act = *then;
    }
    match act {
        Act::Answer => answer(&mut body, respond, shared, health).await,
        Act::Status(code, message, more) => {
            let mut response = head();
            *response.headers_mut() = status(code, message);
            response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
            for (name, value) in more {
                response.headers_mut().append(HeaderName::from_static(name), HeaderValue::from_static(value));
            }
            let _ = respond.send_response(response, true);
        }
        Act::ReadThenStatus(code, message) => {
            read(&mut body, shared).await;
            let mut response = head();
            response.headers_mut().extend(status(code, message));
            let _ = respond.send_response(response, true);
        }
        Act::StatusText(text) => {
            let mut response = head();
            response.headers_mut().insert("grpc-status", HeaderValue::from_static(text));
            let _ = respond.send_response(response, true);
        }
        Act::Page(code, content) => {
            let response = Response::builder().status(code).header("content-type", content);
            let Ok(mut stream) = respond.send_response(response.body(()).unwrap(), false) else { return };
            let _ = stream.send_data(Bytes::from_static(b"<html>no such luck</html>"), true);
        }
        Act::Http(code) => {
            let response = Response::builder().status(code).header("content-type", "text/html");
            let _ = respond.send_response(response.body(()).unwrap(), true);
        }
        Act::Reset(reason) => respond.send_reset(reason),
        Act::ReadThenReset(reason) => {
            read(&mut body, shared).await;
            respond.send_reset(reason);
        }
        Act::Begin(messages, end) => {
            let Ok(mut stream) = respond.send_response(head(), false) else { return };
            for _ in 0..messages {
                let _ = stream.send_data(EMPTY_MESSAGE, false);
            }
            match end {
                End::Hang => hang(&mut body, shared).await,
                End::Reset(reason) => {
                    // After the messages, not instead of them.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    stream.send_reset(reason);
                }
                End::Status(code) => drop(stream.send_trailers(status(code, "as told"))),
                End::Pushback(code, wait) => {
                    let mut trailers = status(code, "as told");
                    trailers.insert("grpc-retry-pushback-ms", HeaderValue::from_static(wait));
                    let _ = stream.send_trailers(trailers);
                }
                End::Details(code, details) => {
                    let mut trailers = status(code, "as told");
                    trailers.insert("grpc-status-details-bin", HeaderValue::from_static(details));
                    let _ = stream.send_trailers(trailers);
                }
                End::StatusText(text) => {
                    let mut trailers = HeaderMap::new();
                    trailers.insert("grpc-status", HeaderValue::from_static(text));
                    let _ = stream.send_trailers(trailers);
                }
                End::NoStatus => {
                    let mut trailers = HeaderMap::new();
                    trailers.insert("x-mine", HeaderValue::from_static("kept"));
                    let _ = stream.send_trailers(trailers);
                }
                End::NoTrailers => drop(stream.send_data(Bytes::new(), true)),
                End::BadDetails => {
                    let mut trailers = status(3, "mine");
                    trailers.insert("grpc-status-details-bin", HeaderValue::from_static("!no base64!"));
                    trailers.insert("x-mine", HeaderValue::from_static("kept"));
                    let _ = stream.send_trailers(trailers);
                }
                End::NotServing => {
                    let _ = stream.send_data(NOT_SERVING, false);
                    let _ = stream.send_trailers(status(0, ""));
                }
            }
        }
        Act::Hang => {
            read(&mut body, shared).await;
            let reset = std::future::poll_fn(|cx| respond.poll_reset(cx)).await;
            if matches!(reset, Ok(Reason::CANCEL)) {
                shared.cancelled.fetch_add(1, Ordering::SeqCst);
            }
            std::future::pending().await
        }
        Act::GoAway(_) | Act::GoAwayFor(..) | Act::Close | Act::After(..) => hang(&mut body, shared).await,
    }
}

/// Keeps the stream open until the client ends it.
async fn hang(body: &mut RecvStream, shared: &Shared) {
    read(body, shared).await;
    std::future::pending().await
}

async fn read(body: &mut RecvStream, shared: &Shared) {
    while let Some(Ok(data)) = body.data().await {
        shared.received.fetch_add(data.len(), Ordering::SeqCst);
        let _ = body.flow_control().release_capacity(data.len());
    }
}

const EMPTY_MESSAGE: Bytes = Bytes::from_static(&[0, 0, 0, 0, 0]);
/// `HealthCheckResponse { status: SERVING }`.
const SERVING: Bytes = Bytes::from_static(&[0, 0, 0, 0, 2, 8, 1]);

/// `HealthCheckResponse { status: NOT_SERVING }`.
const NOT_SERVING: Bytes = Bytes::from_static(&[0, 0, 0, 0, 2, 8, 2]);

async fn answer(body: &mut RecvStream, mut respond: SendResponse<Bytes>, shared: &Shared, health: bool) {
    if !health {
        read(body, shared).await;
    }
    let Ok(mut stream) = respond.send_response(head(), false) else { return };
    let _ = stream.send_data(if health { SERVING } else { EMPTY_MESSAGE }, false);
    let _ = stream.send_trailers(status(0, ""));
}

fn head() -> Response<()> {
    Response::builder().header("content-type", "application/grpc").body(()).unwrap()
}

fn status(code: i32, message: &'static str) -> HeaderMap {
    let mut map = HeaderMap::new();
    map.insert("grpc-status", HeaderValue::from(code));
    if !message.is_empty() {
        map.insert("grpc-message", HeaderValue::from_static(message));
    }
    map
}

/// RFC 9113, 6.8: length 8, type 7, no flags, stream 0; last stream id, reason.
fn go_away(socket: &TcpStream, last: u32, reason: Reason) {
    let mut frame = [0; 17];
    (frame[2], frame[3]) = (8, 7);
    frame[9..13].copy_from_slice(&last.to_be_bytes());
    frame[13..].copy_from_slice(&u32::from(reason).to_be_bytes());
    assert_eq!(socket.try_write(&frame).unwrap(), frame.len());
}

/// A socket that can be written to beside h2.
#[derive(Clone)]
struct Shareable(Arc<TcpStream>);

impl AsyncRead for Shareable {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(buf.initialize_unfilled()) {
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Shareable {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match self.0.try_write(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
