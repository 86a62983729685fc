//! A TCP proxy that can stop forwarding, cut, and count.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{broadcast, watch},
    task::JoinSet,
};

/// How much is taken from each side while nothing is forwarded: enough to see
/// that a side closes, and not so much that a large request fits in.
const HELD: usize = 64 * 1024;

#[derive(Default)]
struct Counts {
    connections: AtomicUsize,
    open: AtomicUsize,
    /// What clients have sent: the request lines of HTTP/1.
    lines: Mutex<Vec<String>>,
}

/// The running proxy; dropping it closes everything.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    forwarding: watch::Sender<bool>,
    cut: broadcast::Sender<()>,
    counts: Arc<Counts>,
    _task: JoinSet<()>,
}

impl Proxy {
    /// In front of whatever listens on `port` of this host.
    pub(crate) async fn before(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (forwarding, _) = watch::channel(true);
        let (cut, _) = broadcast::channel(4);
        let counts = Arc::new(Counts::default());
        let mut task = JoinSet::new();
        let (flow, cuts, all) = (forwarding.clone(), cut.clone(), counts.clone());
        task.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((client, _)) = listener.accept() => {
                        all.connections.fetch_add(1, Ordering::SeqCst);
                        all.open.fetch_add(1, Ordering::SeqCst);
                        let (flow, mut cuts, all) = (flow.subscribe(), cuts.subscribe(), all.clone());
                        connections.spawn(async move {
                            tokio::select! {
                                () = forward(client, target, flow, &all) => {}
                                _ = cuts.recv() => {}
                            }
                            all.open.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                    Some(_) = connections.join_next() => {}
                }
            }
        });
        Self { port, forwarding, cut, counts, _task: task }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Forwards nothing any more, in neither direction; new connections are
    /// accepted and hear nothing. That a side closes is still noticed.
    pub(crate) fn stop(&self) {
        self.forwarding.send_replace(false);
    }

    pub(crate) fn go_on(&self) {
        self.forwarding.send_replace(true);
    }

    /// Closes what is open.
    pub(crate) fn cut(&self) {
        let _ = self.cut.send(());
    }

    /// The connections ever accepted.
    pub(crate) fn connections(&self) -> usize {
        self.counts.connections.load(Ordering::SeqCst)
    }

    /// The connections that are open towards clients.
    pub(crate) fn open(&self) -> usize {
        self.counts.open.load(Ordering::SeqCst)
    }

    /// The health queries sent so far that do not block.
    pub(crate) fn look_ups(&self) -> usize {
        let lines = self.counts.lines.lock();
        lines.iter().filter(|l| l.starts_with("GET /v1/health/service/") && !l.contains("index=")).count()
    }

    /// All requests of HTTP/1 so far.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.counts.lines.lock().clone()
    }
}

async fn forward(client: TcpStream, target: u16, flow: watch::Receiver<bool>, counts: &Counts) {
    client.set_nodelay(true).unwrap();
    let (from_client, to_client) = client.into_split();
    let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    server.set_nodelay(true).unwrap();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = pump(from_client, to_server, flow.clone(), Some(counts)) => {}
        () = pump(from_server, to_client, flow, None) => {}
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut flow: watch::Receiver<bool>,
    counts: Option<&Counts>,
) {
    let mut buffer = vec![0; 64 * 1024];
    let mut held = Vec::new();
    loop {
        let open = *flow.borrow_and_update();
        if open && !held.is_empty() && to.write_all(&std::mem::take(&mut held)).await.is_err() {
            return;
        }
        let n = tokio::select! {
            read = from.read(&mut buffer), if held.len() < HELD => match read {
                Ok(0) | Err(_) => return,
                Ok(n) => n,
            },
            changed = flow.changed() => if changed.is_err() { return } else { continue },
        };
        if let Some(counts) = counts {
            note(&buffer[..n], counts);
        }
        if !*flow.borrow() {
            held.extend_from_slice(&buffer[..n]);
        } else if to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}

/// Requests are small and sent whole: each begins a chunk.
fn note(chunk: &[u8], counts: &Counts) {
    let line = chunk.split(|b| *b == b'\r').next().unwrap_or_default();
    if let Ok(line) = std::str::from_utf8(line)
        && line.ends_with(" HTTP/1.1")
    {
        counts.lines.lock().push(line.to_owned());
    }
}
