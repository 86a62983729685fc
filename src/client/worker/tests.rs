//! Selection, ejection and probation under random faults, on a paused clock: the
//! worker as it is, a world instead of the network, and rules that must hold after
//! each step. Each rule is seen to be broken when its mechanism is switched off.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use parking_lot::Mutex;
use proptest::prelude::*;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport;

use super::*;
use crate::{
    InstanceId,
    client::{
        balance::Picker,
        binding::Binding,
        connector::{BoxFuture, Life},
        event,
        fleet::Ejection,
        mechanisms::FleetWithout,
        options::Policy,
        plays::Cases,
        registry::StaticList,
        resolver::ResolverSettings,
        status::ServiceStatus,
    },
};

const SITES: usize = 4;
const FAILURES: u32 = 3;
const FIRST_REST: Duration = Duration::from_millis(500);

/// The rest, shortened by its jitter.
const LEFT_ALONE: Duration = Duration::from_millis(400);

/// An attempt that began while its instance was silent, and the longest rest while
/// nothing is usable: so long may nothing be usable while something answers.
const EMPTY_AT_MOST: Duration = Duration::from_millis(2000);

/// Long enough for the worker to see to what has happened.
const MOMENT: Duration = Duration::from_millis(1);

/// How often the rules are looked at while time passes.
const LOOK: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Up,
    /// It answers probes well, and calls with UNAVAILABLE.
    Bad,
    /// It keeps its connections and says nothing.
    Silent,
    Down,
}

#[derive(Clone, Debug)]
enum Step {
    Becomes(usize, State),
    /// The registry lists these.
    Lists([bool; SITES]),
    Calls(u8),
    Waits(u16),
}

/// What is switched off.
#[derive(Clone, Copy, Debug, Default)]
struct Off {
    fleet: FleetWithout,
    /// What is ejected rests.
    rest: bool,
    /// What is connected to has answered.
    probe: bool,
    /// Enough of those that answer badly stay.
    panic: bool,
}

struct Site {
    state: State,
    since: Instant,
    listed_since: Option<Instant>,
    links: Vec<Arc<Link>>,
    answered: Option<Instant>,
    dialled: Vec<Instant>,
}

/// In place of the network.
#[derive(Clone)]
struct World {
    sites: Arc<Mutex<Vec<Site>>>,
    off: Off,
}

fn instance(site: usize) -> Instance {
    Instance::new(format!("i{site}"), "127.0.0.1", u16::try_from(site).unwrap() + 1, "dc1")
}

fn site_of(id: &InstanceId) -> usize {
    (0..SITES).find(|&site| instance(site).id == *id).expect("one of ours")
}

// === impl World ===

impl World {
    fn new(off: Off) -> Self {
        let now = Instant::now();
        let sites = (0..SITES).map(|_| Site {
            state: State::Up,
            since: now,
            listed_since: Some(now),
            links: Vec::new(),
            answered: None,
            dialled: Vec::new(),
        });
        Self { sites: Arc::new(Mutex::new(sites.collect())), off }
    }

    fn becomes(&self, site: usize, state: State) {
        let site = &mut self.sites.lock()[site];
        if site.state != state {
            (site.state, site.since) = (state, Instant::now());
        }
        if state == State::Down {
            site.links.drain(..).for_each(|link| link.lose(LossCause::Closed));
        }
    }

    /// What is asked while a site is silent is answered once it goes on, as a process does that was stopped.
    async fn says(&self, site: usize, within: Duration) -> Option<bool> {
        let until = Instant::now() + within;
        loop {
            let answer = self.answers(site);
            if answer.is_some() || Instant::now() >= until {
                return answer;
            }
            sleep(MOMENT).await;
        }
    }

    /// Answers a probe, or does not.
    fn answers(&self, site: usize) -> Option<bool> {
        let site = &mut self.sites.lock()[site];
        match site.state {
            State::Up | State::Bad => {
                site.answered = Some(Instant::now());
                Some(true)
            }
            State::Silent => None,
            State::Down => Some(false),
        }
    }
}

