//! A client bound to one of two instances, and callers that go on.

use std::time::Duration;

use tonic_failover::{
    client::{ConsulServiceBuilder, DatacenterStatus, GrpcClient},
    consul::ConsulConfig,
    testkit::Registry,
};

use super::{Backend, Callers, Method, Tally, record::Record, register, steady, until};

/// Two instances that the registry calls passing for ever, a client bound to one
/// of them, and callers that go on.
pub(crate) struct Stage {
    pub(crate) client: GrpcClient,
    pub(crate) record: Record,
    pub(crate) callers: Callers,
    pub(crate) a: Backend,
    pub(crate) b: Backend,
}

impl Stage {
    pub(crate) async fn set(registry: &Registry, builder: ConsulServiceBuilder, method: Method) -> Self {
        let (a, b) = (Backend::start("a").await, Backend::start("b").await);
        register(registry, "counter", "a", a.port).await;
        register(registry, "counter", "b", b.port).await;
        let client = builder.service(steady()).build().unwrap().grpc_client("counter").unwrap();
        let record = Record::of(&client);
        until(&client, "a spare is ready", |c| first(c).ready == 2).await;
        let callers = Callers::at_a_fixed_rate(&client, method);
        callers.go_on_for(20).await;
        Self { client, record, callers, a, b }
    }

    /// Waits until the registry counts as lost, and the calls go on.
    pub(crate) async fn lost(&self, reason: &str) {
        until(&self.client, reason, |_| self.is_lost(reason)).await;
        self.callers.go_on_for(64).await;
    }

    /// Whether it does, for now.
    pub(crate) fn is_lost(&self, reason: &str) -> bool {
        let line = self.client.status().to_string();
        line.contains("dc1 stale for ") && line.contains(reason)
    }

    /// Waits until the registry counts as well again, and the calls go on.
    pub(crate) async fn back(&self) {
        until(&self.client, "it is no longer stale", |c| first(c).stale_since.is_none()).await;
        let line = self.client.status().to_string();
        assert!(!line.contains("stale"), "{line}");
        self.callers.go_on_for(64).await;
    }

    /// What changes now is seen soon, long before a wait of the default 60 s is over.
    pub(crate) async fn a_change_is_seen(&self, registry: &Registry) {
        let known = first(&self.client).known;
        // Nobody listens there, which is not the matter here.
        let port = u16::try_from(known).expect("few instances");
        register(registry, "counter", &format!("nobody-{port}"), port).await;
        until(&self.client, "the new one is known", |c| first(c).known == known + 1).await;
    }

    /// The registry was lost or cut off, and came back, so many times.
    pub(crate) async fn episodes(&self, count: usize) {
        let all = (count, count);
        self.record.until(&format!("{count} episodes"), |r| r.episodes() == all).await;
    }

    /// The registry has been lost so often, and has come back so often.
    pub(crate) fn episodes_so_far(&self, lost: usize, back: usize) {
        assert_eq!(self.record.episodes(), (lost, back), "{:#?}", self.record.words());
    }

    pub(crate) async fn end(self, what: &str) -> Record {
        print(what, &self.callers.stop().await);
        self.record
    }
}

pub(crate) fn first(client: &GrpcClient) -> DatacenterStatus {
    client.status().datacenters.first().cloned().unwrap_or_default()
}

/// Prints what the calls met with, and holds it against what they may.
pub(crate) fn print(what: &str, tally: &Tally) {
    println!(
        "{what}: {} calls, {} resent, {} failed, {} slow (over {:?}), {} held back, slowest {:?}",
        tally.calls,
        tally.resent,
        tally.failed.len(),
        tally.slow,
        super::SLOW,
        tally.held_back,
        tally.slowest
    );
    assert!(tally.failed.is_empty(), "{what}: {:?}", tally.failed);
}

/// Notices an agent's silence soon.
pub(crate) fn impatient(url: &str) -> ConsulServiceBuilder {
    let config = ConsulConfig::new(url).unwrap().request_timeout(Duration::from_millis(700));
    tonic_failover::client::ConsulService::builder(config).wait(Duration::from_secs(1))
}
