//! A server in this process that says of itself what it is told to.

use std::{pin::Pin, sync::Arc};

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_stream::{Stream, wrappers::TcpListenerStream};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status, transport::Server};
use tonic_failover::demo::pb::{
    AddRequest, CounterReply, GetRequest, IncrementRequest, WatchRequest, counter_server,
};
use tonic_health::{ServingStatus, server::HealthReporter};

/// The name under which it tells its health.
pub(crate) const SERVICE: &str = "counter.v1.Counter";

/// Ends with this.
pub(crate) struct Healthy {
    pub(crate) port: u16,
    health: HealthReporter,
    calls: Arc<Mutex<u64>>,
    _server: AbortOnDropHandle<()>,
}

impl Healthy {
    pub(crate) async fn start(serving: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (health, service) = tonic_health::server::health_reporter();
        let calls = Arc::new(Mutex::new(0));
        let counter = counter_server::CounterServer::new(Counted(calls.clone()));
        let server = Server::builder().add_service(service).add_service(counter);
        let server = server.serve_with_incoming(TcpListenerStream::new(listener));
        let server = AbortOnDropHandle::new(tokio::spawn(async { server.await.unwrap() }));
        let this = Self { port, health, calls, _server: server };
        this.says(serving).await;
        this
    }

    pub(crate) async fn says(&self, serving: bool) {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.health.set_service_status(SERVICE, status).await;
    }

    /// Ends the streams of those that watch.
    pub(crate) async fn forget(&self) {
        self.health.clone().clear_service_status(SERVICE).await;
    }

    pub(crate) fn calls(&self) -> u64 {
        *self.calls.lock()
    }
}

struct Counted(Arc<Mutex<u64>>);

impl Counted {
    fn reply(&self) -> Result<Response<CounterReply>, Status> {
        *self.0.lock() += 1;
        Ok(Response::new(CounterReply::default()))
    }
}

#[tonic::async_trait]
impl counter_server::Counter for Counted {
    async fn increment(&self, _: Request<IncrementRequest>) -> Result<Response<CounterReply>, Status> {
        self.reply()
    }

    async fn get(&self, _: Request<GetRequest>) -> Result<Response<CounterReply>, Status> {
        self.reply()
    }

    async fn add(&self, _: Request<AddRequest>) -> Result<Response<CounterReply>, Status> {
        self.reply()
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<CounterReply, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("not here"))
    }
}
