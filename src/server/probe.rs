//! Whether this instance serves, as a client would find out.
//!
//! A process that renews a lease and serves nothing is worse than a dead one: nobody takes over. So
//! it is asked through its own listener, on a new connection each time: one that is kept would go on
//! answering while the listener takes no more.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::task::AbortOnDropHandle;
#[cfg(feature = "tls")]
use tonic::transport::ClientTlsConfig;
use tonic::{
    Code, Status,
    body::Body,
    transport::{self, Endpoint},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tower::ServiceExt;

use super::pulse::{Pulse, running};

/// Until the first answer: an instance is to be known as soon as it serves.
const AT_FIRST: Duration = Duration::from_millis(50);
/// tonic panics on one that is no base64, and nothing here reads it.
const DETAILS: &str = "grpc-status-details-bin";

/// Asks this instance for a sign of life, again and again, through the listener it serves on:
/// `grpc.health.v1` Check on a new connection. SERVING is life, and so is any answer of a gRPC server
/// without the health service (UNIMPLEMENTED and the like). NOT_SERVING and UNAVAILABLE are not: the
/// application says that it cannot, so another instance is to be primary. (A standby is SERVING.)
///
/// It runs on a thread of its own, so that a busy runtime does not keep it from asking; the server's
/// runtime must answer, though. It starts with the first [`watch`](Self::watch), or with the lease or
/// registration it is given to, and ends when its last clone is dropped: these hold one.
#[derive(Clone)]
pub struct Probe {
    settings: Settings,
    running: Arc<Mutex<Option<Running>>>,
}

#[derive(Clone)]
struct Settings {
    address: SocketAddr,
    every: Duration,
    grace: Duration,
    #[cfg(feature = "tls")]
    tls: Option<ClientTlsConfig>,
}

struct Running {
    alive: watch::Receiver<bool>,
    pulse: Pulse,
    _task: AbortOnDropHandle<()>,
}

/// Why a [`Probe`] cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A setting is impossible.
    #[error("probe of {address}: {setting} = {value:?} is not usable: {expected}")]
    Setting {
        /// What is probed.
        address: SocketAddr,
        /// The setting's name.
        setting: &'static str,
        /// What was given.
        value: Duration,
        /// What would be right.
        expected: String,
    },
    /// What the listener is asked with cannot be set up.
    #[error("probe of {address}: no connection can be set up")]
    Endpoint {
        /// What is probed.
        address: SocketAddr,
        /// What tonic says.
        source: transport::Error,
    },
    /// There is no thread to run on.
    #[error("the probe's thread could not be started")]
    Thread {
        /// What the system says.
        source: io::Error,
    },
}

/// Why an answer is no sign of life.
#[derive(Debug, thiserror::Error)]
enum Lifeless {
    #[error("no connection")]
    Connect(#[source] transport::Error),
    #[error("no gRPC answer")]
    Exchange(#[source] Box<Status>),
    #[error("it says that it is not serving")]
    NotServing,
    #[error("it says UNAVAILABLE")]
    Unavailable,
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
}

// === impl Probe ===

impl Probe {
    /// Probes what listens on `address`: mostly the listener's `local_addr()`. Where that is an
    /// unspecified address (`0.0.0.0`, `[::]`), loopback is asked.
    pub fn of(address: SocketAddr) -> Self {
        let settings = Settings {
            address: reachable(address),
            every: Duration::from_millis(500),
            grace: Duration::from_millis(1500),
            #[cfg(feature = "tls")]
            tls: None,
        };
        Self { settings, running: Arc::default() }
    }

    /// Between two questions. 10 ms to half of the grace. Default: 500 ms.
    pub fn every(self, every: Duration) -> Self {
        self.with(|settings| settings.every = every)
    }

    /// How long without an answer until it counts as dead, from when the last question that got one
    /// was sent. A hung primary is taken over after this, and a released lease at once; so it is
    /// also how long the server's runtime may be blocked at the most. Up to 5 min. Default: 1.5 s.
    pub fn grace(self, grace: Duration) -> Self {
        self.with(|settings| settings.grace = grace)
    }

    /// The listener speaks TLS. Its certificate is verified against `tls`, whose `domain_name` it must
    /// be for. Default: it does not.
    #[cfg(feature = "tls")]
    pub fn tls(self, tls: ClientTlsConfig) -> Self {
        self.with(|settings| settings.tls = Some(tls))
    }

    /// One of its own: what was given away before keeps its settings.
    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self.running = Arc::default();
        self
    }

    /// Whether it serves: at first not, until it has answered once. Starts the probe, if that has not
    /// been done. When the probe ends, so does what this gives: keep a clone of it.
    ///
    /// # Errors
    /// A setting is impossible, or there is no thread to run on.
    pub fn watch(&self) -> Result<watch::Receiver<bool>, ProbeError> {
        self.start().map(|(alive, _)| alive)
    }

    /// Whether it serves, and the thread that asks.
    pub(super) fn start(&self) -> Result<(watch::Receiver<bool>, Pulse), ProbeError> {
        let mut running = self.running.lock();
        if let Some(running) = &*running {
            return Ok((running.alive.clone(), running.pulse.clone()));
        }
        let endpoint = self.settings.check()?;
        let pulse = Pulse::start().map_err(|source| ProbeError::Thread { source })?;
        let (say, alive) = watch::channel(false);
        let task = pulse.spawn(run(self.settings.clone(), endpoint, say));
        *running =
            Some(Running { alive: alive.clone(), pulse: pulse.clone(), _task: AbortOnDropHandle::new(task) });
        Ok((alive, pulse))
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alive = self.running.lock().as_ref().map(|running| *running.alive.borrow());
        f.debug_struct("Probe")
            .field("address", &self.settings.address)
            .field("alive", &alive)
            .finish_non_exhaustive()
    }
}

fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

impl Settings {
    fn check(&self) -> Result<Endpoint, ProbeError> {
        let address = self.address;
        let refuse =
            |setting, value, expected| Err(ProbeError::Setting { address, setting, value, expected });
        if self.grace > Duration::from_secs(300) {
            return refuse("grace", self.grace, "5 min at the most".to_owned());
        }
        // A question that fails must be followed by another before the grace is over.
        if self.every < Duration::from_millis(10) || self.every > self.grace / 2 {
            let expected = format!("10 ms to {:?}, half of grace = {:?}", self.grace / 2, self.grace);
            return refuse("every", self.every, expected);
        }
        let wrong = |source| ProbeError::Endpoint { address, source };
        #[cfg(feature = "tls")]
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        #[cfg(not(feature = "tls"))]
        let scheme = "http";
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}")).map_err(wrong)?;
        #[cfg(feature = "tls")]
        let endpoint = match &self.tls {
            Some(tls) => endpoint.tls_config(tls.clone()).map_err(wrong)?,
            None => endpoint,
        };
        Ok(endpoint)
    }
}

