//! The last handle is dropped in the middle of something: nothing is left.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::runtime::{self, Runtime};
use tonic_failover::{
    client::{ConsulService, FailoverChannel, GrpcClient, ServiceOptions},
    demo::pb::{GetRequest, WatchRequest, counter_client::CounterClient},
    testkit::ConsulProcess,
};

use crate::{
    common::{
        SOON, builder, consul, hostile, options,
        proxy::Proxy,
        register,
        scripted::{Act, End, Scripted},
    },
    stage::{get, wait_for},
};

/// A client on a runtime of its own, so that its tasks can be counted.
struct Apart {
    runtime: Option<Runtime>,
    _consul: ConsulProcess,
    registry: Arc<Proxy>,
}

impl Apart {
    async fn new(instances: &[(&str, u16)]) -> Option<Self> {
        let consul = consul().await?;
        for (name, port) in instances {
            register(consul.registry(), "counter", name, *port).await;
        }
        let registry = Arc::new(Proxy::before(consul.http_addr().port()).await);
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Some(Self { runtime: Some(runtime), _consul: consul, registry })
    }

    /// Runs `middle` on the client's runtime; with its end everything is dropped.
    async fn run<F, T>(
        &self,
        options: ServiceOptions,
        middle: impl FnOnce(GrpcClient) -> F + Send + 'static,
    ) -> T
    where
        F: Future<Output = T> + Send,
        T: Send + 'static,
    {
        let url = self.registry.url();
        let task = async move {
            let consul: ConsulService = builder(&url).service(options).build().unwrap();
            let client = consul.grpc_client("counter").unwrap();
            drop(consul);
            middle(client).await
        };
        self.runtime.as_ref().unwrap().spawn(task).await.unwrap()
    }

