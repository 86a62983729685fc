//! Instances of one lease whose lengths differ.

use std::time::Duration;

use tokio::time::timeout;
use tonic_failover::{
    InstanceId, Role,
    consul::ConsulConfig,
    server::{
        Lease,
        store::{ConsulLeaseStore, FileLeaseStore, LeaseStore},
    },
};

use crate::{
    common::SOON,
    places::{PREFIX, store},
};

fn lease(store: impl LeaseStore, name: &str, length: u64, renewal: u64) -> Lease {
    let (ms, address) = (Duration::from_millis, InstanceId::new("127.0.0.1", 1));
    let lease = Lease::builder(store, name, address);
    lease.length(ms(length)).renewal(ms(renewal)).margin(ms(length / 10)).campaign().unwrap()
}

/// The primary renews each second; the standby, by its own length, would wait for less than half of that.
async fn a_longer_lease_is_waited_for<S: LeaseStore>(open: impl Fn() -> S) {
    let primary = lease(open(), "counter-a", 4_000, 1_000);
    let is_primary = |role: &Role| matches!(role, Role::Primary { .. });
    timeout(SOON, primary.role().wait_for(is_primary)).await.expect("it is primary").unwrap();
    let begun = primary.token();
    let standby = lease(open(), "counter-b", 400, 50);
    let stands_by = |role: &Role| matches!(role, Role::Standby { primary: Some(_) });
    timeout(SOON, standby.role().wait_for(stands_by)).await.expect("it stands by").unwrap();
    // Three of the standby's lengths, and more, pass between these.
    let reader = open();
    let mut seen = reader.read().await.unwrap();
    for _ in 0..3 {
        let changed = async {
            loop {
                let now = reader.changed(&seen, SOON).await.unwrap();
                if now.heartbeat_version != seen.heartbeat_version {
                    return now;
                }
            }
        };
        seen = timeout(SOON, changed).await.expect("it is renewed");
        assert_eq!(seen.holder.as_ref().map(|it| it.primary.token), begun, "nobody else has taken it");
    }
    assert!(matches!(*standby.role().borrow(), Role::Standby { primary: Some(_) }));
    primary.shutdown().await;
    timeout(SOON, standby.role().wait_for(is_primary)).await.expect("it takes over").unwrap();
    standby.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_files_a_primary_with_a_longer_lease_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    a_longer_lease_is_waited_for(|| FileLeaseStore::new(directory.path()).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_consul_a_primary_with_a_longer_lease_is_waited_for() {
    let Some(agent) = crate::common::consul().await else { return };
    let url = agent.registry().url().to_owned();
    a_longer_lease_is_waited_for(|| store(&url)).await;
}

/// Above the greatest number there is none for a next term.
#[tokio::test]
async fn a_key_with_the_greatest_number_is_named_and_needs_no_restart() {
    let Some(agent) = crate::common::consul().await else { return };
    let registry = agent.registry();
    let one = ConsulLeaseStore::new(ConsulConfig::new(registry.url()).unwrap(), PREFIX).unwrap();
    let first = crate::cases::take(&one, &crate::cases::claim("counter-a")).await;
    let put = async |flags: u64, key: &str| {
        let answer = registry.put(&format!("/v1/kv/{key}?flags={flags}"), "1").await.unwrap();
        assert_eq!(answer.status.as_u16(), 200);
    };
    for key in ["lease/heartbeat", "state/count"] {
        let key = format!("{PREFIX}/{key}");
        put(u64::MAX, &key).await;
        let seen = one.read().await.unwrap();
        let refused = one.acquire(&seen, &crate::cases::claim("counter-b")).await.unwrap_err().to_string();
        assert!(refused.contains(&key) && refused.contains("without a restart"), "{refused}");
        // What the line says is to be done.
        put(1, &key).await;
        let next = crate::cases::take(&one, &crate::cases::claim("counter-b")).await;
        assert!(next.token > first.token && next.token.get() < 5, "{next:?}");
    }
}
