//! A process that campaigns for a lease in files and, while it has it, counts.
//!
//! It tells what it does in lines: `@ term TOKEN FROM UNTIL`, `@ over AT`, `@ call ID KIND AT`,
//! `@ answer ID AT VALUE`, `@ undone ID`, `@ open ID`. Times are nanoseconds of the host's monotonic
//! clock, which is one for all processes.

use std::{
    env,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tonic_failover::{
    InstanceId,
    server::{
        FencedState, StateError,
        store::{Claim, FileLeaseStore, LeaseRecord, LeaseStore, Nonce, StoreError, Term},
    },
};

/// Short, so that much happens in a test's time.
const LENGTH: Duration = Duration::from_millis(400);
const MARGIN: Duration = Duration::from_millis(60);
const RENEWAL: Duration = Duration::from_millis(80);
const LOOK: Duration = Duration::from_millis(20);

/// Names the directory to a child.
pub(crate) const DIRECTORY: &str = "FILE_STORE_TEST_DIRECTORY";

/// What to do there.
pub(crate) const PART: &str = "FILE_STORE_TEST_PART";

/// Nanoseconds of the clock that all processes share.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap()
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap()
}

/// A claim of this process. No two have the same nonce.
pub(crate) fn claim(name: &str) -> Claim {
    let nonce = Nonce::new(&format!("{name}-{}-{}", std::process::id(), now()));
    Claim::new(name, InstanceId::new("127.0.0.1", 1), nonce)
}

struct Campaign {
    store: Arc<FileLeaseStore>,
    claim: Claim,
    terms: watch::Sender<Option<Arc<Term>>>,
}

impl Campaign {
    async fn run(self) {
        let mut seen: Option<(LeaseRecord, Instant)> = None;
        loop {
            sleep(LOOK).await;
            let Ok(record) = self.store.read().await else {
                seen = None;
                continue;
            };
            let since = match &seen {
                Some((before, since)) if *before == record => *since,
                _ => Instant::now(),
            };
            let free = record == LeaseRecord::empty() || record.released || since.elapsed() >= LENGTH;
            if free {
                let (sent, at) = (Instant::now(), now());
                if let Ok(term) = self.store.acquire(&record, &self.claim).await {
                    self.hold(term, sent, at).await;
                }
                seen = None;
            } else {
                seen = Some((record, since));
            }
        }
    }

    /// Renews until another has it.
    async fn hold(&self, term: Term, sent: Instant, at: u64) {
        let last = LENGTH - MARGIN;
        let (mut until, mut until_at) = (sent + last, at + nanos(last));
        let term = Arc::new(term);
        loop {
            let (token, mine) = (term.token, Instant::now() < until);
            let held = self.terms.borrow().is_some();
            if mine && !held {
                println!("@ term {token} {} {until_at}", now());
                self.terms.send_replace(Some(term.clone()));
            } else if !mine && held {
                self.terms.send_replace(None);
            }
            let next = if mine { until.min(Instant::now() + RENEWAL) } else { Instant::now() + LOOK };
            tokio::time::sleep_until(next).await;
            let (sent, at) = (Instant::now(), now());
            match self.store.renew(&term).await {
                Ok(()) => {
                    let held = self.terms.borrow().is_some() && Instant::now() < until;
                    (until, until_at) = (sent + last, at + nanos(last));
                    if held {
                        println!("@ term {token} {at} {until_at}");
                    }
                }
                Err(StoreError::Superseded) => {
                    self.terms.send_replace(None);
                    println!("@ over {}", now());
                    return;
                }
                Err(_) => {}
            }
        }
    }
}

async fn count(state: FencedState<u64>, calls: Arc<AtomicU64>) {
    loop {
        let id = calls.fetch_add(1, Ordering::Relaxed);
        let get = id.is_multiple_of(4);
        let called = now();
        println!("@ call {id} {} {called}", if get { "get" } else { "increment" });
        let answer = if get {
            state.read().await.map(|value| *value)
        } else {
            state
                .update(|value| {
                    *value += 1;
                    *value
                })
                .await
        };
        match answer {
            Ok(value) => println!("@ answer {id} {} {value}", now()),
            Err(error) if error.may_be_stored() => println!("@ open {id}"),
            Err(error) => {
                println!("@ undone {id}");
                assert!(matches!(error, StateError::NotPrimary), "{error}");
                sleep(Duration::from_millis(3)).await;
            }
        }
    }
}

async fn serve(directory: PathBuf) {
    let durable = env::var("FILE_STORE_TEST_DURABLE").is_ok();
    let store = Arc::new(FileLeaseStore::builder(directory).durable(durable).build().unwrap());
    let (terms, seen) = watch::channel(None);
    let state = FencedState::builder(store.clone(), seen, "counter").build::<u64>().unwrap();
    let calls = Arc::new(AtomicU64::new(0));
    for _ in 0..4 {
        tokio::spawn(count(state.clone(), calls.clone()));
    }
    Campaign { store, claim: claim("counter"), terms }.run().await;
}

/// Starts for the lease in each directory that it is told, at once.
async fn start() {
    for directory in std::io::stdin().lines() {
        let store = FileLeaseStore::new(directory.unwrap()).unwrap();
        let record = store.read().await.unwrap();
        // Another's claim is waited for, not taken over.
        if record != LeaseRecord::empty() {
            println!("@ lost");
            continue;
        }
        match store.acquire(&record, &claim("counter")).await {
            Ok(term) => println!("@ won {}", term.token),
            Err(StoreError::Superseded) => println!("@ lost"),
            Err(error) => println!("@ failed {error}"),
        }
    }
}

/// The child's life, in a test that is none unless it is told to be.
pub(crate) fn live() {
    let Ok(part) = env::var(PART) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match part.as_str() {
        "serve" => runtime.block_on(serve(env::var(DIRECTORY).unwrap().into())),
        _ => runtime.block_on(start()),
    }
}
