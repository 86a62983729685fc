//! Consul as a registry.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Asking, Listing, Question, Registry};
use crate::consul::{AccessProbe, BlockingIndex, ConsulClient, HealthQuery};

/// Answers with what Consul says to one query, whatever the name in the
/// question: tags, filters and the datacenter are a part of the query.
pub(crate) struct ConsulQuery {
    client: ConsulClient,
    query: HealthQuery,
    access: Arc<AccessProbe>,
    /// The agent that the last question to fail was put to, where it was put to any.
    failed_at: Arc<Mutex<Option<Arc<str>>>>,
}

impl ConsulQuery {
    pub(crate) fn new(client: ConsulClient, query: HealthQuery) -> Self {
        Self { client, query, access: Arc::default(), failed_at: Arc::default() }
    }
}

impl Registry for ConsulQuery {
    fn address(&self) -> Option<Arc<str>> {
        self.failed_at.lock().clone()
    }

    fn ask(&self, question: Question) -> Asking {
        let (client, query, access) = (self.client.clone(), self.query.clone(), self.access.clone());
        let failed_at = self.failed_at.clone();
        if question.begins {
            // What was known of rights is as old as the last one to ask.
            access.forget();
        }
        let wait = access.wait(question.wait);
        let after = question.seen.map_or(BlockingIndex::NONE, BlockingIndex::from);
        Box::pin(async move {
            let mut answer = client.watch(&query, after, wait).await.map_err(|failure| {
                *failed_at.lock() = failure.agent;
                failure.error
            })?;
            access.complete(&client, &query, &mut answer).await;
            // A substitute is waited at for a random part of it, at least a half.
            let waited_for = if *answer.agent == *client.address() { wait } else { wait / 2 };
            let mut listing = Listing::from(answer);
            listing.waited_for = Some(waited_for);
            Ok(listing)
        })
    }
}
