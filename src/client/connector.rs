//! From an instance to a connection that has answered.
//!
//! tonic's own channel reconnects by itself, at once and without end, and says
//! nothing about it. Ours connects once: the channel is published only after
//! one exchange has been answered on it, its socket tells the worker when it
//! closes, and any later attempt to connect fails as never sent.

use std::{
    fmt,
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper::rt::{Read, Write};
use hyper_util::client::legacy::connect::HttpConnector;
use tokio::time::timeout;
use tonic::{
    Code, Status,
    transport::{self, Channel},
};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tower::Service;

use super::{
    details::Checked,
    endpoint::{Endpoint, Link},
    options::ServiceOptions,
    outcome,
    socket::WatchedIo,
    together::Together,
};
use crate::Instance;

/// Makes verified connections. The one place that knows the transport.
pub(crate) trait Connector: Send + Sync + 'static {
    /// Connects to `instance` and makes sure that it answers, within the
    /// connect time-out. Dropping the future gives the attempt up.
    fn connect(&self, instance: Arc<Instance>, link: Arc<Link>) -> BoxFuture<Result<Endpoint, ConnectError>>;

    /// Asks a connected instance for a sign of life, within the probe time-out:
    /// on its connection, and where that stays silent on a new one with `link`.
    fn probe(&self, endpoint: Arc<Endpoint>, link: Arc<Link>) -> BoxFuture<Result<Life, ConnectError>>;
}

