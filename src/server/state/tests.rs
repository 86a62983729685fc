mod panics;

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::FutureExt;
use serde::{Deserialize, Serializer};
use tokio::{sync::Semaphore, time::timeout};

use super::*;
use crate::{
    role::FencingToken,
    server::store::{Claim, LeaseRecord, Nonce, StoreError, Stored, Version, Write},
};

/// What becomes of a write.
#[derive(Clone, Copy, Debug)]
enum Fault {
    LostAfterwards,
    LostBefore,
    Unavailable,
    Refused,
}

/// A store in memory: one value, the token of its holder, and what is to go wrong with the next steps.
#[derive(Debug)]
struct Scripted {
    holder: Mutex<u64>,
    stored: Mutex<Option<Stored>>,
    versions: AtomicUsize,
    writes: AtomicUsize,
    loads: AtomicUsize,
    write_faults: Mutex<VecDeque<Fault>>,
    load_faults: Mutex<VecDeque<Fault>>,
    /// A place for each write that may go on.
    gate: Semaphore,
}

fn no_answer() -> Arc<std::io::Error> {
    Arc::new(std::io::ErrorKind::TimedOut.into())
}

// === impl Scripted ===

impl Scripted {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            holder: Mutex::new(1),
            stored: Mutex::new(None),
            versions: AtomicUsize::new(1),
            writes: AtomicUsize::new(0),
            loads: AtomicUsize::new(0),
            write_faults: Mutex::default(),
            load_faults: Mutex::default(),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
        })
    }

    fn put(&self, token: FencingToken, sequence: u64, value: Bytes) -> Version {
        let version = Version::new(self.versions.fetch_add(1, Ordering::Relaxed) as u64);
        *self.stored.lock() = Some(Stored::new(version, token, sequence, value));
        version
    }

    fn text(&self) -> String {
        let stored = self.stored.lock().clone();
        stored.map_or_else(String::new, |stored| String::from_utf8_lossy(&stored.value).into_owned())
    }

    fn faults(&self, faults: impl IntoIterator<Item = Fault>) {
        self.write_faults.lock().extend(faults);
    }

    fn count(&self, of: &AtomicUsize) -> usize {
        of.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl LeaseStore for Scripted {
    async fn read(&self) -> Result<LeaseRecord, StoreError> {
        Ok(LeaseRecord::empty())
    }

    async fn changed(&self, _: &LeaseRecord, _: Duration) -> Result<LeaseRecord, StoreError> {
        Ok(LeaseRecord::empty())
    }

    async fn acquire(&self, _: &LeaseRecord, _: &Claim) -> Result<Term, StoreError> {
        Err(StoreError::Superseded)
    }

    async fn renew(&self, _: &Term) -> Result<(), StoreError> {
        Ok(())
    }

    async fn release(&self, _: &Term, _: Option<&str>) -> Result<(), StoreError> {
        Ok(())
    }

    async fn load(&self, term: &Term, _: &str) -> Result<Option<Stored>, StoreError> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        if self.load_faults.lock().pop_front().is_some() {
            return Err(StoreError::Unavailable { source: no_answer() });
        }
        if *self.holder.lock() != term.token.get() {
            return Err(StoreError::Superseded);
        }
        Ok(self.stored.lock().clone())
    }

    async fn write(&self, term: &Term, write: &Write) -> Result<Version, StoreError> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.gate.acquire().await.expect("it is never closed").forget();
        let fault = self.write_faults.lock().pop_front();
        match fault {
            Some(Fault::LostBefore) => return Err(StoreError::Unanswered { source: no_answer() }),
            Some(Fault::Unavailable) => return Err(StoreError::Unavailable { source: no_answer() }),
            Some(Fault::Refused) => return Err(StoreError::Refused { reason: "no right".into() }),
            Some(Fault::LostAfterwards) | None => {}
        }
        if *self.holder.lock() != term.token.get() {
            return Err(StoreError::Superseded);
        }
        let version = self.stored.lock().as_ref().map_or(Version::ABSENT, |stored| stored.version);
        if version != write.expected {
            return Err(StoreError::Conflict);
        }
        let version = self.put(term.token, write.sequence, write.value.clone());
        match fault {
            Some(Fault::LostAfterwards) => Err(StoreError::Unanswered { source: no_answer() }),
            _ => Ok(version),
        }
    }

    fn value_limit(&self) -> usize {
        100
    }
}

