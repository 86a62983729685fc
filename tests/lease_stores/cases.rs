//! What every store must do.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{sync::Barrier, task::JoinSet, time::timeout};
use tonic_failover::{
    FencingToken, InstanceId, Primary,
    server::store::{
        Claim, Holder, LeaseRecord, LeaseStore, Nonce, StoreError, Stored, Term, Version, Write,
    },
};

use crate::{common::SOON, places::Place};

/// A process called `name`, another one each time.
pub(crate) fn claim(name: &str) -> Claim {
    static PROCESSES: AtomicU64 = AtomicU64::new(1);
    let number = PROCESSES.fetch_add(1, Ordering::Relaxed);
    let port = 50_000 + u16::try_from(number % 1000).unwrap();
    Claim::new(name, InstanceId::new("127.0.0.1", port), Nonce::new(&format!("nonce-{number:x}")))
}

/// Takes the lease, whoever has it.
pub(crate) async fn take(store: &dyn LeaseStore, claim: &Claim) -> Term {
    let seen = store.read().await.unwrap();
    store.acquire(&seen, claim).await.unwrap()
}

pub(crate) fn write(key: &str, expected: Version, sequence: u64, value: &'static str) -> Write {
    Write::new(key, expected, sequence, Bytes::from_static(value.as_bytes()))
}

fn holder(claim: &Claim, term: &Term) -> Holder {
    let primary = Primary::new(&*claim.instance, claim.address.clone(), term.token);
    Holder::new(primary, claim.nonce.clone())
}

/// The error, in the words of a test.
pub(crate) fn name<T: std::fmt::Debug>(outcome: Result<T, StoreError>) -> &'static str {
    match outcome {
        Ok(_) => "done",
        Err(StoreError::Superseded) => "superseded",
        Err(StoreError::Conflict) => "conflict",
        Err(StoreError::Unanswered { .. }) => "unanswered",
        Err(StoreError::Unavailable { .. }) => "unavailable",
        Err(StoreError::Refused { .. }) => "refused",
        Err(StoreError::TooLarge { .. }) => "too large",
        Err(StoreError::NotUnderstood { .. }) => "not understood",
        Err(_) => "something new",
    }
}

/// That nothing can be done in this term any more, which changes nothing.
async fn is_deposed(store: &dyn LeaseStore, term: &Term, key: &str) {
    let before = store.read().await.unwrap();
    assert_eq!(name(store.renew(term).await), "superseded");
    assert_eq!(name(store.load(term, key).await), "superseded");
    assert_eq!(name(store.write(term, &write(key, Version::ABSENT, 99, "late")).await), "superseded");
    assert_eq!(name(store.release(term, None).await), "superseded");
    assert_eq!(store.read().await.unwrap(), before);
}

pub(crate) async fn nobody_holds_a_lease_at_first_and_whoever_asks_gets_it(place: &dyn Place) {
    let (store, a) = (place.open(), claim("counter-a"));
    let seen = store.read().await.unwrap();
    assert_eq!(seen, LeaseRecord::empty());
    let term = store.acquire(&seen, &a).await.unwrap();
    assert_eq!((term.token, &term.nonce), (FencingToken::new(1), &a.nonce));
    let now = place.open().read().await.unwrap();
    assert_eq!(now.holder, Some(holder(&a, &term)));
    assert_eq!(now.holder_version, term.holder_version);
    assert!(now.holder_version != Version::ABSENT && now.heartbeat_version != Version::ABSENT);
    assert_eq!((now.released, now.successor), (false, None));
}

pub(crate) async fn one_with_an_older_record_is_refused_and_changes_nothing(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    let seen = other.read().await.unwrap();
    let term = take(&*one, &claim("counter-a")).await;
    let before = one.read().await.unwrap();
    assert_eq!(name(other.acquire(&seen, &claim("counter-b")).await), "superseded");
    assert_eq!(one.read().await.unwrap(), before);
    one.renew(&term).await.unwrap();
}

pub(crate) async fn a_renewal_changes_the_heartbeat_alone_and_each_time(place: &dyn Place) {
    let store = place.open();
    let term = take(&*store, &claim("counter-a")).await;
    let (first, mut heartbeats) = (store.read().await.unwrap(), HashSet::new());
    heartbeats.insert(first.heartbeat_version);
    for _ in 0..5 {
        store.renew(&term).await.unwrap();
        let mut now = store.read().await.unwrap();
        assert!(heartbeats.insert(now.heartbeat_version), "{now:?}");
        now.heartbeat_version = first.heartbeat_version;
        assert_eq!(now, first);
    }
}

