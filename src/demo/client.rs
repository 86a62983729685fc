//! `demo client`: calls at a steady rate and tells what happens meanwhile.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use clap::{Args, ValueEnum};
use futures_util::StreamExt;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{
    calls::{self, Answer, Client, Failed, Method, SLOW},
    cli::Failure,
    pb,
    screen::{Screen, Tone},
    signals::Signals,
    text::{self, count},
};
use crate::client::{ConsulService, FailoverEvent, Fallback, GrpcClient, ServiceOptions};

/// How often a line says how it goes: a few times a minute.
const STATUS: Duration = Duration::from_secs(15);
/// How often the live line is drawn anew.
const FRAME: Duration = Duration::from_millis(200);
/// How long the calls still out may take when the client is told to end.
const PATIENCE: Duration = Duration::from_secs(3);
/// Failed calls are told one by one, but not faster than this.
const BETWEEN_FAILURES: Duration = Duration::from_secs(2);

/// What `demo client` calls, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// The service to call.
    #[arg(long, env = "DEMO_SERVICE", default_value = "counter")]
    service: String,

    /// Calls a second.
    #[arg(long, env = "DEMO_RATE", default_value = "20", value_parser = parse_rate)]
    rate: f64,

    /// How long a call may take, all its attempts together.
    #[arg(long, env = "DEMO_DEADLINE", default_value = "2s", value_name = "DURATION", value_parser = text::parse_positive_duration)]
    deadline: Duration,

    /// What to call: get and add can be resent, increment never once it may have run; mix takes turns.
    #[arg(long, env = "DEMO_METHOD", value_enum, default_value_t = Plan::Mix)]
    method: Plan,

    /// Where to go when no instance in the own datacenter answers: nearest, none, or
    /// datacenters in order, for example dc2,dc3.
    #[arg(long, env = "DEMO_FALLBACK", default_value = "nearest", value_parser = parse_fallback)]
    fallback: FallbackTo,

    /// Call the primary only: of instances that share a lease.
    #[arg(long, env = "DEMO_PRIMARY_ONLY")]
    primary_only: bool,

    /// End after so long; without it at Ctrl-C or SIGTERM.
    #[arg(long = "for", env = "DEMO_FOR", value_name = "DURATION", value_parser = text::parse_positive_duration)]
    run_for: Option<Duration>,

    /// One JSON object a line, for machines.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Plan {
    Get,
    Add,
    Increment,
    Mix,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum FallbackTo {
    Nearest,
    None,
    Datacenters(Vec<String>),
}

#[derive(Default)]
struct Totals {
    begun: u64,
    answered: BTreeMap<String, u64>,
    resent: u64,
    slow: u64,
    failed: u64,
    longest: Duration,
    latest: Option<String>,
    failure_told: Option<Instant>,
    /// Failures since then.
    untold: u64,
}

struct Teller {
    screen: Screen,
    json: bool,
    totals: Mutex<Totals>,
}

