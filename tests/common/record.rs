//! What a client told while a test ran.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio_stream::StreamExt;
use tokio_util::task::AbortOnDropHandle;
use tonic_failover::client::{FailoverEvent, GrpcClient};

/// Every event of a client from now on.
pub(crate) struct Record {
    events: Arc<Mutex<Vec<FailoverEvent>>>,
    _task: AbortOnDropHandle<()>,
}

impl Record {
    pub(crate) fn of(client: &GrpcClient) -> Self {
        let events = Arc::new(Mutex::new(Vec::new()));
        let (mut stream, into) = (client.events(), Arc::clone(&events));
        let task = tokio::spawn(async move {
            while let Some(event) = stream.next().await {
                into.lock().push(event);
            }
        });
        Self { events, _task: AbortOnDropHandle::new(task) }
    }

    /// How many events `is_it` has matched so far.
    pub(crate) fn count(&self, is_it: impl Fn(&FailoverEvent) -> bool) -> usize {
        self.events.lock().iter().filter(|event| is_it(event)).count()
    }

    /// How often the registry was lost or cut off, and how often it came back.
    pub(crate) fn episodes(&self) -> (usize, usize) {
        let lost = self.count(|event| {
            matches!(event, FailoverEvent::RegistryLost { .. } | FailoverEvent::RegistryBehind { .. })
        });
        (lost, self.count(|event| matches!(event, FailoverEvent::RegistryBack { .. })))
    }

    /// Whether the registry was lost and back in turns, the last time back.
    pub(crate) fn takes_turns(&self) -> bool {
        let lost = |event: &FailoverEvent| match event {
            FailoverEvent::RegistryLost { .. } | FailoverEvent::RegistryBehind { .. } => Some(true),
            FailoverEvent::RegistryBack { .. } => Some(false),
            _ => None,
        };
        let told: Vec<_> = self.events.lock().iter().filter_map(lost).collect();
        told.chunks(2).all(|pair| pair == [true, false])
    }

    /// Who was bound, one after the other.
    pub(crate) fn bound(&self) -> Vec<String> {
        let name = |event: &FailoverEvent| match event {
            FailoverEvent::Rebound { to, .. } => Some(to.name.clone()),
            _ => None,
        };
        self.events.lock().iter().filter_map(name).collect()
    }

    /// All of it, in words.
    pub(crate) fn words(&self) -> Vec<String> {
        self.events.lock().iter().map(ToString::to_string).collect()
    }

    pub(crate) async fn until(&self, words: &str, is_so: impl Fn(&Self) -> bool) {
        let wait = async {
            while !is_so(self) {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        let so = tokio::time::timeout(super::SOON, wait).await;
        so.unwrap_or_else(|_| panic!("not so: {words}; events: {:#?}", self.words()));
    }
}