pub(crate) async fn a_renewal_that_was_not_seen_stands_against_a_takeover(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    let term = take(&*one, &claim("counter-a")).await;
    let seen = other.read().await.unwrap();
    one.renew(&term).await.unwrap();
    assert_eq!(name(other.acquire(&seen, &claim("counter-b")).await), "superseded");
    one.renew(&term).await.unwrap();
}

pub(crate) async fn after_a_takeover_nothing_of_the_deposed_is_done(place: &dyn Place) {
    let (one, other, b) = (place.open(), place.open(), claim("counter-b"));
    let first = take(&*one, &claim("counter-a")).await;
    one.write(&first, &write("count", Version::ABSENT, 1, "41")).await.unwrap();
    let second = take(&*other, &b).await;
    assert!(second.token > first.token);
    assert_eq!(other.read().await.unwrap().holder, Some(holder(&b, &second)));
    is_deposed(&*one, &first, "count").await;
    is_deposed(&*one, &first, "new").await;
    let stored = other.load(&second, "count").await.unwrap().unwrap();
    assert_eq!((stored.token, stored.sequence, &stored.value[..]), (first.token, 1, &b"41"[..]));
    assert_eq!(other.load(&second, "new").await.unwrap(), None);
    other.write(&second, &write("count", stored.version, 1, "42")).await.unwrap();
    is_deposed(&*one, &first, "count").await;
}

pub(crate) async fn after_a_release_nothing_more_is_done_and_the_next_has_it_at_once(place: &dyn Place) {
    let (one, other, a, b) = (place.open(), place.open(), claim("counter-a"), claim("counter-b"));
    let first = take(&*one, &a).await;
    one.write(&first, &write("count", Version::ABSENT, 1, "41")).await.unwrap();
    one.release(&first, None).await.unwrap();
    let seen = other.read().await.unwrap();
    assert_eq!((&seen.holder, seen.released, &seen.successor), (&Some(holder(&a, &first)), true, &None));
    is_deposed(&*one, &first, "count").await;
    let second = other.acquire(&seen, &b).await.unwrap();
    assert!(second.token > first.token);
    let now = other.read().await.unwrap();
    assert_eq!((now.holder, now.released), (Some(holder(&b, &second)), false));
    assert_eq!(&other.load(&second, "count").await.unwrap().unwrap().value[..], b"41");
}

pub(crate) async fn a_release_names_its_successor(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    let first = take(&*one, &claim("counter-a")).await;
    one.release(&first, Some("counter-b")).await.unwrap();
    let seen = other.read().await.unwrap();
    assert_eq!((seen.released, seen.successor.as_deref()), (true, Some("counter-b")));
    // It is for the others to heed, not for the store.
    let second = other.acquire(&seen, &claim("counter-c")).await.unwrap();
    assert_eq!(one.read().await.unwrap().successor, None);
    other.renew(&second).await.unwrap();
}

pub(crate) async fn a_holders_length_is_kept_and_may_be_missing(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    let length = Duration::from_millis(2_500);
    let told = async || other.read().await.unwrap().holder.unwrap().length;
    let first = take(&*one, &claim("counter-a").with_length(length)).await;
    assert_eq!(told().await, Some(length));
    one.renew(&first).await.unwrap();
    assert_eq!(told().await, Some(length));
    one.release(&first, None).await.unwrap();
    assert_eq!(told().await, Some(length));
    // As an earlier version writes it.
    take(&*other, &claim("counter-b")).await;
    assert_eq!(told().await, None);
}

pub(crate) async fn the_same_process_may_begin_a_new_term_and_ends_its_old_one_by_it(place: &dyn Place) {
    let (store, a) = (place.open(), claim("counter-a"));
    let first = take(&*store, &a).await;
    let second = take(&*store, &a).await;
    assert!(second.token > first.token);
    is_deposed(&*store, &first, "count").await;
    store.renew(&second).await.unwrap();
}

pub(crate) async fn of_many_at_the_same_instant_one_wins_each_time(place: &dyn Place) {
    const ROUNDS: usize = 100;
    const PROCESSES: usize = 4;
    let stores: Vec<_> = (0..PROCESSES).map(|_| place.open()).collect();
    let mut last = FencingToken::new(0);
    for round in 0..ROUNDS {
        let (barrier, mut all) = (Arc::new(Barrier::new(PROCESSES)), JoinSet::new());
        for store in &stores {
            let (store, barrier) = (Arc::clone(store), Arc::clone(&barrier));
            all.spawn(async move {
                let (seen, me) = (store.read().await.unwrap(), claim("counter"));
                barrier.wait().await;
                store.acquire(&seen, &me).await
            });
        }
        let mut outcomes = all.join_all().await;
        outcomes.sort_by_key(Result::is_err);
        let names: Vec<_> = outcomes.iter().map(|it| name(it.clone())).collect();
        assert_eq!(names, ["done", "superseded", "superseded", "superseded"], "round {round}");
        let term = outcomes.swap_remove(0).unwrap();
        assert!(term.token > last, "round {round}: {term:?} after {last}");
        last = term.token;
        stores[round % PROCESSES].renew(&term).await.unwrap();
    }
}

