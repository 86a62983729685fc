//! Blocking steps, a bounded number at a time and for a bounded time.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::Semaphore,
    task::spawn_blocking,
    time::{Instant, timeout_at},
};

use super::error::Late;
use crate::server::store::StoreError;

/// Steps of one kind. A disk that hangs holds as many threads as it has places, and no more.
#[derive(Debug)]
pub(super) struct Lane {
    places: Arc<Semaphore>,
    path: PathBuf,
    limit: Duration,
}

// === impl Lane ===

impl Lane {
    pub(super) fn new(places: usize, path: &Path, limit: Duration) -> Self {
        Self { places: Arc::new(Semaphore::new(places)), path: path.to_owned(), limit }
    }

    /// A step that only reads.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        step: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.run(step, |late| StoreError::Unavailable { source: Arc::new(late) }).await
    }

    /// A step that writes, and goes on when it is not waited for any longer.
    pub(super) async fn write<T: Send + 'static>(
        &self,
        step: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.run(step, |late| StoreError::Unanswered { source: Arc::new(late) }).await
    }

    async fn run<T: Send + 'static>(
        &self,
        step: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
        unfinished: impl Fn(Late) -> StoreError,
    ) -> Result<T, StoreError> {
        let (path, limit) = (self.path.clone(), self.limit);
        let until = Instant::now() + limit;
        let Ok(Ok(place)) = timeout_at(until, self.places.clone().acquire_owned()).await else {
            return Err(StoreError::Unavailable { source: Arc::new(Late::Waiting { path, limit }) });
        };
        let working = spawn_blocking(move || {
            let done = step();
            drop(place);
            done
        });
        match timeout_at(until, working).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Err(unfinished(Late::Ended { path })),
            Err(_) => Err(unfinished(Late::Working { path, limit })),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn lane() -> Lane {
        Lane::new(1, Path::new("/somewhere"), Duration::from_millis(50))
    }

    #[tokio::test]
    async fn a_write_that_does_not_return_in_time_may_have_happened_and_the_next_has_not() {
        let lane = lane();
        let (go, wait) = mpsc::channel::<()>();
        let first = lane.write(move || wait.recv().map_err(|_| StoreError::Conflict)).await;
        assert!(matches!(first, Err(StoreError::Unanswered { .. })), "{first:?}");
        let second = lane.write(|| Ok(())).await;
        assert!(matches!(second, Err(StoreError::Unavailable { .. })), "{second:?}");
        go.send(()).unwrap();
        while lane.places.available_permits() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(lane.write(|| Ok(())).await.is_ok());
    }

    #[tokio::test]
    async fn a_read_that_does_not_return_in_time_is_no_answer_about_the_lease() {
        let (_go, wait) = mpsc::channel::<()>();
        let read = lane().read(move || wait.recv().map_err(|_| StoreError::Conflict)).await;
        assert!(matches!(read, Err(StoreError::Unavailable { .. })), "{read:?}");
    }
}