pub(crate) async fn run(options: Options, mut signals: Signals, screen: Screen) -> Result<(), Failure> {
    let mut service = ServiceOptions::new(&options.service)
        .descriptors(pb::FILE_DESCRIPTOR_SET)
        .default_timeout(options.deadline);
    if options.primary_only {
        service = service.primary_only();
    }
    let consul = ConsulService::from_env()?.service(service).fallback(options.fallback()).build()?;
    let counter = consul.grpc_client(&options.service)?;
    let teller = Arc::new(Teller { screen, json: options.json, totals: Mutex::default() });
    teller.tell(Tone::Title, "started", &options.headline(), json!({}));

    let stop = CancellationToken::new();
    let client = Client::new(counter.channel());
    // Unlike those of another run against the same servers.
    let run = text::run_id();
    let calling = calls::pace(options.rate, stop.clone(), PATIENCE, |number| {
        let (client, teller, deadline) = (client.clone(), teller.clone(), options.deadline);
        let method = options.method.at(number);
        let id = format!("{run}-{number}");
        teller.totals.lock().begun += 1;
        async move {
            let began = Instant::now();
            let result = calls::call(client, method, id, deadline).await;
            teller.ended(method, began.elapsed(), result);
        }
    });
    let ending = async {
        let why = tokio::select! {
            signal = signals.next() => signal,
            () = over(options.run_for) => "the time is over",
            () = teller.screen.closed() => "nobody reads this",
        };
        stop.cancel();
        why
    };
    let began = Instant::now();
    let telling = async { tokio::join!(events(&counter, &teller), statuses(&counter, &teller)) };
    let why = tokio::select! {
        ((), why) = async { tokio::join!(calling, ending) } => why,
        _ = telling => "the client has ended",
    };
    teller.screen.live("");
    teller.sums(why, began.elapsed());
    let _ = timeout(PATIENCE, consul.shutdown()).await;
    Ok(())
}

async fn over(time: Option<Duration>) {
    match time {
        Some(time) => sleep(time).await,
        None => std::future::pending().await,
    }
}

async fn events(counter: &GrpcClient, teller: &Teller) {
    let mut events = counter.events();
    while let Some(event) = events.next().await {
        let (tone, kind, more) = described(&event);
        teller.tell(tone, kind, &event.to_string(), more);
    }
    // The others decide when it is over.
    std::future::pending::<()>().await;
}

async fn statuses(counter: &GrpcClient, teller: &Teller) {
    let alive = teller.screen.is_alive() && !teller.json;
    let mut ticks = interval(if alive { FRAME } else { STATUS });
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    // The first tick is at once, when there is nothing to say yet.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let line = format!("{}; {}", counter.status(), teller.totals.lock().line());
        if alive {
            teller.screen.live(&teller.screen.paint(Tone::Quiet, line));
        } else {
            let totals = teller.totals.lock().json();
            teller.tell(Tone::Quiet, "status", &line, totals);
        }
    }
}

fn described(event: &FailoverEvent) -> (Tone, &'static str, Value) {
    use FailoverEvent as E;
    match event {
        E::Rebound { from, to, took, cause, .. } => {
            let more = json!({
                "from": from.as_ref().map(ToString::to_string), "to": to.to_string(),
                "cause": cause.to_string(), "took_ms": text::ms(*took),
            });
            (Tone::Good, "rebound", more)
        }
        E::Ejected { instance, .. } => (Tone::Notice, "ejected", json!({ "instance": instance.to_string() })),
        E::Readmitted { instance, .. } => {
            (Tone::Good, "readmitted", json!({ "instance": instance.to_string() }))
        }
        E::FellBack { from, to, .. } => (Tone::Notice, "fell_back", json!({ "from": from, "to": to })),
        E::FailedBack { from, to, .. } => (Tone::Good, "failed_back", json!({ "from": from, "to": to })),
        E::RegistryLost { .. } => (Tone::Notice, "registry_lost", json!({})),
        E::RegistryBehind { .. } => (Tone::Notice, "registry_behind", json!({})),
        E::RegistryBack { .. } => (Tone::Good, "registry_back", json!({})),
        E::Unusable { .. } => (Tone::Bad, "unusable", json!({})),
        _ => (Tone::Notice, "event", json!({})),
    }
}

// === impl Options ===

impl Options {
    fn headline(&self) -> String {
        let each = text::duration(self.deadline);
        format!("calls {} at {} a second, each given {each}", self.service, self.rate)
    }

    fn fallback(&self) -> Fallback {
        match &self.fallback {
            FallbackTo::Nearest => Fallback::nearest(),
            FallbackTo::None => Fallback::none(),
            FallbackTo::Datacenters(names) => Fallback::datacenters(names),
        }
    }
}

