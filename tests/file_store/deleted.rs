//! Files that somebody has deleted, and what stands in the place of files.

use std::{
    fs,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tokio::time::timeout;
use tonic_failover::server::store::{FileLeaseStore, LeaseStore, StoreError, Term, Version, Write};

use crate::child::claim;

/// However busy the machine is.
const SOON: Duration = Duration::from_secs(30);

fn store(directory: &Path) -> FileLeaseStore {
    FileLeaseStore::builder(directory).durable(false).step_timeout(SOON).build().unwrap()
}

async fn begin(store: &FileLeaseStore) -> Result<Term, StoreError> {
    store.acquire(&store.read().await.unwrap(), &claim("counter")).await
}

async fn put(store: &FileLeaseStore, term: &Term, sequence: u64, value: &'static str) {
    let stored = store.load(term, "counter").await.unwrap();
    let version = stored.map_or(Version::ABSENT, |stored| stored.version);
    let write = Write::new("counter", version, sequence, Bytes::from_static(value.as_bytes()));
    store.write(term, &write).await.unwrap();
}

async fn value(store: &FileLeaseStore, term: &Term) -> Option<Bytes> {
    store.load(term, "counter").await.unwrap().map(|stored| stored.value)
}

/// The file of this kind of the term of `token`.
fn file(directory: &Path, kind: &str, token: u64) -> PathBuf {
    let begins = format!("{kind}-{token:020}");
    let names = fs::read_dir(directory).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
    let name = names.filter(|name| name.starts_with(&begins)).max();
    directory.join(name.unwrap_or_else(|| panic!("{begins} is there")))
}

fn delete(directory: &Path, kind: &str, token: u64) {
    fs::remove_file(file(directory, kind, token)).unwrap();
}

fn not_understood<T: std::fmt::Debug>(outcome: Result<T, StoreError>, names: &str) -> String {
    match outcome {
        Err(error @ StoreError::NotUnderstood { .. }) => {
            let text = error.to_string();
            assert!(text.contains(names), "{names}: {text}");
            text
        }
        other => panic!("{names}: {other:?}"),
    }
}

#[tokio::test]
async fn a_start_that_was_deleted_takes_no_acknowledged_write_back() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    for (number, (before, after)) in [("41", "42"), ("43", "44"), ("45", "46")].into_iter().enumerate() {
        let first = begin(&one).await.unwrap();
        put(&one, &first, 1, before).await;
        let second = begin(&one).await.unwrap();
        put(&one, &second, 1, after).await;
        delete(directory.path(), "start", second.token.get());
        assert!(matches!(one.renew(&second).await, Err(StoreError::Superseded)), "{number}");
        // Another process, which has seen nothing of it.
        let other = store(directory.path());
        let third = begin(&other).await.unwrap();
        assert!(third.token > second.token);
        assert_eq!(value(&other, &third).await.as_deref(), Some(after.as_bytes()));
    }
}

/// It has the state of the one before; that is proven by its renewals.
#[tokio::test]
async fn a_term_without_its_start_is_gone_on_from_where_it_was_renewed_or_given_up() {
    for release in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (store(directory.path()), store(directory.path()));
        let first = begin(&one).await.unwrap();
        put(&one, &first, 1, "41").await;
        let second = begin(&other).await.unwrap();
        match release {
            false => other.renew(&second).await.unwrap(),
            true => other.release(&second, None).await.unwrap(),
        }
        delete(directory.path(), "start", 2);
        // Of a term that is over, and of the one that was the last.
        delete(directory.path(), "state", 1);
        let third = begin(&one).await.unwrap();
        assert_eq!(value(&one, &third).await.as_deref(), Some(&b"41"[..]));
    }
}

