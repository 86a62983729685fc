//! Several attempts at once: who gets one, who wins, and what becomes of the others.

use std::time::Duration;

use h2::Reason;
use tonic::Code;
use tonic_failover::client::{
    CallError, CallErrorKind, HedgingPolicy, MethodOptions, ServiceConfig, ServiceOptions,
};

use crate::{
    common::{
        DEADLINE, SOON, register,
        scripted::{Act, Ask, Scripted},
        steady,
    },
    request_bodies::collect,
    stage::{Stage, get, increment, kind, observed, served, timed, wait_for},
};

const SHORT: Duration = Duration::from_millis(30);

/// Longer than any of these tests may take.
const NEVER: Duration = Duration::from_secs(600);

fn hedged(policy: HedgingPolicy) -> ServiceOptions {
    steady().method("/", MethodOptions::new().hedging(policy)).spares(3)
}

fn after(delay: Duration) -> ServiceOptions {
    hedged(HedgingPolicy::new(delay))
}

/// Bound to the first; the others are ready beside it.
async fn set(options: ServiceOptions, servers: &[&Scripted]) -> Option<Stage> {
    let stage = Stage::with(options, &[("0", servers[0].port)]).await?.ready(1).await;
    for (i, server) in servers.iter().enumerate().skip(1) {
        register(stage.consul.registry(), "counter", &i.to_string(), server.port).await;
        stage.until_ready(i + 1).await;
    }
    assert_eq!(stage.bound(), "0");
    Some(stage)
}

async fn hang() -> Scripted {
    Scripted::start(|_| Act::Hang).await
}