impl Plan {
    fn at(self, number: u64) -> Method {
        match self {
            Plan::Get => Method::Get,
            Plan::Add => Method::Add,
            Plan::Increment => Method::Increment,
            Plan::Mix => Method::ALL[(number % 3) as usize],
        }
    }
}

// === impl Teller ===

impl Teller {
    fn tell(&self, tone: Tone, kind: &str, text: &str, mut more: Value) {
        let time = text::time_of_day();
        if self.json {
            more["time"] = time.into();
            more["event"] = kind.into();
            more["text"] = text.into();
            self.screen.line(more);
        } else {
            let time = self.screen.paint(Tone::Quiet, time);
            self.screen.line(format!("{time} {}", self.screen.paint(tone, text)));
        }
    }

    fn ended(&self, method: Method, took: Duration, result: Result<Answer, Failed>) {
        let mut totals = self.totals.lock();
        match result {
            Ok(answer) => {
                let by = format!("{}@{}", answer.instance, answer.datacenter);
                *totals.answered.entry(by.clone()).or_default() += 1;
                totals.resent += u64::from(answer.attempts > 1);
                totals.slow += u64::from(took > SLOW);
                totals.longest = totals.longest.max(took);
                totals.latest = Some(by);
            }
            Err(failed) => {
                totals.failed += 1;
                let now = Instant::now();
                if totals.failure_told.is_some_and(|told| now - told < BETWEEN_FAILURES) {
                    totals.untold += 1;
                    return;
                }
                totals.failure_told = Some(now);
                let untold = std::mem::take(&mut totals.untold);
                drop(totals);
                let mut line = format!("{method} failed after {}: {failed}", text::duration(took));
                if untold > 0 {
                    line.push_str(&format!("; {untold} more before it"));
                }
                let more = json!({ "method": method.name(), "untold": untold });
                self.tell(Tone::Bad, "failed", &line, more);
            }
        }
    }

    fn sums(&self, why: &str, ran: Duration) {
        let totals = self.totals.lock();
        let line = format!("ended ({why}) after {}; {}", text::duration(ran), totals.line());
        let tone = if totals.failed > 0 { Tone::Notice } else { Tone::Good };
        self.tell(tone, "totals", &line, totals.json());
        if !self.json {
            for (by, calls) in &totals.answered {
                self.screen.line(format!("  {by} answered {}", count(*calls, "call")));
            }
        }
    }
}

impl Totals {
    fn line(&self) -> String {
        let answered: u64 = self.answered.values().sum();
        let mut line = format!(
            "{}: {answered} answered, {} resent, {} slow (over {}), {} failed",
            count(self.begun, "call"),
            self.resent,
            self.slow,
            text::duration(SLOW),
            self.failed,
        );
        let out = self.begun - answered - self.failed;
        if out > 0 {
            line.push_str(&format!(", {out} under way"));
        }
        line
    }

    fn json(&self) -> Value {
        json!({
            "calls": self.begun, "answered": self.answered, "resent": self.resent, "slow": self.slow,
            "failed": self.failed, "longest_ms": text::ms(self.longest), "answers_now": self.latest,
        })
    }
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        // Above, the timer's own millisecond would decide.
        Ok(rate) if (0.01..=1000.0).contains(&rate) => Ok(rate),
        _ => Err(format!("{text:?} is no rate: write calls a second from 0.01 to 1000")),
    }
}

fn parse_fallback(text: &str) -> Result<FallbackTo, String> {
    match text {
        "nearest" => Ok(FallbackTo::Nearest),
        "none" => Ok(FallbackTo::None),
        _ => {
            let names: Vec<_> = text.split(',').map(|name| name.trim().to_owned()).collect();
            let fits = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            if names.iter().any(|name| name.is_empty() || !name.chars().all(fits)) {
                return Err(format!(
                    "{text:?} is no fallback: write nearest, none, or datacenters like dc2,dc3"
                ));
            }
            Ok(FallbackTo::Datacenters(names))
        }
    }
}
