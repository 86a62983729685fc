//! Files and directories that are not what they should be.

use std::{error::Error, fs, path::Path, time::Duration};

use bytes::Bytes;
use tokio::time::{Instant, timeout};
use tonic_failover::{
    InstanceId, Role,
    server::{
        Lease,
        store::{
            FileLeaseStore, InvalidFileStore, LeaseRecord, LeaseStore, StoreError, Term, Version, Write,
        },
    },
};

use crate::child::claim;

fn store(directory: &Path) -> FileLeaseStore {
    FileLeaseStore::builder(directory).durable(false).build().unwrap()
}

async fn begin(store: &FileLeaseStore) -> Term {
    store.acquire(&store.read().await.unwrap(), &claim("counter")).await.unwrap()
}

fn write(expected: Version, sequence: u64, value: &str) -> Write {
    Write::new("counter", expected, sequence, Bytes::copy_from_slice(value.as_bytes()))
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn named(directory: &Path, begins: &str) -> std::path::PathBuf {
    let names = names(directory);
    let name = names.iter().find(|name| name.starts_with(begins));
    directory.join(name.unwrap_or_else(|| panic!("{begins} is not among {names:?}")))
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[test]
fn a_directory_that_cannot_keep_a_lease_is_refused_with_its_path() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let error = FileLeaseStore::new(&missing).unwrap_err();
    assert!(matches!(error, InvalidFileStore::NotADirectory { .. }), "{error:?}");
    assert!(chain(&error).contains("missing"), "{}", chain(&error));
    let file = directory.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(matches!(FileLeaseStore::new(&file), Err(InvalidFileStore::NotADirectory { .. })));
    // Whoever runs this, nobody makes files there.
    let error = FileLeaseStore::new("/proc/self").unwrap_err();
    assert!(matches!(error, InvalidFileStore::Unusable { .. }), "{error:?}");
    assert!(chain(&error).contains("/proc/self"), "{}", chain(&error));
    let error = FileLeaseStore::builder(directory.path()).poll(Duration::ZERO).build().unwrap_err();
    assert!(error.to_string().contains("poll is 0ns"), "{error}");
    // What it tries out leaves nothing behind.
    FileLeaseStore::new(directory.path()).unwrap();
    assert_eq!(names(directory.path()), ["file"]);
}

#[tokio::test]
async fn a_directory_that_is_away_is_no_free_lease() {
    let scratch = tempfile::tempdir().unwrap();
    let (here, away) = (scratch.path().join("lease"), scratch.path().join("away"));
    fs::create_dir(&here).unwrap();
    let store = store(&here);
    let term = begin(&store).await;
    fs::rename(&here, &away).unwrap();
    let error = store.read().await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(chain(&error).contains(here.to_str().unwrap()), "{}", chain(&error));
    for error in [
        store.renew(&term).await.unwrap_err(),
        store.write(&term, &write(Version::ABSENT, 1, "1")).await.unwrap_err(),
        store.load(&term, "counter").await.unwrap_err(),
        store.release(&term, None).await.unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    }
    fs::rename(&away, &here).unwrap();
    store.renew(&term).await.unwrap();
}

/// What a path leads to when its file system is not mounted, or a link has been turned.
#[tokio::test]
async fn another_directory_in_the_place_of_the_first_is_no_free_lease() {
    let scratch = tempfile::tempdir().unwrap();
    let (here, away) = (scratch.path().join("lease"), scratch.path().join("away"));
    fs::create_dir(&here).unwrap();
    let (one, other) = (store(&here), store(&here));
    let term = begin(&one).await;
    one.write(&term, &write(Version::ABSENT, 1, "7")).await.unwrap();
    let seen = other.read().await.unwrap();
    fs::rename(&here, &away).unwrap();
    fs::create_dir(&here).unwrap();
    for error in [
        one.read().await.unwrap_err(),
        one.renew(&term).await.unwrap_err(),
        one.load(&term, "counter").await.unwrap_err(),
        other.read().await.unwrap_err(),
        other.acquire(&LeaseRecord::empty(), &claim("b")).await.unwrap_err(),
        other.acquire(&seen, &claim("b")).await.unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
        let told = chain(&error);
        assert!(told.contains(here.to_str().unwrap()) && told.contains("mounted"), "{told}");
    }
    assert_eq!(names(&here), Vec::<String>::new());
    // A copy that has all the terms is as good as the first.
    for name in names(&away) {
        fs::copy(away.join(&name), here.join(&name)).unwrap();
    }
    one.renew(&term).await.unwrap();
    assert_eq!(&one.load(&term, "counter").await.unwrap().unwrap().value[..], b"7");
}

#[tokio::test]
async fn a_claim_that_cannot_be_read_is_not_free_and_can_be_replaced() {
    for garbage in ["", "{", "\u{0}\u{1}", "[]", "{\"token\": 1}"] {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (store(directory.path()), store(directory.path()));
        let term = begin(&one).await;
        fs::write(named(directory.path(), "term-"), garbage).unwrap();
        let record = other.read().await.unwrap();
        assert!(record.holder.is_none() && !record.released, "{garbage:?}");
        assert_ne!(record.holder_version, Version::ABSENT);
        assert_eq!(other.read().await.unwrap(), record, "nothing has changed");
        assert!(matches!(one.renew(&term).await, Err(StoreError::Superseded)));
        let next = other.acquire(&record, &claim("counter")).await.unwrap();
        assert!(next.token > term.token);
    }
}

#[tokio::test]
async fn heartbeats_and_releases_that_cannot_be_read_free_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    let term = begin(&one).await;
    fs::write(named(directory.path(), "heartbeat-"), "").unwrap();
    let record = one.read().await.unwrap();
    assert!(record.holder.is_some() && !record.released);
    one.renew(&term).await.unwrap();
    assert_ne!(one.read().await.unwrap().heartbeat_version, record.heartbeat_version);
    let released = named(directory.path(), "term-").to_str().unwrap().replace("term-", "released-");
    fs::write(&released, "").unwrap();
    let record = one.read().await.unwrap();
    assert!(record.holder.is_some() && !record.released);
}

