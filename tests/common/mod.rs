//! What the client's tests have in common: real backends, real Consuls, callers.

#![allow(clippy::unwrap_used, reason = "a test may fail")]
#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod acl;
pub(crate) mod alone;
pub(crate) mod hostile;
pub(crate) mod proxy;
pub(crate) mod record;
pub(crate) mod scripted;
pub(crate) mod stage;

use std::{
    net::SocketAddr,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout},
    sync::watch,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, timeout},
};
use tokio_stream::StreamExt;
use tonic::{Code, Request, Status};
use tonic_failover::{
    client::{
        ConsulService, ConsulServiceBuilder, FailoverChannel, FailoverEvent, GrpcClient, Served,
        ServiceOptions,
    },
    consul::ConsulConfig,
    demo::pb::{self, AddRequest, GetRequest, IncrementRequest, counter_client::CounterClient},
    testkit::{ConsulProcess, Port, Registry},
};

/// A bound for things that come soon. Generous: a busy machine must not fail a test.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A call that takes longer is counted as slow.
pub(crate) const SLOW: Duration = Duration::from_millis(250);

/// So many calls of one caller at a fixed rate are under way at most: a machine that
/// cannot keep up must not be buried in calls that will be too late.
pub(crate) const MOST_UNDER_WAY: usize = 4;

/// The deadline of the tests' calls.
pub(crate) const DEADLINE: Duration = Duration::from_secs(2);

/// A real Consul with one datacenter, or `None`, loudly, where none is installed.
pub(crate) async fn consul() -> Option<ConsulProcess> {
    let bin = consul_bin()?;
    Some(ConsulProcess::builder(bin).datacenter("dc1").dev().start().await.expect("consul starts"))
}

/// The consul program; says where it may come from when there is none.
pub(crate) fn consul_bin() -> Option<std::path::PathBuf> {
    let found = ConsulProcess::find();
    if found.is_none() {
        assert!(std::env::var_os("CI").is_none(), "CI runs everything: scripts/get-consul has gone wrong");
        eprintln!("SKIPPED: no `consul` found: run ./test, which fetches one, or set CONSUL_BIN");
    }
    found
}

/// Nobody listens on port 1.
pub(crate) const NOWHERE: &str = "http://127.0.0.1:1";

// === backends ===

/// A `demo backend` of ours, killed with the test.
pub(crate) struct Backend {
    pub(crate) name: String,
    /// Nobody else's until this is dropped, however often its process has died.
    pub(crate) port: u16,
    _held: Port,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    journal: tempfile::NamedTempFile,
}

impl Backend {
    /// Starts one that registers itself nowhere.
    pub(crate) async fn start(name: &str) -> Self {
        Self::start_with(name, 0, NOWHERE, &[]).await
    }

    /// Starts one on `port` (0: any) that registers itself in the Consul at `consul`.
    pub(crate) async fn start_with(name: &str, port: u16, consul: &str, more: &[&str]) -> Self {
        Self::start_at(name, &format!("127.0.0.1:{port}"), consul, more).await
    }

    /// Starts one that listens at `listen`.
    pub(crate) async fn start_at(name: &str, listen: &str, consul: &str, more: &[&str]) -> Self {
        Self::start_as(name, listen, consul, more, None).await
    }