pub(crate) async fn what_was_written_is_loaded_and_a_version_is_replaced_once(place: &dyn Place) {
    let store = place.open();
    let term = take(&*store, &claim("counter-a")).await;
    assert_eq!(store.load(&term, "count").await.unwrap(), None);
    assert_eq!(name(store.write(&term, &write("count", Version::new(7), 1, "1")).await), "conflict");
    let first = store.write(&term, &write("count", Version::ABSENT, 1, "1")).await.unwrap();
    let stored = Stored::new(first, term.token, 1, Bytes::from_static(b"1"));
    assert_eq!(store.load(&term, "count").await.unwrap(), Some(stored));
    assert_eq!(name(store.write(&term, &write("count", Version::ABSENT, 2, "2")).await), "conflict");
    let second = store.write(&term, &write("count", first, 2, "2")).await.unwrap();
    assert!(second != first && second != Version::ABSENT);
    assert_eq!(name(store.write(&term, &write("count", first, 3, "3")).await), "conflict");
    let stored = Stored::new(second, term.token, 2, Bytes::from_static(b"2"));
    assert_eq!(store.load(&term, "count").await.unwrap(), Some(stored.clone()));
    // Another key is another value.
    store.write(&term, &write("other_1.x-y", Version::ABSENT, 3, "")).await.unwrap();
    assert_eq!(store.load(&term, "other_1.x-y").await.unwrap().unwrap().value.len(), 0);
    assert_eq!(store.load(&term, "count").await.unwrap(), Some(stored));
}

pub(crate) async fn the_same_write_once_more_is_a_conflict_and_the_sequence_tells(place: &dyn Place) {
    let store = place.open();
    let term = take(&*store, &claim("counter-a")).await;
    let before = store.write(&term, &write("count", Version::ABSENT, 6, "1")).await.unwrap();
    let again = write("count", before, u64::MAX, "1");
    let version = store.write(&term, &again).await.unwrap();
    assert_ne!(version, before, "the same value is another write");
    assert_eq!(name(store.write(&term, &again).await), "conflict");
    let stored = store.load(&term, "count").await.unwrap().unwrap();
    assert_eq!((stored.sequence, stored.token, stored.version), (u64::MAX, term.token, version));
}

pub(crate) async fn of_many_writes_on_one_version_one_is_done(place: &dyn Place) {
    let store = place.open();
    let term = take(&*store, &claim("counter-a")).await;
    let mut version = Version::ABSENT;
    for round in 0..10_u64 {
        let mut all = JoinSet::new();
        for task in 0..4_u64 {
            let (store, term) = (Arc::clone(&store), term.clone());
            all.spawn(
                async move { store.write(&term, &write("count", version, 10 * round + task, "1")).await },
            );
        }
        let outcomes = all.join_all().await;
        let done: Vec<_> = outcomes.iter().filter_map(|it| it.as_ref().ok()).collect();
        assert_eq!(done.len(), 1, "{outcomes:?}");
        version = *done[0];
        assert!(
            outcomes.iter().filter(|it| it.is_err()).all(|it| name(it.clone()) == "conflict"),
            "{outcomes:?}"
        );
    }
}

pub(crate) async fn a_value_is_taken_up_to_the_limit(place: &dyn Place) {
    let store = place.open();
    let term = take(&*store, &claim("counter-a")).await;
    let limit = store.value_limit();
    let value = |size: usize| Bytes::from((0..size).map(|it| (it * it % 251) as u8).collect::<Vec<_>>());
    let key = "k".repeat(64);
    let version =
        store.write(&term, &Write::new(&key, Version::ABSENT, u64::MAX, value(limit))).await.unwrap();
    match store.write(&term, &Write::new(&key, version, 2, value(limit + 1))).await {
        Err(StoreError::TooLarge { size, limit: told }) => assert_eq!((size, told), (limit + 1, limit)),
        other => panic!("{other:?}"),
    }
    let stored = store.load(&term, &key).await.unwrap().unwrap();
    assert!(
        stored == Stored::new(version, term.token, u64::MAX, value(limit)),
        "it is what was written first"
    );
}

