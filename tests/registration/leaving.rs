//! Leaving in order.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    sync::{oneshot, watch},
    task::JoinHandle,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Code, Request, Response, Status,
    transport::{Channel, Server},
};
use tonic_failover::{
    InstanceId,
    consul::ConsulConfig,
    demo::pb::{
        AddRequest, CounterReply, GetRequest, IncrementRequest, WatchRequest,
        counter_client::CounterClient,
        counter_server::{Counter, CounterServer},
    },
    server::{NotDrained, Registration, RegistrationBuilder, RegistrationStatus},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use super::world::{World, until, until_registered};
use crate::common::SOON;

/// Long enough that a test sees what is done in it.
const SETTLE: Duration = Duration::from_secs(3);

type Stream = tokio_stream::wrappers::ReceiverStream<Result<CounterReply, Status>>;

/// Answers `Get` at once, and `Increment` after so many milliseconds.
struct Slow {
    registration: Registration,
    /// How many increments have been begun.
    begun: watch::Sender<usize>,
}

impl Slow {
    fn of(registration: Registration) -> (Self, watch::Receiver<usize>) {
        let (begun, seen) = watch::channel(0);
        (Self { registration, begun }, seen)
    }
}

#[tonic::async_trait]
impl Counter for Slow {
    async fn get(&self, _: Request<GetRequest>) -> Result<Response<CounterReply>, Status> {
        Ok(Response::new(CounterReply::default()))
    }

    async fn increment(&self, request: Request<IncrementRequest>) -> Result<Response<CounterReply>, Status> {
        self.begun.send_modify(|begun| *begun += 1);
        tokio::time::sleep(Duration::from_millis(request.get_ref().by)).await;
        Ok(Response::new(CounterReply::default()))
    }

    async fn add(&self, _: Request<AddRequest>) -> Result<Response<CounterReply>, Status> {
        Ok(Response::new(CounterReply::default()))
    }

    type WatchStream = Stream;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Stream>, Status> {
        let (send, receive) = tokio::sync::mpsc::channel(1);
        let stopping = self.registration.stopping();
        tokio::spawn(async move {
            let _ = send.send(Ok(CounterReply::default())).await;
            stopping.cancelled().await;
            let _ = send.send(Err(Status::unavailable("told to end"))).await;
        });
        Ok(Response::new(Stream::new(receive)))
    }
}

/// A server that is registered as `a`, and what ends it.
struct Serving {
    registration: Registration,
    address: InstanceId,
    begun: watch::Receiver<usize>,
    signal: Option<oneshot::Sender<()>>,
    server: JoinHandle<Result<(), NotDrained>>,
}

impl Serving {
    async fn start(world: &World, with: impl FnOnce(RegistrationBuilder) -> RegistrationBuilder) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = InstanceId::from(listener.local_addr().unwrap());
        let config = ConsulConfig::new(world.registry().url()).unwrap();
        let builder = Registration::builder(config, "s", "a", address.clone()).serves("counter.v1.Counter");
        let registration = with(builder).start().unwrap();
        let (signal, signalled) = oneshot::channel::<()>();
        let left = registration.left(async { drop(signalled.await) });
        let (slow, begun) = Slow::of(registration.clone());
        let server = Server::builder()
            .add_service(registration.health_service())
            .add_service(CounterServer::new(slow))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), left);
        let it = registration.clone();
        let server = tokio::spawn(async move { it.drained(server).await.map(|ended| ended.unwrap()) });
        Self { registration, address, begun, signal: Some(signal), server }
    }

    async fn channel(&self) -> Channel {
        let url = format!("http://{}", self.address);
        Channel::from_shared(url).unwrap().connect().await.unwrap()
    }

    /// An increment is under way.
    async fn until_begun(&mut self) {
        timeout(SOON, self.begun.wait_for(|begun| *begun > 0)).await.expect("it begins").unwrap();
    }

    fn signal(&mut self) {
        drop(self.signal.take());
    }

    async fn ended(self) -> Result<(), NotDrained> {
        timeout(SOON, self.server).await.expect("it ends").unwrap()
    }
}

async fn health(channel: &Channel, service: &str) -> Result<i32, Code> {
    let request = HealthCheckRequest { service: service.to_owned() };
    let answer = HealthClient::new(channel.clone()).check(request).await;
    answer.map(|it| it.into_inner().status).map_err(|status| status.code())
}

const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;
const SERVICE_UNKNOWN: i32 = 3;

