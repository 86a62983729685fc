//! A runtime for the client alone, so that what it leaves behind can be counted.

use std::{future::Future, time::Duration};

use tokio::runtime::{Builder, Runtime};

/// Runs the client; everything else of the test runs elsewhere.
pub(crate) struct Alone(Option<Runtime>);

impl Alone {
    pub(crate) fn new() -> Self {
        Self(Some(Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()))
    }

    fn runtime(&self) -> &Runtime {
        self.0.as_ref().expect("it is there until it is dropped")
    }

    /// Runs `future` on it to its end.
    pub(crate) async fn run<F>(&self, future: F) -> F::Output
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.runtime().spawn(future).await.expect("it does not panic")
    }

    /// Runs `future` on it; the handle ends it.
    pub(crate) fn spawn<F>(&self, future: F) -> tokio::task::JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.runtime().spawn(future)
    }

    pub(crate) fn tasks(&self) -> usize {
        self.runtime().metrics().num_alive_tasks()
    }

    /// Waits until no task is left.
    pub(crate) async fn until_empty(&self, when: &str) {
        let wait = async {
            while self.tasks() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let empty = tokio::time::timeout(super::SOON, wait).await;
        empty.unwrap_or_else(|_| panic!("{when}: {} tasks are left", self.tasks()));
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        // Dropping a runtime within another one panics.
        self.0.take().expect("dropped once").shutdown_background();
    }
}
