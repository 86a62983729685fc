//! What happens between a process and Consul: answers that are lost, agents that fail, data that
//! is lost, rights that are missing.

use std::time::Duration;

use tonic_failover::{
    consul::ConsulConfig,
    server::store::{ConsulLeaseStore, InvalidConsulStore, LeaseRecord, LeaseStore, StoreError, Version},
    testkit::Agent,
};

use crate::{
    cases::{claim, name, take, write},
    common::{SOON, acl::Guarded, proxy::Proxy},
    places::{PREFIX, store},
};

async fn agent() -> Agent {
    Agent::start("dc1").await.unwrap()
}

/// The requests that change something.
fn transactions(proxy: &Proxy) -> usize {
    proxy.requests().iter().filter(|it| it.starts_with("PUT /v1/txn HTTP")).count()
}

/// The port is closed and opened within moments.
async fn until_it_reads(store: &ConsulLeaseStore, told: &str) {
    let reads = async {
        while name(store.read().await) != told {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, reads).await.unwrap_or_else(|_| panic!("reading is never {told}"));
}

// === answers that are lost ===

#[tokio::test]
async fn an_acquisition_whose_answer_is_lost_is_found_again_by_its_nonce() {
    let agent = agent().await;
    let (store, a) = (store(&agent.url()), claim("counter-a"));
    let fault = agent.faults().lose_answers();
    assert_eq!(name(store.acquire(&LeaseRecord::empty(), &a).await), "unanswered");
    assert_eq!(agent.counters().requests_to("/v1/txn"), 1, "it is never repeated");
    fault.off();
    let now = store.read().await.unwrap();
    let holder = now.holder.unwrap();
    assert_eq!(holder.nonce, a.nonce);
    let term = tonic_failover::server::store::Term::new(holder.primary.token, now.holder_version, a.nonce);
    store.renew(&term).await.unwrap();
    store.write(&term, &write("count", Version::ABSENT, 1, "1")).await.unwrap();
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_is_done_once_and_its_sequence_tells() {
    let agent = agent().await;
    let store = store(&agent.url());
    let term = take(&store, &claim("counter-a")).await;
    let before = agent.counters().requests_to("/v1/txn");
    let fault = agent.faults().lose_answers();
    let first = write("count", Version::ABSENT, 17, "1");
    let outcome = store.write(&term, &first).await;
    assert!(matches!(&outcome, Err(error) if error.may_have_happened()), "{outcome:?}");
    assert_eq!(agent.counters().requests_to("/v1/txn"), before + 1, "it is never repeated");
    assert_eq!(name(store.renew(&term).await), "unanswered");
    fault.off();
    assert_eq!(name(store.write(&term, &first).await), "conflict");
    assert_eq!(store.load(&term, "count").await.unwrap().unwrap().sequence, 17);
    store.release(&term, None).await.unwrap();
    assert!(store.read().await.unwrap().released);
    assert_eq!(name(store.release(&term, None).await), "superseded", "which is as good");
}

#[tokio::test]
async fn what_consul_proves_undone_is_told_from_what_may_have_been_done() {
    let agent = agent().await;
    let store = store(&agent.url());
    let term = take(&store, &claim("counter-a")).await;
    let value = write("count", Version::ABSENT, 1, "1");
    for (status, body, told) in [
        (500, "No cluster leader", "unavailable"),
        (500, "rpc error making call: No cluster leader", "unavailable"),
        (500, "No known Consul servers", "unavailable"),
        (500, "rpc error getting client: failed to get conn: dial tcp: connection refused", "unavailable"),
        (500, "rpc error making call: node is not the leader", "unavailable"),
        (500, "leadership lost while committing log", "unanswered"),
        (500, "rpc error making call: EOF", "unanswered"),
        (500, "rpc error making call: i/o deadline reached", "unanswered"),
        (502, "No cluster leader", "unanswered"),
        (503, "", "unanswered"),
        (504, "", "unanswered"),
        (429, "", "unavailable"),
        (403, "ACL not found", "refused"),
        (400, "Bad request", "refused"),
        (413, "Request body too large, max size: 1 bytes", "refused"),
        (404, "page not found", "unavailable"),
        (409, "", "unanswered"),
        (409, "{\"Results\":null,\"Errors\":[]}", "unanswered"),
        (302, "", "unanswered"),
        (200, "", "unanswered"),
        (200, "{}", "unanswered"),
    ] {
        let fault = agent.faults().status(status, body);
        assert_eq!(name(store.write(&term, &value).await), told, "{status} {body}");
        assert_eq!(name(store.renew(&term).await), told, "{status} {body}");
        fault.off();
    }
    let fault = agent.faults().refuse();
    until_it_reads(&store, "unavailable").await;
    assert_eq!(name(store.write(&term, &value).await), "unavailable");
    assert_eq!(name(store.acquire(&LeaseRecord::empty(), &claim("counter-b")).await), "unavailable");
    fault.off();
    until_it_reads(&store, "done").await;
    let fault = agent.faults().hang();
    let outcomes = tokio::join!(store.write(&term, &value), store.read(), store.renew(&term));
    assert_eq!(
        (name(outcomes.0), name(outcomes.1), name(outcomes.2)),
        ("unanswered", "unavailable", "unanswered")
    );
    fault.off();
    let fault = agent.faults().no_leader_after(Duration::from_millis(10));
    assert_eq!(name(store.write(&term, &value).await), "unavailable");
    assert_eq!(name(store.read().await), "unavailable");
    fault.off();
    store.renew(&term).await.unwrap();
}

// === agents that fail ===

/// A store that asks one agent by two ways.
fn by_two(one: &Proxy, other: &Proxy) -> ConsulLeaseStore {
    let config = ConsulConfig::new(&one.url()).unwrap().more_agents([other.url()]).unwrap();
    ConsulLeaseStore::new(config, PREFIX).unwrap()
}

#[tokio::test]
async fn a_renewal_goes_to_the_next_agent_within_the_same_call_and_a_write_does_not() {
    let agent = agent().await;
    let port = agent.http_addr().port();
    let (one, other) = (Proxy::before(port).await, Proxy::before(port).await);
    let store = by_two(&one, &other);
    let term = take(&store, &claim("counter-a")).await;
    assert_eq!((transactions(&one), transactions(&other)), (1, 0));
    let seen = store.read().await.unwrap();
    one.stop();
    store.renew(&term).await.unwrap();
    assert_eq!((transactions(&one), transactions(&other)), (2, 1));
    // Others that know nothing of the first agent's failure yet.
    let value = write("count", Version::ABSENT, 1, "1");
    assert_eq!(name(by_two(&one, &other).write(&term, &value).await), "unanswered");
    assert_eq!((transactions(&one), transactions(&other)), (3, 1), "it is not repeated");
    // Looking for tokens has found the failure before anything was to be written.
    assert_eq!(name(by_two(&one, &other).acquire(&seen, &claim("counter-b")).await), "superseded");
    assert_eq!((transactions(&one), transactions(&other)), (3, 2));
    let idle = by_two(&one, &other);
    idle.release(&term, None).await.unwrap();
    assert!(store.read().await.unwrap().released);
}

#[tokio::test]
async fn what_was_not_sent_goes_to_the_next_agent_at_once() {
    let agent = agent().await;
    let live = Proxy::before(agent.http_addr().port()).await;
    // Nobody listens there.
    let config = ConsulConfig::new(crate::common::NOWHERE).unwrap().more_agents([live.url()]).unwrap();
    let store = ConsulLeaseStore::new(config, PREFIX).unwrap();
    let term = take(&store, &claim("counter-a")).await;
    store.renew(&term).await.unwrap();
    let version = store.write(&term, &write("count", Version::ABSENT, 1, "1")).await.unwrap();
    assert_eq!(store.load(&term, "count").await.unwrap().unwrap().version, version);
    store.release(&term, None).await.unwrap();
    assert_eq!(transactions(&live), 4, "{:?}", live.requests());
}

// === data that is lost ===

#[tokio::test]
async fn where_lost_data_gives_another_holder_the_very_same_index_the_deposed_is_refused_all_the_same() {
    let agent = agent().await;
    let (one, other) = (store(&agent.url()), store(&agent.url()));
    let first = take(&one, &claim("counter-a")).await;
    one.write(&first, &write("count", Version::ABSENT, 1, "1")).await.unwrap();
    let seen = one.read().await.unwrap();
    agent.restart_empty().await;
    let b = claim("counter-b");
    let second = take(&other, &b).await;
    assert_eq!(second.holder_version, first.holder_version, "else this shows nothing");
    let now = other.read().await.unwrap();
    assert_eq!(
        (now.heartbeat_version, seen.heartbeat_version),
        (second.holder_version, first.holder_version)
    );
    assert_eq!(name(one.renew(&first).await), "superseded");
    assert_eq!(name(one.load(&first, "count").await), "superseded");
    assert_eq!(name(one.write(&first, &write("count", Version::ABSENT, 2, "2")).await), "superseded");
    assert_eq!(name(one.release(&first, None).await), "superseded");
    // Nor does the old record let anybody in.
    assert_eq!(name(one.acquire(&seen, &claim("counter-c")).await), "superseded");
    assert_eq!(other.read().await.unwrap(), now);
    other.renew(&second).await.unwrap();
}

#[tokio::test]
async fn after_the_indexes_fell_the_lease_is_taken_anew_with_a_greater_token() {
    let agent = agent().await;
    let store = store(&agent.url());
    let first = take(&store, &claim("counter-a")).await;
    let seen = store.read().await.unwrap();
    agent.faults().reset_index();
    assert_eq!(name(store.renew(&first).await), "superseded");
    let changed =
        tokio::time::timeout(SOON, store.changed(&seen, 2 * SOON)).await.expect("it is seen").unwrap();
    assert!(changed.holder_version.get() < first.holder_version.get());
    assert_eq!(changed.holder, seen.holder, "the data is the same");
    let second = store.acquire(&changed, &claim("counter-a")).await.unwrap();
    assert!(second.token > first.token);
}

/// What the documentation promises, and what it says that it cannot.
#[tokio::test]
async fn a_snapshot_brings_back_the_term_of_its_time_and_ends_those_after_it() {
    let Some(consul) = crate::common::consul().await else { return };
    let open = || {
        let config = ConsulConfig::new(&consul.url()).unwrap();
        ConsulLeaseStore::builder(config, PREFIX).try_timeout(SOON).build().unwrap()
    };
    let (one, other) = (open(), open());
    let first = take(&one, &claim("counter-a")).await;
    let version = one.write(&first, &write("count", Version::ABSENT, 1, "1")).await.unwrap();
    let saved = consul.registry().save_snapshot().await.unwrap();
    let then = one.read().await.unwrap();
    let second = take(&other, &claim("counter-b")).await;
    other.write(&second, &write("count", version, 1, "2")).await.unwrap();
    consul.registry().restore_snapshot(saved).await.unwrap();

    let now = other.read().await.unwrap();
    assert_eq!(now, then);
    for (store, term) in [(&other, &second), (&one, &second)] {
        assert_eq!(name(store.renew(term).await), "superseded");
        assert_eq!(name(store.write(term, &write("count", version, 2, "3")).await), "superseded");
        assert_eq!(name(store.load(term, "count").await), "superseded");
    }
    // The restored term goes on with the restored state, until another begins.
    one.renew(&first).await.unwrap();
    assert_eq!(one.load(&first, "count").await.unwrap().unwrap().version, version);
    let third = take(&other, &claim("counter-b")).await;
    assert!(third.token > second.token, "it has met them all");
    assert_eq!(name(one.renew(&first).await), "superseded");
}

#[tokio::test]
async fn tokens_go_on_from_those_beside_the_state_where_the_lease_alone_was_deleted() {
    for real in [false, true] {
        let embedded = agent().await;
        let consul = if real { crate::common::consul().await } else { None };
        let registry = consul.as_ref().map_or(embedded.registry(), |it| it.registry());
        let url = registry.url().to_owned();
        let third = {
            let old = store(&url);
            take(&old, &claim("counter-a")).await;
            take(&old, &claim("counter-a")).await;
            let third = take(&old, &claim("counter-a")).await;
            old.write(&third, &write("count", Version::ABSENT, 1, "1")).await.unwrap();
            let keys = registry.kv_keys(&format!("{PREFIX}/")).await.unwrap();
            let ends = [
                "lease/heartbeat",
                "lease/holder",
                &format!("lease/term/3-{}", third.nonce.as_str()),
                "state/count",
            ];
            assert_eq!(keys, ends.map(|it| format!("{PREFIX}/{it}")), "a term leaves nothing behind");
            third
        };
        registry.kv_delete_below(&format!("{PREFIX}/lease")).await.unwrap();
        let fourth = take(&store(&url), &claim("counter-b")).await;
        assert!(fourth.token > third.token, "{fourth:?} after {third:?}");
    }
}

// === rights ===

#[tokio::test]
async fn the_policy_in_the_documentation_is_enough_and_nothing_less_is() {
    let Some(guarded) = Guarded::start().await else { return };
    let documentation = include_str!("../../src/server/store/consul/mod.rs");
    let policy = documentation.split("/// ```hcl\n/// ").nth(1).unwrap().lines().next().unwrap();
    assert!(policy.contains(&format!("\"{PREFIX}/\"")), "{policy}");
    let store = async |name: &str, rules: &str| {
        let token = guarded.token_for(name, rules).await;
        let config = ConsulConfig::new(&guarded.url()).unwrap().token(&token.secret);
        ConsulLeaseStore::builder(config, PREFIX).try_timeout(SOON).build().unwrap()
    };
    let nothing = store("nothing", "").await;
    let reader = store("reader", &policy.replace("write", "read")).await;
    let lease = store("lease", &policy.replace("/\"", "/lease/\"")).await;
    for it in [&nothing, &lease] {
        // With no key there, a list that is hidden looks as one that is empty.
        let expected = if std::ptr::eq(it, &nothing) { "refused" } else { "done" };
        assert_eq!(name(it.read().await), expected);
    }
    assert_eq!(name(nothing.changed(&LeaseRecord::empty(), Duration::ZERO).await), "refused");
    assert_eq!(name(nothing.acquire(&LeaseRecord::empty(), &claim("x")).await), "refused");
    assert_eq!(name(reader.acquire(&LeaseRecord::empty(), &claim("x")).await), "refused");

    let writer = store("writer", policy).await;
    let first = take(&writer, &claim("counter-a")).await;
    writer.renew(&first).await.unwrap();
    assert_eq!(writer.load(&first, "count").await.unwrap(), None);
    let version = writer.write(&first, &write("count", Version::ABSENT, 1, "1")).await.unwrap();
    assert_eq!(writer.load(&first, "count").await.unwrap().unwrap().version, version);
    let seen = writer.read().await.unwrap();
    assert_eq!(reader.read().await.unwrap(), seen);
    assert_eq!(name(nothing.read().await), "refused");
    for it in [&nothing, &reader] {
        assert_eq!(name(it.renew(&first).await), "refused");
        assert_eq!(name(it.write(&first, &write("count", version, 2, "2")).await), "refused");
        assert_eq!(name(it.acquire(&seen, &claim("x")).await), "refused");
    }
    // A value that may not be read is not one that is not there.
    lease.renew(&first).await.unwrap();
    assert_eq!(name(lease.load(&first, "count").await), "refused");
    assert_eq!(name(lease.load(&first, "other").await), "refused");
    assert_eq!(name(lease.write(&first, &write("count", version, 2, "2")).await), "refused");
    writer.release(&first, None).await.unwrap();

    let unknown = ConsulConfig::new(&guarded.url()).unwrap().token("a-token-that-is-unknown");
    let unknown = ConsulLeaseStore::new(unknown, PREFIX).unwrap();
    for error in [unknown.read().await.unwrap_err(), unknown.renew(&first).await.unwrap_err()] {
        assert!(
            matches!(&error, StoreError::Refused { reason } if reason.contains("ACL not found")),
            "{error:?}"
        );
        assert!(!format!("{error:?} {error}").contains("a-token-that-is-unknown"), "{error:?}");
    }
}

// === settings ===

#[tokio::test]
async fn a_setting_that_cannot_be_used_is_named() {
    let config = || ConsulConfig::new("127.0.0.1:8500").unwrap();
    let error = ConsulLeaseStore::new(config(), "/a").unwrap_err();
    assert!(matches!(&error, InvalidConsulStore::Prefix { prefix, .. } if prefix == "/a"), "{error}");
    for given in [Duration::ZERO, Duration::from_secs(61)] {
        let error = ConsulLeaseStore::builder(config(), "a").try_timeout(given).build().unwrap_err();
        assert!(error.to_string().contains("10 ms to 60 s"), "{error}");
    }
    let file = config().token_file("/nowhere/token");
    let error = ConsulLeaseStore::new(file, "a").unwrap_err();
    assert!(matches!(error, InvalidConsulStore::Config { .. }), "{error}");
    let debug = format!("{:?}", ConsulLeaseStore::builder(config().token("geheim"), "a"));
    assert!(!debug.contains("geheim"), "{debug}");
}
