//! A bare channel, and a client; both call without any generated code.

use std::{error::Error, sync::Arc, time::Duration};

use bytes::{Buf, BufMut, Bytes};
use http_body_util::Full;
use parking_lot::Mutex;
use prost::Message;
use prost_types::{
    FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto, MethodOptions, ServiceDescriptorProto,
    method_options::IdempotencyLevel,
};
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::{Channel, Endpoint},
};
use tonic_failover::{
    Instance,
    client::{
        CallError, CallErrorKind, FailoverChannel, GrpcClient, Served, ServiceOptions, Services,
        registry::StaticList,
    },
};
use tower::{Service, ServiceExt};

use crate::table::outcome::{Proof, Verdict, judge};

/// A bound for what comes soon. Generous: a busy machine must not fail a test.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The method that has no side effect, as the descriptors say.
pub(crate) const GET: &str = "/counter.v1.Counter/Get";
/// The method that must not run twice.
pub(crate) const INCREMENT: &str = "/counter.v1.Counter/Increment";
/// The one that streams.
pub(crate) const WATCH: &str = "/counter.v1.Counter/Watch";

// === a bare channel ===

/// A tonic channel as it comes, connected.
pub(crate) async fn bare(port: u16) -> Channel {
    endpoint(port).connect().await.unwrap()
}

pub(crate) fn endpoint(port: u16) -> Endpoint {
    Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap()
}

