//! Selection, ejection and replay together, under random faults: calls of several callers
//! through a channel, with all that is beneath it but the sockets, on a paused clock. Rules that
//! must hold after each step; each is seen to be broken when its mechanism is switched off.

mod rules;
mod world;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use parking_lot::Mutex;
use proptest::prelude::*;
use tokio::{
    runtime::Handle,
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::{Status, body::Body};

use self::{
    rules::Rule,
    world::{ID, Mood, SITES, World, instance, site_of},
};
use super::{
    CallError, FailoverChannel, HedgingPolicy, MethodOptions, Policy, RetryPolicy, ServiceOptions,
    call::Served,
    connector::TonicConnector,
    datacenters::Fallback,
    fleet::{Ejection, Settings},
    mechanisms::{CallMechanism, CallWithout, FleetWithout},
    plays::Cases,
    registry::StaticList,
    resolver::ResolverSettings,
    services::{Running, Start},
    worker::{Others, Sources},
};
use crate::demo::pb::{
    self, AddRequest, CounterReply, GetRequest, IncrementRequest, counter_client::CounterClient,
};

/// Attempts of a call without a policy, and of one with.
const ATTEMPTS: u32 = 5;
const ATTEMPTS_BY_POLICY: u32 = 3;

/// Enough for the instances that are silent, one after the other.
const LONG: Duration = Duration::from_secs(6);
const SHORT: Duration = Duration::from_millis(300);

/// A timer is not late on a paused clock, but has milliseconds.
const SLACK: Duration = Duration::from_millis(2);

/// Long enough for the worker to see to what has happened.
const MOMENT: Duration = Duration::from_millis(1);

/// How often it is looked whether the set is empty while time passes.
const LOOK: Duration = Duration::from_millis(20);

/// What a call may expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Unsafe,
    Safe,
    /// Safe, with a policy of its own: for retries, or for hedging.
    Ruled,
}

#[derive(Clone, Debug)]
enum Step {
    Becomes(usize, Mood),
    Cuts(usize),
    GoesAway(usize),
    /// The registry lists these.
    Lists([bool; SITES]),
    /// So many callers at once, with a short deadline of their own or with the long one of the service.
    Calls(u8, Kind, bool),
    /// So many looks.
    Waits(u16),
}

/// How the service is set.
#[derive(Clone, Copy, Debug)]
struct Setup {
    policy: Policy,
    hedged: bool,
    /// The budget has little.
    scarce: bool,
}

/// What is switched off.
#[derive(Clone, Copy, Debug, Default)]
struct Off {
    fleet: FleetWithout,
    call: CallWithout,
    /// What shows it soon.
    trouble: Option<Mood>,
}

/// A call as its caller knows it.
#[derive(Clone, Debug)]
struct Call {
    id: u64,
    kind: Kind,
    began: Instant,
    within: Duration,
    /// Who was in the set and in use when it began.
    known: BTreeSet<usize>,
}

/// And how it ended.
#[derive(Debug)]
struct Ended {
    call: Call,
    at: Instant,
    result: Result<(), Status>,
    /// The attempts it took; 0 where nobody says.
    attempts: u32,
}

struct Play {
    setup: Setup,
    world: World,
    list: StaticList,
    /// Since when the registry lists each.
    listed: [Option<Instant>; SITES],
    running: Running,
    began: Instant,
    next: u64,
    calls: JoinSet<Ended>,
    out: BTreeMap<u64, Call>,
    /// The calls that are over, and whether the client says that they never ran.
    over: BTreeMap<u64, (Kind, bool)>,
    /// Who was in the set at the last look, and answered.
    before: BTreeSet<usize>,
    /// Who is in the set that was published last: what was taken out of it for the sake of another
    /// is not missed, although that is lost before the next look.
    published: Arc<Mutex<BTreeSet<usize>>>,
    empty_since: Option<Instant>,
    /// The one rule that is looked at, where it is not all.
    only: Option<Rule>,
    _tasks: [AbortOnDropHandle<()>; 3],
}

type Kept = Result<(), TestCaseError>;

