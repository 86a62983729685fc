//! The walk through `docker-compose.yml` with real containers, as the README has it: up, stop
//! a, kill b, start a, down; each step is believed when the client's log shows it.
//!
//! It takes minutes and a Docker engine, so it runs where `COMPOSE_TEST=1` says so, as `./test`
//! does. Elsewhere it is skipped, with a line on standard error that says why.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::{
    fmt::Display,
    hash::{DefaultHasher, Hash, Hasher},
    io::Write,
    process::{Command, Output, Stdio},
    time::Duration,
};

use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep, timeout},
};

/// Between two looks at a condition.
const LOOK: Duration = Duration::from_millis(300);
/// Stand-ins and image, with nothing cached on two busy cores.
const BUILD: Duration = Duration::from_secs(20 * 60);
/// A compose command on images that are there.
const COMMAND: Duration = Duration::from_secs(120);
/// From an action until the client's log shows what follows from it. Consul asks a container
/// that is gone for 10 s before it calls it critical.
const FOLLOWS: Duration = Duration::from_secs(60);
/// So that compose knows the second walk's services.
const PROFILE: [&str; 2] = ["--profile", "primary-standby"];
/// Calls that may fail in all. Only a killed backend costs any, those that it had taken and that
/// may not be run twice; the client has few under way at a time.
const LOST: u32 = 5;

#[tokio::test]
async fn the_client_in_compose_follows_its_backends_through_stop_kill_and_restart() {
    let compose = match Compose::find().await {
        Ok(compose) => compose,
        Err(reason) => return say(format_args!("SKIPPED the compose walk-through: {reason}")),
    };
    // A test runner that loses patience, or Ctrl-C: the containers go all the same.
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    let mut interrupt = signal(SignalKind::interrupt()).unwrap();
    tokio::select! {
        () = walk_through(&compose) => {}
        _ = terminate.recv() => panic!("ended by SIGTERM"),
        _ = interrupt.recv() => panic!("ended by SIGINT"),
    }
}

async fn walk_through(compose: &Compose) {
    // What a run that was killed has left behind.
    let down = ["down", "--volumes", "--remove-orphans", "--timeout", "1"];
    compose.run(&[&PROFILE[..], &down].concat(), COMMAND).await;

    // Pulls the images that files name, or makes stand-ins where that cannot be.
    step("base images", run(Command::new("scripts/stand-in-images"), BUILD)).await;
    step("image", compose.run(&["build"], BUILD)).await;
    step("up", compose.run(&["up", "--detach"], COMMAND)).await;

    let mut log = ClientLog { compose, read: 0 };
    step("the client is bound to a", log.shows("counter-a@dc1")).await;
    step("b and c are passing, the datacenters joined", async {
        compose.passing("consul-dc1", "dc1", "counter-b").await;
        compose.passing("consul-dc1", "dc2", "counter-c").await;
    })
    .await;

    log.skip().await;
    step("stop a", compose.run(&["stop", "backend-a"], COMMAND)).await;
    step("the client is bound to b", log.shows("counter-b@dc1")).await;

    log.skip().await;
    step("kill b", compose.run(&["kill", "backend-b"], COMMAND)).await;
    step("the client is bound to c, in the other datacenter", log.shows("counter-c@dc2")).await;

    log.skip().await;
    step("start a", compose.run(&["start", "backend-a"], COMMAND)).await;
    step("the client is back at a", log.shows("counter-a@dc1")).await;

    step("stop the client", compose.run(&["stop", "client"], COMMAND)).await;
    assert_eq!(compose.exit_code("client").await, "0", "the client did not end cleanly on SIGTERM");
    assert_eq!(compose.exit_code("backend-b").await, "137", "backend-b was not killed");
    let lines = log.lines().await;
    let sums = lines.iter().rev().find(|line| line.contains("ended (")).expect("the client's sums");
    say(format_args!("    client: {sums}"));
    assert!(failed(sums) <= LOST, "more calls failed than one kill explains:\n{}", lines.join("\n"));
    walk_through_primary_standby(compose).await;
}