impl Connector for World {
    fn connect(&self, instance: Arc<Instance>, link: Arc<Link>) -> BoxFuture<Result<Endpoint, ConnectError>> {
        let (world, site) = (self.clone(), site_of(&instance.id));
        world.sites.lock()[site].dialled.push(Instant::now());
        Box::pin(async move {
            sleep(Duration::from_millis(1)).await;
            if !world.off.probe {
                let within = Duration::from_secs(1);
                match world.says(site, within).await {
                    Some(true) => {}
                    Some(false) => return Err(ConnectError::NotServing),
                    None => return Err(ConnectError::TimedOut(within)),
                }
            }
            world.sites.lock()[site].links.push(link.clone());
            let channel = transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
            Ok(Endpoint::new(instance, channel, link))
        })
    }

    fn probe(&self, endpoint: Arc<Endpoint>, _: Arc<Link>) -> BoxFuture<Result<Life, ConnectError>> {
        let (world, site) = (self.clone(), site_of(&endpoint.instance().id));
        Box::pin(async move {
            sleep(Duration::from_millis(1)).await;
            let within = FIRST_REST;
            match world.says(site, within).await {
                Some(true) => Ok(Life::Here),
                Some(false) | None => Err(ConnectError::TimedOut(within)),
            }
        })
    }
}

/// The worker, those who call, and what is known to have happened.
struct Play {
    world: World,
    list: StaticList,
    binding: watch::Receiver<Binding>,
    status: watch::Receiver<ServiceStatus>,
    /// With the moment of each.
    events: Arc<Mutex<Vec<(Instant, FailoverEvent)>>>,
    reports: mpsc::UnboundedSender<Report>,
    picker: Picker,
    ejected: BTreeMap<usize, Instant>,
    /// Who was in the set at the end of the last step, and answered.
    before: BTreeSet<usize>,
    empty_since: Option<Instant>,
    /// How many the worker knew at the last look.
    known: usize,
    /// The one rule that is looked at, where it is not all.
    only: Option<Rule>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

type Kept = Result<(), TestCaseError>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// The set is not empty while something answers.
    NeverEmpty,
    /// No ejected one is picked while another is usable.
    NotPicked,
    /// What is used has answered a probe, after it was ejected.
    Probed,
    /// What was ejected is not dialled at once.
    LeftAlone,
    /// Enough of those that answer badly stay.
    EnoughStay,
}

// === impl Play ===

impl Play {
    fn begin(policy: Policy, off: Off, only: Option<Rule>) -> Self {
        let world = World::new(off);
        let list = StaticList::new();
        list.set("counter", (0..SITES).map(instance));
        let options = ServiceOptions::new("counter").policy(policy).failures_to_eject(FAILURES);
        let options = Arc::new(options);
        let service: Arc<str> = "counter".into();
        let (reporter, reports) = mpsc::unbounded_channel();
        let (binding_tx, binding) = watch::channel(Binding::default());
        let (status_tx, status) = watch::channel(ServiceStatus::at_start(service.clone()));
        let (reach, _) = watch::channel(Vec::new());
        let events = event::channel();
        let (heard, mut hearing) = (Arc::new(Mutex::new(Vec::new())), events.subscribe());
        let into = Arc::clone(&heard);
        let hearing = tokio::spawn(async move {
            while let Ok(event) = hearing.recv().await {
                into.lock().push((Instant::now(), event));
            }
        });
        let first = if off.rest { Duration::ZERO } else { FIRST_REST };
        let settings = Settings {
            policy,
            registry_order: false,
            ejection: Ejection { first, at_most: first * 60 },
            panic_threshold: if off.panic { 0 } else { 50 },
            without: off.fleet,
            ..Settings::of_tests()
        };
        let registry = Arc::new(list.clone());
        let sources = Sources::new(service.clone(), registry, Others::None, ResolverSettings::default());
        let parts = Parts {
            options,
            connector: Arc::new(world.clone()),
            settings,
            sources,
            publisher: Publisher::new(service, binding_tx, status_tx, events),
            reporter: reporter.clone(),
            reports,
            reach,
            starving: Arc::new(AtomicBool::new(false)),
            lookout: None,
        };
        let worker = tokio::spawn(Worker::new(parts).run(CancellationToken::new()));
        Self {
            world,
            list,
            binding,
            status,
            events: heard,
            reports: reporter,
            picker: Picker::new(policy, 7),
            ejected: BTreeMap::new(),
            before: BTreeSet::new(),
            empty_since: None,
            known: SITES,
            only,
            _tasks: [worker, hearing].map(AbortOnDropHandle::new),
        }
    }

