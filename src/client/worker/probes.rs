//! Probing those who fell silent.

use std::{collections::HashMap, sync::Arc};

use tokio::{task::JoinSet, time::Instant};

use super::Worker;
use crate::client::{
    connector::{ConnectError, Life},
    endpoint::{Endpoint, Link, Words},
    event::RebindCause,
    report::LossCause,
};

/// How many probes in a row must time out before an instance without a ready
/// peer is given up. It may be busy, so that the probe waits behind thousands of
/// calls, and its calls have nowhere else to go.
const WHEN_ALONE: u32 = 4;

/// The probes under way.
#[derive(Default)]
pub(super) struct Probes {
    tasks: JoinSet<Probed>,
    /// By connection.
    suspects: HashMap<u64, Suspicion>,
}

#[derive(Clone, Copy)]
struct Suspicion {
    since: Instant,
    /// What had been heard by then.
    words: Words,
    unanswered: u32,
}

pub(super) struct Probed {
    endpoint: Arc<Endpoint>,
    result: Result<Life, ConnectError>,
}

impl Probes {
    /// Whether the connection is being asked about.
    pub(super) fn is_asking(&self, serial: u64) -> bool {
        self.suspects.contains_key(&serial)
    }

    /// The next probe that has ended. `None` where there is none.
    pub(super) async fn next(&mut self) -> Option<Probed> {
        // The tasks do not panic, and are aborted only with this.
        self.tasks.join_next().await?.ok()
    }
}

impl Worker {
    /// Asks the instance for a sign of life, unless that is under way.
    pub(super) fn probe(&mut self, endpoint: Arc<Endpoint>, since: Instant) {
        if !self.probes.is_asking(endpoint.serial()) {
            let words = endpoint.link().words();
            self.send_probe(endpoint, Suspicion { since, words, unanswered: 0 });
        }
    }

    fn send_probe(&mut self, endpoint: Arc<Endpoint>, suspicion: Suspicion) {
        self.probes.suspects.insert(endpoint.serial(), suspicion);
        self.next_serial += 1;
        let link = Link::new(self.next_serial, self.reporter.clone());
        let probe = self.connector.probe(endpoint.clone(), link);
        self.probes.tasks.spawn(async move { Probed { endpoint, result: probe.await } });
    }

    pub(super) fn on_probed(&mut self, Probed { endpoint, result }: Probed) {
        let (now, link) = (Instant::now(), endpoint.link());
        let Some(suspicion) = self.probes.suspects.remove(&endpoint.serial()) else { return };
        match result {
            Ok(Life::Here) => link.acquit(),
            // It answers others, if not the probe: busy, not dead.
            Ok(Life::Elsewhere(_)) | Err(ConnectError::TimedOut(_)) if link.heard_since(suspicion.words) => {
                link.acquit();
            }
            Ok(Life::Elsewhere(fresh)) => {
                let (serial, fresh) = (endpoint.serial(), Arc::new(fresh));
                match self.fleet.replace(|e| e.serial() == serial, fresh.clone()) {
                    Some(unused) => unused.link().retire(),
                    // Lost again before anybody knew of it.
                    None if !fresh.is_usable() => self.on_lost(fresh.serial(), LossCause::Closed, now),
                    None => {}
                }
                link.leave();
                self.drains.part(&endpoint);
                // What stays on it may wait for long, and is asked after again.
                link.rest_suspicion();
            }
            // It lives, and says itself that it is the wrong one to ask.
            Err(ConnectError::NotServing | ConnectError::Unavailable(_)) => {
                link.acquit();
                if self.fleet.ready_peers() > 1 {
                    self.take_out(&endpoint, RebindCause::Failing, suspicion.since, now);
                }
            }
            // It may be finishing what it has, though it is not there for anything new. Where it is dead its
            // socket says so.
            Err(ConnectError::GoingAway) => {
                link.lose(LossCause::GoingAway);
                link.leave();
                link.rest_suspicion();
            }
            Err(ConnectError::TimedOut(_))
                if suspicion.unanswered + 1 < WHEN_ALONE && self.is_alone(&endpoint) =>
            {
                let unanswered = suspicion.unanswered + 1;
                self.send_probe(endpoint, Suspicion { unanswered, ..suspicion });
            }
            Err(_) => {
                self.take_out(&endpoint, RebindCause::Unresponsive, suspicion.since, now);
                link.abandon();
                self.want_look_up();
            }
        }
    }

    /// In use, and there is nothing that could take its place.
    fn is_alone(&self, endpoint: &Endpoint) -> bool {
        endpoint.is_usable() && self.fleet.ready_peers() < 2 && !self.sources.may_have_others()
    }
}
