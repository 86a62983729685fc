//! `counter.v1.Counter`, as this process serves it.

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures_util::{Stream, StreamExt, stream};
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{journal::Journal, shared::Number};
use crate::{
    FencingToken,
    demo::pb::{AddRequest, CounterReply, GetRequest, IncrementRequest, WatchRequest, counter_server},
};

/// The term of the primary that answers, in the metadata of its answers.
pub(crate) const TERM: &str = "fencing-token";

/// Who answers: what every reply names.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) instance: Arc<str>,
    /// Known once Consul has said so.
    pub(super) datacenter: Arc<OnceLock<String>>,
}

/// The service. Cheap to clone.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) identity: Identity,
    pub(super) counter: Number,
    pub(super) journal: Journal,
    /// How long the handling of a request is made to take.
    pub(super) work: Duration,
    /// Ends the streams.
    pub(super) stop: CancellationToken,
}

// === impl Identity ===

impl Identity {
    fn reply(&self, value: u64) -> CounterReply {
        let datacenter = self.datacenter.get().map_or("unknown", String::as_str).to_owned();
        CounterReply { value, instance: self.instance.to_string(), datacenter }
    }
}

// === impl Service ===

impl Service {
    async fn handle(
        &self,
        method: &str,
        term: Option<FencingToken>,
        id: &str,
        act: impl Future<Output = Result<u64, Status>>,
    ) -> Result<Response<CounterReply>, Status> {
        let entry = self.journal.received(method, id)?;
        if !self.work.is_zero() {
            tokio::time::sleep(self.work).await;
        }
        let value = act.await;
        entry.answered();
        let mut response = Response::new(self.identity.reply(value?));
        if let Some(term) = term {
            response.metadata_mut().insert(TERM, term.get().into());
        }
        Ok(response)
    }
}

/// The term in which the fence has let a request in; none where there is no fence.
fn term<T>(request: &Request<T>) -> Option<FencingToken> {
    request.extensions().get::<FencingToken>().copied()
}

#[tonic::async_trait]
impl counter_server::Counter for Service {
    async fn increment(&self, request: Request<IncrementRequest>) -> Result<Response<CounterReply>, Status> {
        let term = term(&request);
        let IncrementRequest { by, request_id } = request.into_inner();
        self.handle("Increment", term, &request_id, self.counter.increment(by)).await
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<CounterReply>, Status> {
        let term = term(&request);
        let GetRequest { request_id } = request.into_inner();
        self.handle("Get", term, &request_id, self.counter.get()).await
    }

    async fn add(&self, request: Request<AddRequest>) -> Result<Response<CounterReply>, Status> {
        let term = term(&request);
        let AddRequest { request_key, by } = request.into_inner();
        self.handle("Add", term, &request_key, self.counter.add(&request_key, by)).await
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<CounterReply, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let entry = self.journal.received("Watch", &request.into_inner().request_id)?;
        let identity = self.identity.clone();
        let values = WatchStream::new(self.counter.watch().await?)
            .map(move |value| Ok(identity.reply(value)))
            .take_until(self.stop.clone().cancelled_owned());
        // A clean end would say that the counter will never change again.
        let instance = self.identity.instance.clone();
        let end = stream::once(async move {
            entry.answered();
            Err(Status::unavailable(format!("{instance} is shutting down: watch again")))
        });
        Ok(Response::new(Box::pin(values.chain(end))))
    }
}