/// The primary itself finds its own claim, and can do nothing in that term any more.
#[tokio::test]
async fn a_primary_whose_term_was_spoilt_by_hand_is_primary_again_in_another() {
    for (spoilt, with) in [("released-", Some("rubbish")), ("start-", None)] {
        let directory = tempfile::tempdir().unwrap();
        let address = InstanceId::new("127.0.0.1", 1);
        let lease = Lease::builder(store(directory.path()), "counter-a", address);
        let ms = Duration::from_millis;
        let lease = lease.length(ms(400)).renewal(ms(80)).margin(ms(60)).campaign().unwrap();
        let mut role = lease.role();
        let mut later_than = async |before: u64| {
            let is = |role: &Role| role.primary_at(Instant::now()).is_some_and(|it| it.get() > before);
            let role = timeout(Duration::from_secs(20), role.wait_for(is)).await;
            role.unwrap_or_else(|_| panic!("primary after term {before}, {spoilt}")).unwrap();
        };
        later_than(0).await;
        let file = named(directory.path(), "term-").to_str().unwrap().replace("term-", spoilt);
        match with {
            Some(rubbish) => fs::write(file, rubbish).unwrap(),
            None => fs::remove_file(file).unwrap(),
        }
        later_than(1).await;
        lease.shutdown().await;
    }
}

#[tokio::test]
async fn a_value_that_cannot_be_read_is_told_with_its_file_and_never_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    let term = begin(&one).await;
    one.write(&term, &write(Version::ABSENT, 1, "12345")).await.unwrap();
    let file = named(directory.path(), "state-");
    let whole = fs::read(&file).unwrap();
    for length in 0..whole.len() {
        // As an editor would: a new file.
        fs::write(directory.path().join("edited"), &whole[..length]).unwrap();
        fs::rename(directory.path().join("edited"), &file).unwrap();
        let error = one.load(&term, "counter").await.unwrap_err();
        let StoreError::NotUnderstood { place, .. } = &error else { panic!("{length}: {error:?}") };
        assert_eq!(place, file.to_str().unwrap());
        let error = one.write(&term, &write(Version::ABSENT, 2, "1")).await.unwrap_err();
        assert!(matches!(error, StoreError::NotUnderstood { .. }), "{error:?}");
        assert_eq!(fs::read(&file).unwrap(), &whole[..length]);
    }
    // Nor does the next term begin without it.
    let next = begin(&one).await;
    assert!(matches!(one.load(&next, "counter").await, Err(StoreError::NotUnderstood { .. })));
}

