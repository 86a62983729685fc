//! What a call costs in writes, as the kernel counts them for the client's one thread.

use std::fs;

use tonic::{body::Body, client::GrpcService, transport::Endpoint};
use tonic_failover::{
    Instance,
    client::{Services, registry::StaticList},
    demo::pb::{GetRequest, IncrementRequest, counter_client::CounterClient},
};

use crate::common::{Backend, options};

const CALLS: u64 = 100;

/// The runtime wakes itself by a write as well, once in some sixteen calls.
const OTHERS: u64 = CALLS / 4;

/// All writes that this thread has made, to whatever it may be.
fn writes() -> u64 {
    let io = fs::read_to_string("/proc/thread-self/io").expect("Linux counts what a thread reads and writes");
    let count = io.lines().find_map(|line| line.strip_prefix("syscw: "));
    count.expect("it counts writes").parse().expect("in digits")
}

/// How many, for calls of which each has been answered before the next begins.
async fn of_calls<C>(mut client: CounterClient<C>, safe: bool) -> u64
where
    C: GrpcService<Body>,
    C::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    C::ResponseBody: tonic::codegen::Body<Data = bytes::Bytes> + Send + 'static,
    <C::ResponseBody as tonic::codegen::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    client.get(GetRequest::default()).await.unwrap(); // The first carries the connection's own frames.
    let before = writes();
    for _ in 0..CALLS {
        match safe {
            true => client.get(GetRequest::default()).await.map(drop),
            false => client.increment(IncrementRequest { by: 1, ..Default::default() }).await.map(drop),
        }
        .unwrap();
    }
    writes() - before
}

#[tokio::test(flavor = "current_thread")]
async fn a_lonely_call_is_one_write_where_tonic_takes_two() {
    let backend = Backend::start("a").await;
    let list = StaticList::new();
    list.set("counter", [Instance::new("a", "127.0.0.1", backend.port, "here")]);
    let services = Services::builder(list).service(options()).build().unwrap();
    let client = services.grpc_client("counter").unwrap();
    client.ready().await.unwrap();
    for safe in [true, false] {
        let writes = of_calls(CounterClient::new(client.channel()), safe).await;
        assert!((CALLS..CALLS + OTHERS).contains(&writes), "safe: {safe}, {writes} writes");
    }
    // That they are counted at all.
    let raw = Endpoint::from_shared(format!("http://127.0.0.1:{}", backend.port)).unwrap();
    let writes = of_calls(CounterClient::new(raw.connect().await.unwrap()), true).await;
    assert!((2 * CALLS..2 * CALLS + OTHERS).contains(&writes), "raw, {writes} writes");
}