    /// The same with an ACL token.
    pub(crate) async fn start_as(
        name: &str,
        listen: &str,
        consul: &str,
        more: &[&str],
        token: Option<&str>,
    ) -> Self {
        let journal = tempfile::NamedTempFile::new().unwrap();
        let held = Port::hold(listen.parse::<SocketAddr>().unwrap()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
        command.args(["backend", "--name", name, "--listen", &held.addr().to_string(), "--journal"]);
        command.arg(journal.path()).args(more);
        for (variable, _) in std::env::vars_os() {
            let variable = variable.to_string_lossy().into_owned();
            if variable.starts_with("CONSUL_") || variable.starts_with("DEMO_") {
                command.env_remove(variable);
            }
        }
        command.env("CONSUL_HTTP_ADDR", consul).stdin(Stdio::null()).stdout(Stdio::piped());
        command.envs(token.map(|token| ("CONSUL_HTTP_TOKEN", token)));
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (name, port) = (name.to_owned(), held.number());
        let mut backend = Self { name, port, _held: held, child, lines, journal };
        backend.line_with("listens on ").await;
        backend
    }

    /// Waits for a line of its log with these words.
    pub(crate) async fn says(&mut self, words: &str) -> String {
        self.line_with(words).await
    }

    async fn line_with(&mut self, words: &str) -> String {
        let find = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("the backend goes on writing");
                if line.contains(words) {
                    return line;
                }
            }
        };
        timeout(SOON, find).await.unwrap_or_else(|_| panic!("no line with {words:?}"))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().expect("it runs")).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
        if signal == Signal::STOP {
            // A busy process has threads that run on for a moment, and answer.
            let asked = Instant::now();
            while !stands_still(pid) {
                assert!(asked.elapsed() < SOON, "{pid} does not stop");
                std::thread::yield_now();
            }
        }
    }

    /// What it has written and nobody has read.
    pub(crate) async fn last_words(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        while let Ok(Ok(Some(line))) = timeout(Duration::from_millis(200), self.lines.next_line()).await {
            words.push(line);
        }
        words
    }

    /// SIGKILL, and waits for the end.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    /// SIGTERM, and waits for the end.
    pub(crate) async fn terminate(&mut self) {
        self.signal(Signal::TERM);
        self.ended().await;
    }

    /// Waits for the end.
    pub(crate) async fn ended(&mut self) {
        timeout(SOON, self.child.wait()).await.expect("it ends").unwrap();
    }

    /// The journal's lines so far.
    pub(crate) fn journal(&self) -> Vec<String> {
        std::fs::read_to_string(self.journal.path()).unwrap().lines().map(str::to_owned).collect()
    }
}

/// Whether each thread of the process is stopped.
fn stands_still(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.into_iter().all(|thread| {
        // The state follows the name, which is in brackets and may hold anything.
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    })
}

/// Registers an instance in Consul by hand, without a check: Consul calls it
/// passing whatever becomes of it.
pub(crate) async fn register(registry: &Registry, service: &str, name: &str, port: u16) {
    let body = format!(r#"{{"ID":"{name}","Name":"{service}","Address":"127.0.0.1","Port":{port}}}"#);
    let answer = registry.put("/v1/agent/service/register", body).await.unwrap();
    assert!(answer.status.is_success(), "{answer:?}");
}

pub(crate) async fn deregister(registry: &Registry, name: &str) {
    let answer = registry.put(&format!("/v1/agent/service/deregister/{name}"), "").await.unwrap();
    assert!(answer.status.is_success(), "{answer:?}");
}

// === the client under test ===

pub(crate) fn options() -> ServiceOptions {
    ServiceOptions::new("counter").descriptors(pb::FILE_DESCRIPTOR_SET)
}

/// For tests in which nobody falls silent: what a busy machine delays must not
/// look as if somebody had.
pub(crate) fn steady() -> ServiceOptions {
    options().suspect_after(SOON).probe_timeout(SOON).connect_timeout(SOON)
}

/// A client of `counter` for such tests.
pub(crate) fn steady_client(url: &str) -> GrpcClient {
    builder(url).service(steady()).build().unwrap().grpc_client("counter").unwrap()
}

pub(crate) fn builder(url: &str) -> ConsulServiceBuilder {
    ConsulService::builder(ConsulConfig::new(url).unwrap())
}

/// A client of the service `counter` in the Consul at `url`.
pub(crate) fn client(url: &str) -> GrpcClient {
    builder(url).service(options()).build().unwrap().grpc_client("counter").unwrap()
}

/// Waits until the status satisfies `is_so`.
pub(crate) async fn until<O>(client: &GrpcClient<O>, words: &str, is_so: impl Fn(&GrpcClient<O>) -> bool) {
    let wait = async {
        while !is_so(client) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, wait).await.unwrap_or_else(|_| panic!("not so: {words}; {}", client.status()));
}

/// The name of the instance that is bound.
pub(crate) fn bound<O>(client: &GrpcClient<O>) -> Option<String> {
    client.status().bound.map(|i| i.name.clone())
}

pub(crate) async fn until_bound_to<O>(client: &GrpcClient<O>, name: &str) {
    until(client, &format!("bound to {name}"), |c| bound(c).as_deref() == Some(name)).await;
}

/// The next event that `pick` wants.
pub(crate) async fn event<T>(
    events: &mut (impl tokio_stream::Stream<Item = FailoverEvent> + Unpin),
    words: &str,
    pick: impl Fn(&FailoverEvent) -> Option<T>,
) -> T {
    let find = async {
        while let Some(event) = events.next().await {
            if let Some(found) = pick(&event) {
                return found;
            }
        }
        panic!("the events ended before: {words}");
    };
    timeout(SOON, find).await.unwrap_or_else(|_| panic!("no such event: {words}"))
}

/// One `Get` with the tests' deadline: who answered.
pub(crate) async fn get(channel: FailoverChannel) -> Result<Served, Status> {
    let mut request = Request::new(GetRequest::default());
    request.set_timeout(DEADLINE);
    let response = CounterClient::new(channel).get(request).await?;
    Ok(response.extensions().get::<Served>().expect("every answer says who gave it").clone())
}

/// An error and all that caused it.
pub(crate) fn in_full(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(&format!(" <- {cause} ({cause:?})"));
        next = cause.source();
    }
    text
}