// === impl Play ===

impl Play {
    fn begin(setup: Setup, off: Off, only: Option<Rule>) -> Self {
        let world = World::new();
        let list = StaticList::new();
        list.set("counter", (0..SITES).map(instance));
        let options = Arc::new(options(setup));
        let settings = Settings {
            policy: setup.policy,
            registry_order: false,
            ejection: Ejection { first: options.eject_for, at_most: options.eject_at_most },
            panic_threshold: options.traffic.panic_threshold,
            without: off.fleet,
            ..Settings::of_tests()
        };
        let registry = Arc::new(list.clone());
        let start = Start {
            methods: options.methods().expect("read before"),
            connector: Arc::new(TonicConnector::over(world.clone(), options.clone())),
            settings,
            sources: Sources::new("counter".into(), registry, Others::None, ResolverSettings::default()),
            lots: 7,
            fallback: Fallback::none(),
            runtime: &Handle::current(),
            without: off.call,
            options,
        };
        let (running, worker, ticker) = start.prepare(CancellationToken::new());
        let published = Arc::new(Mutex::new(BTreeSet::new()));
        let (into, mut binding) = (published.clone(), running.shared.binding.clone());
        let watching = async move {
            while binding.changed().await.is_ok() {
                *into.lock() = binding.borrow_and_update().instances().map(|it| site_of(&it.id)).collect();
            }
        };
        let tasks = [tokio::spawn(worker), tokio::spawn(ticker.map(drop)), tokio::spawn(watching)];
        Self {
            setup,
            world,
            list,
            listed: [Some(Instant::now()); SITES],
            running,
            began: Instant::now(),
            next: 0,
            calls: JoinSet::new(),
            out: BTreeMap::new(),
            over: BTreeMap::new(),
            before: BTreeSet::new(),
            published,
            empty_since: None,
            only,
            _tasks: tasks.map(AbortOnDropHandle::new),
        }
    }

    async fn step(&mut self, step: &Step) -> Kept {
        match *step {
            Step::Becomes(site, mood) => {
                if self.world.mood(site) != mood {
                    self.world.becomes(site, mood);
                }
                self.before.remove(&site);
            }
            Step::Cuts(site) => {
                self.world.cut(site);
                self.before.remove(&site);
            }
            Step::GoesAway(site) => {
                self.world.goes_away(site);
                self.before.remove(&site);
            }
            Step::Lists(listed) => self.lists(listed),
            Step::Calls(count, kind, short) => (0..count).for_each(|_| self.call(kind, short)),
            Step::Waits(looks) => {
                for _ in 0..looks {
                    self.goes_on(LOOK).await?;
                }
            }
        }
        self.goes_on(5 * MOMENT).await?;
        self.look_at_the_journal()
    }

    /// All calls end, and what was frozen goes on.
    async fn end(&mut self) -> Kept {
        let until = Instant::now() + LONG + LOOK;
        while !self.out.is_empty() && Instant::now() < until {
            self.goes_on(LOOK).await?;
        }
        for site in 0..SITES {
            if self.world.mood(site) == Mood::Frozen {
                self.world.becomes(site, Mood::Up);
            }
        }
        sleep(5 * MOMENT).await;
        self.look_at_the_journal()
    }

    async fn goes_on(&mut self, time: Duration) -> Kept {
        sleep(time).await;
        while let Some(ended) = self.calls.try_join_next() {
            let ended = ended.expect("calls do not panic");
            self.out.remove(&ended.call.id);
            self.look_at_the_end(&ended)?;
            let never_ran =
                ended.result.err().is_some_and(|it| CallError::of(&it).is_some_and(|it| !it.may_have_run()));
            self.over.insert(ended.call.id, (ended.call.kind, never_ran));
        }
        self.look_at_the_set()
    }

    fn lists(&mut self, listed: [bool; SITES]) {
        let some = listed.iter().any(|&it| it);
        // An empty list is another story: the old ones stay.
        let listed = if some { listed } else { [true; SITES] };
        for (site, &listed) in listed.iter().enumerate() {
            if !listed {
                self.listed[site] = None;
                self.before.remove(&site);
            } else if self.listed[site].is_none() {
                self.listed[site] = Some(Instant::now());
            }
        }
        self.list.set("counter", (0..SITES).filter(|&site| listed[site]).map(instance));
    }

