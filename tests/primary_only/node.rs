//! An instance in a runtime of its own, which can be killed with all its connections.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::TcpListener,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use parking_lot::Mutex;
use tokio::{runtime::Runtime, sync::watch, time::Instant};
use tokio_stream::StreamExt;
use tonic::{
    Request, Response, Status,
    body::Body,
    server::NamedService,
    transport::{Server, server::TcpIncoming},
};
use tonic_failover::{
    FencingToken, Instance, InstanceId, Primary, Role,
    demo::pb::{
        AddRequest, CounterReply, GetRequest, IncrementRequest, WatchRequest,
        counter_server::{Counter, CounterServer},
    },
    server::FenceLayer,
};
use tower::{Layer, Service};

/// What ran, by the id that the caller gave it, with the term's token.
pub(crate) type Journal = Arc<Mutex<Vec<(String, u64)>>>;

/// A call whose id begins so finds the state's store without an answer.
pub(crate) const UNSTORED: &str = "unstored";

pub(crate) struct Node {
    pub(crate) name: &'static str,
    pub(crate) port: u16,
    pub(crate) role: watch::Sender<Role>,
    pub(crate) fence: FenceLayer,
    pub(crate) journal: Journal,
    /// How long a call takes.
    pub(crate) work: Arc<Mutex<Duration>>,
    asked: Arc<AtomicUsize>,
    runtime: Option<Runtime>,
}

impl Node {
    /// A standby that knows of no primary.
    pub(crate) fn start(name: &'static str) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (role, watched) = watch::channel(Role::Standby { primary: None });
        let (fence, journal) = (FenceLayer::new(watched), Journal::default());
        let (asked, work) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Duration::ZERO)));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let counter = Handler { name, journal: journal.clone(), work: work.clone() };
        let counter = Counted { inner: fence.layer(CounterServer::new(counter)), asked: asked.clone() };
        let sink = Counted { inner: fence.layer(Sink(journal.clone())), asked: asked.clone() };
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let server = Server::builder().add_service(counter).add_service(sink);
            server.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap();
        });
        Self { name, port, role, fence, journal, work, asked, runtime: Some(runtime) }
    }

    pub(crate) fn id(&self) -> InstanceId {
        InstanceId::new("127.0.0.1", self.port)
    }

    pub(crate) fn instance(&self) -> Instance {
        Instance::new(self.name, "127.0.0.1", self.port, "here")
    }

    /// The same with the tag of a primary.
    pub(crate) fn tagged(&self, token: u64) -> Instance {
        let mut instance = self.instance();
        instance.tags.push("primary".to_owned());
        instance.meta.insert("token".to_owned(), token.to_string());
        instance
    }

    /// As a hint of another.
    pub(crate) fn as_primary(&self, token: u64) -> Primary {
        Primary::new(self.name, self.id(), FencingToken::new(token))
    }

    pub(crate) fn leads(&self, token: u64) {
        let until = Instant::now() + Duration::from_secs(3600);
        self.role.send_replace(Role::Primary { token: FencingToken::new(token), until });
    }

    pub(crate) fn stands_by(&self, primary: Option<Primary>) {
        self.role.send_replace(Role::Standby { primary });
    }

    /// How many calls have come, refused ones too.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    /// How many have run.
    pub(crate) fn ran(&self) -> usize {
        self.journal.lock().len()
    }

    /// Its sockets are closed, whatever they were about.
    pub(crate) fn kill(&mut self) {
        self.runtime.take().expect("killed once").shutdown_background();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// How often each id has run, on any of them.
pub(crate) fn runs(nodes: &[&Node]) -> HashMap<String, usize> {
    let mut runs = HashMap::new();
    for node in nodes {
        for (id, _) in &*node.journal.lock() {
            *runs.entry(id.clone()).or_default() += 1;
        }
    }
    runs
}

struct Handler {
    name: &'static str,
    journal: Journal,
    work: Arc<Mutex<Duration>>,
}

fn token<T>(request: &Request<T>) -> u64 {
    request.extensions().get::<FencingToken>().expect("the fence says whose term it is").get()
}

impl Handler {
    async fn run(&self, id: String, token: u64) -> Result<Response<CounterReply>, Status> {
        let is_stored = !id.starts_with(UNSTORED);
        self.journal.lock().push((id, token));
        if !is_stored {
            return Err(Status::unavailable("it may have been stored"));
        }
        let work = *self.work.lock();
        if !work.is_zero() {
            tokio::time::sleep(work).await;
        }
        Ok(Response::new(CounterReply {
            value: token,
            instance: self.name.to_owned(),
            ..CounterReply::default()
        }))
    }
}

#[tonic::async_trait]
impl Counter for Handler {
    async fn increment(&self, request: Request<IncrementRequest>) -> Result<Response<CounterReply>, Status> {
        let token = token(&request);
        self.run(request.into_inner().request_id, token).await
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<CounterReply>, Status> {
        let token = token(&request);
        self.run(request.into_inner().request_id, token).await
    }

    async fn add(&self, request: Request<AddRequest>) -> Result<Response<CounterReply>, Status> {
        let token = token(&request);
        self.run(request.into_inner().request_key, token).await
    }

    type WatchStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<CounterReply, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let value = token(&request);
        let first = CounterReply { value, instance: self.name.to_owned(), ..CounterReply::default() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(first)).chain(tokio_stream::pending()))))
    }
}

/// Takes a stream of messages in and says well: what came is in the journal.
#[derive(Clone)]
struct Sink(Journal);

impl NamedService for Sink {
    const NAME: &'static str = "test.Sink";
}

impl Service<http::Request<Body>> for Sink {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (journal, token) = (self.0.clone(), request.extensions().get::<FencingToken>().unwrap().get());
        Box::pin(async move {
            let Ok(body) = request.into_body().collect().await else {
                return Ok(Status::cancelled("the request was cut").into_http());
            };
            journal.lock().push((format!("{} bytes", body.to_bytes().len()), token));
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            let frames =
                [http_body::Frame::data(Bytes::from_static(&[0; 5])), http_body::Frame::trailers(trailers)];
            let body = StreamBody::new(tokio_stream::iter(frames.map(Ok::<_, Status>)));
            let response = http::Response::builder().header("content-type", "application/grpc");
            Ok(response.body(Body::new(body)).unwrap())
        })
    }
}

/// Counts what comes, outside of the fence.
#[derive(Clone)]
struct Counted<S> {
    inner: S,
    asked: Arc<AtomicUsize>,
}

impl<S: NamedService> NamedService for Counted<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<http::Request<Body>>> Service<http::Request<Body>> for Counted<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> S::Future {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.inner.call(request)
    }
}