// === callers ===

/// What a caller calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Add,
    Increment,
}

/// The failures of one kind of calls.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) calls: u64,
    pub(crate) resent: u64,
    pub(crate) failed: Vec<(Code, String)>,
    pub(crate) slowest: Duration,
    /// Calls that took longer than [`SLOW`].
    pub(crate) slow: u64,
    /// Calls that were due and not made.
    pub(crate) held_back: u64,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.resent += other.resent;
        self.failed.extend(other.failed);
        self.slow += other.slow;
        self.held_back += other.held_back;
        self.slowest = self.slowest.max(other.slowest);
    }
}

/// Callers that go on until they are told to stop.
pub(crate) struct Callers {
    stop: watch::Sender<bool>,
    /// How many calls have ended.
    calls: Arc<AtomicU64>,
    tasks: JoinSet<Tally>,
}

struct Caller {
    name: usize,
    channel: FailoverChannel,
    method: Method,
    stop: watch::Receiver<bool>,
    calls: Arc<AtomicU64>,
}

impl Caller {
    async fn in_turn(mut self, every: Duration) -> Tally {
        let mut tally = Tally::default();
        let mut pace = tokio::time::interval(every);
        while !*self.stop.borrow_and_update() {
            pace.tick().await;
            let ended = self.call(tally.calls, Instant::now()).await;
            tally.add(ended);
        }
        tally
    }

    async fn at_a_rate(mut self, first: Instant, every: Duration) -> Tally {
        let (mut tally, mut made) = (Tally::default(), 0);
        let mut pace = tokio::time::interval_at(first, every);
        pace.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut under_way = JoinSet::new();
        loop {
            tokio::select! {
                _ = self.stop.changed() => break,
                due = pace.tick() => {
                    if under_way.len() < MOST_UNDER_WAY {
                        under_way.spawn(self.call(made, due));
                        made += 1;
                    } else {
                        tally.held_back += 1;
                    }
                }
                Some(ended) = under_way.join_next() => tally.add(ended.expect("no call panics")),
            }
        }
        while let Some(ended) = under_way.join_next().await {
            tally.add(ended.expect("no call panics"));
        }
        tally
    }

