//! `demo backend`: one instance of the `Counter` service.
//!
//! ```text
//! SIGTERM -> out of Consul -> callers move -> health says NOT_SERVING -> streams end, GOAWAY
//!         -> calls in flight are finished -> exit 0
//! ```

mod address;
mod counter;
mod journal;
mod options;
mod registration;
mod service;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::{net::TcpListener, time::timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Server, server::TcpIncoming};

use self::{
    counter::Counter,
    journal::Journal,
    registration::Log,
    service::{Identity, Service},
};
use super::{
    pb::counter_server::CounterServer,
    screen::{Screen, Tone},
    text,
};
use crate::{
    consul::{ConsulClient, ConsulConfig},
    server::RegistrationError,
};

pub(crate) use self::journal::{ANSWERED, RECEIVED};
pub use self::options::{CheckKind, Options};

/// How long the log's last line about Consul is waited for. It is there already.
const LAST_LINE: Duration = Duration::from_millis(100);

/// Why a backend did not serve, or stopped serving.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The journal's file cannot be opened.
    #[error("the journal {} cannot be opened for appending", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The listener does not tell its address.
    #[error("the listener does not tell its address")]
    Listener(#[source] io::Error),
    /// The instance cannot be registered as it is to be.
    #[error("the instance cannot be registered")]
    Registration(#[from] RegistrationError),
    /// The server ended by itself.
    #[error("the server ended without having been told to")]
    Ended(#[source] Option<tonic::transport::Error>),
}

/// Serves `counter.v1.Counter` and `grpc.health.v1.Health` on `listener` and
/// keeps the instance registered with `consul`, until `shutdown` ends; then takes
/// it out of Consul and finishes what is in flight, 5 s at most. Consul's absence
/// is no error: it is waited for.
///
/// # Errors
/// [`BackendError`]; never because of Consul or a client.
///
/// # Cancel safety
/// Dropping the future stops listening and registering at once; connections that
/// are open live on in tonic's tasks until the runtime ends.
pub async fn serve(
    listener: TcpListener,
    options: Options,
    consul: ConsulConfig,
    shutdown: impl Future<Output = ()>,
) -> Result<(), BackendError> {
    serve_on(listener, options, consul, Screen::none(), shutdown).await
}

pub(crate) async fn serve_on(
    listener: TcpListener,
    options: Options,
    consul: ConsulConfig,
    screen: Screen,
    shutdown: impl Future<Output = ()>,
) -> Result<(), BackendError> {
    let listening = listener.local_addr().map_err(BackendError::Listener)?;
    let journal = match &options.journal {
        Some(path) => {
            Journal::open(path).map_err(|source| BackendError::Journal { path: path.clone(), source })?
        }
        None => Journal::default(),
    };
    let name = match &options.name {
        Some(name) => name.clone(),
        None => address::default_name(&options.service, listening.port()),
    };
    let log = Log { screen, name: name.clone() };
    log.say(Tone::Title, &format!("listens on {listening}"));

    let client = ConsulClient::new(consul.clone()).map_err(RegistrationError::from)?;
    tokio::pin!(shutdown);
    let address = tokio::select! {
        address = registration::address(&options, listening, &client, &log) => address,
        () = &mut shutdown => return Ok(()),
    };
    let registration = registration::start(&options, &name, consul, address)?;
    let datacenter = Arc::new(OnceLock::new());
    let learn = registration::learn(datacenter.clone(), client.clone());
    let _learn = AbortOnDropHandle::new(tokio::spawn(learn));
    let lines = log.clone().follow(registration.subscribe(), client);
    let lines = AbortOnDropHandle::new(tokio::spawn(lines));
    let service = Service {
        identity: Identity { instance: name.into(), datacenter },
        counter: Arc::new(Counter::new()),
        journal: journal.clone(),
        work: options.work,
        stop: registration.stopping(),
    };
    let told = async {
        shutdown.await;
        log.say(Tone::Title, "stopping");
    };
    let server = Server::builder()
        .add_service(registration.health_service())
        .add_service(CounterServer::new(service))
        .serve_with_incoming_shutdown(
            TcpIncoming::from(listener).with_nodelay(Some(true)),
            registration.left(told),
        );
    let drained = registration.drained(server).await;
    // The last one says how the registration ended.
    let _ = timeout(LAST_LINE, lines).await;
    match drained {
        Ok(ended) if !registration.stopping().is_cancelled() => return Err(BackendError::Ended(ended.err())),
        Ok(_) => log.say(Tone::Title, "stopped; every call in flight was answered"),
        Err(late) => log.say(Tone::Notice, &format!("stopped; {late}")),
    }
    journal.close().await;
    Ok(())
}

/// One line of a backend's log.
fn say(screen: &Screen, tone: Tone, name: &str, words: &str) {
    let time = screen.paint(Tone::Quiet, text::time_of_day());
    screen.line(format!("{time} {name}: {}", screen.paint(tone, words)));
}