#[tokio::test]
async fn a_claimant_that_died_on_the_way_is_passed_over() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    let term = begin(&one).await;
    one.write(&term, &write(Version::ABSENT, 1, "7")).await.unwrap();
    // All that it had done was to claim.
    let claimed = named(directory.path(), "term-").to_str().unwrap().replace("0001", "0002");
    fs::write(claimed, "{\"token\":2,\"instance\":\"b\",\"address\":\"h:1\",\"nonce\":\"n\"}").unwrap();
    assert!(matches!(one.renew(&term).await, Err(StoreError::Superseded)));
    let next = begin(&one).await;
    assert_eq!(next.token.get(), 3);
    assert_eq!(&one.load(&next, "counter").await.unwrap().unwrap().value[..], b"7");
}

#[tokio::test]
async fn a_claim_deleted_by_hand_does_not_bring_an_earlier_term_back() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (store(directory.path()), store(directory.path()));
    let first = begin(&one).await;
    let second = begin(&other).await;
    let claim_file = named(directory.path(), "term-").to_str().unwrap().replace("0001", "0002");
    fs::remove_file(claim_file).unwrap();
    for (store, term) in [(&one, &first), (&other, &second)] {
        let written = store.write(term, &write(Version::ABSENT, 1, "1")).await;
        assert!(matches!(written, Err(StoreError::Superseded)), "{written:?}");
    }
    assert!(one.read().await.unwrap().holder.is_none());
    assert_eq!(begin(&one).await.token.get(), 3);
}

#[tokio::test]
async fn a_token_is_greater_than_any_that_was_seen_though_all_files_are_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    begin(&one).await;
    let second = begin(&one).await;
    for name in names(directory.path()) {
        fs::remove_file(directory.path().join(name)).unwrap();
    }
    assert!(matches!(one.renew(&second).await, Err(StoreError::Superseded)));
    assert_eq!(begin(&one).await.token.get(), 3);
}

#[tokio::test]
async fn what_is_left_over_is_cleared_away_and_the_directory_does_not_grow() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    let mut sizes = Vec::new();
    for sequence in 1..20 {
        let term = begin(&one).await;
        let version =
            one.load(&term, "counter").await.unwrap().map_or(Version::ABSENT, |stored| stored.version);
        one.write(&term, &write(version, sequence, "7")).await.unwrap();
        // Of a process that died as it wrote.
        let token = term.token.get();
        fs::write(directory.path().join(format!("unfinished-{token:020}-00000000000000ff")), "x").unwrap();
        fs::write(directory.path().join("somebody's"), "x").unwrap();
        sizes.push(names(directory.path()).len());
    }
    assert!(sizes.iter().all(|size| *size < 13), "{sizes:?}");
    assert!(names(directory.path()).contains(&"somebody's".to_owned()));
}

#[tokio::test]
async fn who_waits_for_a_change_is_woken_by_one() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (store(directory.path()), store(directory.path()));
    let term = begin(&one).await;
    let seen = other.read().await.unwrap();
    let begun = Instant::now();
    assert_eq!(other.changed(&seen, Duration::from_millis(200)).await.unwrap(), seen);
    assert!(begun.elapsed() >= Duration::from_millis(200));
    let waits = tokio::spawn(async move { other.changed(&seen, Duration::from_secs(3600)).await });
    one.release(&term, Some("counter-b")).await.unwrap();
    let record = timeout(Duration::from_secs(30), waits).await.expect("it is woken").unwrap().unwrap();
    assert_eq!((record.released, record.successor.as_deref()), (true, Some("counter-b")));
}

#[tokio::test]
async fn a_value_of_the_greatest_length_is_kept_and_a_longer_one_refused() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    let term = begin(&one).await;
    let limit = one.value_limit();
    let longest = Bytes::from(vec![b'x'; limit + 1]);
    let version =
        one.write(&term, &Write::new("counter", Version::ABSENT, 1, longest.slice(1..))).await.unwrap();
    let error = one.write(&term, &Write::new("counter", version, 2, longest)).await.unwrap_err();
    assert!(matches!(error, StoreError::TooLarge { size, limit: of } if (size, of) == (limit + 1, limit)));
    assert_eq!(one.load(&term, "counter").await.unwrap().unwrap().value.len(), limit);
    let error = one.load(&term, "../counter").await.unwrap_err();
    assert!(error.to_string().contains("\"../counter\""), "{error}");
}