    /// One call, which counts from when it was `due`: what it took.
    fn call(&self, number: u64, due: Instant) -> impl Future<Output = Tally> + Send + 'static {
        let (channel, method, calls) = (self.channel.clone(), self.method, self.calls.clone());
        let id = format!("{}-{number}", self.name);
        async move {
            let mut tally = Tally { calls: 1, ..Tally::default() };
            match call(channel, method, id).await {
                Ok(attempts) => tally.resent += u64::from(attempts > 1),
                Err(status) => tally.failed.push((status.code(), in_full(&status))),
            }
            tally.slowest = due.elapsed();
            tally.slow = u64::from(tally.slowest > SLOW);
            calls.fetch_add(1, Ordering::Relaxed);
            tally
        }
    }
}

impl Callers {
    /// `count` callers, each calling every 10 ms, or as soon as its last call has ended.
    pub(crate) fn start<O>(client: &GrpcClient<O>, count: usize, method: Method) -> Self {
        Self::spread(client, count, method, |caller, _| caller.in_turn(Duration::from_millis(10)))
    }

    /// `count` callers, each calling `every` so often, whether the call before has
    /// ended or not: a slow call delays none of those that follow, and hides none. Where
    /// a caller has [`MOST_UNDER_WAY`] calls under way, those that are due are
    /// [counted](Tally::held_back) and not made.
    pub(crate) fn start_at<O>(client: &GrpcClient<O>, count: usize, method: Method, every: Duration) -> Self {
        let now = Instant::now();
        Self::spread(client, count, method, |caller, part| {
            // Not all at the same moment.
            caller.at_a_rate(now + every.mul_f64(part), every)
        })
    }

    /// 32 callers, each calling ten times a second.
    pub(crate) fn at_a_fixed_rate<O>(client: &GrpcClient<O>, method: Method) -> Self {
        Self::start_at(client, 32, method, Duration::from_millis(100))
    }

    /// Starts callers, each told its place in a round.
    fn spread<O, F>(
        client: &GrpcClient<O>,
        count: usize,
        method: Method,
        run: impl Fn(Caller, f64) -> F,
    ) -> Self
    where
        F: Future<Output = Tally> + Send + 'static,
    {
        let (stop, _) = watch::channel(false);
        let calls = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        for name in 0..count {
            let (channel, stop, calls) = (client.channel(), stop.subscribe(), calls.clone());
            #[expect(clippy::cast_precision_loss, reason = "there are few")]
            let part = name as f64 / count as f64;
            tasks.spawn(run(Caller { name, channel, method, stop, calls }, part));
        }
        Self { stop, calls, tasks }
    }

    /// Waits for `more` further calls to have ended.
    pub(crate) async fn go_on_for(&self, more: u64) {
        let goal = self.calls.load(Ordering::Relaxed) + more;
        let wait = async {
            while self.calls.load(Ordering::Relaxed) < goal {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, wait).await.expect("the calls go on");
    }

    pub(crate) async fn stop(mut self) -> Tally {
        self.stop.send_replace(true);
        let mut total = Tally::default();
        while let Some(tally) = self.tasks.join_next().await {
            total.add(tally.expect("no caller panics"));
        }
        total
    }
}

/// One call; the attempts it took.
pub(crate) async fn call(channel: FailoverChannel, method: Method, id: String) -> Result<u32, Status> {
    fn request<T>(message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(DEADLINE);
        request
    }
    let mut client = CounterClient::new(channel);
    let response = match method {
        Method::Get => client.get(request(GetRequest { request_id: id })).await?,
        Method::Add => client.add(request(AddRequest { request_key: id, by: 1 })).await?,
        Method::Increment => client.increment(request(IncrementRequest { by: 1, request_id: id })).await?,
    };
    Ok(response.extensions().get::<Served>().expect("every answer says who gave it").attempts)
}

/// Counts what a flag guards against being forgotten.
pub(crate) fn flag() -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(false))
}
