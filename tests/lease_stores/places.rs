//! Where the suite's leases are kept.

use std::{fs, sync::Arc};

use tonic_failover::{
    consul::ConsulConfig,
    server::store::{ConsulLeaseStore, FileLeaseStore, LeaseStore},
    testkit::{Agent, ConsulProcess, Registry},
};

/// The prefix of the lease.
pub(crate) const PREFIX: &str = "services/counter";

/// A place that keeps one lease.
#[async_trait::async_trait]
pub(crate) trait Place: Send + Sync {
    /// The store as a process sees it that has just started.
    fn open(&self) -> Arc<dyn LeaseStore>;

    /// Deletes all that is kept.
    async fn wipe(&self);

    /// Puts something else in the place of the holder's record.
    async fn garble(&self);

    /// Puts something else in the place of a value.
    async fn garble_value(&self, key: &str);
}

/// An agent, real or embedded.
struct Keys<A> {
    registry: Registry,
    _agent: A,
}

/// The testkit's agent.
pub(crate) async fn embedded() -> Option<Box<dyn Place>> {
    let agent = Agent::start("dc1").await.unwrap();
    Some(Box::new(Keys { registry: agent.registry().clone(), _agent: agent }))
}

/// A real Consul.
pub(crate) async fn real() -> Option<Box<dyn Place>> {
    let agent: ConsulProcess = crate::common::consul().await?;
    Some(Box::new(Keys { registry: agent.registry().clone(), _agent: agent }))
}

/// A folder of its own.
pub(crate) async fn files() -> Option<Box<dyn Place>> {
    Some(Box::new(Files(tempfile::tempdir().unwrap())))
}

struct Files(tempfile::TempDir);

impl Files {
    /// Puts something else into the last of the files that `is_it` finds.
    fn garble(&self, is_it: impl Fn(&str) -> bool) {
        let names = fs::read_dir(&self.0).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
        let last = names.filter(|name| is_it(name)).max().unwrap();
        fs::write(self.0.path().join(last), "{\"mine\": 1").unwrap();
    }
}

#[async_trait::async_trait]
impl Place for Files {
    fn open(&self) -> Arc<dyn LeaseStore> {
        Arc::new(FileLeaseStore::builder(self.0.path()).step_timeout(crate::common::SOON).build().unwrap())
    }

    async fn wipe(&self) {
        for entry in fs::read_dir(&self.0).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }

    async fn garble(&self) {
        self.garble(|name| name.starts_with("term-"));
    }

    async fn garble_value(&self, key: &str) {
        self.garble(|name| name.starts_with("state-") && name.ends_with(&format!("-{key}")));
    }
}

/// The store in the agent at `url`.
pub(crate) fn store(url: &str) -> ConsulLeaseStore {
    ConsulLeaseStore::new(ConsulConfig::new(url).unwrap(), PREFIX).unwrap()
}

#[async_trait::async_trait]
impl<A: Send + Sync> Place for Keys<A> {
    /// A busy machine must not look like an agent that hangs.
    fn open(&self) -> Arc<dyn LeaseStore> {
        let config = ConsulConfig::new(self.registry.url()).unwrap();
        let store = ConsulLeaseStore::builder(config, PREFIX).try_timeout(crate::common::SOON);
        Arc::new(store.build().unwrap())
    }

    async fn wipe(&self) {
        self.registry.kv_delete_below(PREFIX).await.unwrap();
    }

    async fn garble(&self) {
        self.registry.kv_put(&format!("{PREFIX}/lease/holder"), "{\"mine\": 1").await.unwrap();
    }

    async fn garble_value(&self, key: &str) {
        self.registry.kv_put(&format!("{PREFIX}/state/{key}"), "17").await.unwrap();
    }
}
