//! The server that calls go to: another process, on a current-thread runtime.

use std::{
    env,
    fs::{File, OpenOptions},
    io::{self, BufRead, BufReader, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use futures_util::{Stream, stream};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{io::AsyncReadExt, net::TcpListener};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};
use tonic_failover::{
    demo::pb::{
        AddRequest, CounterReply, GetRequest, IncrementRequest, WatchRequest,
        counter_server::{Counter, CounterServer},
    },
    testkit::Port,
};

use super::ROLE;

/// What every reply says besides the server's number: with it the message has 16 bytes.
const FILLING: &str = "sixteen byte";

/// What a server does.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Replies name it.
    pub(crate) number: u64,
    pub(crate) listen: SocketAddr,
    /// How long the handler takes.
    pub(crate) work: Duration,
    /// Where one line is written for each call that the handler has begun.
    pub(crate) journal: Option<PathBuf>,
}

/// A running server. Dropping it ends the process.
pub(crate) struct Backend {
    process: Child,
    pub(crate) port: u16,
    _held: Port,
}

impl Settings {
    pub(crate) fn new(number: u64) -> Self {
        Self { number, listen: ([127, 0, 0, 1], 0).into(), work: Duration::ZERO, journal: None }
    }
}

impl Backend {
    /// Starts this program anew in the role of a server, and waits until it listens.
    pub(crate) fn start(settings: &Settings) -> io::Result<Self> {
        // Ours while the process is dead, too: it may be started again there.
        let held = Port::hold(settings.listen)?;
        let role = format!(
            "server {} {} {} {}",
            settings.number,
            held.addr(),
            settings.work.as_micros(),
            settings.journal.as_deref().map_or("-".into(), Path::to_string_lossy),
        );
        // Not the current executable: under valgrind that is valgrind.
        let program = env::args_os().next().ok_or_else(|| io::Error::other("the program has no name"))?;
        let mut process =
            Command::new(program).env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line.trim() != held.number().to_string() {
            return Err(io::Error::other("the server did not say its port"));
        }
        Ok(Self { process, port: held.number(), _held: held })
    }

    pub(crate) fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill_process(Pid::from_child(&self.process), signal)?)
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        self.process.wait().map(drop)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // A process that has ended already is as good.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Serves as `role` says, until standard input ends or SIGTERM comes; then drains.
pub(crate) fn serve(role: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut words = role.splitn(5, ' ').skip(1);
    let mut next = || words.next().ok_or("a server's role has four words");
    let number = next()?.parse()?;
    let listen: SocketAddr = next()?.parse()?;
    let work = Duration::from_micros(next()?.parse()?);
    let journal = match next()? {
        "-" => None,
        path => Some(OpenOptions::new().create(true).append(true).open(path)?),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(listen).await?;
        writeln!(io::stdout(), "{}", listener.local_addr()?.port())?;
        let service = Service { number, work, journal: journal.map(|file| Arc::new(Mutex::new(file))) };
        let mut terminated = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let end = async {
            let mut nothing = Vec::new();
            let mut stdin = tokio::io::stdin();
            tokio::select! {
                _ = stdin.read_to_end(&mut nothing) => {}
                _ = terminated.recv() => {}
            }
        };
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = Server::builder().add_service(CounterServer::new(service));
        server.serve_with_incoming_shutdown(incoming, end).await?;
        Ok::<_, Box<dyn std::error::Error>>(())
    })?;
    // The thread that reads standard input waits for ever.
    runtime.shutdown_background();
    Ok(())
}

#[derive(Clone)]
struct Service {
    number: u64,
    work: Duration,
    journal: Option<Arc<Mutex<File>>>,
}

impl Service {
    async fn handle(&self, id: &str) -> Result<Response<CounterReply>, Status> {
        if let Some(journal) = &self.journal {
            // One write, before the work: the kernel has it when the process is killed.
            let line = format!("{id}\n");
            journal.lock().write_all(line.as_bytes()).map_err(|e| Status::internal(e.to_string()))?;
        }
        if !self.work.is_zero() {
            tokio::time::sleep(self.work).await;
        }
        let datacenter = String::new();
        Ok(Response::new(CounterReply { value: self.number, instance: FILLING.to_owned(), datacenter }))
    }
}

#[tonic::async_trait]
impl Counter for Service {
    async fn increment(&self, request: Request<IncrementRequest>) -> Result<Response<CounterReply>, Status> {
        self.handle(&request.get_ref().request_id).await
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<CounterReply>, Status> {
        self.handle(&request.get_ref().request_id).await
    }

    async fn add(&self, request: Request<AddRequest>) -> Result<Response<CounterReply>, Status> {
        self.handle(&request.get_ref().request_key).await
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<CounterReply, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(stream::empty())))
    }
}