pub(crate) async fn a_key_that_is_none_is_refused(place: &dyn Place) {
    let store = place.open();
    let term = take(&*store, &claim("counter-a")).await;
    for key in ["", ".", "..", ".a", "a/b", "a b", "../a", "ä", "a\0", &"a".repeat(65)] {
        assert_eq!(
            name(store.write(&term, &write(key, Version::ABSENT, 1, "1")).await),
            "refused",
            "{key:?}"
        );
        assert_eq!(name(store.load(&term, key).await), "refused", "{key:?}");
    }
}

pub(crate) async fn a_record_that_is_not_understood_is_nobodys_and_is_replaced(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    let first = take(&*one, &claim("counter-a")).await;
    one.write(&first, &write("count", Version::ABSENT, 1, "41")).await.unwrap();
    place.garble().await;
    let seen = other.read().await.unwrap();
    assert_eq!((&seen.holder, seen.released), (&None, false));
    assert_ne!(seen.holder_version, Version::ABSENT);
    is_deposed(&*one, &first, "count").await;
    let second = other.acquire(&seen, &claim("counter-b")).await.unwrap();
    assert!(second.token > first.token, "{second:?} after {first:?}");
    assert_eq!(&other.load(&second, "count").await.unwrap().unwrap().value[..], b"41");
    is_deposed(&*one, &first, "count").await;
}

pub(crate) async fn after_everything_is_deleted_the_token_goes_on_where_a_store_lives(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    let mut last = take(&*one, &claim("counter-a")).await;
    for _ in 0..3 {
        other.read().await.unwrap();
        place.wipe().await;
        assert_eq!(one.read().await.unwrap(), LeaseRecord::empty());
        is_deposed(&*one, &last, "count").await;
        // Whoever has merely read it remembers it.
        let next = take(&*other, &claim("counter-b")).await;
        assert!(next.token > last.token, "{next:?} after {last:?}");
        is_deposed(&*one, &last, "count").await;
        last = next;
    }
}

pub(crate) async fn a_value_that_is_not_understood_says_so(place: &dyn Place) {
    let store = place.open();
    let term = take(&*store, &claim("counter-a")).await;
    store.write(&term, &write("count", Version::ABSENT, 1, "41")).await.unwrap();
    place.garble_value("count").await;
    match store.load(&term, "count").await {
        Err(StoreError::NotUnderstood { place, .. }) => assert!(place.contains("count"), "{place}"),
        other => panic!("{other:?}"),
    }
    store.renew(&term).await.unwrap();
}

pub(crate) async fn whoever_waits_is_woken_by_a_change(place: &dyn Place) {
    let (one, other) = (place.open(), place.open());
    let waits = async |seen: &LeaseRecord| {
        let changed = other.changed(seen, 3 * SOON);
        timeout(2 * SOON, changed).await.expect("it is woken").unwrap()
    };
    let mut seen = other.read().await.unwrap();
    let term = take(&*one, &claim("counter-a")).await;
    // What has changed already is no news to wait for.
    seen = waits(&seen).await;
    assert_eq!(seen.holder_version, term.holder_version);
    for step in 0..3 {
        let change = async {
            // Most likely the other one waits by then.
            tokio::time::sleep(Duration::from_millis(50)).await;
            match step {
                0 | 1 => one.renew(&term).await.unwrap(),
                _ => one.release(&term, None).await.unwrap(),
            }
        };
        let (next, ()) = tokio::join!(waits(&seen), change);
        assert_ne!(next, seen);
        assert_eq!(next, one.read().await.unwrap());
        seen = next;
    }
    assert!(seen.released);
    let change = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        place.wipe().await;
    };
    let (next, ()) = tokio::join!(waits(&seen), change);
    assert_ne!(next, seen);
}

pub(crate) async fn whoever_waits_in_vain_is_told_so_in_time(place: &dyn Place) {
    let store = place.open();
    let empty = store.read().await.unwrap();
    let waits = async |seen: &LeaseRecord| {
        let changed = store.changed(seen, Duration::from_millis(200));
        timeout(SOON, changed).await.expect("it ends").unwrap()
    };
    assert_eq!(waits(&empty).await, empty);
    let term = take(&*store, &claim("counter-a")).await;
    let seen = store.read().await.unwrap();
    for _ in 0..2 {
        assert_eq!(waits(&seen).await, seen);
    }
    store.renew(&term).await.unwrap();
}
