//! `demo backend`: one instance of the `Counter` service.
//!
//! ```text
//! SIGTERM -> lease given up -> out of Consul -> callers move -> health says NOT_SERVING -> streams end, GOAWAY
//!         -> calls in flight are finished -> exit 0
//! ```

mod access;
mod address;
mod counter;
mod incoming;
mod journal;
mod lease_at;
mod operator;
mod options;
mod presence;
mod primary;
mod registration;
mod service;
mod shared;
mod unfenced;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::{net::TcpListener, time::timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Server;
use tower::{Layer, util::option_layer};

use self::{
    access::AccessLog,
    counter::Counter,
    journal::Journal,
    operator::Operator,
    presence::{Alone, Presence},
    primary::Candidate,
    registration::Log,
    service::{Identity, Service},
    shared::Number,
};
use super::{
    cli::Failure,
    pb::{counter_server::CounterServer, operator_server::OperatorServer},
    screen::{Screen, Tone},
    text,
};
use crate::{
    consul::{ConsulClient, ConsulConfig},
    server::RegistrationError,
};

pub(crate) use self::{
    journal::{ANSWERED, RECEIVED},
    service::TERM,
};
pub use self::{
    lease_at::LeaseAt,
    options::{CheckKind, Options},
};

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
    /// The lease cannot be campaigned for.
    #[error("the lease cannot be campaigned for (--lease)")]
    Lease(#[source] Box<dyn std::error::Error + Send + Sync>),
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
    let candidate = match &options.lease {
        Some(at) => {
            let candidate = Candidate::start(at, &options, &name, listening, address.clone(), &consul);
            Some(candidate.map_err(BackendError::Lease)?)
        }
        None => None,
    };
    let _roles = candidate.as_ref().map(|it| spawn(primary::tell(it.lease.role(), log.clone())));
    let (alone_health, alone_service) = tonic_health::server::health_reporter();
    let datacenter = Arc::new(OnceLock::new());
    let (presence, lines, _learn) = if options.no_consul {
        (Presence::Alone(Alone::new(alone_health, candidate.clone()).await), None, None)
    } else {
        let registration = registration::start(&options, &name, consul, address, candidate.as_ref())?;
        let learn = spawn(registration::learn(datacenter.clone(), client.clone()));
        let lines = spawn(log.clone().follow(registration.subscribe(), client));
        (Presence::InConsul(registration), Some(lines), Some(learn))
    };
    let counter = match &candidate {
        Some(candidate) => Number::Shared(candidate.counter.clone()),
        None => Number::Own(Arc::new(Counter::new())),
    };
    let service = CounterServer::new(Service {
        identity: Identity { instance: name.into(), datacenter },
        counter,
        journal: journal.clone(),
        work: options.work,
        stop: presence.stopping(),
    });
    let told = async {
        shutdown.await;
        log.say(Tone::Title, "stopping");
    };
    let health = match &presence {
        Presence::InConsul(registration) => Some(registration.health_service()),
        Presence::Alone(_) => None,
    };
    let access = options.access_log.then(|| AccessLog(log.clone()));
    let (fenced, open) = match &candidate {
        Some(candidate) => (Some(candidate.fence.layer(service)), None),
        None => (None, Some(service)),
    };
    let server = Server::builder()
        .layer(option_layer(access))
        .add_optional_service(options.no_consul.then_some(alone_service))
        .add_optional_service(health)
        .add_optional_service(candidate.clone().map(|it| OperatorServer::new(Operator(it))))
        .add_optional_service(fenced)
        .add_optional_service(open)
        .serve_with_incoming_shutdown(
            incoming::incoming(listener, options.blockable).map_err(BackendError::Listener)?,
            presence.clone().left(told),
        );
    let drained = presence.drained(Box::pin(server)).await;
    // The last one says how the registration ended.
    if let Some(lines) = lines {
        let _ = timeout(LAST_LINE, lines).await;
    }
    match drained {
        Ok(ended) if !presence.stopping().is_cancelled() => return Err(BackendError::Ended(ended.err())),
        Ok(_) => log.say(Tone::Title, "stopped; every call in flight was answered"),
        Err(late) => log.say(Tone::Notice, &format!("stopped; {late}")),
    }
    journal.close().await;
    Ok(())
}

fn spawn(task: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(task))
}

/// One line of a backend's log.
fn say(screen: &Screen, tone: Tone, name: &str, words: &str) {
    let time = screen.paint(Tone::Quiet, text::time_of_day());
    screen.line(format!("{time} {name}: {}", screen.paint(tone, words)));
}
