//! A thread with a runtime of its own, for what must not starve.
//!
//! A lease's renewal, a probe and a registration's heartbeat are worth nothing if they wait for a
//! worker that the application keeps busy. So they run here, where nothing of the application does.

use std::{future::Future, io, pin::pin, sync::Arc, time::Duration};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
    task::JoinHandle,
    time::timeout,
};

/// Work on blocking threads that is left at the end may go on for so long, then it is left alone.
const FAREWELL: Duration = Duration::from_millis(100);

/// The thread. It ends when the last clone is dropped, and with it all that runs on it; a task on
/// it may hold one. Nobody waits for that: a drop must not block.
#[derive(Clone, Debug)]
pub(super) struct Pulse(Arc<Thread>);

#[derive(Debug)]
struct Thread {
    handle: Handle,
    /// Dropped, it ends the thread.
    _end: oneshot::Sender<()>,
}

impl Pulse {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread or no descriptor left.
    pub(super) fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        std::thread::Builder::new().name("failover-pulse".to_owned()).spawn(move || {
            // An error: that the sender was dropped is the sign.
            let _ = runtime.block_on(ended);
            runtime.shutdown_timeout(FAREWELL);
        })?;
        Ok(Self(Arc::new(Thread { handle, _end: end })))
    }

    /// Runs `future` on it. The caller owns the task.
    pub(super) fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.0.handle.spawn(future)
    }
}

/// In so many parts is a time-out counted.
const PARTS: u32 = 10;

/// Waits for `future`, but no longer than `within` of the time in which this process ran: after a
/// pause the answer may lie in the socket unread.
pub(super) async fn running<T>(within: Duration, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    for _ in 0..PARTS {
        if let Ok(output) = timeout(within / PARTS, &mut future).await {
            return Some(output);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_runs_while_the_callers_runtime_is_busy() {
        let pulse = Pulse::start().unwrap();
        let (done, mut said) = oneshot::channel();
        let task = pulse.spawn(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            done.send(()).unwrap();
        });
        // This thread is the caller's whole runtime, and it does not yield.
        while said.try_recv().is_err() {
            std::hint::spin_loop();
        }
        task.await.unwrap();
    }

    #[tokio::test]
    async fn it_ends_with_its_last_clone_and_with_it_what_runs_on_it() {
        let pulse = Pulse::start().unwrap();
        let own = pulse.clone();
        let (go, gone) = oneshot::channel::<()>();
        // A task that holds a clone of its own, and drops it in the end.
        let first = pulse.spawn(async move {
            let _ = gone.await;
            drop(own);
        });
        let second = pulse.spawn(std::future::pending::<()>());
        drop(pulse);
        assert!(!second.is_finished());
        go.send(()).unwrap();
        first.await.unwrap();
        assert!(second.await.unwrap_err().is_cancelled());
    }
}
