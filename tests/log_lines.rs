//! The log: one line an episode. Alone in its program, for what is logged is
//! decided once for each place in the code.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::{io, sync::Arc};

use common::{Backend, Callers, Method, client, consul, register, until, until_bound_to};
use parking_lot::Mutex;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

/// A log in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn lines_with(&self, words: &str) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().clone()).unwrap();
        text.lines().filter(|line| line.contains(words)).map(str::to_owned).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn an_episode_is_one_line_of_the_log() {
    let log = Log::default();
    // On this thread alone, and the runtime has no other.
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new("info"))
        .with_writer(log.clone())
        .with_ansi(false)
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let Some(consul) = consul().await else { return };
    let mut backends = [Backend::start("a").await, Backend::start("b").await];
    for backend in &backends {
        register(consul.registry(), "counter", &backend.name, backend.port).await;
    }
    let client = client(&consul.url());
    until(&client, "a spare is ready", |c| c.status().datacenters.first().is_some_and(|d| d.ready == 2))
        .await;
    let first = common::bound(&client).unwrap();
    let (bound, other) = if first == "a" { (0, "b") } else { (1, "a") };

    let callers = Callers::start(&client, 32, Method::Increment);
    callers.go_on_for(64).await;
    backends[bound].kill().await;
    until_bound_to(&client, other).await;
    callers.go_on_for(200).await;
    let tally = callers.stop().await;
    assert!(!tally.failed.is_empty() || tally.calls > 264, "calls were running");

    for words in [format!("bound to {first}@dc1"), format!("rebound from {first}@dc1 to {other}@dc1")] {
        assert_eq!(log.lines_with(&words).len(), 1, "{words}: {:#?}", log.lines_with(""));
    }
    assert_eq!(log.lines_with("ejected ").len(), 1, "{:#?}", log.lines_with("ejected "));
    let all = log.lines_with(" INFO ").len() + log.lines_with(" WARN ").len() + log.lines_with("ERROR").len();
    assert!(all <= 6, "a line an episode, not a call: {:#?}", log.lines_with(""));
}