fn term(token: u64) -> Option<Arc<Term>> {
    Some(Arc::new(Term::new(FencingToken::new(token), Version::new(token), Nonce::new("n"))))
}

type Terms = watch::Sender<Option<Arc<Term>>>;

fn state<T>(store: &Arc<Scripted>) -> (FencedState<T>, Terms)
where
    T: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static,
{
    let (terms, seen) = watch::channel(term(1));
    (FencedState::builder(store.clone(), seen, "counter").build().unwrap(), terms)
}

async fn add(state: &FencedState<u64>) -> Result<u64, StateError> {
    let add = state.update(|n| {
        *n += 1;
        *n
    });
    timeout(Duration::from_secs(60), add).await.expect("an answer comes")
}

#[tokio::test(start_paused = true)]
async fn a_thousand_callers_make_few_writes_and_each_gets_its_own_answer() {
    let store = Scripted::new();
    let (state, _terms) = state(&store);
    let callers: Vec<_> = (0..1000)
        .map(|_| {
            let state = state.clone();
            tokio::spawn(async move { add(&state).await })
        })
        .collect();
    let mut answers = Vec::new();
    for caller in callers {
        answers.push(caller.await.unwrap().unwrap());
    }
    answers.sort_unstable();
    assert_eq!(answers, (1..=1000).collect::<Vec<_>>());
    assert_eq!(store.text(), "1000");
    assert!(store.count(&store.writes) < 10, "{}", store.count(&store.writes));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::disallowed_methods, reason = "an update that takes long blocks, whatever it does")]