    async fn nothing_is_left(&self, what: &str) {
        let metrics = self.runtime.as_ref().unwrap().metrics();
        wait_for(&format!("{what}: no task is left"), || metrics.num_alive_tasks() == 0).await;
        wait_for(&format!("{what}: no connection to Consul is left"), || self.registry.open() == 0).await;
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Long enough to be in the middle of whatever was begun.
const MIDDLE: Duration = Duration::from_millis(300);

/// Polls a call for a while, and gives it up.
async fn begin<T>(call: impl Future<Output = T>) {
    assert!(tokio::time::timeout(MIDDLE, call).await.is_err(), "it was to hang");
}

async fn call(channel: FailoverChannel) {
    begin(get(channel, SOON)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_it_is_idle() {
    let server = Scripted::good().await;
    let Some(apart) = Apart::new(&[("a", server.port)]).await else { return };
    apart
        .run(options(), |client| async move {
            client.ready().await.unwrap();
            get(client.channel(), SOON).await.unwrap();
        })
        .await;
    apart.nothing_is_left("idle").await;
    wait_for("no connection is left", || server.open() == 0).await;
    assert_eq!(server.connections(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_it_connects() {
    for (what, listening) in
        [("black hole", hostile::black_hole().await), ("silent", hostile::silent().await)]
    {
        let Some(apart) = Apart::new(&[("a", listening.port)]).await else { return };
        apart.run(options(), |client| async move { call(client.channel()).await }).await;
        apart.nothing_is_left(what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_connected_peer_does_not_answer_the_first_exchange() {
    let server = Scripted::good().await;
    server.health(Act::Hang);
    let Some(apart) = Apart::new(&[("a", server.port)]).await else { return };
    apart.run(options(), |client| async move { call(client.channel()).await }).await;
    apart.nothing_is_left("first exchange").await;
    wait_for("no connection is left", || server.open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_there_is_nothing_to_call() {
    let Some(apart) = Apart::new(&[]).await else { return };
    apart.run(options(), |client| async move { call(client.channel()).await }).await;
    apart.nothing_is_left("nothing to call").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_consul_hangs() {
    let server = Scripted::good().await;
    let Some(apart) = Apart::new(&[("a", server.port)]).await else { return };
    apart.registry.stop();
    apart.run(options(), |client| async move { call(client.channel()).await }).await;
    apart.nothing_is_left("Consul hangs").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_an_update_waits() {
    let server = Scripted::good().await;
    let Some(apart) = Apart::new(&[("a", server.port)]).await else { return };
    let registry = apart.registry.clone();
    apart
        .run(options(), |client| async move {
            client.ready().await.unwrap();
            registry.stop();
            begin(client.consul_service().update_grpc_client("counter")).await;
        })
        .await;
    apart.nothing_is_left("update").await;
    wait_for("no connection is left", || server.open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_call_is_out_and_a_stream_is_open() {
    let server = Scripted::start(|ask| match ask.path.ends_with("/Watch") {
        true => Act::Begin(1, End::Hang),
        false => Act::Hang,
    })
    .await;
    let Some(apart) = Apart::new(&[("a", server.port)]).await else { return };
    apart
        .run(options(), |client| async move {
            let mut stream = CounterClient::new(client.channel())
                .watch(WatchRequest::default())
                .await
                .unwrap()
                .into_inner();
            stream.message().await.unwrap().expect("the first");
            call(client.channel()).await;
        })
        .await;
    apart.nothing_is_left("calls").await;
    wait_for("no connection is left", || server.open() == 0).await;
}

/// A stream outlives its handle, and takes the connection with it when it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_held_goes_on_without_its_handle() {
    let server = Scripted::start(|_| Act::Begin(1, End::Status(0)).after(Duration::from_millis(100))).await;
    let held = Scripted::start(|_| Act::Begin(1, End::Hang)).await;
    for (server, ends) in [(server, true), (held, false)] {
        let Some(apart) = Apart::new(&[("a", server.port)]).await else { return };
        let mut stream = apart
            .run(options(), |client| async move {
                CounterClient::new(client.channel())
                    .watch(WatchRequest::default())
                    .await
                    .unwrap()
                    .into_inner()
            })
            .await;
        stream.message().await.unwrap().expect("the first");
        wait_for("no connection to Consul is left", || apart.registry.open() == 0).await;
        if ends {
            assert!(stream.message().await.unwrap().is_none(), "a good end");
        } else {
            assert!(tokio::time::timeout(MIDDLE, stream.message()).await.is_err(), "it goes on");
            drop(stream);
        }
        apart.nothing_is_left("stream").await;
        wait_for("no connection is left", || server.open() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_silent_instance_is_probed() {
    let server = Scripted::good().await;
    let proxy = Arc::new(Proxy::before(server.port).await);
    let Some(apart) = Apart::new(&[("a", proxy.port)]).await else { return };
    let network = proxy.clone();
    let options = options().suspect_after(Duration::from_millis(100)).probe_timeout(SOON);
    apart
        .run(options, |client| async move {
            client.ready().await.unwrap();
            network.stop();
            call(client.channel()).await;
        })
        .await;
    apart.nothing_is_left("probe").await;
    wait_for("no connection is left", || proxy.open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_refused_call_pauses() {
    let server = Scripted::start(|_| Act::Reset(h2::Reason::REFUSED_STREAM)).await;
    let Some(apart) = Apart::new(&[("a", server.port)]).await else { return };
    apart.run(options().max_attempts(100), |client| async move { call(client.channel()).await }).await;
    apart.nothing_is_left("pause").await;
    wait_for("no connection is left", || server.open() == 0).await;
}

/// More is to be sent than the dead network takes: the connection cannot say goodbye.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_large_request_is_stuck() {
    let server = Scripted::good().await;
    for given_up in [true, false] {
        let proxy = Arc::new(Proxy::before(server.port).await);
        let Some(apart) = Apart::new(&[("a", proxy.port)]).await else { return };
        let network = proxy.clone();
        // Many, for the system takes some megabytes before it says no.
        let options = if given_up { options() } else { options().suspect_after(SOON) };
        apart
            .run(options, move |client| async move {
                client.ready().await.unwrap();
                network.stop();
                let request_id = "x".repeat(1024 * 1024);
                let calls = (0..64).map(|_| {
                    let mut client = CounterClient::new(client.channel());
                    let request_id = request_id.clone();
                    async move { client.get(GetRequest { request_id }).await }
                });
                let all = futures_util::future::join_all(calls);
                if given_up {
                    for result in tokio::time::timeout(SOON, all).await.expect("they end") {
                        result.unwrap_err();
                    }
                } else {
                    begin(all).await;
                }
            })
            .await;
        apart.nothing_is_left(if given_up { "stuck, given up" } else { "stuck" }).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_ends_in_order_and_says_so_to_later_calls() {
    let server = Scripted::start(|_| Act::Answer.after(MIDDLE)).await;
    let Some(apart) = Apart::new(&[("a", server.port)]).await else { return };
    apart
        .run(options(), |client| async move {
            client.ready().await.unwrap();
            let in_flight = tokio::spawn(get(client.channel(), SOON));
            let mut bindings = client.subscribe();
            tokio::time::sleep(MIDDLE / 3).await;
            client.consul_service().shutdown().await;
            assert!(bindings.borrow_and_update().is_empty());
            assert!(bindings.changed().await.is_err(), "closed");
            in_flight.await.unwrap().expect("what is in flight is finished");
            let status = get(client.channel(), SOON).await.unwrap_err();
            assert_eq!(crate::stage::kind(&status), tonic_failover::client::CallErrorKind::Closed);
            assert!(client.consul_service().update_grpc_client("counter").await.is_err());
        })
        .await;
    apart.nothing_is_left("shutdown").await;
    wait_for("no connection is left", || server.open() == 0).await;
}
