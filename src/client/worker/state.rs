//! What a worker is seen to be, and its end.

use tokio::time::Instant;

use super::{Worker, sources::trouble};
use crate::client::status::ServiceStatus;

impl Worker {
    pub(super) fn status(&self, now: Instant) -> ServiceStatus {
        let binding = self.publisher.current();
        let bound = binding.endpoints().iter().find(|e| e.is_usable()).map(|e| e.instance().clone());
        let datacenters = (0..self.fleet.len())
            .map(|tier| {
                let source = self.sources.get(tier);
                let mut status = self.fleet.status(tier, now);
                status.name.clone_from(&source.name);
                let failing_since = source.last.episode.as_ref().map(|it| it.since);
                status.stale_since = [failing_since, source.last.hidden_since].into_iter().flatten().min();
                status.skipped = source.last.skipped;
                status.first_skipped.clone_from(&source.last.first_skipped);
                status.denied = source.last.denied;
                status.agent.clone_from(&source.last.agent);
                let asked = source.last.asked.as_deref();
                status.registry_error = source.last.error.as_ref().map(|error| trouble(error, asked));
                status.doubt = source.last.doubt;
                status
            })
            .collect();
        ServiceStatus {
            service: self.publisher.service(),
            generation: binding.generation(),
            bound,
            primary_only: self.followed.lookout.is_some(),
            primary: self.followed.now.as_ref().map(|(instance, _)| instance.clone()),
            token: self.followed.now.as_ref().and_then(|(_, token)| *token),
            datacenters,
            closed: false,
        }
    }

    pub(super) fn publish_status(&self, now: Instant) {
        self.publisher.status(self.status(now));
    }

    pub(super) fn close(&mut self) {
        self.refuse_updates();
        self.publisher.close();
        self.wants.close();
        self.fleet.clear().iter().for_each(|endpoint| endpoint.link().retire());
    }
}
