//! One call of the demo's service, and how it went.

use std::{fmt, time::Duration};

use clap::ValueEnum;
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use super::pb::{AddRequest, CounterReply, GetRequest, IncrementRequest, counter_client::CounterClient};
use crate::client::{CallError, FailoverChannel, Served};

/// The demo's client.
pub(crate) type Client = CounterClient<FailoverChannel>;

/// The methods that the demo's clients call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Method {
    /// Has no side effect.
    Get,
    /// May be repeated: its request key counts once.
    Add,
    /// Counts each time it runs.
    Increment,
}

/// An answered call.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// As the reply names them.
    pub(crate) instance: String,
    pub(crate) datacenter: String,
    /// How often the call was sent: 2 where it was resent once.
    pub(crate) attempts: u32,
}

/// A failed call.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) code: tonic::Code,
    pub(crate) message: String,
    /// The name of the instance that had it, where the client knows.
    pub(crate) instance: Option<String>,
    /// Whether the call may have run; `None` where the client does not say.
    pub(crate) may_have_run: Option<bool>,
}

/// Above this a call is called slow. Our choice: what a person begins to feel.
pub(crate) const SLOW: Duration = Duration::from_millis(250);

/// Makes one call. `id` goes into the servers' journals; for `Add` it is the
/// request key.
pub(crate) async fn call(
    mut client: Client,
    method: Method,
    id: String,
    deadline: Duration,
) -> Result<Answer, Failed> {
    let response = match method {
        Method::Get => client.get(within(deadline, GetRequest { request_id: id })).await,
        Method::Add => client.add(within(deadline, AddRequest { request_key: id, by: 1 })).await,
        Method::Increment => {
            client.increment(within(deadline, IncrementRequest { by: 1, request_id: id })).await
        }
    };
    let response = response.map_err(|status| Failed::from(&status))?;
    let attempts = response.extensions().get::<Served>().map_or(1, |served| served.attempts);
    let CounterReply { instance, datacenter, .. } = response.into_inner();
    Ok(Answer { instance, datacenter, attempts })
}

fn within<T>(deadline: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

/// Begins `rate` calls a second, each whether or not those before have ended,
/// until `stop`; then waits `patience` for those still out. `make` gets the
/// number of the call. Dropping the future drops the calls.
pub(crate) async fn pace<F>(
    rate: f64,
    stop: CancellationToken,
    patience: Duration,
    mut make: impl FnMut(u64) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut ticks = interval(Duration::from_secs_f64(1.0 / rate));
    // After a pause of this process the calls missed are not caught up in a burst.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut calls = JoinSet::new();
    let mut number = 0;
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = ticks.tick() => {
                calls.spawn(make(number));
                number += 1;
            }
            Some(_) = calls.join_next() => {}
        }
    }
    let _ = timeout(patience, async { while calls.join_next().await.is_some() {} }).await;
}

// === impl Method ===

impl Method {
    pub(crate) const ALL: [Method; 3] = [Method::Get, Method::Add, Method::Increment];

    /// As the proto calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Method::Get => "Get",
            Method::Add => "Add",
            Method::Increment => "Increment",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

// === impl Failed ===

impl From<&Status> for Failed {
    fn from(status: &Status) -> Self {
        let error = CallError::of(status);
        Self {
            code: status.code(),
            message: status.message().to_owned(),
            instance: error.and_then(CallError::instance).map(|it| it.name.clone()),
            may_have_run: error.map(CallError::may_have_run),
        }
    }
}

/// In the library's words.
impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.message, self.code)
    }
}
