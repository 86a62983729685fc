//! The two kinds of channel, as one kind of caller.

use std::time::Duration;

use tonic::{Status, transport::Channel};
use tonic_failover::{
    Instance,
    client::{FailoverChannel, GrpcClient, Policy, ServiceOptions, Services, registry::StaticList},
    demo::pb::{FILE_DESCRIPTOR_SET, GetRequest, IncrementRequest, counter_client::CounterClient},
};

/// Which method is called. Both messages have 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// `NO_SIDE_EFFECTS`: its answer is taken in whole, so that it can be repeated.
    Safe,
    /// May not run twice.
    Unsafe,
}

/// A generated client on either kind of channel.
pub(crate) trait Caller: Clone + Send + 'static {
    /// Makes one call; who answered.
    fn call(&mut self, method: Method) -> impl Future<Output = Result<u64, Status>> + Send;
}

macro_rules! caller {
    ($channel:ty) => {
        impl Caller for CounterClient<$channel> {
            async fn call(&mut self, method: Method) -> Result<u64, Status> {
                let answer = match method {
                    Method::Safe => self.get(GetRequest { request_id: "fourteen bytes".to_owned() }).await,
                    Method::Unsafe => {
                        let request_id = "twelve bytes".to_owned();
                        self.increment(IncrementRequest { by: 1, request_id }).await
                    }
                };
                answer.map(|answer| answer.into_inner().value)
            }
        }
    };
}
caller!(Channel);
caller!(FailoverChannel);

/// Ours, over instances at these ports of this host, once all are ready.
pub(crate) struct Ours {
    pub(crate) list: StaticList,
    pub(crate) client: GrpcClient<Services>,
}

impl Ours {
    pub(crate) fn new(instances: impl IntoIterator<Item = Instance>, policy: Policy) -> Self {
        let list = StaticList::new();
        list.set("counter", instances);
        let options = ServiceOptions::new("counter").descriptors(FILE_DESCRIPTOR_SET).policy(policy);
        let services =
            Services::builder(list.clone()).service(options).build().expect("the settings are right");
        let client = services.grpc_client("counter").expect("it is among the options");
        Self { list, client }
    }

    pub(crate) async fn until_ready(&self, count: usize) {
        while self.client.status().datacenters[0].ready < count {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) fn caller(&self) -> CounterClient<FailoverChannel> {
        CounterClient::new(self.client.channel())
    }
}

pub(crate) fn instance(port: u16) -> Instance {
    Instance::new(format!("i-{port}"), "127.0.0.1", port, "here")
}
