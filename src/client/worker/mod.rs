//! The task of one service: hears everything, decides, publishes. It waits for
//! no caller, and no caller waits for it, but for the first usable endpoint.
//!
//! ```text
//! Sources (registry) --+
//! reports (call path) -+-> Fleet::plan -> dials, probes -> Publisher
//! dials, probes -------+
//! ```

mod doubts;
mod drains;
mod health;
mod listing;
mod primary;
mod probes;
mod publisher;
mod sources;
mod state;
mod updates;
mod wants;

#[cfg(test)]
mod tests;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tower::util::rng::{HasherRng, Rng};

use self::{
    drains::Drains,
    health::HealthWatches,
    primary::Followed,
    probes::Probes,
    sources::{Emptied, Loss, News, trouble},
    updates::LookUps,
    wants::Wants,
};
pub(crate) use self::{
    publisher::Publisher,
    sources::{Others, Sources},
};
use super::{
    choice::Reach,
    connector::{ConnectError, Connector},
    endpoint::{Endpoint, Link},
    event::{FailoverEvent, RebindCause},
    fleet::{Dial, Fleet, Key, Plan, Settings, Word},
    options::ServiceOptions,
    primary::Lookout,
    report::{LossCause, Report},
    resolver::{Cause, Failure, RegistryDoubt, Resolved},
};
use crate::{Instance, consul::RegistryError};

/// How much more is heard before the next step.
const AT_ONCE: usize = 1024;

struct Dialled {
    key: Key,
    attempt: u64,
    result: Result<Arc<Endpoint>, ConnectError>,
}

/// The worker and all it owns: dropping its future ends every dial, probe,
/// query and connection that nobody else holds.
pub(crate) struct Worker {
    options: Arc<ServiceOptions>,
    connector: Arc<dyn Connector>,
    fleet: Fleet<Arc<Endpoint>>,
    sources: Sources,
    publisher: Publisher,
    reports: mpsc::UnboundedReceiver<Report>,
    /// For the links of new connections.
    reporter: mpsc::UnboundedSender<Report>,
    starving: Arc<AtomicBool>,
    dials: JoinSet<Dialled>,
    probes: Probes,
    next_serial: u64,
    rng: HasherRng,
    look_ups: LookUps,
    wants: Wants,
    drains: Drains,
    health: HealthWatches,
    followed: Followed,
}

pub(crate) struct Parts {
    pub(crate) options: Arc<ServiceOptions>,
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) settings: Settings,
    pub(crate) sources: Sources,
    pub(crate) publisher: Publisher,
    pub(crate) reporter: mpsc::UnboundedSender<Report>,
    pub(crate) reports: mpsc::UnboundedReceiver<Report>,
    pub(crate) reach: watch::Sender<Reach>,
    pub(crate) starving: Arc<AtomicBool>,
    pub(crate) lookout: Option<Arc<Lookout>>,
}

impl Worker {
    pub(crate) fn new(parts: Parts) -> Self {
        let mut fleet = Fleet::new(parts.settings, Instant::now());
        fleet.set_others(&vec![None; parts.sources.len() - 1]);
        Self {
            drains: Drains::new(parts.options.traffic.drain_after),
            health: HealthWatches::new(parts.options.watched_health()),
            options: parts.options,
            connector: parts.connector,
            fleet,
            sources: parts.sources,
            publisher: parts.publisher,
            reports: parts.reports,
            reporter: parts.reporter,
            starving: parts.starving,
            dials: JoinSet::new(),
            probes: Probes::default(),
            next_serial: 0,
            rng: HasherRng::new(),
            look_ups: LookUps::default(),
            wants: Wants::new(parts.reach),
            followed: Followed::new(parts.lookout),
        }
    }

