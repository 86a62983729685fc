//! Real servers and client agents that die under a lease.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tonic_failover::{
    consul::ConsulConfig,
    server::store::{ConsulLeaseStore, LeaseStore, Term},
    testkit::ConsulCluster,
};

use crate::{
    cases::{claim, name, take},
    common::{SOON, consul_bin},
    places::PREFIX,
};

/// As the lease does by default.
const RENEWAL: Duration = Duration::from_millis(400);
/// The default lease less its margin: a holder that renews less often has stopped.
const HOLDS: Duration = Duration::from_millis(1_700);

fn store(cluster: &ConsulCluster) -> ConsulLeaseStore {
    let urls: Vec<_> = cluster.agents().iter().map(|it| it.url()).collect();
    let config = ConsulConfig::new(&urls[0]).unwrap().more_agents(&urls[1..]).unwrap();
    ConsulLeaseStore::new(config, PREFIX).unwrap()
}

/// Renews in time for a while: the longest time from before a renewal that succeeded until
/// the next one had.
async fn renewing(store: &ConsulLeaseStore, term: &Term, time: Duration) -> Duration {
    let mut ticks = interval(RENEWAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (started, mut last, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
    while started.elapsed() < time {
        ticks.tick().await;
        let sent = Instant::now();
        match name(store.renew(term).await) {
            "done" => {
                longest = longest.max(last.elapsed());
                last = sent;
            }
            told => {
                assert!(matches!(told, "unavailable" | "unanswered"), "{told}");
                longest = longest.max(last.elapsed());
            }
        }
    }
    longest
}

/// Renews until it has worked again and again.
async fn until_renewed(store: &ConsulLeaseStore, term: &Term) -> Duration {
    let started = Instant::now();
    let renewed = async {
        let mut in_a_row = 0;
        while in_a_row < 3 {
            in_a_row = match name(store.renew(term).await) {
                "done" => in_a_row + 1,
                told => {
                    assert!(matches!(told, "unavailable" | "unanswered"), "{told}");
                    0
                }
            };
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(3 * SOON, renewed).await.expect("it is renewed again");
    started.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_agent_that_leaves_dies_or_stands_still_costs_no_lease() {
    let Some(bin) = consul_bin() else { return };
    let mut cluster = ConsulCluster::start(bin, 1, 2).await.unwrap();
    let store = store(&cluster);
    let term = take(&store, &claim("counter-a")).await;
    until_renewed(&store, &term).await;
    for fault in ["leaves", "dies", "stands still"] {
        let (time, agent) = (Duration::from_secs(6), &mut cluster.agents_mut()[0]);
        let broken = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            match fault {
                "leaves" => agent.terminate().await.unwrap(),
                "dies" => agent.kill().await.unwrap(),
                _ => agent.pause().await.unwrap(),
            }
        };
        let (longest, ()) = tokio::join!(renewing(&store, &term, time), broken);
        println!("the local agent {fault}: {longest:?} at the most without a renewal");
        assert!(longest < HOLDS, "the local agent {fault}: {longest:?}");
        match fault {
            "stands still" => agent.resume().unwrap(),
            _ => agent.restart().await.unwrap(),
        }
        until_renewed(&store, &term).await;
    }
    assert_eq!(store.read().await.unwrap().holder_version, term.holder_version);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_dies_takes_the_lease_from_nobody() {
    let Some(bin) = consul_bin() else { return };
    let mut cluster = ConsulCluster::start(bin, 3, 2).await.unwrap();
    let store = store(&cluster);
    let term = take(&store, &claim("counter-a")).await;
    for _ in 0..2 {
        let elected = async {
            loop {
                match cluster.leader().await {
                    Some(leader) => return leader,
                    None => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let leader = timeout(3 * SOON, elected).await.expect("a leader");
        cluster.kill(&[leader]).await.unwrap();
        println!("renewed again {:?} after the leader's death", until_renewed(&store, &term).await);
        cluster.restart(&[leader]).await.unwrap();
        until_renewed(&store, &term).await;
    }
    let now = store.read().await.unwrap();
    assert_eq!((now.holder_version, now.holder.unwrap().primary.token), (term.holder_version, term.token));
}
