//! A lease in files, between real processes that are killed and paused, and with files that
//! are not what they should be.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod child;
mod deleted;
mod fleet;
#[path = "../common/history.rs"]
mod history;
mod odd;

use std::{
    collections::BTreeSet,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use rustix::process::Signal;
use tonic_failover::server::store::{FileLeaseStore, LeaseStore};

use self::{
    child::{claim, now},
    fleet::{Process, Told},
    history::{Call, Kind, Outcome, check},
};

/// None in itself: what the other tests start this program again for.
#[test]
fn a_child_of_these_tests_lives() {
    child::live();
}

struct Random(u64);

impl Random {
    /// Of the environment's seed, or of chance. Printed, so that a failure can be looked into.
    fn new() -> Self {
        let given = std::env::var("FILE_STORE_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = given.unwrap_or_else(|| RandomState::new().hash_one(1));
        println!("FILE_STORE_TEST_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Kills and pauses three processes as they count; what all of them have told.
async fn troubled(rounds: usize, durable: bool) -> Vec<Told> {
    let more = std::env::var("FILE_STORE_TEST_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    let rounds = more.unwrap_or(rounds);
    let mut random = Random::new();
    let directory = tempfile::tempdir().unwrap();
    let start = || Process::start("serve", directory.path(), durable);
    let mut processes = vec![start(), start(), start()];
    let mut told: Vec<Told> = Vec::new();
    // Until there was enough of it, however slow the machine is.
    for round in 0..10 * rounds {
        tokio::time::sleep(Duration::from_millis(100 + random.below(600))).await;
        let primaries: Vec<_> = processes.iter_mut().map(Process::primary_until).collect();
        let past: usize = told.iter().map(|told| told.tokens.len()).sum();
        if round >= rounds && past + primaries.iter().map(|(_, terms)| terms).sum::<usize>() > 4 {
            break;
        }
        // The primary twice as often as any.
        let primary = (0..3).max_by_key(|process| primaries[*process].0).unwrap_or(0);
        let chosen = if random.below(3) == 0 { random.below(3) as usize } else { primary };
        if random.below(2) == 0 {
            told.push(processes.remove(chosen).kill());
            processes.push(start());
        } else {
            // Shorter than the lease, or longer.
            processes[chosen].signal(Signal::STOP);
            tokio::time::sleep(Duration::from_millis(50 + random.below(900))).await;
            processes[chosen].signal(Signal::CONT);
        }
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    told.extend(processes.into_iter().map(Process::kill));
    // One that comes after them sees what counts in the end.
    let store = FileLeaseStore::new(directory.path()).unwrap();
    let term = store.acquire(&store.read().await.unwrap(), &claim("last")).await.unwrap();
    let called = now();
    let stored = store.load(&term, "counter").await.unwrap();
    let value = stored.map_or(0, |stored| String::from_utf8_lossy(&stored.value).parse().unwrap());
    let outcome = Outcome::Answered { returned: now(), value };
    told.push(Told { calls: vec![Call { called, kind: Kind::Get, outcome }], ..Told::default() });
    told
}

fn judge(told: &[Told]) {
    let calls: Vec<_> = told.iter().flat_map(|told| told.calls.clone()).collect();
    let answered = check(&calls).unwrap_or_else(|wrong| panic!("{wrong}"));
    let open = calls.iter().filter(|call| call.outcome == Outcome::Open).count();
    let mut tokens = BTreeSet::new();
    let mut primaries = Vec::new();
    for (process, told) in told.iter().enumerate() {
        for token in told.tokens.iter().collect::<BTreeSet<_>>() {
            assert!(tokens.insert(*token), "term {token} was begun by two");
        }
        primaries.extend(told.primary.iter().map(|(from, until)| (*from, *until, process)));
    }
    primaries.sort_unstable();
    for pair in primaries.windows(2) {
        let ((_, until, one), (from, _, other)) = (pair[0], pair[1]);
        assert!(one == other || until <= from, "two are primary: {pair:?}");
    }
    println!("{answered} increments answered, {open} calls open, {} terms", tokens.len());
    assert!(answered > 20 && tokens.len() > 3, "much has happened");
}

#[tokio::test]
async fn processes_that_are_killed_and_paused_lose_no_acknowledged_write() {
    judge(&troubled(14, false).await);
}

#[tokio::test]
async fn processes_that_are_killed_and_paused_lose_nothing_on_the_disk_either() {
    judge(&troubled(8, true).await);
}

#[test]
fn of_two_processes_that_start_at_the_same_instant_one_is_primary_a_hundred_times() {
    let scratch = tempfile::tempdir().unwrap();
    let mut processes = [0, 1].map(|_| Process::start("start", scratch.path(), false));
    for round in 0..100 {
        let directory = scratch.path().join(round.to_string());
        std::fs::create_dir(&directory).unwrap();
        for process in &mut processes {
            process.write(directory.to_str().unwrap());
        }
        let mut answers = Vec::new();
        for process in &processes {
            answers.push(process.lines.recv_timeout(Duration::from_secs(30)).unwrap());
        }
        let won = answers.iter().filter(|answer| answer.starts_with("won")).count();
        let lost = answers.iter().filter(|answer| *answer == "lost").count();
        assert_eq!((won, lost), (1, 1), "round {round}: {answers:?}");
    }
}

#[tokio::test]
async fn of_many_that_acquire_what_they_have_all_seen_one_does_a_hundred_times() {
    for round in 0..100 {
        let directory = tempfile::tempdir().unwrap();
        let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(8));
        let starts: Vec<_> = (0..8)
            .map(|_| {
                let store =
                    FileLeaseStore::builder(directory.path()).durable(round % 10 == 0).build().unwrap();
                let barrier = barrier.clone();
                tokio::spawn(async move {
                    let record = store.read().await.unwrap();
                    barrier.wait().await;
                    store.acquire(&record, &claim("counter")).await
                })
            })
            .collect();
        let mut won = 0;
        for start in starts {
            match start.await.unwrap() {
                Ok(term) => {
                    assert_eq!(term.token.get(), 1);
                    won += 1;
                }
                Err(error) => assert_eq!(error.to_string(), "the lease is no longer as it was read"),
            }
        }
        assert_eq!(won, 1, "round {round}");
    }
}