    fn rule(&self, rule: Rule, holds: bool, words: impl FnOnce() -> String) -> Kept {
        if holds || self.only.is_some_and(|only| only != rule) {
            return Ok(());
        }
        Err(TestCaseError::fail(format!("{rule:?}: {}", words())))
    }

    async fn step(&mut self, step: &Step) -> Kept {
        match *step {
            Step::Becomes(site, state) => {
                self.world.becomes(site, state);
                self.before.remove(&site);
            }
            Step::Lists(listed) => self.lists(listed),
            Step::Calls(count) => {
                for _ in 0..count {
                    self.call()?;
                    self.goes_on(MOMENT).await?;
                }
            }
            Step::Waits(looks) => {
                for _ in 0..looks {
                    self.goes_on(LOOK).await?;
                }
            }
        }
        self.goes_on(5 * MOMENT).await
    }

    async fn goes_on(&mut self, time: Duration) -> Kept {
        sleep(time).await;
        self.hear()?;
        self.set_is_not_empty()?;
        self.ejected_ones_are_left_alone()
    }

    fn lists(&mut self, listed: [bool; SITES]) {
        let some = listed.iter().any(|&it| it);
        // An empty list is another story: the old ones stay.
        let listed = if some { listed } else { [true; SITES] };
        for (site, &listed) in listed.iter().enumerate() {
            let since = &mut self.world.sites.lock()[site].listed_since;
            if !listed {
                *since = None;
                self.before.remove(&site);
                self.ejected.remove(&site);
            } else if since.is_none() {
                *since = Some(Instant::now());
            }
        }
        let all = (0..SITES).filter(|&site| listed[site]);
        self.list.set("counter", all.map(instance));
    }

    /// One call, which is over at once.
    fn call(&mut self) -> Kept {
        let binding = self.binding.borrow().clone();
        let Some(chosen) = self.picker.pick(&binding, &[]) else {
            let _ = self.reports.send(Report::Starved);
            return Ok(());
        };
        let site = site_of(&chosen.instance().id);
        let (state, answered) = {
            let sites = self.world.sites.lock();
            (sites[site].state, sites[site].answered)
        };
        let others = binding.endpoints().iter().any(|e| e.is_usable() && e.serial() != chosen.serial());
        if let Some(&at) = self.ejected.get(&site) {
            self.rule(Rule::NotPicked, !others, || format!("{site} is ejected, and another is usable"))?;
            self.rule(Rule::Probed, answered >= Some(at), || format!("{site} has not answered since"))?;
        }
        let link = chosen.link();
        match state {
            State::Up => link.succeeded(),
            State::Bad => link.failed(FAILURES),
            State::Silent => chosen.suspect(),
            State::Down => link.lose(LossCause::Closed),
        }
        Ok(())
    }