#[tokio::test]
async fn where_the_last_state_cannot_be_had_no_term_begins_and_no_file_is_left() {
    // In how many terms something is written, how many begin, what is deleted, what is cut, and what is named.
    type Case = (u64, u64, &'static [(&'static str, u64)], &'static [(&'static str, u64)], &'static str);
    let cases: [Case; 4] = [
        // The third has a value of the second, of which nothing else is left.
        (2, 3, &[("start", 3), ("start", 2), ("state", 2)], &[], "state-00000000000000000003-counter"),
        // The second began with a value, and has none.
        (1, 2, &[("state", 2)], &[], "state-00000000000000000002-counter"),
        // A claim that came to nothing has a value of the first, which has none.
        (1, 2, &[("start", 2), ("state", 1)], &[], "state-00000000000000000001-counter"),
        // It may be the last state or a link to the one before.
        (2, 2, &[("start", 2)], &[("state", 2)], "state-00000000000000000002-counter"),
    ];
    for (written, begun, deleted, cut, named) in cases {
        let directory = tempfile::tempdir().unwrap();
        let one = store(directory.path());
        for token in 1..=begun {
            let term = begin(&one).await.unwrap();
            if token <= written {
                put(&one, &term, 1, "41").await;
            }
        }
        deleted
            .iter()
            .for_each(|(kind, token)| fs::remove_file(file(directory.path(), kind, *token)).unwrap());
        cut.iter().for_each(|(kind, token)| fs::write(file(directory.path(), kind, *token), "").unwrap());
        let before = fs::read_dir(directory.path()).unwrap().count();
        for _ in 0..3 {
            // Another process, which has seen nothing of it.
            let text = not_understood(begin(&store(directory.path())).await, named);
            assert!(text.contains("missing") && text.contains("put back"), "{text}");
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), before, "{named}");
    }
}

#[tokio::test]
async fn a_value_that_was_deleted_under_its_holder_is_not_taken_for_one_that_never_was() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    let term = begin(&one).await.unwrap();
    assert_eq!(value(&one, &term).await, None);
    put(&one, &term, 1, "41").await;
    delete(directory.path(), "state", 1);
    let named = "state-00000000000000000001-counter";
    not_understood(one.load(&term, "counter").await, named);
    let write = Write::new("counter", Version::ABSENT, 2, Bytes::from_static(b"1"));
    not_understood(one.write(&term, &write).await, named);
    // One that the term began with, as another process sees it.
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (store(directory.path()), store(directory.path()));
    let first = begin(&one).await.unwrap();
    put(&one, &first, 1, "41").await;
    let second = begin(&other).await.unwrap();
    delete(directory.path(), "state", 2);
    not_understood(other.load(&second, "counter").await, "state-00000000000000000002-counter");
}

/// Puts something into the place of a file that is none.
fn replace(path: &Path, by: &str) -> Box<dyn std::any::Any> {
    if path.exists() {
        fs::remove_file(path).unwrap();
    }
    match by {
        "a directory" => fs::create_dir(path).unwrap(),
        "a FIFO" => mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap(),
        "a socket" => return Box::new(UnixListener::bind(path).unwrap()),
        _ => std::os::unix::fs::symlink("/dev/zero", path).unwrap(),
    }
    Box::new(())
}

#[tokio::test]
async fn what_is_no_file_is_refused_with_its_path_and_holds_no_thread() {
    for by in ["a directory", "a FIFO", "a socket", "a device"] {
        for kind in ["term", "heartbeat", "released", "state", "start"] {
            let directory = tempfile::tempdir().unwrap();
            let (one, other) = (store(directory.path()), store(directory.path()));
            let first = begin(&one).await.unwrap();
            put(&one, &first, 1, "41").await;
            let seen = other.read().await.unwrap();
            let key = if kind == "state" { "-counter" } else { "" };
            let path = directory.path().join(format!("{kind}-{:020}{key}", 1));
            let _kept = replace(&path, by);
            let steps = async {
                match kind {
                    "state" => not_understood(one.load(&first, "counter").await, path.to_str().unwrap()),
                    "start" => {
                        not_understood(other.acquire(&seen, &claim("b")).await, path.to_str().unwrap())
                    }
                    _ => not_understood(other.read().await, path.to_str().unwrap()),
                }
            };
            let text = timeout(SOON / 2, steps).await.unwrap_or_else(|_| panic!("{kind}, {by}: no answer"));
            assert!(text.contains(by), "{kind}: {text}");
        }
    }
}

#[tokio::test]
async fn a_number_above_which_there_is_none_is_told_and_needs_no_restart() {
    let directory = tempfile::tempdir().unwrap();
    let one = store(directory.path());
    let first = begin(&one).await.unwrap();
    put(&one, &first, 1, "41").await;
    for number in [u64::MAX, u64::MAX - 1] {
        let foreign = directory.path().join(format!("void-{number:020}"));
        fs::write(&foreign, "").unwrap();
        match begin(&one).await {
            Err(StoreError::Refused { reason }) => {
                assert!(reason.contains(&number.to_string()) && reason.contains("remove"), "{reason}");
                assert!(reason.contains(directory.path().to_str().unwrap()), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        fs::remove_file(foreign).unwrap();
    }
    let second = begin(&one).await.unwrap();
    assert_eq!(second.token.get(), 2);
    assert_eq!(value(&one, &second).await.as_deref(), Some(&b"41"[..]));
}
