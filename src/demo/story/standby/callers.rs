//! The client of the story: eight callers that add without pause, through everything.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use super::{
    books::{Ack, Books},
    duo::{Duo, NAMES},
};
use crate::{
    Instance,
    client::{ConsulService, FailoverChannel, ServiceOptions, Services, registry::StaticList},
    consul::ConsulConfig,
    demo::{
        cli::Failure,
        pb::{self, AddRequest, CounterReply, GetRequest, counter_client::CounterClient},
        text::duration,
    },
};

pub(super) const CALLERS: usize = 8;
/// Of one attempt; then it is made again with the same key.
pub(super) const ATTEMPT: Duration = Duration::from_secs(2);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(10);

/// The callers and their books; dropping it ends them at once.
pub(super) struct Callers {
    books: Arc<Mutex<Books>>,
    changed: watch::Sender<()>,
    channel: FailoverChannel,
    _keeps: Keeps,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

#[allow(dead_code, reason = "they keep the client alive")]
enum Keeps {
    Consul(ConsulService),
    List(Services),
}

// === impl Callers ===

impl Callers {
    /// A client that goes to the primary only, found in Consul or by the addresses; and its callers.
    pub(super) fn start(duo: &Duo) -> Result<Self, Failure> {
        let options = ServiceOptions::new("counter").descriptors(pb::FILE_DESCRIPTOR_SET).primary_only();
        let (channel, keeps) = match duo.store().url() {
            Some(url) => {
                let consul = ConsulService::builder(ConsulConfig::new(&url)?).service(options).build()?;
                (consul.grpc_client("counter")?.channel(), Keeps::Consul(consul))
            }
            None => {
                let list = StaticList::new();
                let at = |name: &str| Instance::new(name, "127.0.0.1", duo.port(name), "here");
                list.set("counter", NAMES.map(at));
                let services = Services::builder(list).service(options).build()?;
                (services.grpc_client("counter")?.channel(), Keeps::List(services))
            }
        };
        let (books, changed, stop) =
            (Arc::new(Mutex::new(Books::default())), watch::Sender::new(()), CancellationToken::new());
        let mut tasks = JoinSet::new();
        for caller in 0..CALLERS {
            let (channel, books) = (channel.clone(), books.clone());
            let (changed, stop) = (changed.clone(), stop.clone());
            tasks.spawn(async move {
                let mut number = 0;
                while !stop.is_cancelled() {
                    let ack = add(&channel, format!("{caller}-{number}"), &books).await;
                    books.lock().acknowledge(ack);
                    changed.send_replace(());
                    number += 1;
                }
            });
        }
        Ok(Self { books, changed, channel, _keeps: keeps, stop, tasks })
    }

    /// Reads or writes the books.
    pub(super) fn books<T>(&self, act: impl FnOnce(&mut Books) -> T) -> T {
        act(&mut self.books.lock())
    }

    /// Waits, `bound` at most, until `look` finds something in the books.
    pub(super) async fn until<T>(
        &self,
        what: &str,
        bound: Duration,
        mut look: impl FnMut(&Books) -> Option<T>,
    ) -> Result<T, Failure> {
        let mut changed = self.changed.subscribe();
        let watch = async {
            loop {
                if let Some(found) = look(&self.books.lock()) {
                    return found;
                }
                // The sender is `self`: it cannot have gone.
                let _ = changed.changed().await;
            }
        };
        let found = timeout(bound, watch).await;
        found.map_err(|_| format!("waited {} for this in vain: {what}", duration(bound)).into())
    }

    /// Stops when every request has its answer, and asks what was counted.
    pub(super) async fn counted(&mut self, bound: Duration) -> Result<u64, Failure> {
        self.stop.cancel();
        let end = async { while self.tasks.join_next().await.is_some() {} };
        timeout(bound, end).await.map_err(|_| "some requests were never acknowledged")?;
        let mut request = Request::new(GetRequest::default());
        request.set_timeout(bound);
        Ok(CounterClient::new(self.channel.clone()).get(request).await?.into_inner().value)
    }
}

/// Adds once, however often it must be sent.
async fn add(channel: &FailoverChannel, key: String, books: &Mutex<Books>) -> Ack {
    let began = Instant::now();
    loop {
        match attempt(channel.clone(), key.clone()).await {
            Ok((reply, token)) => {
                let CounterReply { value, instance, .. } = reply;
                return Ack { began, ended: Instant::now(), value, instance, token };
            }
            Err(_) => {
                books.lock().again += 1;
                sleep(AGAIN).await;
            }
        }
    }
}

async fn attempt(channel: FailoverChannel, key: String) -> Result<(CounterReply, u64), Status> {
    let mut request = Request::new(AddRequest { request_key: key, by: 1 });
    request.set_timeout(ATTEMPT);
    let response = CounterClient::new(channel).add(request).await?;
    let term = response.metadata().get(crate::demo::backend::TERM);
    let token = term.and_then(|it| it.to_str().ok()).and_then(|it| it.parse().ok());
    let token = token.ok_or_else(|| Status::internal("the answer names no term"))?;
    Ok((response.into_inner(), token))
}
