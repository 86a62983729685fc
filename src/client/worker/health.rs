//! Listening to what the connected instances say of themselves.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

use super::Worker;
use crate::client::{
    event::{FailoverEvent, RebindCause},
    health::{HealthWatch, HealthWord},
};

/// How many words may wait for the worker; who has more to say waits.
const WORDS: usize = 64;

/// One task a connection, where health is watched at all.
pub(super) struct HealthWatches {
    service: Option<Arc<str>>,
    tasks: HashMap<u64, AbortOnDropHandle<()>>,
    words: mpsc::Receiver<HealthWord>,
    /// For the tasks.
    speaker: mpsc::Sender<HealthWord>,
}

impl HealthWatches {
    pub(super) fn new(service: Option<&str>) -> Self {
        let (speaker, words) = mpsc::channel(WORDS);
        Self { service: service.map(Arc::from), tasks: HashMap::new(), words, speaker }
    }

    /// The next word. Cancel safe.
    pub(super) async fn next(&mut self) -> HealthWord {
        match self.words.recv().await {
            Some(word) => word,
            // It holds a sender itself.
            None => std::future::pending().await,
        }
    }
}

impl Worker {
    /// Listens to each connection in use, and to no other: a task keeps its connection.
    pub(super) fn watch_health(&mut self) {
        let Some(service) = &self.health.service else { return };
        let connected = self.fleet.connections();
        let serials: HashSet<_> = connected.iter().map(|endpoint| endpoint.serial()).collect();
        self.health.tasks.retain(|serial, _| serials.contains(serial));
        for endpoint in connected {
            let serial = endpoint.serial();
            let (service, words) = (service.clone(), self.health.speaker.clone());
            self.health.tasks.entry(serial).or_insert_with(|| {
                let watch = HealthWatch { endpoint, service, words };
                AbortOnDropHandle::new(tokio::spawn(watch.run().in_current_span()))
            });
        }
    }

    pub(super) fn on_health(&mut self, HealthWord { serial, serving }: HealthWord) {
        let Some(endpoint) = self.fleet.connection(|e| e.serial() == serial) else { return };
        if !self.fleet.heard_of_health(|e| e.serial() == serial, serving) {
            return;
        }
        let (service, instance) = (self.publisher.service(), endpoint.instance().clone());
        if serving {
            self.publisher.found_again(RebindCause::NotServing);
            self.publisher.event(FailoverEvent::ServingAgain { service, instance });
        } else {
            self.publisher.lost(&endpoint, RebindCause::NotServing, tokio::time::Instant::now());
            self.publisher.event(FailoverEvent::NotServing { service, instance });
        }
    }
}