async fn updates_that_take_long_are_not_all_done_before_the_first_is_answered() {
    let store = Scripted::new();
    let (state, _terms) = state::<u64>(&store);
    let (answered, is_answered) = std::sync::mpsc::channel();
    let (entered, is_entered) = std::sync::mpsc::channel();
    let (gate, opened) = std::sync::mpsc::channel();
    let late = Duration::from_secs(20);
    let holds_up = state.clone();
    let before = tokio::spawn(async move {
        let hold = move |_: &mut u64| {
            entered.send(()).unwrap();
            opened.recv().unwrap();
        };
        holds_up.update(hold).await
    });
    is_entered.recv_timeout(late).unwrap();
    let mut first = Box::pin(state.update(|_| std::thread::sleep(Duration::from_millis(50))));
    let mut second = Box::pin(state.update(move |_| is_answered.recv_timeout(late)));
    // Both are in the queue, in this order.
    assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
    gate.send(()).unwrap();
    before.await.unwrap().unwrap();
    first.await.unwrap();
    answered.send(()).unwrap();
    second.await.unwrap().expect("the first was answered before the second was applied");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_answered_before_the_store_has_it() {
    let store = Scripted::new();
    store.gate.forget_permits(usize::MAX);
    let (state, _terms) = state::<u64>(&store);
    let update = add(&state);
    tokio::pin!(update);
    assert!(timeout(Duration::from_secs(5), &mut update).await.is_err());
    assert_eq!(state.possibly_stale().as_deref().copied().unwrap_or_default(), 0);
    store.gate.add_permits(1);
    assert_eq!(update.await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_update_that_refuses_or_panics_changes_nothing_and_holds_nobody_up() {
    let store = Scripted::new();
    let (state, _terms) = state::<u64>(&store);
    let refuses = state.try_update(|n| {
        *n = 77;
        Err::<(), _>("no")
    });
    let panics = tokio::spawn({
        let state = state.clone();
        async move {
            state
                .update(|n: &mut u64| {
                    if std::mem::replace(n, 88) < 100 {
                        panic!("its own")
                    }
                })
                .await
        }
    });
    let (first, refused, second, panicked) = tokio::join!(add(&state), refuses, add(&state), panics);
    assert_eq!((first.unwrap(), second.unwrap()), (1, 2));
    assert!(matches!(refused, Err(UpdateError::Refused("no"))), "{refused:?}");
    assert!(panicked.is_err_and(|error| error.is_panic()));
    assert_eq!(store.text(), "2");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_went_by_a_deposed_primarys_value_is_not_told() {
    let store = Scripted::new();
    let (state, _terms) = state(&store);
    add(&state).await.unwrap();
    *store.holder.lock() = 2;
    let refused = state.try_update(|_| Err::<(), _>("no")).await;
    assert!(matches!(refused, Err(UpdateError::State(StateError::NotPrimary))), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_was_lost_is_stored_once_whether_it_was_done_or_not() {
    for faults in [
        vec![Fault::LostAfterwards],
        vec![Fault::LostBefore],
        vec![Fault::LostBefore, Fault::LostAfterwards],
        vec![Fault::LostAfterwards, Fault::LostBefore, Fault::Unavailable],
        vec![Fault::Unavailable],
    ] {
        let store = Scripted::new();
        let (state, _terms) = state(&store);
        store.faults(faults.clone());
        assert_eq!(add(&state).await.unwrap(), 1, "{faults:?}");
        assert_eq!(add(&state).await.unwrap(), 2, "{faults:?}");
        assert_eq!(store.text(), "2", "{faults:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_may_be_stored_is_never_called_not_primary() {
    for (fault, stored) in [(Fault::LostAfterwards, "1"), (Fault::LostBefore, "")] {
        // Another takes over before it is sent again.
        let store = Scripted::new();
        let (state, _terms) = state(&store);
        state.read().await.unwrap();
        store.faults([fault]);
        let update = add(&state);
        let takeover = async {
            while store.count(&store.writes) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            *store.holder.lock() = 2;
        };
        let (error, ()) = tokio::join!(update, takeover);
        let error = error.unwrap_err();
        assert!(error.may_be_stored(), "{error:?}");
        assert_eq!(store.text(), stored);
        assert!(matches!(add(&state).await, Err(StateError::NotPrimary)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_without_an_answer_ends_with_the_term_and_says_what_is_known() {
    for (fault, may_be_stored) in [(Fault::LostBefore, true), (Fault::Unavailable, false)] {
        let store = Scripted::new();
        let (state, terms) = state(&store);
        store.faults([fault; 10_000]);
        let ends = async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            terms.send_replace(None);
        };
        let (error, ()) = tokio::join!(add(&state), ends);
        assert_eq!(error.unwrap_err().may_be_stored(), may_be_stored, "{fault:?}");
        assert!(store.count(&store.writes) > 10, "it was sent again and again");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deposed_primary_is_told_so_and_a_standby_asks_nobody() {
    let store = Scripted::new();
    let (state, terms) = state(&store);
    add(&state).await.unwrap();
    *store.holder.lock() = 2;
    assert!(matches!(add(&state).await, Err(StateError::NotPrimary)));
    assert!(matches!(state.read().await, Err(StateError::NotPrimary)));
    assert_eq!(store.text(), "1");
    terms.send_replace(None);
    let asked = store.count(&store.loads);
    assert!(matches!(add(&state).await, Err(StateError::NotPrimary)));
    assert!(matches!(state.read().await, Err(StateError::NotPrimary)));
    assert_eq!(store.count(&store.loads), asked);
    assert_eq!(*state.possibly_stale().unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_gone_leaves_no_term_behind() {
    let store = Scripted::new();
    let (state, terms) = state(&store);
    add(&state).await.unwrap();
    drop(terms);
    assert!(matches!(add(&state).await, Err(StateError::NotPrimary)));
}

#[tokio::test(start_paused = true)]
async fn a_new_term_goes_on_from_what_others_have_written_meanwhile() {
    let store = Scripted::new();
    let (state, terms) = state(&store);
    add(&state).await.unwrap();
    store.put(FencingToken::new(2), 1, "50".into());
    *store.holder.lock() = 3;
    terms.send_replace(None);
    terms.send_replace(term(3));
    assert_eq!(add(&state).await.unwrap(), 51);
}

#[tokio::test(start_paused = true)]
async fn a_term_loads_the_value_before_anybody_asks_and_once() {
    let store = Scripted::new();
    store.put(FencingToken::new(1), 1, "7".into());
    let (state, _terms) = state::<u64>(&store);
    let known = async {
        while state.possibly_stale().is_none() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(60), known).await.expect("it is loaded");
    assert_eq!(add(&state).await.unwrap(), 8);
    assert_eq!(add(&state).await.unwrap(), 9);
    assert_eq!((store.count(&store.loads), store.count(&store.writes)), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn reads_share_one_confirmation_and_none_is_answered_without() {
    let store = Scripted::new();
    let (state, _terms) = state(&store);
    add(&state).await.unwrap();
    let before = store.count(&store.loads);
    let readers: Vec<_> = (0..100)
        .map(|_| {
            let state = state.clone();
            tokio::spawn(async move { state.read().await })
        })
        .collect();
    for reader in readers {
        assert_eq!(*reader.await.unwrap().unwrap(), 1);
    }
    let loads = store.count(&store.loads) - before;
    assert!((1..5).contains(&loads), "{loads}");
}

#[tokio::test(start_paused = true)]
async fn a_value_that_is_too_long_is_refused_alone_and_changes_nothing() {
    let store = Scripted::new();
    let (state, _terms) = state::<String>(&store);
    let long = state.update(|text| text.push_str(&"x".repeat(99)));
    let (first, long, second) =
        tokio::join!(state.update(|text| text.push('a')), long, state.update(|text| text.push('b')));
    first.unwrap();
    second.unwrap();
    assert!(matches!(long, Err(StateError::TooLarge { size: 102, limit: 100 })), "{long:?}");
    assert_eq!(*state.read().await.unwrap(), "ab");
    assert_eq!(store.text(), "\"ab\"");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_is_told_and_stays_until_it_is_repaired() {
    let store = Scripted::new();
    store.put(FencingToken::new(1), 1, "{not json".into());
    let (state, _terms) = state(&store);
    for _ in 0..2 {
        let error = add(&state).await.unwrap_err();
        assert!(matches!(&error, StateError::NotDecodable { key, .. } if key == "counter"), "{error:?}");
        assert!(std::error::Error::source(&error).is_some());
    }
    assert_eq!((store.text().as_str(), store.count(&store.writes)), ("{not json", 0));
    store.put(FencingToken::new(1), 2, "7".into());
    assert_eq!(add(&state).await.unwrap(), 8);
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn what_somebody_has_to_repair_is_logged_with_its_cause_once_until_it_is_well() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let lines = |about: &str| {
        let text = String::from_utf8(log.0.lock().clone()).unwrap();
        text.lines().filter(|line| line.contains(about)).map(str::to_owned).collect::<Vec<_>>()
    };
    let store = Scripted::new();
    store.put(FencingToken::new(1), 1, "{not json".into());
    let (state, _terms) = state(&store);
    for _ in 0..3 {
        add(&state).await.unwrap_err();
    }
    let told = lines("the state is of no use");
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("counter") && told[0].contains("line 1 column"), "{told:?}");
    store.put(FencingToken::new(1), 2, "7".into());
    add(&state).await.unwrap();
    add(&state).await.unwrap();
    assert_eq!(lines("can be used again").len(), 1);
    // And of a store that refuses, as where the rights to a key are gone.
    store.faults([Fault::Refused; 3]);
    for _ in 0..3 {
        add(&state).await.unwrap_err();
    }
    let told = lines("the state is of no use");
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[1].contains("no right"), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_says_why_and_nothing_is_kept_of_the_update() {
    let store = Scripted::new();
    let (state, _terms) = state(&store);
    store.faults([Fault::Refused]);
    let error = add(&state).await.unwrap_err();
    assert!(matches!(&error, StateError::Store { source: StoreError::Refused { .. } }), "{error:?}");
    assert_eq!(add(&state).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_asked_for_a_while_is_asked_again() {
    let store = Scripted::new();
    store.load_faults.lock().extend([Fault::Unavailable; 5]);
    let (state, _terms) = state(&store);
    assert_eq!(add(&state).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn two_states_of_one_key_lose_nothing_of_each_other() {
    let store = Scripted::new();
    let (one, _terms) = state(&store);
    let (other, _others) = state(&store);
    let (mut acknowledged, mut overtaken) = (0, 0);
    for _ in 0..20 {
        for state in [&one, &other] {
            match add(state).await {
                Ok(_) => acknowledged += 1,
                Err(StateError::Overtaken) => overtaken += 1,
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert_eq!(store.text(), acknowledged.to_string());
    assert!(overtaken > 0);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_says_so_and_what_is_dropped_in_it_is_passed_over() {
    let store = Scripted::new();
    store.gate.forget_permits(usize::MAX);
    let (_terms, seen) = watch::channel(term(1));
    let state: FencedState<u64> = FencedState::builder(store.clone(), seen, "c").queue(2).build().unwrap();
    let under_way = tokio::spawn({
        let state = state.clone();
        async move { add(&state).await }
    });
    while store.count(&store.writes) == 0 {
        tokio::task::yield_now().await;
    }
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let state = state.clone();
            tokio::spawn(async move { add(&state).await })
        })
        .collect();
    tokio::task::yield_now().await;
    assert!(matches!(add(&state).await, Err(StateError::QueueFull { limit: 2 })));
    waiting[0].abort();
    tokio::task::yield_now().await;
    store.gate.add_permits(100);
    assert_eq!(under_way.await.unwrap().unwrap(), 1);
    let mut answers = Vec::new();
    for waiting in waiting {
        answers.extend(waiting.await);
    }
    assert!(matches!(answers[..], [Ok(2)]), "{answers:?}");
}

#[tokio::test(start_paused = true)]
async fn the_task_ends_with_the_last_handle() {
    let store = Scripted::new();
    let (state, _terms) = state(&store);
    add(&state).await.unwrap();
    let clone = state.clone();
    drop(state);
    add(&clone).await.unwrap();
    drop(clone);
    while Arc::strong_count(&store) > 1 {
        tokio::task::yield_now().await;
    }
}

/// A value whose own code panics.
#[derive(Clone, Default, Debug, PartialEq, Deserialize)]
struct Panics(u32);

impl Serialize for Panics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        assert_ne!(self.0, 13, "unlucky");
        self.0.serialize(serializer)
    }
}

#[tokio::test(start_paused = true)]
async fn a_value_whose_own_code_panics_is_refused_alone() {
    let store = Scripted::new();
    let (state, _terms) = state::<Panics>(&store);
    let unlucky = state.update(|value| value.0 = 13).await;
    assert!(matches!(unlucky, Err(StateError::NotEncodable { .. })), "{unlucky:?}");
    state.update(|value| value.0 = 14).await.unwrap();
    assert_eq!(state.read().await.unwrap().0, 14);
}

/// JSON has no NaN: it is written as null, which no term could read afterwards.
#[tokio::test(start_paused = true)]
async fn a_value_that_could_not_be_read_back_is_never_stored() {
    let store = Scripted::new();
    let (rates, _terms) = state::<Vec<f64>>(&store);
    rates.update(|rates| rates.push(0.5)).await.unwrap();
    let (nan, other) =
        tokio::join!(rates.update(|rates| rates.push(f64::NAN)), rates.update(|rates| rates.push(1.5)));
    assert!(matches!(nan, Err(StateError::NotEncodable { .. })), "{nan:?}");
    other.unwrap();
    assert_eq!(store.text(), "[0.5,1.5]");
}

#[test]
fn a_state_is_not_made_of_what_cannot_be() {
    let builder = |key| {
        let (_, seen) = watch::channel(None);
        FencedState::builder(Scripted::new(), seen, key)
    };
    let error = builder("a/b").build::<u64>().unwrap_err();
    assert!(error.to_string().contains("\"a/b\""), "{error}");
    let error = builder("a").queue(0).build::<u64>().unwrap_err();
    assert!(error.to_string().contains("from 1 to"), "{error}");
    assert!(matches!(builder("a").build::<u64>(), Err(InvalidState::NoRuntime)));
}

#[test]
fn each_error_is_the_status_that_its_table_says() {
    use tonic::{Code, Status};
    let source = StoreError::Superseded;
    for (error, code) in [
        (StateError::NotPrimary, Code::Unavailable),
        (StateError::MayBeStored { source: source.clone() }, Code::Unavailable),
        (StateError::Store { source }, Code::Unavailable),
        (StateError::Overtaken, Code::Aborted),
        (StateError::QueueFull { limit: 1 }, Code::ResourceExhausted),
        (StateError::TooLarge { size: 2, limit: 1 }, Code::ResourceExhausted),
        (StateError::Ended, Code::Internal),
    ] {
        let status = Status::from(error.clone());
        assert_eq!(status.code(), code);
        assert!(status.message().contains(&error.to_string()), "{status}");
        assert!(
            std::error::Error::source(&status)
                .is_some_and(|source| source.is::<Arc<StateError>>() || source.is::<StateError>())
        );
    }
}
