//! One run: calls at a steady pace to two servers, one of which is struck.
//!
//! It knows nothing of the client: the bench of the peers uses it too.

use std::{
    collections::{HashMap, HashSet},
    env, fs,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rustix::process::Signal;
use tokio::{
    io::AsyncReadExt,
    net::TcpStream,
    sync::watch,
    task::{JoinSet, spawn_blocking, yield_now},
    time::{Instant, sleep_until},
};

use super::common::backend::{Backend, Settings};

const CALLS: usize = 20_000;
const CALLERS: usize = 32;
/// Between the beginnings of two calls: 2,000 a second.
const PACE: Duration = Duration::from_micros(500);
/// How long the server's handler takes.
const WORK: Duration = Duration::from_millis(5);
pub(crate) const DEADLINE: Duration = Duration::from_secs(2);
/// When the one server is struck, and when it is back.
const STRUCK: Duration = Duration::from_secs(3);
const BACK: Duration = Duration::from_secs(5);
const THAWED: Duration = Duration::from_secs(9);
/// After so long a freeze must have been detected.
const DETECTED: Duration = Duration::from_millis(1200);
/// A call that takes so long has been to the frozen server: none leaves it before `suspect_after`,
/// which is 500 ms, and none takes so long elsewhere.
const STUCK: Duration = Duration::from_millis(450);

/// What becomes of one of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Calm,
    /// Its callers make no call while it dies: what has been sent it has read.
    Kill,
    /// As most processes are killed: calls go on while it dies.
    KillAmidCalls,
    Terminate,
    Stop,
}

/// A client of any kind.
pub(crate) trait Client: Clone + Send + 'static {
    /// Makes one call: the number of the server that answered, or the code of the failure.
    fn call(&mut self, id: String, deadline: Duration) -> impl Future<Output = Result<u64, String>> + Send;
}

/// What came of one call.
struct Call {
    begun: Duration,
    ended: Duration,
    answer: Result<u64, String>,
}

/// What came of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Run {
    pub(crate) failed: f64,
    /// Of those, the ones that a server had begun to execute.
    pub(crate) executed_though_failed: f64,
    /// Of those, the ones that none had begun, made while the killed process died: its sockets still took
    /// what nobody reads any more.
    pub(crate) sent_to_the_dying: f64,
    pub(crate) executed_twice: f64,
    /// The longest time without a success, in ms; so are all times.
    pub(crate) gap: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// Of all calls, failed ones too.
    pub(crate) slowest: f64,
    /// From the server's return until it answers a call begun after that.
    pub(crate) back: Option<f64>,
    /// Calls that went to the frozen server after it must have been detected.
    pub(crate) into_the_freeze: f64,
    /// How many calls failed with which code.
    pub(crate) codes: HashMap<String, usize>,
}

impl Fault {
    pub(crate) const ALL: [Self; 5] =
        [Self::Calm, Self::Kill, Self::KillAmidCalls, Self::Terminate, Self::Stop];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Kill => "SIGKILL",
            Self::KillAmidCalls => "SIGKILL-amid-calls",
            Self::Terminate => "SIGTERM",
            Self::Stop => "SIGSTOP",
        }
    }

    fn back(self) -> Duration {
        if self == Self::Stop { THAWED } else { BACK }
    }

    fn kills(self) -> bool {
        matches!(self, Self::Kill | Self::KillAmidCalls)
    }

    /// The time for which a killed process's sockets still stood, if one was killed.
    async fn strike(
        self,
        callers: &Callers,
        journals: &[PathBuf; 2],
        victim: &mut Target,
    ) -> std::io::Result<Option<Range<Duration>>> {
        let start = callers.start;
        sleep_until(start + STRUCK).await;
        callers.hold.send_replace(self == Self::Kill);
        // When a handler has begun each call that was made: what is on its way to a server when that dies, nobody
        // could tell from what it has begun. Calls are made with the runtime's clock, which ticks every
        // millisecond; no other is before the signal is sent, for the runtime has one thread.
        while callers.made.load(Ordering::Relaxed) != written(journals)? {
            yield_now().await;
        }
        let mut died = None;
        match self {
            Self::Calm => return Ok(None),
            Self::Kill | Self::KillAmidCalls => {
                let struck = start.elapsed();
                victim.server.signal(Signal::KILL)?;
                for witness in &mut victim.witnesses {
                    while witness.read_u8().await.is_ok() {}
                }
                died = Some(struck..start.elapsed());
                // The runtime looks at its sockets once more before the callers go on.
                yield_now().await;
                callers.hold.send_replace(false);
            }
            Self::Terminate => victim.server.signal(Signal::TERM)?,
            Self::Stop => victim.server.signal(Signal::STOP)?,
        }
        sleep_until(start + self.back()).await;
        match self {
            Self::Stop => victim.server.signal(Signal::CONT)?,
            _ => {
                victim.server.wait()?;
                // On a thread of its own: the callers' would stand still meanwhile.
                let settings = victim.settings.clone();
                victim.server = spawn_blocking(move || Backend::start(&settings)).await??;
            }
        }
        Ok(died)
    }
}

/// Those who make the calls.
struct Callers {
    start: Instant,
    /// How many bytes the journals have once a handler has begun each call that was made so far.
    made: AtomicU64,
    /// Whether they make no further call for now.
    hold: watch::Sender<bool>,
}

/// A server that may be struck.
struct Target {
    server: Backend,
    settings: Settings,
    /// Connections on which nothing is said to it, so that one sees when a killed process's sockets are closed.
    /// The kernel closes them in an order of its own: one was there before the client's, and one came after.
    witnesses: Vec<TcpStream>,
}