/// The second walk in the file, on the same Consul.
async fn walk_through_primary_standby(compose: &Compose) {
    let up = async |services: &[&str]| {
        compose.run(&[&PROFILE[..], &["up", "--detach"], services].concat(), COMMAND).await;
    };
    step("a primary, and its client", up(&["primary-a", "primary-client"])).await;
    compose.says("primary-a", "became PRIMARY", 1).await;
    step("a standby", up(&["primary-b"])).await;
    compose.says("primary-b", "standby of counter-a", 1).await;

    step("kill the primary", compose.run(&[&PROFILE[..], &["kill", "primary-a"]].concat(), COMMAND)).await;
    step("the standby is primary", compose.says("primary-b", "became PRIMARY", 1)).await;
    step("start the other", compose.run(&[&PROFILE[..], &["start", "primary-a"]].concat(), COMMAND)).await;
    compose.says("primary-a", "standby of counter-b", 1).await;

    let hand_over = ["run", "--rm", "-T", "primary-client", "hand-over", "--to", "counter-a"];
    let said = step("hand over", compose.run(&[&PROFILE[..], &hand_over].concat(), COMMAND)).await;
    assert!(said.contains("counter-a is primary"), "{said}");
    compose.says("primary-a", "became PRIMARY", 2).await;

    compose.run(&[&PROFILE[..], &["stop", "primary-client"]].concat(), COMMAND).await;
    let log = compose.log("primary-client").await;
    let sums = log.lines().rev().find(|line| line.contains("ended (")).expect("the client's sums");
    say(format_args!("    client: {sums}"));
    assert_eq!(failed(sums), 0, "a primary's death costs a client time, and no call:\n{log}");
}

#[test]
fn the_profile_primary_standby_has_two_that_share_a_lease_and_a_client_of_the_primary() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docker-compose.yml");
    let text = std::fs::read_to_string(file).unwrap();
    let service = |name: &str| {
        let begin = text.find(&format!("\n  {name}:")).unwrap_or_else(|| panic!("{name} is a service"));
        let rest = &text[begin + 1..];
        let lines = rest.lines().skip(1).take_while(|line| line.starts_with("    ") || line.is_empty());
        lines.collect::<Vec<_>>().join("\n")
    };
    let (a, b, client) = (service("primary-a"), service("primary-b"), service("primary-client"));
    for wanted in ["profiles: [primary-standby]", "--lease, consul", "DEMO_SERVICE: shared-counter"] {
        assert!(a.contains(wanted), "{wanted}:\n{a}");
    }
    // The other is the same under another name.
    assert!(b.contains("<<: *primary\n") && b.contains("<<: *primary-environment\n"), "{b}");
    assert!(a.contains("DEMO_NAME: counter-a") && b.contains("DEMO_NAME: counter-b"));
    for wanted in ["profiles: [primary-standby]", "--primary-only", "DEMO_SERVICE: shared-counter"] {
        assert!(client.contains(wanted), "{wanted}:\n{client}");
    }
}

/// What the client has printed.
struct ClientLog<'a> {
    compose: &'a Compose,
    /// Lines already dealt with.
    read: usize,
}

/// Compose, in whichever version, with a project of this test's own.
struct Compose {
    command: Vec<&'static str>,
    project: String,
}

// === impl ClientLog ===

impl ClientLog<'_> {
    async fn lines(&self) -> Vec<String> {
        self.compose.log("client").await.lines().map(str::to_owned).collect()
    }

    /// Only what comes from now on counts.
    async fn skip(&mut self) {
        self.read = self.lines().await.len();
    }

    /// Waits until a new line says that the client is bound to `instance`.
    async fn shows(&mut self, instance: &str) {
        let mut lines = Vec::new();
        let found = timeout(FOLLOWS, async {
            loop {
                lines = self.lines().await;
                if let Some(line) = lines.iter().skip(self.read).find(|line| binds(line, instance)) {
                    return line.clone();
                }
                sleep(LOOK).await;
            }
        });
        match found.await {
            Ok(line) => say(format_args!("    client: {line}")),
            Err(_) => {
                panic!("no binding to {instance} within {FOLLOWS:?}; the client said:\n{}", lines.join("\n"))
            }
        }
    }
}

/// Whether this line tells of a binding to `instance`: the words of `FailoverEvent::Rebound`.
fn binds(line: &str, instance: &str) -> bool {
    line.contains("bound ") && line.contains(&format!(" to {instance} "))
}

/// The number in `..., 3 failed`.
fn failed(sums: &str) -> u32 {
    let count = sums.split(", ").find_map(|part| part.trim().strip_suffix(" failed"));
    count
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| panic!("no count of failed calls in: {sums}"))
}

// === impl Compose ===

impl Compose {
    /// Compose and an engine, or why there is none.
    async fn find() -> Result<Self, String> {
        if std::env::var("COMPOSE_TEST").as_deref() != Ok("1") {
            return Err("it takes minutes and runs with COMPOSE_TEST=1, as ./test sets".to_owned());
        }
        let quick = Duration::from_secs(30);
        let engine = words(&["docker", "version", "--format", "{{.Server.Version}}"]);
        let engine = try_run(engine, quick).await.map_err(|error| format!("no Docker engine: {error}"))?;
        for command in [vec!["docker", "compose"], vec!["docker-compose"]] {
            let mut version = words(&command);
            version.args(["version", "--short"]);
            if let Ok(version) = try_run(version, quick).await {
                say(format_args!("Docker {}, {} {}", engine.trim(), command.join(" "), version.trim()));
                return Ok(Self { command, project: project() });
            }
        }
        Err("a Docker engine, but neither `docker compose` nor `docker-compose`".to_owned())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = words(&self.command);
        command.args(["--project-name", &self.project]).args(args);
        // An image of its own, built quickly.
        command.env("DEMO_IMAGE", "tonic-failover-demo:test").env("DEMO_PROFILE", "dev");
        // BuildKit is a plugin that may be missing; the classic builder is part of the engine.
        // docker-compose 1.29 leaves it to the docker command, which waits as long as it takes;
        // its own client gives up when the engine is silent for 60 s, as it is on a busy machine.
        command.env("DOCKER_BUILDKIT", "0").env("COMPOSE_DOCKER_CLI_BUILD", "1");
        command.env("COMPOSE_HTTP_TIMEOUT", COMMAND.as_secs().to_string());
        command
    }