    /// Who is in the set, and in use.
    fn usable(&self) -> BTreeSet<usize> {
        let binding = self.running.shared.binding.borrow();
        let usable = binding.endpoints().iter().filter(|it| it.is_usable());
        usable.map(|it| site_of(&it.instance().id)).collect()
    }

    /// Since when it has been listed and answering well.
    fn good_since(&self, site: usize) -> Option<Instant> {
        Some(self.world.good_since(site)?.max(self.listed[site]?))
    }

    fn call(&mut self, kind: Kind, short: bool) {
        self.next += 1;
        let within = if short { SHORT } else { LONG };
        let call = Call { id: self.next, kind, began: Instant::now(), within, known: self.usable() };
        self.out.insert(call.id, call.clone());
        let Running { shared, lifetime, .. } = self.running.clone();
        let channel = Noting { channel: FailoverChannel::new(shared, lifetime), attempts: Arc::default() };
        self.calls.spawn(async move {
            let attempts = channel.attempts.clone();
            let result = ask(channel, &call, short).await.map(drop);
            let told = result.as_ref().err().and_then(CallError::of).map(CallError::attempts);
            let attempts = told.unwrap_or(*attempts.lock());
            Ended { call, at: Instant::now(), result, attempts }
        });
    }
}

async fn ask(channel: Noting, call: &Call, short: bool) -> Result<tonic::Response<CounterReply>, Status> {
    fn request<T>(message: T, call: &Call, short: bool) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.metadata_mut().insert(ID, call.id.into());
        if short {
            request.set_timeout(call.within);
        }
        request
    }
    let mut client = CounterClient::new(channel);
    match call.kind {
        Kind::Unsafe => client.increment(request(IncrementRequest::default(), call, short)).await,
        Kind::Safe => client.get(request(GetRequest::default(), call, short)).await,
        Kind::Ruled => client.add(request(AddRequest::default(), call, short)).await,
    }
}

fn options(setup: Setup) -> ServiceOptions {
    let ruled = match setup.hedged {
        true => MethodOptions::new()
            .hedging(HedgingPolicy::new(Duration::from_millis(50)).max_attempts(ATTEMPTS_BY_POLICY)),
        false => MethodOptions::new().retry(
            RetryPolicy::new().max_attempts(ATTEMPTS_BY_POLICY).attempt_timeout(Duration::from_millis(500)),
        ),
    };
    let (share, per_second) = if setup.scarce { (0.0, 1) } else { (0.0, 10_000) };
    ServiceOptions::new("counter")
        .policy(setup.policy)
        .descriptors(pb::FILE_DESCRIPTOR_SET)
        .method("/counter.v1.Counter/Add", ruled)
        .default_timeout(LONG)
        .failures_to_eject(3)
        .max_attempts(ATTEMPTS)
        .retry_budget(share, per_second)
}

/// A channel that notes how many attempts the answer took.
#[derive(Clone)]
struct Noting {
    channel: FailoverChannel,
    attempts: Arc<Mutex<u32>>,
}

impl tower::Service<http::Request<Body>> for Noting {
    type Response = http::Response<Body>;
    type Error = CallError;
    type Future = BoxFuture<'static, Result<http::Response<Body>, CallError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.channel.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (answer, attempts) = (self.channel.call(request), self.attempts.clone());
        Box::pin(async move {
            let response = answer.await?;
            *attempts.lock() = response.extensions().get::<Served>().expect("who served").attempts;
            Ok(response)
        })
    }
}

