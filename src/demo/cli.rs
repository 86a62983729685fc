//! The command line.

use std::{io::IsTerminal, process::ExitCode};

use clap::{Parser, Subcommand};
use tokio::{io::AsyncReadExt, net::TcpListener};
use tracing_subscriber::EnvFilter;

use super::{
    backend,
    screen::{Screen, Tone},
    signals::Signals,
};

/// Why a subcommand failed, in one printable chain.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Parser)]
#[command(name = "demo", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Backend(backend::Options),
}

/// Parses the command line, runs the subcommand and says how it went.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    log("warn");
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let done = runtime.block_on(async {
        match cli.command {
            Some(Command::Backend(options)) => run_backend(options).await.map(|()| ExitCode::SUCCESS),
            None => Ok(ExitCode::SUCCESS),
        }
    });
    // What is left are tonic's connection tasks and a read of standard input,
    // which would be waited for.
    runtime.shutdown_background();
    done.unwrap_or_else(|error| fail(&*error))
}

async fn run_backend(options: backend::Options) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let listener = TcpListener::bind(options.listen)
        .await
        .map_err(|error| format!("cannot listen on {} (--listen): {error}", options.listen))?;
    let consul =
        backend::Agent::new(&std::env::var("CONSUL_HTTP_ADDR").unwrap_or("http://127.0.0.1:8500".into()));
    let ends_with_stdin = options.ends_with_stdin;
    let shutdown = async move {
        tokio::select! {
            _ = signals.next() => {}
            () = stdin_closed(), if ends_with_stdin => {}
        }
    };
    backend::serve_on(listener, options, consul, Screen::stdout(), shutdown).await?;
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
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    eprintln!("demo: {}", Screen::stdout().paint(Tone::Bad, text));
    ExitCode::FAILURE
}
