//! A server that says what it is told to say, byte for byte.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

/// What to do with a request.
#[derive(Clone)]
pub(crate) enum Reply {
    /// Send this and close.
    Send(Vec<u8>),
    /// Send this to the first request of all, and close on every other.
    SendOnce(Vec<u8>),
    /// Send this so many times, each on a request, and close on the next one.
    SendThenClose(Vec<u8>, usize),
    /// Send this, then keep the connection open in silence.
    SendAndHang(Vec<u8>),
    /// Do this with a question that waits for news (nothing: close on it), and send the other
    /// on any other.
    Waiting(Option<Vec<u8>>, Vec<u8>),
    /// Send this, then the other again and again for as long as it is taken.
    SendForEver(Vec<u8>, Vec<u8>),
}

pub(crate) struct Scripted {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    open: Arc<AtomicUsize>,
    _task: AbortOnDropHandle<()>,
}

// === impl Scripted ===

impl Scripted {
    /// Answers every request alike.
    pub(crate) async fn always(reply: Reply) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), reply)
    }

    /// Cuts off what waits for news, and answers what does not.
    pub(crate) async fn waiting(cut: Option<Vec<u8>>, good: Vec<u8>) -> Self {
        Self::always(Reply::Waiting(cut, good)).await
    }

    /// The same on this listener.
    pub(crate) fn on(listener: TcpListener, reply: Reply) -> Self {
        let address = listener.local_addr().unwrap();
        let (requests, open) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicUsize>::default());
        let (seen, counted) = (requests.clone(), open.clone());
        let accepting = async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, counted, reply) = (seen.clone(), counted.clone(), reply.clone());
                connections.spawn(async move {
                    counted.fetch_add(1, Ordering::SeqCst);
                    serve(stream, &seen, reply).await;
                    counted.fetch_sub(1, Ordering::SeqCst);
                });
            }
        };
        Self { address, requests, open, _task: AbortOnDropHandle::new(tokio::spawn(accepting)) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The heads of the requests that came.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }

    /// How many connections are open.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

/// An answer with its length.
pub(crate) fn answer(status: &str, headers: &str, body: impl AsRef<[u8]>) -> Reply {
    let body = body.as_ref();
    let mut text =
        format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len()).into_bytes();
    text.extend(body);
    Reply::Send(text)
}

/// Serves one request, and returns once the other side has gone.
async fn serve(mut stream: TcpStream, seen: &Mutex<Vec<String>>, reply: Reply) {
    if let Reply::SendThenClose(bytes, times) = reply {
        let mut left = times;
        while request(&mut stream, seen).await && left > 0 {
            let _ = stream.write_all(&bytes).await;
            left -= 1;
        }
        return;
    }
    if let Reply::Waiting(cut, good) = reply {
        while request(&mut stream, seen).await {
            let waits = seen.lock().last().is_some_and(|it| it.contains("index="));
            match if waits { cut.as_ref() } else { Some(&good) } {
                Some(bytes) => _ = stream.write_all(bytes).await,
                None => return,
            }
        }
        return;
    }
    if let Reply::SendOnce(bytes) = reply {
        while request(&mut stream, seen).await && seen.lock().len() == 1 {
            let _ = stream.write_all(&bytes).await;
        }
        return;
    }
    if !request(&mut stream, seen).await {
        return;
    }
    match reply {
        Reply::SendThenClose(..) | Reply::SendOnce(_) | Reply::Waiting(..) => {}
        Reply::Send(bytes) => {
            let _ = stream.write_all(&bytes).await;
            let _ = stream.shutdown().await;
        }
        Reply::SendAndHang(bytes) => {
            let _ = stream.write_all(&bytes).await;
        }
        Reply::SendForEver(first, again) => {
            let mut sent = stream.write_all(&first).await;
            while sent.is_ok() {
                sent = stream.write_all(&again).await;
            }
        }
    }
    while let Ok(1..) = stream.read(&mut [0; 4096]).await {}
}

/// Reads a request's head. False where none came.
async fn request(stream: &mut TcpStream, seen: &Mutex<Vec<String>>) -> bool {
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    while !head.windows(4).any(|it| it == b"\r\n\r\n") {
        match stream.read(&mut buffer).await {
            Ok(length @ 1..) => head.extend(&buffer[..length]),
            _ => return false,
        }
    }
    seen.lock().push(String::from_utf8_lossy(&head).into_owned());
    true
}
