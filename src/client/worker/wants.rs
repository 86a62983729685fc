//! Calls that want to go to one instance, or to another datacenter than the one in
//! use: what they want is connected, published, and kept for a while.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{oneshot, watch},
    time::Instant,
};

use super::Worker;
use crate::{
    client::{
        binding::Binding,
        choice::{Aim, Reach},
        fleet::{Outlook, Wanted},
    },
    instance::Shown,
};

/// How long what was wanted stays connected after it was last used. Our choice.
pub(super) const KEPT_FOR: Duration = Duration::from_secs(60);

type Reply = oneshot::Sender<Result<(), String>>;

/// What is wanted, and by whom.
pub(super) struct Wants {
    /// Until when each is kept.
    kept: HashMap<Aim, Instant>,
    waiting: Vec<Waiting>,
    reach: watch::Sender<Reach>,
}

struct Waiting {
    aim: Aim,
    patient: bool,
    reply: Reply,
}

impl Wants {
    pub(super) fn new(reach: watch::Sender<Reach>) -> Self {
        Self { kept: HashMap::new(), waiting: Vec::new(), reach }
    }

    pub(super) fn hear(&mut self, aim: Aim, patient: bool, reply: Reply, now: Instant) {
        self.keep(aim.clone(), now + KEPT_FOR);
        self.waiting.push(Waiting { aim, patient, reply });
    }

    /// It stays connected until then, without anybody waiting for it.
    pub(super) fn keep(&mut self, aim: Aim, until: Instant) {
        self.kept.insert(aim, until);
    }

    /// Nothing is wanted any more: whoever holds the other end must not hold connections by it.
    pub(super) fn close(&mut self) {
        self.kept.clear();
        self.waiting.clear();
        self.reach.send_replace(Vec::new());
    }
}

impl Worker {
    /// Tells the fleet what is wanted. Returns when that changes by itself.
    pub(super) fn take_up_wants(&mut self, now: Instant) -> Option<Instant> {
        if self.wants.kept.is_empty() {
            return None;
        }
        self.wants.waiting.retain(|waiting| !waiting.reply.is_closed());
        let Wants { kept, waiting, reach } = &mut self.wants;
        let used = |aim: &Aim| {
            let reach = reach.borrow();
            let mut endpoints =
                reach.iter().flat_map(|(name, it)| it.endpoints().iter().map(move |e| (name, e)));
            endpoints.any(|(name, endpoint)| {
                aim.datacenter.as_ref().is_none_or(|it| it == name)
                    && aim.instance.as_ref().is_none_or(|it| *it == endpoint.instance().id)
                    && now.checked_sub(KEPT_FOR / 2).is_some_and(|since| endpoint.link().used_since(since))
            })
        };
        kept.retain(|aim, until| {
            if *until <= now && (used(aim) || waiting.iter().any(|it| it.aim == *aim)) {
                *until = now + KEPT_FOR;
            }
            *until > now
        });
        let until = kept.values().min().copied();
        let ids = kept.keys().filter_map(|aim| aim.instance.clone()).collect();
        let tiers = self.wanted_tiers().collect();
        self.fleet.want(Wanted { tiers, ids });
        until
    }

    /// The datacenters that are wanted and known.
    pub(super) fn wanted_tiers(&self) -> impl Iterator<Item = usize> {
        self.wants.kept.keys().filter_map(|aim| self.sources.place(aim.datacenter.as_deref()?))
    }

    /// A datacenter is wanted that is not known, and may become so.
    pub(super) fn wants_unknown_datacenter(&self) -> bool {
        let unknown = |aim: &Aim| aim.datacenter.as_ref().is_some_and(|it| self.sources.place(it).is_none());
        self.wants.waiting.iter().any(|waiting| unknown(&waiting.aim))
    }

    /// Publishes what there is, and says so to those who wait for it.
    pub(super) fn answer_wants(&mut self, now: Instant) {
        if self.wants.kept.is_empty() && self.wants.reach.borrow().is_empty() {
            return;
        }
        let reach = if self.wants.kept.is_empty() { Vec::new() } else { self.fleet.reach() };
        let named = |(place, endpoints)| (self.sources.get(place).name.clone(), Binding::new(0, endpoints));
        let reach: Reach = reach.into_iter().map(named).collect();
        // Calls that look for the primary listen to it: only news wakes them.
        self.wants.reach.send_if_modified(|before| {
            let news = !same(before, &reach);
            *before = reach;
            news
        });
        let mut unknown = HashSet::new();
        for waiting in std::mem::take(&mut self.wants.waiting) {
            match self.outlook(&waiting.aim, now) {
                // A caller that has gone needs no answer.
                Outlook::Ready => drop(waiting.reply.send(Ok(()))),
                Outlook::Unknown(reason) if !waiting.patient => {
                    let _ = waiting.reply.send(Err(reason));
                    unknown.insert(waiting.aim);
                }
                Outlook::Bleak(reason) if !waiting.patient => drop(waiting.reply.send(Err(reason))),
                Outlook::Open | Outlook::Bleak(_) | Outlook::Unknown(_) => self.wants.waiting.push(waiting),
            }
        }
        self.forget(unknown, now);
    }