/// With more of one `trouble`, where there is to be any.
fn steps(trouble: Option<Mood>) -> impl Strategy<Value = (Setup, Vec<Step>)> {
    let more = if trouble.is_some() { 12 } else { 4 };
    let mood = prop_oneof![
        4 => Just(Mood::Up),
        more => Just(trouble.unwrap_or(Mood::Up)),
        1 => Just(Mood::Slow),
        3 => Just(Mood::Bad),
        2 => Just(Mood::Refuses),
        2 => Just(Mood::BreaksOff),
        1 => Just(Mood::Stuck),
        2 => Just(Mood::Frozen),
        1 => Just(Mood::DiesBefore),
        1 => Just(Mood::DiesAfter),
        1 => Just(Mood::DiesAmid),
        1 => Just(Mood::Down),
    ];
    let kind = prop_oneof![1 => Just(Kind::Unsafe), 2 => Just(Kind::Safe), 1 => Just(Kind::Ruled)];
    let step = prop_oneof![
        5 => (0..SITES, mood).prop_map(|(site, mood)| Step::Becomes(site, mood)),
        1 => (0..SITES).prop_map(Step::Cuts),
        1 => (0..SITES).prop_map(Step::GoesAway),
        1 => any::<[bool; SITES]>().prop_map(Step::Lists),
        7 => (1..8_u8, kind, prop::bool::weighted(0.2)).prop_map(|(n, kind, short)| Step::Calls(n, kind, short)),
        2 => (1..80_u16).prop_map(Step::Waits),
    ];
    let policy = prop_oneof![Just(Policy::PickFirst), Just(Policy::RoundRobin), Just(Policy::LeastRequest)];
    let setup = (policy, any::<bool>(), prop::bool::weighted(0.3))
        .prop_map(|(policy, hedged, scarce)| Setup { policy, hedged, scarce });
    (setup, prop::collection::vec(step, 1..30))
}

/// Plays many times over. An error tells the rule that was broken.
fn play(cases: Cases, off: Off, only: Option<Rule>) -> Result<(), String> {
    // What is to fail need not fail shortly.
    let shrinks = if only.is_some() { 0 } else { 1000 };
    cases.try_out(shrinks, &steps(off.trouble), |(setup, steps)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let mut play = Play::begin(setup, off, only);
            for step in &steps {
                play.step(step).await?;
            }
            play.end().await
        })
    })
}

#[test]
fn whatever_fails_calls_end_as_they_must_and_none_runs_that_must_not() {
    if let Err(broken) = play(Cases::fixed_or_searched(100), Off::default(), None) {
        panic!("{broken}");
    }
}

#[test]
fn each_rule_of_calls_is_broken_without_its_mechanism() {
    let call = |mechanism, trouble| {
        let off = CallWithout { off: Some(mechanism) };
        Off { call: off, trouble: Some(trouble), ..Off::default() }
    };
    let last_resort = FleetWithout { last_resort: true, ..FleetWithout::default() };
    let last_resort = Off { fleet: last_resort, trouble: Some(Mood::Bad), ..Off::default() };
    for (off, rule) in [
        (call(CallMechanism::Deadline, Mood::Stuck), Rule::InTime),
        (call(CallMechanism::Ending, Mood::BreaksOff), Rule::Reason),
        (call(CallMechanism::Safety, Mood::Bad), Rule::RunsOnce),
        (call(CallMechanism::Proof, Mood::DiesAfter), Rule::RunsOnce),
        (call(CallMechanism::Proof, Mood::DiesAfter), Rule::NeverRan),
        (call(CallMechanism::Replay, Mood::Bad), Rule::Answered),
        (last_resort, Rule::NeverEmpty),
        (call(CallMechanism::Cap, Mood::Refuses), Rule::Attempts),
        (call(CallMechanism::Budget, Mood::Bad), Rule::Budget),
        (call(CallMechanism::RefusedOnce, Mood::Refuses), Rule::RefusedOnce),
        (call(CallMechanism::Unseen, Mood::DiesBefore), Rule::Unseen),
        (call(CallMechanism::Unseen, Mood::Refuses), Rule::Unseen),
    ] {
        let broken = play(Cases::fixed(300), off, Some(rule));
        let broken = broken.expect_err(&format!("{rule:?} holds without its mechanism: {off:?}"));
        println!("{}", broken.lines().next().unwrap_or_default());
    }
}
