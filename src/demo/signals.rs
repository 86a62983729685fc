//! The two signals that end every subcommand.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Ctrl-C (SIGINT) and SIGTERM, caught from the moment this is made.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Catches the signals. Needs a running tokio runtime.
    pub(crate) fn catch() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next one and names it. Cancel safe.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "Ctrl-C",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}