    /// What nobody knows cannot be kept connected, and callers may name ever others: each would cost every step
    /// for as long as it was remembered. The datacenter where it was looked for goes on being asked.
    fn forget(&mut self, mut unknown: HashSet<Aim>, now: Instant) {
        if unknown.is_empty() {
            return;
        }
        for waiting in &self.wants.waiting {
            unknown.remove(&waiting.aim);
        }
        self.wants.kept.retain(|aim, _| !unknown.contains(aim));
        for Aim { datacenter, .. } in unknown {
            if datacenter.as_deref().is_some_and(|name| self.sources.place(name).is_some()) {
                self.wants.keep(Aim { instance: None, datacenter }, now + KEPT_FOR);
            }
        }
    }

    fn outlook(&self, aim: &Aim, now: Instant) -> Outlook {
        let tier = match &aim.datacenter {
            None => None,
            Some(name) => match self.sources.place(name) {
                Some(tier) => Some(tier),
                None if self.sources.awaits_list() => return Outlook::Open,
                None => {
                    let known = (0..self.sources.len()).map(|tier| &self.sources.get(tier).name);
                    let known: Vec<_> = known.map(|name| Shown(name).to_string()).collect();
                    let known = known.join(", ");
                    return Outlook::Unknown(format!("the known datacenters are {known}"));
                }
            },
        };
        match (&aim.instance, tier) {
            (Some(id), tier) => self.fleet.outlook_of(id, tier, now),
            (None, Some(tier)) => self.fleet.outlook_in(tier, now),
            (None, None) => Outlook::Ready,
        }
    }
}

/// The same connections, described by the registry in the same way.
fn same(a: &Reach, b: &Reach) -> bool {
    let connections = |reach: &Reach| {
        let endpoints = reach.iter().flat_map(|(_, it)| it.endpoints());
        endpoints.map(|it| (it.serial(), Arc::as_ptr(it.instance()))).collect::<Vec<_>>()
    };
    a.iter().map(|(name, _)| name).eq(b.iter().map(|(name, _)| name)) && connections(a) == connections(b)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use tokio::sync::mpsc;

    use super::{super::*, *};
    use crate::{
        InstanceId, Snapshot,
        client::{
            binding::Binding, connector::TonicConnector, event, registry::StaticList,
            resolver::ResolverSettings, status::ServiceStatus,
        },
    };

    /// One that knows an instance in its own datacenter. It does not run.
    fn worker() -> Worker {
        let (options, service) = (Arc::new(ServiceOptions::new("counter")), Arc::<str>::from("counter"));
        let (reporter, reports) = mpsc::unbounded_channel();
        let status = ServiceStatus::at_start(service.clone());
        let publisher = Publisher::new(
            service.clone(),
            watch::Sender::new(Binding::default()),
            watch::Sender::new(status),
            event::channel(),
        );
        let registry = Arc::new(StaticList::new());
        let mut worker = Worker::new(Parts {
            connector: Arc::new(TonicConnector::new(options.clone())),
            settings: Settings { spares: 0, ..Settings::of_tests() },
            sources: Sources::new(service, registry, Others::None, ResolverSettings::default()),
            options,
            publisher,
            reporter,
            reports,
            reach: watch::Sender::new(Vec::new()),
            starving: Arc::new(AtomicBool::new(false)),
            lookout: None,
        });
        let instances = vec![Arc::new(Instance::new("a", "127.0.0.1", 1, "dc1"))];
        let resolved = Resolved { snapshot: Some(Snapshot { instances }), ..Resolved::default() };
        worker.hear(0, resolved);
        worker
    }

    fn ask(worker: &mut Worker, aim: Aim, patient: bool) -> Option<Result<(), String>> {
        let (reply, mut answer) = oneshot::channel();
        worker.on_report(Report::Wanted { aim, patient, reply });
        worker.step();
        answer.try_recv().ok()
    }

    #[tokio::test]
    async fn what_nobody_knows_is_not_remembered_and_what_is_known_and_what_is_waited_for_are() {
        let mut worker = worker();
        let at = |port, datacenter: Option<&str>| Aim {
            instance: Some(InstanceId::new("10.0.0.1", port)),
            datacenter: datacenter.map(str::to_owned),
        };
        for port in 0..100 {
            let unknown = ask(&mut worker, at(port, None), false);
            assert_eq!(unknown, Some(Err("no such instance is known".to_owned())));
            assert!(ask(&mut worker, at(port, Some("dc2")), false).unwrap().is_err());
        }
        assert!(worker.wants.kept.is_empty());
        let own = worker.sources.get(0).name.clone();
        for port in 0..100 {
            assert!(ask(&mut worker, at(port, Some(&own)), false).unwrap().is_err());
        }
        let own = Aim { instance: None, datacenter: Some(own) };
        assert_eq!(worker.wants.kept.keys().collect::<Vec<_>>(), [&own], "it goes on being asked");
        let known = Aim { instance: Some(InstanceId::new("127.0.0.1", 1)), datacenter: None };
        let (reply, _answer) = oneshot::channel();
        let patient = Report::Wanted { aim: at(1, None), patient: true, reply };
        worker.on_report(patient);
        assert_eq!(ask(&mut worker, at(1, None), false).map(|it| it.is_err()), Some(true));
        assert_eq!(ask(&mut worker, known.clone(), false), None, "it is being dialled");
        for aim in [&at(1, None), &known] {
            assert!(worker.wants.kept.contains_key(aim), "{aim}");
        }
    }
}
