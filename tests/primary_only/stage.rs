//! A list by hand, and a client of what it lists.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tonic::{Request, Response, Status};
use tonic_failover::{
    Instance,
    client::{
        CallError, CallErrorKind, FailoverChannel, GrpcClient, Served, ServiceOptions, Services,
        registry::StaticList,
    },
    demo::pb::{CounterReply, GetRequest, IncrementRequest, counter_client::CounterClient},
};

use crate::common::{Method, SOON, in_full, steady, until};

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

/// Callers that go on until they are told to stop, one call after the other, each with a deadline that no busy
/// machine comes near: what fails has failed.
pub(crate) struct Calls {
    stop: watch::Sender<bool>,
    ended: Arc<AtomicUsize>,
    tasks: JoinSet<Tally>,
}

#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) calls: usize,
    pub(crate) resent: usize,
    pub(crate) failed: Vec<String>,
}

impl Calls {
    pub(crate) fn start(stage: &Stage, callers: usize, method: Method) -> Self {
        let (stop, ended) = (watch::Sender::new(false), Arc::new(AtomicUsize::new(0)));
        let mut tasks = JoinSet::new();
        for caller in 0..callers {
            let (channel, stop, ended) = (stage.channel(), stop.subscribe(), ended.clone());
            tasks.spawn(async move {
                let mut tally = Tally::default();
                while !*stop.borrow() {
                    let id = format!("{caller}-{}", tally.calls);
                    match call(channel.clone(), method, id).await {
                        Ok((_, attempts)) => tally.resent += usize::from(attempts > 1),
                        Err(status) => tally.failed.push(in_full(&status)),
                    }
                    tally.calls += 1;
                    ended.fetch_add(1, Ordering::SeqCst);
                    sleep(Duration::from_millis(10)).await;
                }
                tally
            });
        }
        Self { stop, ended, tasks }
    }

    /// Waits for `more` further calls to have ended.
    pub(crate) async fn go_on_for(&self, more: usize) {
        let goal = self.ended.load(Ordering::SeqCst) + more;
        let wait = async {
            while self.ended.load(Ordering::SeqCst) < goal {
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(2 * SOON, wait).await.expect("the calls go on");
    }

    /// What they met with; none has failed.
    pub(crate) async fn stop(mut self, what: &str) -> Tally {
        self.stop.send_replace(true);
        let mut total = Tally::default();
        while let Some(tally) = self.tasks.join_next().await {
            let tally = tally.expect("no caller panics");
            total.calls += tally.calls;
            total.resent += tally.resent;
            total.failed.extend(tally.failed);
        }
        println!("{what}: {} calls, {} resent, {} failed", total.calls, total.resent, total.failed.len());
        assert!(total.failed.is_empty(), "{what}: {:?}", total.failed);
        total
    }
}

async fn call(channel: FailoverChannel, method: Method, id: String) -> Result<(String, u32), Status> {
    if method == Method::Increment {
        return increment(channel, id, SOON).await.map(|reply| served(&reply));
    }
    let mut request = Request::new(GetRequest { request_id: id });
    request.set_timeout(SOON);
    CounterClient::new(channel).get(request).await.map(|reply| served(&reply))
}
