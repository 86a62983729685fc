//! The command line.

use std::{io::IsTerminal, process::ExitCode};

use clap::{Parser, Subcommand};
use tokio::{io::AsyncReadExt, net::TcpListener};
use tracing_subscriber::EnvFilter;

use super::{
    agent, ask, backend, client,
    screen::{Screen, Tone},
    signals::Signals,
    story,
    text::chain,
};
use crate::consul::ConsulConfig;

/// Why a subcommand failed, in one printable chain.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A gRPC client that keeps answering while servers come and go, shown and tried.
///
/// Without a subcommand it tells the story: it starts a registry, three servers in
/// two datacenters and a client of its own, kills, stops and pauses the servers,
/// and holds what the client saw against the servers' journals. It takes some
/// twenty seconds, touches no Consul that it did not start, and ends with 1 when a call
/// failed that should not have.
#[derive(Parser)]
#[command(name = "demo", version, args_conflicts_with_subcommands = true, after_help = AFTER)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    story: story::Options,
}

#[derive(Subcommand)]
enum Command {
    /// Tell the whole story, with a registry and servers of its own (the default).
    Story(story::Options),
    /// Run embedded test agents that speak Consul's HTTP API, one for each datacenter.
    Agent(agent::Options),
    /// Serve the counter and register it with Consul.
    ///
    /// SIGTERM and Ctrl-C take it out of Consul, end its streams and let the calls in
    /// flight finish.
    #[command(after_help = CONSUL)]
    Backend(backend::Options),
    /// Call the counter at a steady rate and tell what happens to it.
    ///
    /// It starts before its servers and before Consul if need be, goes on whatever
    /// happens, and ends with its totals at Ctrl-C and SIGTERM.
    #[command(after_help = CONSUL)]
    Client(client::Options),
    /// Make one call, print the answer as JSON, and fail with NOT_PRIMARY where a standby was asked.
    #[command(after_help = CONSUL)]
    Call(ask::CallOptions),
    /// Make another instance the primary, as planned: no call is lost.
    #[command(after_help = CONSUL)]
    HandOver(ask::HandOverOptions),
}

const AFTER: &str = "\
By hand, each in a terminal of its own:
  demo agent dc1 dc2                             prints the addresses to use below
  CONSUL_HTTP_ADDR=... demo backend --name counter-a
  CONSUL_HTTP_ADDR=... demo backend --name counter-b
  CONSUL_HTTP_ADDR=... demo client
Then end a backend and look at the client.

Primary and standby, on one host and without Consul:
  demo backend --no-consul --lease file:/tmp/counter --name A --listen 127.0.0.1:8080
  demo backend --no-consul --lease file:/tmp/counter --name B --listen 127.0.0.1:8081
  demo call --at 127.0.0.1:8080                  counts; at 8081 it gets NOT_PRIMARY
Then end A and call 8081.

RUST_LOG sets the log level of the library (on standard error), NO_COLOR removes colours.";

const CONSUL: &str = "\
Consul is found by its own environment variables: CONSUL_HTTP_ADDR (default 127.0.0.1:8500),
CONSUL_HTTP_TOKEN, CONSUL_HTTP_TOKEN_FILE, CONSUL_HTTP_SSL, CONSUL_HTTP_SSL_VERIFY, CONSUL_CACERT,
CONSUL_CAPATH, CONSUL_CLIENT_CERT, CONSUL_CLIENT_KEY, CONSUL_HTTP_AUTH and CONSUL_NAMESPACE.";

/// Parses the command line, runs the subcommand and says how it went.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let command = cli.command.unwrap_or(Command::Story(cli.story));
    log(match command {
        // These tell the same in their own words.
        Command::Story(_) => "off",
        Command::Client(_) => "warn,tonic_failover::client=off",
        Command::Call(_) | Command::HandOver(_) => "error",
        Command::Backend(_) => "warn,tonic_failover::server::registration=off",
        Command::Agent(_) => "warn",
    });
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let done = runtime.block_on(run(command));
    // What is left are tonic's connection tasks and a read of standard input,
    // which would be waited for.
    runtime.shutdown_background();
    done.unwrap_or_else(|error| fail(&*error))
}

async fn run(command: Command) -> Result<ExitCode, Failure> {
    let signals = Signals::catch()?;
    let screen = Screen::stdout();
    match command {
        Command::Story(options) => return story::run(options, signals, screen).await,
        Command::Agent(options) => agent::run(options, signals, screen).await?,
        Command::Backend(options) => run_backend(options, signals, screen).await?,
        Command::Client(options) => client::run(options, signals, screen).await?,
        Command::Call(options) => return ask::call(options, screen).await,
        Command::HandOver(options) => return ask::hand_over(options, screen).await,
    }
    Ok(ExitCode::SUCCESS)
}

async fn run_backend(options: backend::Options, mut signals: Signals, screen: Screen) -> Result<(), Failure> {
    let listener = TcpListener::bind(options.listen)
        .await
        .map_err(|error| format!("cannot listen on {} (--listen): {error}", options.listen))?;
    let consul = ConsulConfig::from_env()?;
    let ends_with_stdin = options.ends_with_stdin;
    let shutdown = async move {
        tokio::select! {
            _ = signals.next() => {}
            () = stdin_closed(), if ends_with_stdin => {}
        }
    };
    backend::serve_on(listener, options, consul, screen, shutdown).await?;
    Ok(())
}

async fn stdin_closed() {
    let mut stdin = tokio::io::stdin();
    let mut bytes = [0; 64];
    while let Ok(1..) = stdin.read(&mut bytes).await {}
}

/// The crates' own logs, on standard error. `RUST_LOG` overrides `level`.
/// consulrs logs several lines a request and rustify its errors again: ours say
/// the same once.
fn log(level: &str) {
    let filter = EnvFilter::builder()
        .try_from_env()
        .unwrap_or_else(|_| EnvFilter::new(format!("{level},consulrs=off,rustify=off")));
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    // Only a second subscriber makes this fail, and then there is one.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colour)
        .with_writer(std::io::stderr)
        .compact()
        .try_init();
}

fn fail(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    eprintln!("demo: {}", Screen::stdout().paint(Tone::Bad, chain(error)));
    ExitCode::FAILURE
}
