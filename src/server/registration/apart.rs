//! A thread with a runtime of its own, for what a busy runtime must not starve.

use std::{io, thread};

use tokio::runtime::Builder;
use tokio_util::sync::{CancellationToken, DropGuard};

/// What runs apart; ends when this is dropped, at its next point of waiting.
#[derive(Debug)]
pub(super) struct Apart {
    _end: DropGuard,
}

/// Runs `task` on a thread of its own.
pub(super) fn spawn(name: &str, task: impl Future<Output = ()> + Send + 'static) -> io::Result<Apart> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let end = CancellationToken::new();
    let ended = end.clone();
    thread::Builder::new().name(name.to_owned()).spawn(move || {
        runtime.block_on(ended.run_until_cancelled_owned(task));
        // A look-up of a name may hang; nobody waits for it any more.
        runtime.shutdown_background();
    })?;
    Ok(Apart { _end: end.drop_guard() })
}
