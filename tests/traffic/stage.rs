//! A list by hand, and a client of what it lists.

use std::collections::BTreeMap;

use tonic::{Request, Status};
use tonic_failover::{
    Instance,
    client::{
        CallError, CallErrorKind, CallOptions, FailoverChannel, GrpcClient, Served, ServiceOptions, Services,
        registry::StaticList,
    },
    demo::pb::{GetRequest, WatchRequest, counter_client::CounterClient},
};

use crate::common::{Backend, until};

pub(crate) type Client = GrpcClient<Services>;

/// The list, and the client of what it lists.
pub(crate) struct Stage {
    pub(crate) list: StaticList,
    pub(crate) client: Client,
}

impl Stage {
    /// The client has all of these ready.
    pub(crate) async fn ready(options: ServiceOptions, instances: Vec<Instance>) -> Self {
        let count = instances.len();
        let stage = Self::set(options, instances);
        until(&stage.client, "all are ready", |c| c.status().datacenters[0].ready == count).await;
        stage
    }

    pub(crate) fn set(options: ServiceOptions, instances: Vec<Instance>) -> Self {
        let list = StaticList::new();
        list.set("counter", instances);
        let services = Services::builder(list.clone()).service(options).build().unwrap();
        Self { client: services.grpc_client("counter").unwrap(), list }
    }

    pub(crate) fn channel(&self) -> FailoverChannel {
        self.client.channel()
    }
}

pub(crate) fn at(backend: &Backend) -> Instance {
    at_port(&backend.name, backend.port)
}

pub(crate) fn at_port(name: &str, port: u16) -> Instance {
    Instance::new(name, "127.0.0.1", port, "here")
}

pub(crate) fn weighted(backend: &Backend, weight: u32) -> Instance {
    let mut instance = at(backend);
    instance.weight = weight;
    instance
}

/// One safe call without a deadline of its own: who answered.
pub(crate) async fn get(channel: FailoverChannel, options: CallOptions) -> Result<String, Status> {
    let mut request = Request::new(GetRequest::default());
    request.extensions_mut().insert(options);
    let response = CounterClient::new(channel).get(request).await?;
    let served = response.extensions().get::<Served>().expect("every answer says who gave it");
    Ok(served.instance.name.clone())
}

/// A stream that goes on until it is ended.
pub(crate) async fn watch(
    channel: FailoverChannel,
) -> Result<tonic::Response<tonic::Streaming<tonic_failover::demo::pb::CounterReply>>, Status> {
    CounterClient::new(channel).watch(WatchRequest::default()).await
}

/// How many of `calls`, one after the other, each instance answers.
pub(crate) async fn shares(client: &Client, calls: u64) -> BTreeMap<String, u64> {
    let mut shares = BTreeMap::new();
    for _ in 0..calls {
        let name = get(client.channel(), CallOptions::new()).await.expect("all are well");
        *shares.entry(name).or_insert(0) += 1;
    }
    shares
}

pub(crate) fn kind(status: &Status) -> CallErrorKind {
    CallError::of(status).unwrap_or_else(|| panic!("no CallError behind {status:?}")).kind().clone()
}
