//! A Consul, instances registered in it by hand, and a client.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};
use tonic_failover::{
    client::{CallError, CallErrorKind, FailoverChannel, GrpcClient, Served, ServiceOptions},
    demo::pb::{CounterReply, GetRequest, IncrementRequest, WatchRequest, counter_client::CounterClient},
    testkit::ConsulProcess,
};

use crate::common::{self, builder, options, register};

/// Consul and the client of it.
pub(crate) struct Stage {
    pub(crate) consul: ConsulProcess,
    pub(crate) client: GrpcClient,
}

impl Stage {
    /// With these instances, by name and port. The client has asked for nothing yet.
    pub(crate) async fn set(instances: &[(&str, u16)]) -> Option<Self> {
        Self::with(options(), instances).await
    }

    pub(crate) async fn with(options: ServiceOptions, instances: &[(&str, u16)]) -> Option<Self> {
        let consul = common::consul().await?;
        for (name, port) in instances {
            register(consul.registry(), "counter", name, *port).await;
        }
        let client = builder(&consul.url()).service(options).build().unwrap().grpc_client("counter").unwrap();
        Some(Self { consul, client })
    }

    /// The same, once as many instances are connected.
    pub(crate) async fn ready(self, count: usize) -> Self {
        self.client.ready().await.unwrap();
        self.until_ready(count).await;
        self
    }

    pub(crate) async fn until_ready(&self, count: usize) {
        let words = format!("{count} are ready");
        common::until(&self.client, &words, |c| c.status().datacenters[0].ready == count).await;
    }

    pub(crate) fn channel(&self) -> FailoverChannel {
        self.client.channel()
    }

    /// The name of the instance that is bound.
    pub(crate) fn bound(&self) -> String {
        common::bound(&self.client).expect("something is bound")
    }
}

pub(crate) type Called<T> = Result<Response<T>, Status>;

/// A safe call.
pub(crate) async fn get(channel: FailoverChannel, timeout: Duration) -> Called<CounterReply> {
    let mut request = Request::new(GetRequest::default());
    request.set_timeout(timeout);
    CounterClient::new(channel).get(request).await
}

/// A call that must not run twice.
pub(crate) async fn increment(channel: FailoverChannel, timeout: Duration) -> Called<CounterReply> {
    let mut request = Request::new(IncrementRequest::default());
    request.set_timeout(timeout);
    CounterClient::new(channel).increment(request).await
}

/// A server stream without a deadline.
pub(crate) async fn watch(channel: FailoverChannel) -> Called<tonic::Streaming<CounterReply>> {
    CounterClient::new(channel).watch(WatchRequest::default()).await
}

/// Who answered.
pub(crate) fn served<T>(response: &Response<T>) -> (String, u32) {
    let served = response.extensions().get::<Served>().expect("every answer says who gave it");
    (served.instance.name.clone(), served.attempts)
}

/// The typed error behind a status of our own making, which must have one.
pub(crate) fn kind(status: &Status) -> CallErrorKind {
    let error = CallError::of(status).unwrap_or_else(|| panic!("no CallError behind {status:?}"));
    assert_eq!(error.status().code(), status.code());
    let expected = match error.kind() {
        CallErrorKind::DeadlineExceeded => Code::DeadlineExceeded,
        _ => Code::Unavailable,
    };
    assert_eq!(status.code(), expected, "{status:?}");
    error.kind().clone()
}

/// Waits until `is_so`.
pub(crate) async fn wait_for(words: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(common::SOON, wait).await.unwrap_or_else(|_| panic!("not so: {words}"));
}

/// How long it took.
pub(crate) async fn timed<T>(future: impl Future<Output = T>) -> (T, Duration) {
    let started = Instant::now();
    (future.await, started.elapsed())
}

/// What the hook saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) method: String,
    pub(crate) instance: Option<String>,
    pub(crate) attempt: u32,
    pub(crate) code: Code,
    pub(crate) resent: bool,
}

/// Options whose hook writes down what it sees.
pub(crate) fn observed(options: ServiceOptions) -> (ServiceOptions, Arc<Mutex<Vec<Failure>>>) {
    let failures = Arc::new(Mutex::new(Vec::new()));
    let seen = failures.clone();
    let options = options.on_error(move |failure| {
        seen.lock().push(Failure {
            method: failure.method.rsplit('/').next().unwrap_or_default().to_owned(),
            instance: failure.instance.map(|i| i.name.clone()),
            attempt: failure.attempt,
            code: failure.status.code(),
            resent: failure.resent,
        });
    });
    (options, failures)
}
