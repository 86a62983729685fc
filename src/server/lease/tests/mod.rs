//! The campaign on a paused clock, and the lease as its users have it.

use std::time::Duration;

use tokio::{sync::watch, task::JoinHandle, time::timeout};

use self::memory::{Fault, Memory, MemoryStore};
use super::*;
use crate::server::store::Nonce;

mod handle;
mod memory;

fn claim(instance: &str) -> Claim {
    Claim::new(instance, InstanceId::new("127.0.0.1", 1), Nonce::new(&format!("nonce of {instance}")))
}

/// A campaign on the test's own runtime, whose clock is paused.
struct Running {
    published: Arc<Published>,
    calls: TaskTracker,
    commands: mpsc::UnboundedSender<Command>,
    alive: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Running {
    fn start(store: &MemoryStore, instance: &str) -> Self {
        let timing = timing::Timing::default();
        let (commands, orders) = mpsc::unbounded_channel();
        let (alive, told) = watch::channel(true);
        let published = Arc::new(Published::new(instance.to_owned(), claim(instance).address));
        let calls = TaskTracker::new();
        calls.close();
        let campaign = Campaign {
            timing,
            election: Election::new(timing, &claim(instance), HasherRng::new(), Instant::now()),
            store: Arc::new(store.clone()),
            claim: claim(instance),
            published: published.clone(),
            calls: calls.clone(),
            commands: orders,
            alive: Some((told, None)),
            under_way: UnderWay::default(),
        };
        Self { published, calls, commands, alive, task: tokio::spawn(campaign.run()) }
    }

    fn role(&self) -> Role {
        self.published.role().borrow().clone()
    }

    fn token(&self) -> Option<FencingToken> {
        self.role().primary_at(Instant::now())
    }

    /// When it is primary, and in which term.
    async fn primary(&self) -> FencingToken {
        let mut role = self.published.role();
        let is = |role: &Role| role.primary_at(Instant::now()).is_some();
        let role = timeout(Duration::from_secs(60), role.wait_for(is)).await.expect("it is primary").unwrap();
        role.primary_at(Instant::now()).unwrap()
    }

    async fn standby(&self) {
        let mut role = self.published.role();
        let is = |role: &Role| matches!(role, Role::Standby { primary: Some(_) });
        timeout(Duration::from_secs(60), role.wait_for(is)).await.expect("it stands by").unwrap();
    }

    fn give_up(
        &self,
        successor: Option<&str>,
        drain: u64,
    ) -> oneshot::Receiver<Result<usize, HandOverError>> {
        let (reply, answer) = oneshot::channel();
        let (successor, drain) = (successor.map(str::to_owned), Duration::from_millis(drain));
        let _ = self.commands.send(Command::GiveUp { successor, drain, reply });
        answer
    }
}

/// A primary and a standby that knows it.
async fn pair(memory: &Memory) -> [(Running, MemoryStore); 2] {
    let stores = [memory.store(), memory.store()];
    let first = Running::start(&stores[0], "a");
    first.primary().await;
    let second = Running::start(&stores[1], "b");
    second.standby().await;
    let [one, other] = stores;
    [(first, one), (second, other)]
}

async fn sleep(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_is_taken_over_within_the_promise() {
    for dies_after in (0..2_000).step_by(130) {
        let memory = Memory::released();
        let [(first, _), (second, _)] = pair(&memory).await;
        sleep(dies_after).await;
        first.task.abort();
        let dead = Instant::now();
        let token = second.primary().await;
        let took = dead.elapsed();
        assert!(took <= Duration::from_millis(2_500), "{took:?}");
        assert_eq!(token, FencingToken::new(3));
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_is_taken_over_at_once() {
    let memory = Memory::released();
    let [(first, _), (second, _)] = pair(&memory).await;
    sleep(1_000).await;
    let at = Instant::now();
    first.give_up(None, 0).await.unwrap().unwrap();
    second.primary().await;
    assert!(at.elapsed() <= Duration::from_millis(50), "{:?}", at.elapsed());
    // Which can win it again.
    first.standby().await;
    second.task.abort();
    first.primary().await;
}

#[tokio::test(start_paused = true)]
async fn renewals_move_the_end_on_and_wake_nobody() {
    let memory = Memory::released();
    let [(first, _), (second, _)] = pair(&memory).await;
    let (mut role, mut others, mut term) =
        (first.published.role(), second.published.role(), first.published.term());
    role.mark_unchanged();
    others.mark_unchanged();
    term.mark_unchanged();
    let until = |role: &Role| match role {
        Role::Primary { until, .. } => *until,
        other => panic!("{other:?}"),
    };
    let before = until(&role.borrow());
    sleep(10_000).await;
    assert!(until(&role.borrow()) >= before + Duration::from_millis(9_600));
    assert!(!role.has_changed().unwrap() && !others.has_changed().unwrap() && !term.has_changed().unwrap());
}

#[tokio::test(start_paused = true)]
async fn whatever_hangs_beside_it_a_renewal_is_sent_when_it_is_due() {
    let memory = Memory::released();
    let [(first, store), _] = pair(&memory).await;
    store.faults.lock().read = Fault::Hangs;
    store.faults.lock().changed = Fault::Hangs;
    let token = first.token();
    for _ in 0..30 {
        sleep(100).await;
        assert_eq!(first.token(), token);
    }
    // One renewal that hangs is followed by another that does not.
    for _ in 0..10 {
        store.faults.lock().renew = Fault::Hangs;
        sleep(400).await;
        store.faults.lock().renew = Fault::None;
        sleep(800).await;
        assert_eq!(first.token(), token);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_comes_back_finds_the_same_primary() {
    for fault in [Fault::Hangs, Fault::HangsAfterwards, Fault::Panics, Fault::Fails] {
        let memory = Memory::released();
        let [(first, one), (second, two)] = pair(&memory).await;
        let (token, term) = (first.token(), first.published.term().borrow().clone());
        let all =
            memory::Faults { read: fault, changed: fault, acquire: fault, renew: fault, release: fault };
        (*one.faults.lock(), *two.faults.lock()) = (all, all);
        sleep(1_000).await;
        assert_eq!(first.token(), token, "{fault:?}: it has time left");
        // A lost answer is as good as a renewal to a standby, and none to the holder.
        sleep(10_000).await;
        assert_eq!((first.role(), second.role()), (Role::Unknown, Role::Unknown), "{fault:?}");
        *one.faults.lock() = memory::Faults::default();
        *two.faults.lock() = memory::Faults::default();
        assert_eq!(Some(first.primary().await), token);
        assert_eq!(*first.published.term().borrow(), term);
        sleep(10_000).await;
        assert_eq!((first.token(), second.token()), (token, None));
    }
}

#[tokio::test(start_paused = true)]
async fn an_acquisition_whose_answer_is_lost_is_found() {
    let memory = Memory::released();
    let store = memory.store();
    store.faults.lock().acquire = Fault::HangsAfterwards;
    let first = Running::start(&store, "a");
    let token = first.primary().await;
    assert_eq!(token, FencingToken::new(2));
    assert_eq!(memory.holder().as_deref(), Some("a"));
}

#[tokio::test(start_paused = true)]
async fn of_many_that_start_at_once_one_is_primary() {
    let memory = Memory::released();
    let all: Vec<_> = (0..20).map(|n| Running::start(&memory.store(), &format!("n{n}"))).collect();
    for _ in 0..50 {
        sleep(100).await;
        assert_eq!(all.iter().filter(|it| it.token().is_some()).count(), 1);
    }
    assert_eq!(
        memory.record().holder.unwrap().primary.token,
        FencingToken::new(2),
        "nobody else began a term"
    );
}

#[tokio::test(start_paused = true)]
async fn a_hand_over_waits_for_calls_in_flight_and_goes_to_the_successor() {
    let memory = Memory::released();
    let [(first, _), (second, _)] = pair(&memory).await;
    let third = Running::start(&memory.store(), "c");
    third.standby().await;
    let call = first.calls.token();
    let answer = first.give_up(Some("c"), 60_000);
    sleep(10_000).await;
    // No new work, and the old may go on.
    assert_eq!(first.role(), Role::Standby { primary: None });
    assert!(first.published.term().borrow().is_some());
    assert_eq!(memory.holder().as_deref(), Some("a"));
    drop(call);
    let at = Instant::now();
    assert_eq!(answer.await.unwrap().unwrap(), 0);
    third.primary().await;
    assert!(at.elapsed() < Duration::from_millis(100), "{:?}", at.elapsed());
    assert_eq!((first.token(), second.token()), (None, None));
    first.standby().await;
}

#[tokio::test(start_paused = true)]
async fn a_hand_over_ends_although_calls_do_not() {
    let memory = Memory::released();
    let [(first, _), (second, _)] = pair(&memory).await;
    let _call = first.calls.token();
    assert_eq!(first.give_up(None, 3_000).await.unwrap().unwrap(), 1);
    second.primary().await;
}

#[tokio::test(start_paused = true)]
async fn a_successor_that_is_not_there_costs_the_leases_length() {
    let memory = Memory::released();
    let [(first, _), (second, _)] = pair(&memory).await;
    first.give_up(Some("nobody"), 0).await.unwrap().unwrap();
    let at = Instant::now();
    second.primary().await;
    assert!((1_950..=2_500).contains(&at.elapsed().as_millis()), "{:?}", at.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_release_that_the_store_does_not_take_is_told_and_the_role_is_given_up_at_once() {
    let memory = Memory::released();
    let [(first, store), (second, _)] = pair(&memory).await;
    store.faults.lock().release = Fault::Fails;
    let at = Instant::now();
    let answer = first.give_up(None, 0);
    sleep(1).await;
    assert_eq!(first.token(), None);
    let error = answer.await.unwrap().unwrap_err();
    assert!(matches!(error, HandOverError::Store { source: StoreError::Unavailable { .. } }), "{error:?}");
    assert!(at.elapsed() <= Duration::from_millis(2_001), "{:?}", at.elapsed());
    second.primary().await;
    first.standby().await;
}

#[tokio::test(start_paused = true)]
async fn a_standby_has_nothing_to_hand_over() {
    let memory = Memory::released();
    let [_first, (second, _)] = pair(&memory).await;
    assert!(matches!(second.give_up(None, 0).await.unwrap(), Err(HandOverError::NotHeld)));
}

#[tokio::test(start_paused = true)]
async fn what_serves_nothing_gives_the_lease_up_at_once_and_can_win_it_again() {
    let memory = Memory::released();
    let [(first, _), (second, _)] = pair(&memory).await;
    first.alive.send(false).unwrap();
    let at = Instant::now();
    second.primary().await;
    assert!(at.elapsed() < Duration::from_millis(100), "{:?}", at.elapsed());
    second.alive.send(false).unwrap();
    sleep(10_000).await;
    assert_eq!((first.token(), second.token()), (None, None));
    first.alive.send(true).unwrap();
    first.primary().await;
    // Who judges is gone.
    let Running { alive, published, task, commands, calls } = first;
    drop(alive);
    sleep(1).await;
    assert!(!matches!(*published.role().borrow(), Role::Primary { .. }));
    assert_eq!(memory.holder(), None);
    assert!(!task.is_finished());
    drop((commands, calls));
}

#[tokio::test(start_paused = true)]
async fn the_end_releases_and_waits_no_longer_than_it_says() {
    let memory = Memory::released();
    let [(first, _), (second, store)] = pair(&memory).await;
    first.commands.send(Command::Shutdown).unwrap();
    let at = Instant::now();
    first.task.await.unwrap();
    assert!(at.elapsed() < Duration::from_millis(10), "{:?}", at.elapsed());
    assert_eq!(*first.published.role().borrow(), Role::Unknown);
    second.primary().await;
    // A store that takes no release.
    *store.faults.lock() =
        memory::Faults { release: Fault::Hangs, renew: Fault::Hangs, ..Default::default() };
    drop(second.commands);
    let at = Instant::now();
    second.task.await.unwrap();
    assert!(at.elapsed() <= Duration::from_millis(1_001), "{:?}", at.elapsed());
    assert_eq!(*second.published.role().borrow(), Role::Unknown);
}
