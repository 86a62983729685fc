//! Three servers and two client agents, all real, and what becomes of calls when
//! they fail. The client asks a client agent, which both instances are registered with.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{
    Backend, Callers, Method, SOON,
    record::Record,
    register,
    stage::{first, print},
    steady, until,
};
use tonic_failover::{
    client::{ConsulService, GrpcClient},
    consul::ConsulConfig,
    testkit::{Check, ConsulCluster, Registration, Registry},
};

struct Stage {
    cluster: ConsulCluster,
    client: GrpcClient,
    record: Record,
    backends: [Backend; 2],
}

// === impl Stage ===

impl Stage {
    async fn set() -> Option<Self> {
        let cluster = ConsulCluster::start(common::consul_bin()?, 3, 2).await.unwrap();
        let backends = [Backend::start("a").await, Backend::start("b").await];
        let url = cluster.agents()[0].url();
        // What a busy machine delays must not look like silence, which is a loss as well.
        let config = ConsulConfig::new(&url).unwrap().request_timeout(Duration::from_secs(5));
        let consul = ConsulService::builder(config).wait(Duration::from_secs(1)).service(steady());
        let client = consul.build().unwrap().grpc_client("counter").unwrap();
        let record = Record::of(&client);
        let stage = Self { cluster, client, record, backends };
        stage.register().await;
        // An agent that could not sync at once tries again after some 15 s.
        let listed = async {
            while stage.registry().passing("counter").await.is_ok_and(|it| it.len() < 2) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(3 * SOON, listed).await.expect("both are listed");
        stage.until_well().await;
        Some(stage)
    }

    fn registry(&self) -> &Registry {
        self.cluster.agents()[0].registry()
    }

    /// Registers both instances, to be checked by their agent.
    async fn register(&self) {
        for backend in &self.backends {
            let at = format!("127.0.0.1:{}", backend.port);
            let entry = Registration::new("counter", &backend.name, "127.0.0.1", backend.port);
            self.registry().register(&entry.check(Check::grpc(at))).await.unwrap();
        }
    }

    /// Waits until both instances are known and ready, and the registry is told to be
    /// back whenever it was told to be lost. A leader may take long to be elected, and a
    /// server that was restarted long to join, on a machine that is busy.
    async fn until_well(&self) {
        let well = async {
            loop {
                let status = first(&self.client);
                let (lost, back) = self.record.episodes();
                if status.stale_since.is_none()
                    && status.empty_since.is_none()
                    && (status.known, status.ready) == (2, 2)
                    && lost == back
                {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let well = tokio::time::timeout(3 * SOON, well).await;
        well.unwrap_or_else(|_| panic!("not well: {}; {:#?}", self.client.status(), self.record.words()));
    }

    /// The leader, as soon as there is one other than `before`.
    async fn leader(&self, before: Option<usize>) -> usize {
        let elected = async {
            loop {
                match self.cluster.leader().await {
                    Some(leader) if Some(leader) != before => return leader,
                    _ => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        tokio::time::timeout(3 * SOON, elected).await.expect("a leader")
    }

    /// 32 callers, each calling ten times a second, while `fault` comes and goes:
    /// no call fails, and the registry is lost so many times, told in turns with its return.
    async fn under(&mut self, what: &str, lost: usize, fault: impl AsyncFnOnce(&mut Self, &Callers)) {
        let before = self.record.words().len();
        let episodes = self.record.episodes();
        let callers = Callers::start_at(&self.client, 32, Method::Increment, Duration::from_millis(100));
        callers.go_on_for(64).await;
        fault(self, &callers).await;
        self.until_well().await;
        callers.go_on_for(320).await;
        print(what, &callers.stop().await);
        let words = self.record.words().split_off(before);
        println!("{words:#?}");
        let now = self.record.episodes();
        assert_eq!((now.0 - episodes.0, now.1 - episodes.1), (lost, lost), "{what}: {words:#?}");
        assert!(self.record.takes_turns(), "{what}: {words:#?}");
    }

    /// Waits until the status says that what is known is old, and the calls go on.
    async fn stale(&self, callers: &Callers) {
        until(&self.client, "it is stale", |c| first(c).stale_since.is_some()).await;
        let line = self.client.status().to_string();
        assert!(line.contains("dc1 stale for "), "{line}");
        assert_eq!(first(&self.client).known, 2);
        callers.go_on_for(640).await;
    }

    async fn empty(&self, callers: &Callers) {
        until(&self.client, "the list is empty", |c| first(c).empty_since.is_some()).await;
        // The agent takes its services out one by one: the first left a list that
        // was not empty yet.
        assert!(first(&self.client).known >= 1);
        callers.go_on_for(320).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_die_and_come_back_fail_no_call() {
    let Some(mut stage) = Stage::set().await else { return };
    let leader = stage.leader(None).await;
    let rest: Vec<_> = (0..3).filter(|it| *it != leader).collect();
    stage
        .under("two of three servers killed, and back", 1, async |stage, callers| {
            stage.cluster.kill(&[leader, rest[0]]).await.unwrap();
            stage.stale(callers).await;
            stage.cluster.restart(&[leader, rest[0]]).await.unwrap();
        })
        .await;
    stage
        .under("all servers killed, and back", 1, async |stage, callers| {
            stage.cluster.kill(&[0, 1, 2]).await.unwrap();
            stage.stale(callers).await;
            stage.cluster.restart(&[0, 1, 2]).await.unwrap();
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_leader_and_servers_that_stand_still_fail_no_call() {
    let Some(mut stage) = Stage::set().await else { return };
    stage
        .under("all servers paused, and resumed", 1, async |stage, callers| {
            stage.cluster.pause_servers().await.unwrap();
            stage.stale(callers).await;
            stage.cluster.resume_servers().unwrap();
        })
        .await;
    // Whether the client notices depends on the server that its agent asks.
    let leader = stage.leader(None).await;
    let before = stage.record.episodes();
    let callers = Callers::start_at(&stage.client, 32, Method::Increment, Duration::from_millis(100));
    stage.cluster.kill(&[leader]).await.unwrap();
    stage.leader(Some(leader)).await;
    callers.go_on_for(640).await;
    stage.cluster.restart(&[leader]).await.unwrap();
    stage.until_well().await;
    print("the leader killed, and back", &callers.stop().await);
    // None where the agent asks another server; the agent comes upon the dead one again
    // only after the elections, which are another matter.
    let lost = stage.record.episodes().0 - before.0;
    println!("{lost} episodes: {:#?}", stage.record.words());
    assert!(stage.record.takes_turns(), "{:#?}", stage.record.words());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restored_snapshot_fails_no_call_and_hides_no_change() {
    let Some(mut stage) = Stage::set().await else { return };
    let registry = stage.registry().clone();
    let saved = registry.save_snapshot().await.unwrap();
    stage
        .under("a snapshot restored", 0, async |_, callers| {
            for port in 1..20 {
                register(&registry, "other", &format!("other-{port}"), port).await;
            }
            registry.restore_snapshot(saved).await.unwrap();
            callers.go_on_for(320).await;
        })
        .await;
    // The index has fallen, and yet news comes at once.
    let c = Backend::start("c").await;
    register(&registry, "counter", "c", c.port).await;
    until(&stage.client, "the new one is known", |c| first(c).known == 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_dies_and_comes_back_with_or_without_its_data_fails_no_call() {
    let Some(mut stage) = Stage::set().await else { return };
    stage
        .under("the agent killed, and back with its data", 1, async |stage, callers| {
            stage.cluster.agents_mut()[0].kill().await.unwrap();
            stage.stale(callers).await;
            stage.cluster.agents_mut()[0].restart().await.unwrap();
        })
        .await;
    stage
        .under("the agent killed, and back at once", 1, async |stage, _| {
            stage.cluster.agents_mut()[0].restart().await.unwrap();
        })
        .await;
    stage
        .under("the agent back without its data", 1, async |stage, callers| {
            stage.cluster.agents_mut()[0].restart_empty().await.unwrap();
            stage.empty(callers).await;
            stage.register().await;
        })
        .await;
}