/// An instance's sign of life.
pub(crate) enum Life {
    /// On the connection that was asked about.
    Here,
    /// On a new one alone: the old one is dead, or all its streams are taken.
    Elsewhere(Endpoint),
}

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Why an instance is not usable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ConnectError {
    /// Its address is none.
    #[error("{authority:?} is no address")]
    Address { authority: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// No connection came about.
    #[error("no connection: {}", innermost(.0))]
    Connect(#[source] transport::Error),
    /// It was connected, and the exchange failed.
    #[error("connected, but no gRPC answer: {}", innermost(.0))]
    Exchange(#[source] Box<Status>),
    /// Its connection takes no more calls, and there is no other: nobody could be asked.
    #[error("its connection takes no more calls")]
    GoingAway,
    /// It did not answer in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// It says that it is not serving.
    #[error("answers that it is not serving")]
    NotServing,
    /// It says UNAVAILABLE.
    #[error("answers UNAVAILABLE: {:?}", .0.message())]
    Unavailable(Box<Status>),
}

/// The last error of the chain: what really happened.
fn innermost<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last
}

/// What reaches an address: TCP, but for tests.
pub(crate) trait Network:
    Service<Uri, Response: Read + Write + Send + Unpin, Error: Into<NetworkError>, Future: Send>
    + Clone
    + Send
    + Sync
    + 'static
{
}

type NetworkError = Box<dyn std::error::Error + Send + Sync>;

impl<N> Network for N where
    N: Service<Uri, Response: Read + Write + Send + Unpin, Error: Into<NetworkError>, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static
{
}

/// Connects tonic channels.
pub(crate) struct TonicConnector<N = HttpConnector> {
    options: Arc<ServiceOptions>,
    network: N,
}

impl TonicConnector {
    pub(crate) fn new(options: Arc<ServiceOptions>) -> Self {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        Self::over(http, options)
    }
}

impl<N: Network> TonicConnector<N> {
    pub(crate) fn over(network: N, options: Arc<ServiceOptions>) -> Self {
        Self { options, network }
    }

    fn dial(&self, instance: Arc<Instance>, link: Arc<Link>) -> BoxFuture<Result<Endpoint, ConnectError>> {
        let (endpoint, network, tls) = (self.endpoint(&instance), self.network.clone(), self.has_tls());
        Box::pin(async move {
            let calls = Together::default();
            // TLS takes what it is given at once, and comes with it a second time: nothing is gained by waiting.
            let of_socket = if tls { Together::default() } else { calls.clone() };
            let connector = OneShot { network, for_one: Some((link.clone(), of_socket)) };
            let channel = endpoint?.executor(calls).connect_with_connector(connector).await;
            let channel = channel.map_err(ConnectError::Connect)?;
            check(channel.clone()).await?;
            Ok(Endpoint::new(instance, channel, link))
        })
    }

    #[cfg(feature = "tls")]
    fn has_tls(&self) -> bool {
        self.options.tls.is_some()
    }

    #[cfg(not(feature = "tls"))]
    fn has_tls(&self) -> bool {
        false
    }

    fn endpoint(&self, instance: &Instance) -> Result<transport::Endpoint, ConnectError> {
        let authority = instance.id.authority();
        let address = |source: transport::Error| ConnectError::Address {
            authority: authority.to_owned(),
            source: source.into(),
        };
        let scheme = if self.has_tls() { "https" } else { "http" };
        let endpoint =
            transport::Endpoint::from_shared(format!("{scheme}://{authority}")).map_err(address)?;
        #[cfg(feature = "tls")]
        let endpoint = match &self.options.tls {
            Some(tls) => endpoint.tls_config(tls.clone()).map_err(address)?,
            None => endpoint,
        };
        Ok(match self.options.keep_alive {
            Some((interval, timeout)) => endpoint
                .http2_keep_alive_interval(interval)
                .keep_alive_timeout(timeout)
                .keep_alive_while_idle(true),
            None => endpoint,
        })
    }
}

impl<N: Network> Connector for TonicConnector<N> {
    fn connect(&self, instance: Arc<Instance>, link: Arc<Link>) -> BoxFuture<Result<Endpoint, ConnectError>> {
        let within = self.options.connect_timeout;
        let dial = self.dial(instance, link);
        // One bound over TCP, TLS and the exchange: tonic's own covers TCP alone.
        Box::pin(async move { running(within, dial).await.unwrap_or(Err(ConnectError::TimedOut(within))) })
    }

    fn probe(&self, endpoint: Arc<Endpoint>, link: Arc<Link>) -> BoxFuture<Result<Life, ConnectError>> {
        let within = self.options.probe_timeout;
        let dial = self.dial(endpoint.instance().clone(), link);
        Box::pin(async move {
            let mut elsewhere = None;
            let asking = async {
                let mut here = pin!(ask(endpoint.channel().clone()));
                match running(within / 2, &mut here).await {
                    Some(Err(ConnectError::GoingAway)) => {
                        return dial.await.map(Life::Elsewhere).map_err(|_| ConnectError::GoingAway);
                    }
                    Some(answer) => return answer,
                    None => {}
                }
                let mut second = pin!(async { elsewhere = dial.await.ok() });
                tokio::select! {
                    answer = &mut here => return answer,
                    () = &mut second => {}
                }
                here.await
            };
            match running(within, asking).await {
                Some(answer) => answer,
                None => elsewhere.map(Life::Elsewhere).ok_or(ConnectError::TimedOut(within)),
            }
        })
    }
}

/// In so many parts is a time-out counted.
const PARTS: u32 = 10;

/// Waits for `future`, but no longer than `within` of the time in which we run.
///
/// Where the process stands still, or its runtime has no thread to spare, the
/// answer may lie in the socket unread when the time is over, and all instances
/// would look dead at once. So each part of the time counts for what it should
/// have taken, however late its end is noticed.
async fn running<T>(within: Duration, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    for _ in 0..PARTS {
        if let Ok(output) = timeout(within / PARTS, &mut future).await {
            return Some(output);
        }
    }
    None
}

/// One exchange that every gRPC server can answer: `grpc.health.v1` Check.
/// UNIMPLEMENTED and every other status that came over the wire will do as well,
/// but not UNAVAILABLE, nor the server's word that it is not serving.
async fn check(channel: Channel) -> Result<(), ConnectError> {
    match HealthClient::new(Checked(channel)).check(HealthCheckRequest::default()).await {
        Ok(response) if response.get_ref().status() == ServingStatus::NotServing => {
            Err(ConnectError::NotServing)
        }
        Ok(_) => Ok(()),
        Err(status) if came_over_the_wire(&status) => match status.code() {
            Code::Unavailable => Err(ConnectError::Unavailable(Box::new(status))),
            _ => Ok(()),
        },
        Err(status) => Err(ConnectError::Exchange(Box::new(status))),
    }
}

/// The same on a connection that has calls. Where it was told to go away the exchange does not leave, and
/// its failure says nothing: who drains finishes what it has.
async fn ask(channel: Channel) -> Result<Life, ConnectError> {
    match check(channel).await {
        Err(ConnectError::Exchange(status)) if outcome::judge(&*status).is_of_a_spent_connection() => {
            Err(ConnectError::GoingAway)
        }
        answer => answer.map(|()| Life::Here),
    }
}

/// A status made on our side has the transport's error as its source, or is
/// one of tonic's texts for an answer that was not gRPC.
fn came_over_the_wire(status: &Status) -> bool {
    use std::error::Error;
    status.source().is_none()
        && !matches!(status.code(), Code::Internal | Code::Unknown)
        && !status.message().starts_with("grpc-status header missing")
}

/// Connects once. Later calls fail: the channel above is spent.
struct OneShot<N> {
    network: N,
    for_one: Option<(Arc<Link>, Together)>,
}

/// A second connection was asked of a channel that is for one only.
#[derive(Debug)]
struct Spent;

impl fmt::Display for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this channel's one connection has ended; a newer binding has another")
    }
}

impl std::error::Error for Spent {}

impl<N: Network> Service<Uri> for OneShot<N> {
    type Response = WatchedIo<N::Response>;
    type Error = NetworkError;
    type Future = BoxFuture<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.network.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.for_one.take().map(|it| (self.network.call(uri), it));
        Box::pin(async move {
            let (connecting, (link, calls)) = connecting.ok_or(Spent)?;
            Ok(WatchedIo::new(connecting.await.map_err(Into::into)?, link, calls))
        })
    }
}