/// One request with an empty message.
pub(crate) fn request(port: u16, path: &str) -> http::Request<Body> {
    http::Request::post(format!("http://127.0.0.1:{port}{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Full::new(Bytes::from_static(&[0; 5]))))
        .unwrap()
}

/// Sends it: the response's headers, or what tonic reports.
pub(crate) async fn send(
    mut channel: Channel,
    request: http::Request<Body>,
) -> Result<http::Response<Body>, tonic::transport::Error> {
    channel.ready().await?.call(request).await
}

/// What the table says of an error, which is printed with its chain and its code.
pub(crate) fn verdict(what: &str, error: impl Error + Send + Sync + 'static) -> Verdict {
    let verdict = judge(&error);
    let mut chain = format!("{error}");
    let mut next = error.source();
    while let Some(cause) = next {
        chain.push_str(&format!(" <- {cause}"));
        next = cause.source();
    }
    println!("{what}: {verdict:?}, tonic's code {:?}: {chain}", Status::from_error(Box::new(error)).code());
    verdict
}

/// What the table says of a call on a bare channel that gets no headers.
pub(crate) async fn proof(what: &str, channel: Channel, port: u16) -> Proof {
    let sent = tokio::time::timeout(SOON, send(channel, request(port, INCREMENT))).await;
    verdict(what, sent.expect("it ends").expect_err("no headers")).proof
}

// === a client ===

pub(crate) type Client = GrpcClient<Services>;

/// One failed attempt, as the hook saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) attempt: u32,
    pub(crate) resent: bool,
}

/// A client of instances that are listed by hand.
pub(crate) struct Stage {
    pub(crate) client: Client,
    pub(crate) failures: Arc<Mutex<Vec<Failure>>>,
}

/// In which nobody is suspected for being slow.
pub(crate) fn options() -> ServiceOptions {
    let method = |name: &str, safe: bool, streams: bool| MethodDescriptorProto {
        name: Some(name.to_owned()),
        server_streaming: Some(streams),
        options: safe.then(|| {
            let mut options = MethodOptions::default();
            options.set_idempotency_level(IdempotencyLevel::NoSideEffects);
            options
        }),
        ..MethodDescriptorProto::default()
    };
    let service = ServiceDescriptorProto {
        name: Some("Counter".to_owned()),
        method: vec![
            method("Get", true, false),
            method("Increment", false, false),
            method("Watch", false, true),
        ],
        ..ServiceDescriptorProto::default()
    };
    let file = FileDescriptorProto {
        package: Some("counter.v1".to_owned()),
        service: vec![service],
        ..FileDescriptorProto::default()
    };
    let descriptors = FileDescriptorSet { file: vec![file] }.encode_to_vec();
    ServiceOptions::new("counter")
        .descriptors(descriptors)
        .suspect_after(SOON)
        .probe_timeout(SOON)
        .connect_timeout(SOON)
}

impl Stage {
    pub(crate) fn set(options: ServiceOptions, ports: &[u16]) -> Self {
        let failures = Arc::new(Mutex::new(Vec::new()));
        let seen = failures.clone();
        let options = options.on_error(move |failure| {
            seen.lock().push(Failure { attempt: failure.attempt, resent: failure.resent });
        });
        let list = StaticList::new();
        let instance = |(n, port): (usize, &u16)| Instance::new(format!("{n}"), "127.0.0.1", *port, "here");
        list.set("counter", ports.iter().enumerate().map(instance).collect::<Vec<_>>());
        let services = Services::builder(list).service(options).build().unwrap();
        Self { client: services.grpc_client("counter").unwrap(), failures }
    }

    /// With these connected.
    pub(crate) async fn ready(options: ServiceOptions, ports: &[u16]) -> Self {
        let stage = Self::set(options, ports);
        stage.until("all are ready", |c| c.status().datacenters[0].ready == ports.len()).await;
        stage
    }

    /// With one connected.
    pub(crate) async fn of(port: u16) -> Self {
        Self::ready(options(), &[port]).await
    }

    pub(crate) async fn until(&self, words: &str, is_so: impl Fn(&Client) -> bool) {
        let what = || format!("{words}; {}", self.client.status());
        wait_for(what, || is_so(&self.client)).await;
    }

    /// One call without a deadline of its own; its attempts where it was answered.
    pub(crate) async fn call(&self, path: &'static str) -> Result<u32, Status> {
        call(self.client.channel(), path).await
    }

    /// A call that begins a stream.
    pub(crate) async fn watch(&self) -> Result<Streaming<Bytes>, Status> {
        let mut grpc = tonic::client::Grpc::new(self.client.channel());
        grpc.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static(WATCH);
        grpc.server_streaming(Request::new(Bytes::new()), path, Raw).await.map(Response::into_inner)
    }

    /// A call that fails with an error of ours, of this kind, after one attempt.
    pub(crate) async fn fails_once(&self, what: &str, path: &'static str, kind: CallErrorKind) {
        let status = tokio::time::timeout(SOON, self.call(path)).await.expect("it ends").unwrap_err();
        is_ours(what, &status, &kind, 1);
    }
}

/// Checks the typed error behind a status.
pub(crate) fn is_ours(what: &str, status: &Status, kind: &CallErrorKind, attempts: u32) {
    let error = CallError::of(status).unwrap_or_else(|| panic!("{what}: no CallError behind {status:?}"));
    assert_eq!((error.kind(), error.attempts()), (kind, attempts), "{what}: {status:?}");
    let code = match kind {
        CallErrorKind::DeadlineExceeded => tonic::Code::DeadlineExceeded,
        _ => tonic::Code::Unavailable,
    };
    assert_eq!(status.code(), code, "{what}: {status:?}");
}

pub(crate) async fn call(channel: FailoverChannel, path: &'static str) -> Result<u32, Status> {
    call_with(channel, path, Request::new(Bytes::new())).await
}

pub(crate) async fn call_with(
    channel: FailoverChannel,
    path: &'static str,
    request: Request<Bytes>,
) -> Result<u32, Status> {
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static(path);
    let response: Response<Bytes> = grpc.unary(request, path, Raw).await?;
    Ok(response.extensions().get::<Served>().expect("every answer says who gave it").attempts)
}

/// Waits until `is_so`.
pub(crate) async fn wait_for<W: ToString>(words: impl Fn() -> W, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let so = tokio::time::timeout(SOON, wait).await;
    so.unwrap_or_else(|_| panic!("not so: {}", words().to_string()));
}

// === messages as they are ===

pub(crate) struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