impl Target {
    /// None if the server may want to end well, which this would delay.
    async fn add_witness_of(&mut self, fault: Fault) -> std::io::Result<()> {
        if fault.kills() {
            self.witnesses.push(TcpStream::connect(("127.0.0.1", self.server.port)).await?);
        }
        Ok(())
    }
}

/// Two servers, and the client that `connect` makes of their ports and says
/// which of the two is to be struck.
pub(crate) async fn run<C: Client, E: Into<Box<dyn std::error::Error>>>(
    fault: Fault,
    connect: impl AsyncFnOnce([u16; 2]) -> Result<(C, usize), E>,
) -> Result<Run, Box<dyn std::error::Error>> {
    let journals = [1, 2].map(|n| env::temp_dir().join(format!("failover-{}-{n}", std::process::id())));
    for journal in &journals {
        let _ = fs::remove_file(journal);
    }
    let mut targets = Vec::new();
    for (number, journal) in (1..).zip(&journals) {
        let mut settings = Settings { work: WORK, journal: Some(journal.clone()), ..Settings::new(number) };
        let server = Backend::start(&settings)?;
        // It comes back where it was.
        settings.listen.set_port(server.port);
        targets.push(Target { server, settings, witnesses: Vec::new() });
    }
    let ports = [targets[0].server.port, targets[1].server.port];
    for target in &mut targets {
        target.add_witness_of(fault).await?;
    }
    let (client, struck) = connect(ports).await.map_err(Into::into)?;
    targets[struck].add_witness_of(fault).await?;
    let callers = Callers { start: Instant::now(), made: AtomicU64::new(0), hold: watch::Sender::new(false) };
    let callers = Arc::new(callers);
    let strike = fault.strike(&callers, &journals, &mut targets[struck]);
    let (died, calls) = tokio::join!(strike, calls(client, callers.clone()));
    let died = died?;
    // A server that was frozen may still have something to execute.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let run = judge(fault, struck, died, calls, &journals)?;
    for journal in &journals {
        let _ = fs::remove_file(journal);
    }
    Ok(run)
}

/// All calls, in the order of their numbers.
async fn calls<C: Client>(client: C, callers: Arc<Callers>) -> Vec<Call> {
    let start = callers.start;
    let next = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..CALLERS {
        let (mut client, next, callers) = (client.clone(), next.clone(), callers.clone());
        let mut hold = callers.hold.subscribe();
        tasks.spawn(async move {
            let mut calls = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= CALLS {
                    return calls;
                }
                sleep_until(start + PACE * u32::try_from(number).expect("few")).await;
                hold.wait_for(|hold| !hold).await.expect("the sender is among the callers");
                let (begun, id) = (start.elapsed(), number.to_string());
                callers.made.fetch_add(id.len() as u64 + 1, Ordering::Relaxed);
                let answer = client.call(id, DEADLINE).await;
                calls.push((number, Call { begun, ended: start.elapsed(), answer }));
            }
        });
    }
    let mut all: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, call)| call).collect()
}

/// How long the journals are together.
fn written(journals: &[PathBuf; 2]) -> std::io::Result<u64> {
    journals.iter().map(|path| Ok(fs::metadata(path)?.len())).sum()
}

fn judge(
    fault: Fault,
    struck: usize,
    died: Option<Range<Duration>>,
    calls: Vec<Call>,
    journals: &[PathBuf; 2],
) -> Result<Run, Box<dyn std::error::Error>> {
    let mut executed: HashMap<usize, usize> = HashMap::new();
    let mut by_struck = HashSet::new();
    for (place, journal) in journals.iter().enumerate() {
        for line in fs::read_to_string(journal)?.lines() {
            let number = line.parse()?;
            *executed.entry(number).or_default() += 1;
            if place == struck {
                by_struck.insert(number);
            }
        }
    }
    let mut run = Run::default();
    let (mut ends, mut took) = (Vec::new(), Vec::new());
    let server = u64::try_from(struck)? + 1;
    for (number, call) in calls.iter().enumerate() {
        let lasted = call.ended - call.begun;
        run.slowest = run.slowest.max(ms(lasted));
        match &call.answer {
            Ok(by) => {
                ends.push(call.ended);
                took.push(lasted);
                if fault != Fault::Calm && *by == server && call.begun >= fault.back() {
                    let back = ms(call.ended - fault.back());
                    run.back = Some(run.back.map_or(back, |first| first.min(back)));
                }
            }
            Err(code) => {
                run.failed += 1.0;
                *run.codes.entry(code.clone()).or_default() += 1;
                if executed.contains_key(&number) {
                    run.executed_though_failed += 1.0;
                } else if died.as_ref().is_some_and(|died| died.contains(&call.begun)) {
                    run.sent_to_the_dying += 1.0;
                }
            }
        }
        if fault == Fault::Stop
            && (STRUCK + DETECTED..THAWED).contains(&call.begun)
            && (lasted > STUCK || by_struck.contains(&number))
        {
            run.into_the_freeze += 1.0;
        }
    }
    run.executed_twice = executed.values().filter(|times| **times > 1).count() as f64;
    ends.sort();
    took.sort();
    run.gap = ends.windows(2).map(|two| ms(two[1] - two[0])).fold(0.0, f64::max);
    run.p50 = took.get(took.len() / 2).copied().map_or(0.0, ms);
    run.p99 = took.get(took.len() * 99 / 100).copied().map_or(0.0, ms);
    Ok(run)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