/// Asks until it is dropped.
async fn run(settings: Settings, endpoint: Endpoint, alive: watch::Sender<bool>) {
    let Settings { address, every, grace, .. } = settings;
    // A question sent this long after the last good one is judged when the grace is over.
    let within = grace - every;
    let mut last = None;
    loop {
        let sent = Instant::now();
        let answer = running(within, ask(&endpoint)).await.unwrap_or(Err(Lifeless::TimedOut(within)));
        match answer {
            Ok(()) => {
                last = Some(sent);
                if alive.send_if_modified(|alive| !std::mem::replace(alive, true)) {
                    tracing::info!(%address, "the listener answers: this instance serves");
                }
            }
            Err(error) => {
                let over = last.is_none_or(|last| sent.max(Instant::now()) >= last + grace);
                if over && alive.send_if_modified(|alive| std::mem::replace(alive, false)) {
                    let cause = in_brief(&error);
                    tracing::warn!(%address, %cause, "the listener does not answer: this instance serves nothing");
                }
            }
        }
        let pause = if last.is_none() { every.min(AT_FIRST) } else { every };
        sleep_until(sent + pause).await;
    }
}

/// One exchange on a new connection.
async fn ask(endpoint: &Endpoint) -> Result<(), Lifeless> {
    let channel = endpoint.connect().await.map_err(Lifeless::Connect)?;
    let channel = channel.map_response(|response| {
        let (mut head, body) = response.into_parts();
        head.headers.remove(DETAILS);
        http::Response::from_parts(head, Body::new(plain(body)))
    });
    match HealthClient::new(channel).check(HealthCheckRequest::default()).await {
        Ok(response) if response.get_ref().status() == ServingStatus::NotServing => Err(Lifeless::NotServing),
        Ok(_) => Ok(()),
        Err(status) => match status.code() {
            Code::Unavailable if came_over_the_wire(&status) => Err(Lifeless::Unavailable),
            _ if came_over_the_wire(&status) => Ok(()),
            _ => Err(Lifeless::Exchange(Box::new(status))),
        },
    }
}

fn plain(body: Body) -> impl http_body::Body<Data = bytes::Bytes, Error = Status> {
    http_body_util::BodyExt::map_frame(body, |mut frame| {
        if let Some(trailers) = frame.trailers_mut() {
            trailers.remove(DETAILS);
        }
        frame
    })
}

/// A status made on our side has the transport's error as its source, or is one of tonic's texts
/// for an answer that was not gRPC.
fn came_over_the_wire(status: &Status) -> bool {
    std::error::Error::source(status).is_none()
        && !matches!(status.code(), Code::Internal | Code::Unknown)
        && !status.message().starts_with("grpc-status header missing")
}

/// An error and what it comes down to.
fn in_brief(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    let (first, last) = (error.to_string(), last.to_string());
    if first == last { first } else { format!("{first}: {last}") }
}

#[cfg(test)]
mod tests;
