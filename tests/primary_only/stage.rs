//! A list by hand, and a client of what it lists.

use std::time::Duration;

use tonic::{Request, Response, Status};
use tonic_failover::{
    Instance,
    client::{
        CallError, CallErrorKind, FailoverChannel, GrpcClient, Served, ServiceOptions, Services,
        registry::StaticList,
    },
    demo::pb::{CounterReply, IncrementRequest, counter_client::CounterClient},
};

use crate::common::{steady, until};

pub(crate) struct Stage {
    pub(crate) list: StaticList,
    pub(crate) client: GrpcClient<Services>,
}

pub(crate) fn options() -> ServiceOptions {
    steady().primary_only()
}

impl Stage {
    pub(crate) async fn ready(options: ServiceOptions, instances: Vec<Instance>) -> Self {
        let count = instances.len();
        let list = StaticList::new();
        list.set("counter", instances);
        let services = Services::builder(list.clone()).service(options).build().unwrap();
        let client = services.grpc_client("counter").unwrap();
        until(&client, "all are ready", |c| c.status().datacenters[0].ready == count).await;
        Self { list, client }
    }

    pub(crate) fn channel(&self) -> FailoverChannel {
        self.client.channel()
    }

    /// An unsafe call; who ran it, and in how many attempts.
    pub(crate) async fn increment(&self, id: &str, within: Duration) -> Result<(String, u32), Status> {
        increment(self.channel(), id.to_owned(), within).await.map(|reply| served(&reply))
    }

    pub(crate) async fn until_primary(&self, name: &str) {
        let is_it = |c: &GrpcClient<Services>| c.status().primary.is_some_and(|it| it.name == name);
        until(&self.client, &format!("{name} is the primary"), is_it).await;
    }
}

pub(crate) async fn increment(
    channel: FailoverChannel,
    id: String,
    within: Duration,
) -> Result<Response<CounterReply>, Status> {
    let mut request = Request::new(IncrementRequest { by: 1, request_id: id });
    request.set_timeout(within);
    CounterClient::new(channel).increment(request).await
}

pub(crate) fn served<T>(reply: &Response<T>) -> (String, u32) {
    let served = reply.extensions().get::<Served>().expect("every answer says who gave it");
    (served.instance.name.clone(), served.attempts)
}

pub(crate) fn kind(status: &Status) -> CallErrorKind {
    CallError::of(status).unwrap_or_else(|| panic!("no CallError behind {status:?}")).kind().clone()
}