pub(crate) async fn it_leaves_in_order(world: World) {
    let steps = Arc::new(Mutex::new(Vec::new()));
    let (note, registry) = (Arc::clone(&steps), world.registry().clone());
    let mut it = Serving::start(&world, |builder| {
        builder.settle(SETTLE).before_leaving(async move {
            let listed = registry.passing("s").await.unwrap();
            note.lock().push(listed);
        })
    })
    .await;
    until_registered(&it.registration).await;
    let channel = it.channel().await;
    for (name, status) in
        [("", Ok(SERVING)), ("counter.v1.Counter", Ok(SERVING)), ("other.v1.Other", Err(Code::NotFound))]
    {
        assert_eq!(health(&channel, name).await, status, "{name:?}");
    }
    let watch = async |service: &str| {
        let request = HealthCheckRequest { service: service.to_owned() };
        HealthClient::new(channel.clone()).watch(request).await.unwrap().into_inner()
    };
    let (mut known, mut unknown) = (watch("counter.v1.Counter").await, watch("other.v1.Other").await);
    assert_eq!(known.message().await.unwrap().unwrap().status, SERVING);
    assert_eq!(unknown.message().await.unwrap().unwrap().status, SERVICE_UNKNOWN);

    it.signal();
    until("it is out of Consul", async || world.listed("").await.is_empty()).await;
    assert_eq!(*steps.lock(), [["a"]], "what comes first came while it was listed");
    // Who has not heard of it yet is answered, on old connections and on new ones.
    let mut client = CounterClient::new(it.channel().await);
    client.get(GetRequest::default()).await.unwrap();
    assert_eq!(health(&channel, "").await, Ok(SERVING));
    assert!(!it.registration.stopping().is_cancelled());
    assert!(matches!(it.registration.status(), RegistrationStatus::Left { instead: None }));
    let told = timeout(SOON, known.message()).await.unwrap().unwrap().unwrap();
    assert_eq!(told.status, NOT_SERVING);
    for stream in [&mut known, &mut unknown] {
        assert!(timeout(SOON, stream.message()).await.unwrap().unwrap().is_none(), "the stream's end");
    }
    let registration = it.registration.clone();
    assert_eq!(it.ended().await, Ok(()));
    assert!(registration.stopping().is_cancelled());
}

pub(crate) async fn calls_in_flight_are_answered_and_streams_told_to_end(world: World) {
    let mut it = Serving::start(&world, |builder| builder.settle(Duration::ZERO)).await;
    until_registered(&it.registration).await;
    let mut client = CounterClient::new(it.channel().await);
    let mut stream = client.watch(WatchRequest::default()).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    let call = tokio::spawn(async move {
        client.increment(IncrementRequest { by: 1000, request_id: String::new() }).await
    });
    it.until_begun().await;
    it.signal();
    let end = timeout(SOON, stream.message()).await.unwrap().unwrap_err();
    assert_eq!((end.code(), end.message()), (Code::Unavailable, "told to end"));
    call.await.unwrap().unwrap();
    assert_eq!(it.ended().await, Ok(()));
}

pub(crate) async fn a_call_that_does_not_end_is_not_waited_for_for_ever(world: World) {
    let drain = Duration::from_millis(200);
    let mut it = Serving::start(&world, |builder| builder.settle(Duration::ZERO).drain(drain)).await;
    until_registered(&it.registration).await;
    let mut client = CounterClient::new(it.channel().await);
    let hour = IncrementRequest { by: 3_600_000, request_id: String::new() };
    let call = tokio::spawn(async move { client.increment(hour).await });
    it.until_begun().await;
    it.signal();
    let late = it.ended().await.unwrap_err();
    assert_eq!(late.after, drain);
    call.abort();
}

pub(crate) async fn with_consul_away_leaving_ends_in_time(mut world: World) {
    // Never registered, so there is nothing to take out.
    world.stop().await;
    let begun = Instant::now();
    let never = world.a().start().unwrap();
    never.leave().await;
    assert!(begun.elapsed() < Duration::from_secs(4));
    for hangs in [false, true] {
        world.start_empty().await;
        let registration = world.a().settle(Duration::from_secs(600)).start().unwrap();
        until_registered(&registration).await;
        if hangs {
            world.hang().await
        } else {
            world.stop().await
        }
        let begun = Instant::now();
        timeout(SOON, registration.leave()).await.expect("nobody has heard of it, so nobody is waited for");
        // Two seconds, and what a busy machine adds.
        assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
        let status = registration.status();
        assert!(matches!(status, RegistrationStatus::LeftBehind { .. }), "{status}");
        if let (World::Real(consul), true) = (&mut world, hangs) {
            consul.kill().await.unwrap();
        }
    }
}

pub(crate) async fn leaving_is_one_whoever_asks_for_it(world: World) {
    let (begin, begun) = oneshot::channel::<()>();
    let registration =
        world.a().settle(Duration::ZERO).before_leaving(async { drop(begun.await) }).start().unwrap();
    until_registered(&registration).await;
    // One who gives up does not undo it for the next.
    assert!(timeout(Duration::from_millis(50), registration.leave()).await.is_err());
    assert_eq!(world.listed("").await.len(), 1, "first things first");
    let others: Vec<_> = (0..3).map(|_| tokio::spawn(registration.left(async {}))).collect();
    drop(begin);
    for other in others {
        timeout(SOON, other).await.unwrap().unwrap();
    }
    assert!(world.listed("").await.is_empty());
    registration.leave().await;
}