async fn says(code: i32) -> Scripted {
    Scripted::start(move |_| Act::Status(code, "mine", vec![])).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_answer_wins_and_the_other_attempt_is_cancelled_and_not_blamed() {
    let (slow, fast) = (hang().await, Scripted::good().await);
    let Some(stage) = set(after(SHORT).failures_to_eject(1), &[&slow, &fast]).await else { return };
    for n in 1..=3 {
        let reply = get(stage.channel(), SOON).await.unwrap();
        assert_eq!(served(&reply), ("1".to_owned(), 2));
        wait_for("the server is told", || slow.cancelled() == n).await;
        assert_eq!(slow.asks()[n - 1].header("grpc-previous-rpc-attempts"), None);
        assert_eq!(fast.asks()[n - 1].header("grpc-previous-rpc-attempts"), Some("1"));
    }
    assert_eq!((stage.bound(), stage.client.status().datacenters[0].ready), ("0".to_owned(), 2));
    assert_eq!((slow.connections(), slow.open()), (1, 1), "and its connection is kept");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_attempt_may_win_too() {
    let slow = Scripted::start(|_| Act::Answer.after(Duration::from_millis(300))).await;
    let other = hang().await;
    let Some(stage) = set(after(SHORT), &[&slow, &other]).await else { return };
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()), ("0".to_owned(), 2));
    wait_for("the server is told", || other.cancelled() == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_in_time_has_no_hedge() {
    let (good, other) = (Scripted::good().await, Scripted::good().await);
    let Some(stage) = set(after(NEVER), &[&good, &other]).await else { return };
    for _ in 0..10 {
        assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()), ("0".to_owned(), 1));
    }
    assert_eq!((good.asks().len(), other.asks().len()), (10, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_attempts_go_out_at_once_without_a_delay_and_each_elsewhere() {
    let servers = [hang().await, hang().await, Scripted::good().await];
    let options = hedged(HedgingPolicy::new(Duration::ZERO).max_attempts(3));
    let Some(stage) = set(options, &[&servers[0], &servers[1], &servers[2]]).await else { return };
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()), ("2".to_owned(), 3));
    for server in &servers[..2] {
        wait_for("each has one", || server.cancelled() == 1).await;
    }
    // The spares' order is chance.
    let asks: Vec<_> = servers.iter().flat_map(Scripted::asks).collect();
    let mut previous: Vec<_> = asks.iter().map(|ask| ask.header("grpc-previous-rpc-attempts")).collect();
    previous.sort_unstable();
    assert_eq!(previous, [None, Some("1"), Some("2")]);
}

// === statuses ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_non_fatal_status_brings_the_next_attempt_at_once() {
    let (busy, good) = (says(14).await, Scripted::good().await);
    let (options, failures) = observed(after(NEVER));
    let Some(stage) = set(options, &[&busy, &good]).await else { return };
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()), ("1".to_owned(), 2));
    let failures = failures.lock().clone();
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert_eq!((failures[0].code, failures[0].attempt, failures[0].resent), (Code::Unavailable, 1, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fatal_status_ends_the_call_and_all_its_attempts() {
    let fatal = Scripted::start(|_| Act::Status(5, "mine", vec![]).after(Duration::from_millis(200))).await;
    let other = hang().await;
    let (options, failures) = observed(after(SHORT));
    let Some(stage) = set(options, &[&fatal, &other]).await else { return };
    let status = get(stage.channel(), SOON).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::NotFound, "mine"), "as it came");
    wait_for("the other is cancelled", || other.cancelled() == 1).await;
    let failures = failures.lock().clone();
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert_eq!((failures[0].code, failures[0].resent), (Code::NotFound, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_all_fail_the_last_word_reaches_the_caller() {
    let servers = [says(14).await, says(14).await, says(14).await, says(14).await];
    let (options, failures) = observed(hedged(HedgingPolicy::new(NEVER).max_attempts(3)));
    let all: Vec<_> = servers.iter().collect();
    let Some(stage) = set(options, &all).await else { return };
    let status = get(stage.channel(), SOON).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "mine"));
    assert_eq!(servers.map(|it| it.asks().len()).iter().sum::<usize>(), 3);
    let resent: Vec<_> = failures.lock().iter().map(|it| (it.attempt, it.resent)).collect();
    assert_eq!(resent, [(1, true), (2, true), (3, false)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_that_may_have_run_is_not_fatal_to_a_safe_call_nor_a_refusal_counted() {
    for (reason, previous) in [(Reason::INTERNAL_ERROR, Some("1")), (Reason::REFUSED_STREAM, None)] {
        let (bad, good) = (Scripted::start(move |_| Act::Reset(reason)).await, Scripted::good().await);
        let Some(stage) = set(after(NEVER), &[&bad, &good]).await else { return };
        assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()), ("1".to_owned(), 2));
        assert_eq!(good.asks()[0].header("grpc-previous-rpc-attempts"), previous, "{reason:?}");
    }
}

// === who is hedged ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unsafe_method_is_hedged_only_where_a_service_config_declares_it() {
    let (slow, fast) = (hang().await, Scripted::good().await);
    let Some(stage) = set(after(SHORT), &[&slow, &fast]).await else { return };
    let status = increment(stage.channel(), Duration::from_millis(400)).await.unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::DeadlineExceeded);
    assert_eq!((slow.asks().len(), fast.asks().len()), (1, 0));

    let json = r#"{"methodConfig": [{"name": [{"service": "counter.v1.Counter", "method": "Increment"}],
        "hedgingPolicy": {"maxAttempts": 2, "hedgingDelay": "0.03s", "nonFatalStatusCodes": ["UNAVAILABLE"]}}]}"#;
    let options = steady().service_config(ServiceConfig::from_json(json).unwrap());
    let Some(stage) = set(options, &[&slow, &fast]).await else { return };
    assert_eq!(served(&increment(stage.channel(), SOON).await.unwrap()), ("1".to_owned(), 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_cannot_be_kept_is_sent_once() {
    let answer = |_: &Ask| Act::Answer.after(Duration::from_millis(200));
    let (one, other) = (Scripted::start(answer).await, Scripted::good().await);
    let options = after(SHORT).safe_method("/uploads.v1.Uploads/Collect");
    let Some(stage) = set(options, &[&one, &other]).await else { return };
    assert_eq!(served(&collect(stage.channel(), 3, 1000).await.unwrap()), ("0".to_owned(), 1));
    assert_eq!((one.asks().len(), other.asks().len()), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_are_never_two_attempts_on_one_connection() {
    let script = |ask: &Ask| match ask.number {
        2 => Act::Status(14, "mine", vec![]),
        _ => Act::Answer.after(Duration::from_millis(200)),
    };
    let alone = Scripted::start(script).await;
    let options = hedged(HedgingPolicy::new(SHORT).max_attempts(3));
    let Some(stage) = set(options, &[&alone]).await else { return };
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()), ("0".to_owned(), 1));
    assert_eq!(alone.asks().len(), 1, "while one is out there is no second");
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()), ("0".to_owned(), 2));
    assert_eq!(alone.asks().len(), 3, "but once it has failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hedge_that_had_no_connection_goes_to_the_first_that_is_made() {
    let slow = hang().await;
    let Some(stage) = set(after(SHORT), &[&slow]).await else { return };
    let call = tokio::spawn(get(stage.channel(), SOON));
    wait_for("the first attempt is out", || slow.asks().len() == 1).await;
    tokio::time::sleep(3 * SHORT).await;
    let late = Scripted::good().await;
    register(stage.consul.registry(), "counter", "late", late.port).await;
    assert_eq!(served(&call.await.unwrap().unwrap()), ("late".to_owned(), 2));
}

// === what it costs, and what a server says ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hedge_must_be_within_the_budget() {
    let answer = |_: &Ask| Act::Answer.after(Duration::from_millis(200));
    let (slow, other) = (Scripted::start(answer).await, Scripted::good().await);
    let Some(stage) = set(after(SHORT).retry_budget(0.0, 0), &[&slow, &other]).await else { return };
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()), ("0".to_owned(), 1));
    assert_eq!(other.asks().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttling_holds_hedges_back_too() {
    let script = |ask: &Ask| match ask.number {
        1 => Act::Answer.after(Duration::from_millis(200)),
        2 => Act::Status(14, "mine", vec![]),
        _ => Act::Answer.after(Duration::from_millis(200)),
    };
    let (slow, other) = (Scripted::start(script).await, hang().await);
    let Some(stage) = set(after(SHORT).retry_throttling(1, 0.001), &[&slow, &other]).await else { return };
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()).1, 2, "there is a token");
    let status = get(stage.channel(), SOON).await.unwrap_err();
    assert_eq!((status.message(), other.asks().len()), ("mine", 1), "it was the last");
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()).1, 1);
    assert_eq!(other.asks().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_says_when_the_next_attempt_is_made_and_that_there_is_none() {
    let pushes = |millis| {
        Scripted::start(move |_: &Ask| Act::Status(14, "mine", vec![("grpc-retry-pushback-ms", millis)]))
    };
    let good = Scripted::good().await;
    let later = pushes("250").await;
    let Some(stage) = set(after(SHORT), &[&later, &good]).await else { return };
    let (result, took) = timed(get(stage.channel(), SOON)).await;
    assert_eq!(served(&result.unwrap()), ("1".to_owned(), 2));
    assert!(took >= Duration::from_millis(250), "{took:?}");

    let never = pushes("-1").await;
    let Some(stage) = set(after(SHORT), &[&never, &good]).await else { return };
    let status = get(stage.channel(), SOON).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "mine"));
    assert_eq!((never.asks().len(), good.asks().len()), (1, 1), "the one from before");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hedges_end_at_the_deadline_together() {
    let servers = [hang().await, hang().await];
    let (options, failures) = observed(after(SHORT));
    let Some(stage) = set(options, &[&servers[0], &servers[1]]).await else { return };
    let (result, took) = timed(get(stage.channel(), DEADLINE / 4)).await;
    let status = result.unwrap_err();
    assert_eq!(kind(&status), CallErrorKind::DeadlineExceeded);
    let error = CallError::of(&status).unwrap();
    assert!(error.attempts() == 2 && error.may_have_run(), "{error:?}");
    assert!(took < SOON, "{took:?}");
    let mut told: Vec<_> = failures.lock().iter().map(|it| (it.attempt, it.instance.clone())).collect();
    told.sort_unstable();
    assert_eq!(told, [(1, Some("0".to_owned())), (2, Some("1".to_owned()))], "each is told of");
    for server in &servers {
        wait_for("both are cancelled", || server.cancelled() == 1).await;
    }
}