    /// Runs until `closed` is cancelled.
    pub(crate) async fn run(mut self, closed: CancellationToken) {
        self.sources.ask(0);
        loop {
            let wake = self.step();
            let wait = async {
                match wake {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // The registry first: what it says bears on all the rest.
                biased;
                () = closed.cancelled() => break,
                news = self.sources.next() => self.on_news(news),
                Some(report) = self.reports.recv() => self.on_report(report),
                Some(Ok(dialled)) = self.dials.join_next() => self.on_dialled(dialled),
                Some(probed) = self.probes.next() => self.on_probed(probed),
                word = self.health.next() => self.on_health(word),
                () = wait => {}
            }
            self.hear_the_rest();
        }
        self.close();
    }

    /// What has come meanwhile goes into the same step: where a thousand
    /// connections are lost at once, the first one that is back must not wait for
    /// a thousand steps.
    fn hear_the_rest(&mut self) {
        for _ in 0..AT_ONCE {
            let Ok(report) = self.reports.try_recv() else { break };
            self.on_report(report);
        }
        for _ in 0..AT_ONCE {
            let Some(Ok(dialled)) = self.dials.try_join_next() else { break };
            self.on_dialled(dialled);
        }
    }

    /// Does what follows from what is known now. Returns when to look again.
    fn step(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let doubts = self.settle_doubts(now);
        self.follow_primary(now);
        let wants = self.take_up_wants(now);
        self.fleet.describe(|endpoint, instance| {
            let stays = Arc::ptr_eq(endpoint.instance(), instance);
            (!stays).then(|| Arc::new(endpoint.described(instance.clone())))
        });
        let mut plan = self.fleet.plan(now);
        let mut wake = [plan.wake, doubts, wants].into_iter().flatten().min();
        let mut at = |moment: Option<Instant>| wake = [wake, moment].into_iter().flatten().min();
        for dial in std::mem::take(&mut plan.dial) {
            self.dial(dial);
        }
        self.publish(&mut plan, now);
        self.watch_health();
        for endpoint in plan.retire {
            endpoint.link().retire();
            self.drains.part(&endpoint);
        }
        self.begin_drains(now);
        at(self.end_drains(now));
        for (tier, &ask) in plan.ask.iter().enumerate() {
            if ask {
                if self.sources.ask(tier) && tier > 0 {
                    self.fleet.asked(tier, now);
                }
            } else if self.sources.unask(tier) {
                self.unask(tier);
            }
        }
        // Where calls are away already, a list in another order must not move them.
        let away = self.fleet.bound_tier().is_some_and(|tier| tier > 0);
        let needed =
            (plan.need_others && !away) || self.wants_unknown_datacenter() || self.followed.needs_others();
        at(self.sources.want_list(needed, now));
        self.answer_wants(now);
        at(self.look_up_if_due(now));
        self.answer_updates(now);
        at(self.updates_due().filter(|&due| due > now));
        self.publish_status(now);
        wake
    }

    fn dial(&mut self, dial: Dial) {
        let Some(instance) = self.fleet.instance(&dial.key) else { return };
        self.next_serial += 1;
        let link = Link::new(self.next_serial, self.reporter.clone());
        let connect = self.connector.connect(instance, link);
        self.dials.spawn(async move {
            Dialled { key: dial.key, attempt: dial.attempt, result: connect.await.map(Arc::new) }
        });
    }

    fn publish(&mut self, plan: &mut Plan<Arc<Endpoint>>, now: Instant) {
        match plan.bound.take() {
            Some(bound) => {
                self.publisher.bind(bound.tier, bound.endpoints, |id| self.fleet.lists(id), now);
                self.starving.store(false, Ordering::Release);
                self.look_ups.starved = false;
            }
            None if plan.hopeless => {
                let status = self.status(now);
                self.publisher.unusable(|| status.reason().unwrap_or_default());
            }
            None => {}
        }
    }

    // === what is heard ===

    fn on_news(&mut self, news: News) {
        match news {
            News::Answer(tier, resolved) => self.hear(tier, resolved),
            News::LookedUp(error) => self.on_looked_up(error),
            News::Listed(list) => self.on_listed(list),
        }
    }

    fn hear(&mut self, tier: usize, resolved: Resolved) {
        let word = Word {
            answered: resolved.snapshot.is_some(),
            failing: resolved.error.is_some(),
            empty_since: resolved.empty_since,
        };
        for endpoint in self.fleet.hear(tier, word, resolved.snapshot.as_ref()) {
            self.publisher.lost(&endpoint, RebindCause::LeftRegistry, Instant::now());
            endpoint.link().retire();
            self.drains.part(&endpoint);
        }
        let (denied, doubt) = (resolved.denied, resolved.doubt);
        let before = self.sources.note(tier, resolved);
        let (loss, emptied) = (self.sources.note_loss(tier), self.sources.note_empty(tier));
        let name = &self.sources.get(tier).name;
        match loss {
            Some(Loss::Began(Cause::Lost(Failure { error, asked }))) => {
                self.publisher.registry_lost(name, trouble(&error, asked.as_deref()));
            }
            Some(Loss::Began(Cause::Behind(last_contact))) => {
                self.publisher.registry_behind(name, last_contact);
            }
            Some(Loss::Ended(since)) => self.publisher.registry_back(name, since.elapsed()),
            None => {}
        }
        match emptied {
            Some(Emptied::Began) => self.publisher.list_empty(name),
            Some(Emptied::Ended(since)) => self.publisher.list_filled(name, since.elapsed()),
            None => {}
        }
        let idle = |doubt| doubt == Some(RegistryDoubt::NotBlocking);
        if idle(before.doubt) != idle(doubt) {
            self.publisher.blocking(name, !idle(doubt));
        }
        if before.denied != denied {
            self.publisher.access(name, denied);
        }
    }

    fn on_report(&mut self, report: Report) {
        let now = Instant::now();
        match report {
            Report::Lost { serial, cause } => self.on_lost(serial, cause, now),
            Report::Suspect { endpoint } => self.probe(endpoint, now),
            Report::Failing { serial } => self.on_failing(serial),
            Report::Starved => self.look_ups.starved = true,
            // Looked at in each step.
            Report::Primary => {}
            Report::Wanted { aim, patient, reply } => self.wants.hear(aim, patient, reply, now),
            Report::BindingFailed { generation } => {
                let current = self.publisher.current();
                if generation == current.generation() {
                    self.want_look_up();
                    if let Some(endpoint) = current.preferred().filter(|e| e.is_usable()) {
                        self.probe(endpoint.clone(), now);
                    }
                }
            }
            Report::Update { reply } => self.on_update(reply, now),
        }
    }

    fn on_lost(&mut self, serial: u64, cause: LossCause, now: Instant) {
        let Some(endpoint) = self.fleet.connection(|e| e.serial() == serial) else { return };
        let why = match cause {
            LossCause::Closed => RebindCause::ConnectionLost,
            LossCause::GoingAway => RebindCause::GoingAway,
        };
        self.publisher.lost(&endpoint, why, endpoint.link().lost_at().unwrap_or(now));
        if cause == LossCause::GoingAway {
            self.drains.part(&endpoint);
        }
        let random = self.rng.next_f64();
        let served = endpoint.link().has_served();
        let ejected = self.fleet.lost(|e| e.serial() == serial, served, &cause.to_string(), random, now);
        if let Some((instance, rest)) = ejected {
            self.ejected(instance, cause.to_string(), rest);
        }
        self.want_look_up();
    }

    fn on_dialled(&mut self, Dialled { key, attempt, result }: Dialled) {
        let now = Instant::now();
        match result {
            Ok(endpoint) => {
                let instance = endpoint.instance().clone();
                match self.fleet.connected(&key, attempt, endpoint.clone(), now) {
                    Ok(true) => {
                        let service = self.publisher.service();
                        self.publisher.event(FailoverEvent::Readmitted { service, instance });
                    }
                    Ok(false) => {}
                    // The instance has left the registry meanwhile.
                    Err(endpoint) => endpoint.link().retire(),
                }
                if !endpoint.is_usable() {
                    // Lost again before anybody knew of it.
                    self.on_lost(endpoint.serial(), LossCause::Closed, now);
                }
            }
            Err(error) => {
                let cause = error.to_string();
                let random = self.rng.next_f64();
                let ejected = self.fleet.refused(&key, attempt, cause.clone(), random, now);
                if let Some((instance, rest)) = ejected {
                    self.ejected(instance, cause, rest);
                }
            }
        }
    }

    /// Ejects a connected instance. The calls that it has finish.
    fn take_out(&mut self, endpoint: &Arc<Endpoint>, why: RebindCause, since: Instant, now: Instant) {
        self.publisher.lost(endpoint, why, since);
        self.drains.part(endpoint);
        let (serial, random) = (endpoint.serial(), self.rng.next_f64());
        if let Some((instance, rest)) =
            self.fleet.eject(|e| e.serial() == serial, why.to_string(), random, now)
        {
            self.ejected(instance, why.to_string(), rest);
        }
        if self.fleet.connection(|e| e.serial() == serial).is_none() {
            endpoint.link().retire();
        }
    }

    fn ejected(&self, instance: Arc<Instance>, cause: String, retry_in: Duration) {
        let service = self.publisher.service();
        self.publisher.event(FailoverEvent::Ejected { service, instance, cause, retry_in });
    }

    fn on_listed(&mut self, list: Result<Vec<String>, RegistryError>) {
        let serving = self.fleet.bound_tier().into_iter().chain(self.wanted_tiers());
        let serving: Vec<_> = serving.filter(|&tier| tier > 0).collect();
        if let Some(from) = self.sources.set_list(list, &serving, Instant::now()) {
            self.publisher.renumber(&from);
            self.fleet.set_others(&from).iter().for_each(|endpoint| endpoint.link().retire());
        }
    }
}