    fn hear(&mut self) -> Kept {
        // An event may be older than what is known now, and what was known before.
        let known = self.status.borrow().datacenters[0].known;
        let listed = mem::replace(&mut self.known, known).max(known);
        for (at, event) in mem::take(&mut *self.events.lock()) {
            match event {
                FailoverEvent::Ejected { instance, cause, .. } => {
                    let site = site_of(&instance.id);
                    // One that has left, of which the worker has not heard yet, is another story.
                    if self.world.sites.lock()[site].listed_since.is_some() {
                        self.ejected.insert(site, at);
                    }
                    if cause == RebindCause::Failing.to_string() {
                        // As the worker knew it: the list takes a while to come.
                        let ejected = self.ejected.len();
                        let words = || format!("{site} was ejected, number {ejected} of {listed}");
                        self.rule(Rule::EnoughStay, 2 * ejected <= listed, words)?;
                    }
                }
                FailoverEvent::Readmitted { instance, .. } => {
                    let site = site_of(&instance.id);
                    let at = self.ejected.remove(&site);
                    let answered = self.world.sites.lock()[site].answered;
                    self.rule(Rule::Probed, answered >= at, || format!("{site} is back unasked"))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Not at all while one that was in it answers, and not for long while any does.
    fn set_is_not_empty(&mut self) -> Kept {
        let now = Instant::now();
        let binding = self.binding.borrow().clone();
        let world = self.world.clone();
        let sites = world.sites.lock();
        let usable: BTreeSet<_> =
            binding.endpoints().iter().filter(|e| e.is_usable()).map(|e| site_of(&e.instance().id)).collect();
        if !usable.is_empty() {
            let answers = |&site: &usize| {
                sites[site].listed_since.is_some() && matches!(sites[site].state, State::Up | State::Bad)
            };
            self.before = usable.into_iter().filter(answers).collect();
            self.empty_since = None;
            return Ok(());
        }
        self.rule(Rule::NeverEmpty, self.before.is_empty(), || format!("{:?} still answer", self.before))?;
        let empty_since = *self.empty_since.get_or_insert(now);
        for (place, site) in sites.iter().enumerate() {
            let Some(listed) = site.listed_since.filter(|_| site.state == State::Up) else { continue };
            let since = empty_since.max(site.since).max(listed);
            let words = || format!("for {:?} while {place} answers", now - since);
            self.rule(Rule::NeverEmpty, now - since <= EMPTY_AT_MOST, words)?;
        }
        Ok(())
    }

    fn ejected_ones_are_left_alone(&self) -> Kept {
        let sites = self.world.sites.lock();
        for (&site, &at) in &self.ejected {
            let dialled = sites[site].dialled.iter().find(|&&it| it > at && it < at + LEFT_ALONE);
            self.rule(Rule::LeftAlone, dialled.is_none(), || format!("{site} was dialled {dialled:?}"))?;
        }
        Ok(())
    }
}

fn steps() -> impl Strategy<Value = (Policy, Vec<Step>)> {
    let state = prop_oneof![
        3 => Just(State::Up), 3 => Just(State::Bad), 1 => Just(State::Silent), 1 => Just(State::Down)
    ];
    let step = prop_oneof![
        4 => (0..SITES, state).prop_map(|(site, state)| Step::Becomes(site, state)),
        1 => any::<[bool; SITES]>().prop_map(Step::Lists),
        6 => (1..30_u8).prop_map(Step::Calls),
        3 => (1..200_u16).prop_map(Step::Waits),
    ];
    let policy = prop_oneof![Just(Policy::PickFirst), Just(Policy::RoundRobin), Just(Policy::LeastRequest)];
    (policy, proptest::collection::vec(step, 1..30))
}

/// Plays many times over. An error tells the rule that was broken.
fn play(cases: Cases, off: Off, only: Option<Rule>) -> Result<(), String> {
    // What is to fail need not fail shortly.
    let shrinks = if only.is_some() { 0 } else { 2000 };
    cases.try_out(shrinks, &steps(), |(policy, steps)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let mut play = Play::begin(policy, off, only);
            for step in &steps {
                play.step(step).await?;
            }
            Ok(())
        })
    })
}

#[test]
fn whatever_fails_the_set_is_not_empty_and_the_ejected_are_left_alone_and_probed() {
    if let Err(broken) = play(Cases::fixed_or_searched(150), Off::default(), None) {
        panic!("{broken}");
    }
}

#[test]
fn each_rule_is_broken_without_its_mechanism() {
    let last_resort = FleetWithout { last_resort: true, ..FleetWithout::default() };
    let removal = FleetWithout { removal: true, ..FleetWithout::default() };
    for (off, rule) in [
        (Off { fleet: last_resort, ..Off::default() }, Rule::NeverEmpty),
        (Off { fleet: removal, ..Off::default() }, Rule::NotPicked),
        (Off { probe: true, ..Off::default() }, Rule::Probed),
        (Off { rest: true, ..Off::default() }, Rule::LeftAlone),
        (Off { panic: true, ..Off::default() }, Rule::EnoughStay),
    ] {
        let broken = play(Cases::fixed(500), off, Some(rule))
            .expect_err(&format!("{rule:?} holds without its mechanism"));
        println!("{}", broken.lines().next().unwrap_or_default());
    }
}
