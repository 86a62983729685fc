//! Closures, results and values that panic as they are dropped: whom it concerns, and nobody else.

use std::panic::panic_any;

use serde::Serialize;
use tokio::task::{JoinHandle, yield_now};

use super::*;

/// Panics as it is dropped.
#[derive(Debug)]
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("its own drop");
    }
}

type Ask = JoinHandle<Result<(), StateError>>;

/// An update in a task of its own, whose caller keeps nothing that it gets.
fn ask<R: Send + 'static>(
    state: &FencedState<u64>,
    change: impl FnOnce(&mut u64) -> R + Send + 'static,
) -> Ask {
    let state = state.clone();
    tokio::spawn(async move { state.update(change).await.map(std::mem::forget) })
}

/// A state that has a write under way, which the gate holds.
async fn held(store: &Arc<Scripted>) -> (FencedState<u64>, Terms, Ask) {
    store.gate.forget_permits(usize::MAX);
    let (state, terms) = state::<u64>(store);
    let under_way = ask(&state, |n| *n += 1);
    while store.count(&store.writes) == 0 {
        yield_now().await;
    }
    (state, terms, under_way)
}

/// Lets the writes go on, when what was asked last waits in the queue.
async fn go_on(store: &Scripted) {
    for _ in 0..10 {
        yield_now().await;
    }
    store.gate.add_permits(1000);
}

#[tokio::test(start_paused = true)]
async fn a_closure_that_is_never_run_may_panic_as_it_is_dropped() {
    let store = Scripted::new();
    let (state, terms, under_way) = held(&store).await;
    let bomb = Bomb;
    let forgotten = ask(&state, move |_| drop(bomb));
    yield_now().await;
    forgotten.abort();
    let (bomb, other) = (Bomb, Bomb);
    let refused = [ask(&state, move |_| drop(bomb)), ask(&state, move |_| drop(other))];
    let beside = ask(&state, |n| *n += 1);
    yield_now().await;
    terms.send_replace(None);
    go_on(&store).await;
    under_way.await.unwrap().unwrap();
    for asked in refused.into_iter().chain([beside]) {
        let answer = asked.await.unwrap();
        assert!(matches!(answer, Err(StateError::NotPrimary)), "{answer:?}");
    }
    terms.send_replace(term(1));
    assert_eq!(add(&state).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_closure_that_panics_as_it_is_run_may_hold_what_panics_as_it_is_dropped() {
    let store = Scripted::new();
    let (state, _terms, under_way) = held(&store).await;
    let bomb = Bomb;
    let panics = ask(&state, move |_| drop(bomb));
    let payload = ask(&state, |_| panic_any(Bomb));
    let beside = ask(&state, |n| *n += 1);
    yield_now().await;
    // Whoever asked has gone when its panic is known.
    store.gate.add_permits(1);
    while store.count(&store.writes) == 1 {
        yield_now().await;
    }
    payload.abort();
    go_on(&store).await;
    under_way.await.unwrap().unwrap();
    assert!(panics.await.is_err_and(|error| error.is_panic()), "it goes on in the caller");
    beside.await.unwrap().unwrap();
    assert_eq!(add(&state).await.unwrap(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_result_that_nobody_gets_may_panic_as_it_is_dropped() {
    let store = Scripted::new();
    let (state, _terms, under_way) = held(&store).await;
    go_on(&store).await;
    under_way.await.unwrap().unwrap();
    // The store does not take it.
    store.faults([Fault::Refused]);
    let refused = [ask(&state, |n| (*n += 1, Bomb)), ask(&state, |n| (*n += 1, Bomb))];
    for asked in refused {
        let answer = asked.await.unwrap();
        assert!(matches!(answer, Err(StateError::Store { .. })), "{answer:?}");
    }
    // It would be too long, once it has been made.
    let (long, _others) = super::state::<String>(&Scripted::new());
    let answer = long
        .update(|text| {
            *text = "x".repeat(200);
            Bomb
        })
        .await;
    assert!(matches!(answer, Err(StateError::TooLarge { .. })), "{:?}", answer.map(std::mem::forget));
    long.update(|text| text.push('x')).await.unwrap();
    // Whoever asked has gone.
    store.gate.forget_permits(usize::MAX);
    let writes = store.count(&store.writes);
    let (gone, beside) = (ask(&state, |_| Bomb), ask(&state, |n| *n += 1));
    while store.count(&store.writes) == writes {
        yield_now().await;
    }
    gone.abort();
    go_on(&store).await;
    beside.await.unwrap().unwrap();
    assert_eq!(add(&state).await.unwrap(), 3);
}

/// A second panic while the first unwinds would end the process.
#[tokio::test(start_paused = true)]
async fn what_waits_at_the_end_may_panic_as_it_is_dropped() {
    let store = Scripted::new();
    let (state, _terms, under_way) = held(&store).await;
    let waiting: Vec<_> = [Bomb, Bomb, Bomb].map(|bomb| ask(&state, move |_| drop(bomb))).into();
    yield_now().await;
    drop(state);
    for asked in waiting.into_iter().chain([under_way]) {
        asked.abort();
    }
    while Arc::strong_count(&store) > 1 {
        yield_now().await;
    }
}

/// A value that panics as it is dropped, as some do that are closed thus.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
struct Fragile(u32);

impl Drop for Fragile {
    fn drop(&mut self) {
        assert_ne!(self.0, 13, "unlucky");
    }
}

#[tokio::test(start_paused = true)]
async fn a_value_may_panic_as_it_is_dropped() {
    let store = Scripted::new();
    let (state, _terms) = state::<Fragile>(&store);
    state.update(|value| value.0 = 13).await.unwrap();
    state.update(|value| value.0 = 14).await.unwrap();
    let (first, second) =
        tokio::join!(state.update(|value| value.0 = 13), state.update(|value| value.0 = 15));
    first.unwrap();
    second.unwrap();
    assert_eq!(state.read().await.unwrap().0, 15);
    assert_eq!(store.text(), "15");
}