    async fn run(&self, args: &[&str], patience: Duration) -> String {
        run(self.command(args), patience).await
    }

    /// What a service has printed, of whichever profile.
    async fn log(&self, service: &str) -> String {
        self.run(&[&PROFILE[..], &["logs", "--no-color", "--no-log-prefix", service]].concat(), COMMAND).await
    }

    /// Waits until a service has said `words` so many times.
    async fn says(&self, service: &str, words: &str, times: usize) {
        let mut log = String::new();
        let said = timeout(FOLLOWS, async {
            while log.matches(words).count() < times {
                sleep(LOOK).await;
                log = self.log(service).await;
            }
        });
        if said.await.is_err() {
            panic!("{service} does not say {words:?} ({times}) within {FOLLOWS:?}; it said:\n{log}");
        }
    }

    /// Waits until `server` knows `instance` as passing in `datacenter`.
    async fn passing(&self, server: &str, datacenter: &str, instance: &str) {
        let question = format!("/v1/health/service/counter?passing&dc={datacenter}");
        let script = format!(
            "exec 3<>/dev/tcp/{server}/8500 && printf 'GET {question} HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3"
        );
        let mut last = String::new();
        let known = timeout(FOLLOWS, async {
            // Asked from a container of the demo image: it has bash.
            loop {
                match try_run(self.command(&["exec", "-T", "backend-c", "bash", "-c", &script]), COMMAND)
                    .await
                {
                    Ok(answer) if answer.contains(&format!("\"{instance}\"")) => return,
                    Ok(answer) | Err(answer) => last = answer,
                }
                sleep(LOOK).await;
            }
        });
        if known.await.is_err() {
            panic!("{server} does not call {instance}@{datacenter} passing within {FOLLOWS:?}: {last}");
        }
    }

    async fn exit_code(&self, service: &str) -> String {
        let container = run(self.command(&["ps", "--all", "--quiet", service]), COMMAND).await;
        let inspect = words(&["docker", "inspect", "--format", "{{.State.ExitCode}}", container.trim()]);
        run(inspect, COMMAND).await.trim().to_owned()
    }
}

impl Drop for Compose {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The last word of each, for whoever reads the failure.
            let logs = ["logs", "--no-color", "--tail", "25"];
            if let Ok(Output { stdout, .. }) = self.command(&[&PROFILE[..], &logs].concat()).output() {
                say(String::from_utf8_lossy(&stdout));
            }
        }
        let down = ["down", "--volumes", "--remove-orphans", "--timeout", "1"];
        let down = self.command(&[&PROFILE[..], &down].concat()).output();
        if !down.is_ok_and(|output| output.status.success()) {
            say(format_args!("could not take down the compose project {}", self.project));
        }
    }
}

/// One project for each checkout: two of them do not meet, and what a killed run has left is
/// found by the next one.
fn project() -> String {
    let mut hasher = DefaultHasher::new();
    env!("CARGO_MANIFEST_DIR").hash(&mut hasher);
    format!("tonic-failover-test-{:08x}", hasher.finish() as u32)
}

fn words(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

/// Runs a command that must succeed within `patience`.
async fn run(command: Command, patience: Duration) -> String {
    try_run(command, patience).await.unwrap_or_else(|error| panic!("{error}"))
}

/// What `command` prints, or what went wrong.
async fn try_run(mut command: Command, patience: Duration) -> Result<String, String> {
    command.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    let what = format!("{command:?}");
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    let output = match timeout(patience, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(format!("{what}: {error}")),
        Err(_) => return Err(format!("{what}: not done within {patience:?}")),
    };
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    Err(format!("{what}: {}\n{printed}{}", output.status, String::from_utf8_lossy(&output.stderr)))
}

/// Does one step and says how long it took.
async fn step<T>(what: &str, work: impl Future<Output = T>) -> T {
    let start = Instant::now();
    let done = work.await;
    say(format_args!("{what}: {:.1} s", start.elapsed().as_secs_f64()));
    done
}

/// On the real standard error: a test harness keeps back what passing tests print.
fn say(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "compose: {line}");
}
