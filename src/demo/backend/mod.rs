//! `demo backend`: one instance of the `Counter` service.
//!
//! ```text
//! SIGTERM -> out of Consul -> health says NOT_SERVING -> streams end, GOAWAY
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

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::{
    server::NamedService,
    transport::{Server, server::TcpIncoming},
};

use self::{
    counter::Counter,
    journal::Journal,
    registration::{Entry, Registration},
    service::{Identity, Service},
};
use super::{
    pb::counter_server::CounterServer,
    screen::{Screen, Tone},
    text,
};
use crate::consul::ConsulClient;

pub(crate) use self::journal::{ANSWERED, RECEIVED};
pub use self::options::{CheckKind, Options};

/// How long calls in flight may take to end at shutdown. Our choice: longer than
/// the demo's deadline of 2 s, shorter than the 10 s after which Docker kills.
const DRAIN: Duration = Duration::from_secs(5);

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
    consul: ConsulClient,
    shutdown: impl Future<Output = ()>,
) -> Result<(), BackendError> {
    serve_on(listener, options, consul, Screen::none(), shutdown).await
}

pub(crate) async fn serve_on(
    listener: TcpListener,
    options: Options,
    consul: ConsulClient,
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
    let name = options.name.unwrap_or_else(|| address::default_name(&options.service, listening.port()));
    say(&screen, Tone::Title, &name, &format!("listens on {listening}"));

    let stop = CancellationToken::new();
    let datacenter = Arc::new(OnceLock::new());
    let service = Service {
        identity: Identity { instance: name.as_str().into(), datacenter: datacenter.clone() },
        counter: Arc::new(Counter::new()),
        journal: journal.clone(),
        work: options.work,
        stop: stop.clone(),
    };
    let (mut health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<CounterServer<Service>>().await;
    let server = Server::builder()
        .add_service(health_service)
        .add_service(CounterServer::new(service))
        .serve_with_incoming_shutdown(
            TcpIncoming::from(listener).with_nodelay(Some(true)),
            stop.clone().cancelled_owned(),
        );
    let entry = Entry {
        name: name.clone(),
        service: options.service,
        advertise: options.advertise,
        listening,
        check: options.check,
    };
    let registration = Registration::start(consul, entry, datacenter, screen.clone());

    tokio::pin!(server);
    tokio::select! {
        ended = &mut server => return Err(BackendError::Ended(ended.err())),
        () = shutdown => {}
    }
    say(&screen, Tone::Title, &name, "stopping");
    let leave = async {
        registration.end().await;
        // A watcher of the health service gets this and then its stream's end.
        health.set_not_serving::<CounterServer<Service>>().await;
        for watched in ["", CounterServer::<Service>::NAME] {
            health.clear_service_status(watched).await;
        }
        stop.cancel();
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        _ = &mut server => say(&screen, Tone::Title, &name, "stopped; every call in flight was answered"),
        () = leave => {
            let drained = text::duration(DRAIN);
            say(&screen, Tone::Notice, &name, &format!("stopped; some calls had not ended after {drained}"));
        }
    }
    journal.close().await;
    Ok(())
}

/// One line of a backend's log.
fn say(screen: &Screen, tone: Tone, name: &str, words: &str) {
    let time = screen.paint(Tone::Quiet, text::time_of_day());
    screen.line(format!("{time} {name}: {}", screen.paint(tone, words)));
}
