//! When a call is sent again because its method's policy says so, and when not.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use h2::Reason;
use tonic::{Code, Request};
use tonic_failover::{
    client::{CallErrorKind, MethodOptions, RetryPolicy, ServiceConfig, ServiceOptions},
    demo::pb::{GetRequest, WatchRequest, counter_client::CounterClient},
};

use crate::{
    common::{
        DEADLINE, SOON, register,
        scripted::{Act, Ask, End, Scripted},
        steady,
    },
    request_bodies::collect,
    stage::{Stage, get, increment, kind, served, timed, wait_for},
};

const GET: &str = "/counter.v1.Counter/Get";
const INCREMENT: &str = "/counter.v1.Counter/Increment";

/// Longer than any of these tests may take.
const NEVER: Duration = Duration::from_secs(600);

fn with(method: &str, policy: RetryPolicy) -> ServiceOptions {
    steady().method(method, MethodOptions::new().retry(policy))
}

fn busy() -> Act {
    Act::Status(14, "busy", vec![])
}

fn pushed(code: i32, millis: &'static str) -> Act {
    Act::Status(code, "pushed back", vec![("grpc-retry-pushback-ms", millis)])
}

/// The first request gets this, the others are answered.
fn first(act: Act) -> impl Fn(&Ask) -> Act + Send + Sync + 'static {
    move |ask| if ask.number == 1 { act.clone() } else { Act::Answer }
}

/// One instance that does this, connected.
async fn one(
    options: ServiceOptions,
    script: impl Fn(&Ask) -> Act + Send + Sync + 'static,
) -> Option<(Stage, Scripted)> {
    let server = Scripted::start(script).await;
    let stage = Stage::with(options, &[("a", server.port)]).await?;
    Some((stage.ready(1).await, server))
}

/// Bound to the first, with the second as its spare.
async fn two(options: ServiceOptions, bound: &Scripted, spare: &Scripted) -> Option<Stage> {
    let stage = Stage::with(options, &[("bound", bound.port)]).await?.ready(1).await;
    register(stage.consul.registry(), "counter", "spare", spare.port).await;
    stage.until_ready(2).await;
    assert_eq!(stage.bound(), "bound");
    Some(stage)
}

// === codes ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_code_that_is_named_is_resent_of_an_unsafe_method_and_no_other() {
    let policy = RetryPolicy::new().retry_on([Code::Aborted]);
    let Some((stage, server)) =
        one(with(INCREMENT, policy.clone()), first(Act::Status(10, "", vec![]))).await
    else {
        return;
    };
    let reply = increment(stage.channel(), DEADLINE).await.unwrap();
    assert_eq!(served(&reply), ("a".to_owned(), 2));
    assert_eq!(server.asks()[1].header("grpc-previous-rpc-attempts"), Some("1"));

    let Some((stage, server)) = one(with(INCREMENT, policy), |_| busy()).await else { return };
    let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "busy"), "as it came");
    assert_eq!(server.asks().len(), 1);
    get(stage.channel(), DEADLINE).await.unwrap_err();
    assert_eq!(server.asks().len(), 1 + 5, "another method goes by its own rules");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_may_have_run_counts_as_unavailable() {
    for (code, method, resent) in
        [(Code::Unavailable, INCREMENT, true), (Code::Aborted, INCREMENT, false), (Code::Aborted, GET, true)]
    {
        let options = with(method, RetryPolicy::new().retry_on([code]));
        let Some((stage, server)) = one(options, first(Act::Reset(Reason::INTERNAL_ERROR))).await else {
            return;
        };
        let result = match method {
            GET => get(stage.channel(), DEADLINE).await,
            _ => increment(stage.channel(), DEADLINE).await,
        };
        assert_eq!(server.asks().len(), 1 + usize::from(resent), "{code:?} {method}");
        match result {
            Ok(reply) => assert_eq!(served(&reply).1, 2),
            Err(status) => assert_eq!((kind(&status), resent), (CallErrorKind::StreamReset, false)),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policys_attempts_end_and_the_servers_word_reaches_the_caller() {
    let ms = Duration::from_millis;
    let policy = RetryPolicy::new()
        .max_attempts(3)
        .backoff(ms(100), ms(1000), 2.0)
        .jitter(0.0)
        .retry_on([Code::Unavailable]);
    let Some((stage, server)) = one(with(INCREMENT, policy), |_| busy()).await else { return };
    let (result, took) = timed(increment(stage.channel(), DEADLINE)).await;
    let status = result.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "busy"));
    assert_eq!(server.asks().len(), 3);
    assert!(took >= ms(300), "100 ms and 200 ms: {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_back_off_ends_at_the_deadline() {
    let policy = RetryPolicy::new().backoff(NEVER, NEVER, 1.0).retry_on([Code::Unavailable]);
    let Some((stage, server)) = one(with(INCREMENT, policy), |_| busy()).await else { return };
    let (result, took) = timed(increment(stage.channel(), Duration::from_millis(300))).await;
    assert_eq!(kind(&result.unwrap_err()), CallErrorKind::DeadlineExceeded);
    assert!(took < SOON, "{took:?}");
    assert_eq!(server.asks().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_begun_or_was_consumed_is_not_resent_whatever_the_policy() {
    let policy = RetryPolicy::new().retry_on([Code::Unavailable]);
    let options = with("/counter.v1.Counter/", policy);
    let script = |ask: &Ask| match ask.path.ends_with("/Collect") {
        true => Act::ReadThenStatus(14, "busy"),
        false => Act::Begin(1, End::Status(14)),
    };
    let Some((stage, server)) = one(options, script).await else { return };
    let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
    assert_eq!((status.code(), server.asks().len()), (Code::Unavailable, 1), "begun");
    let status = collect(stage.channel(), 3, 1000).await.unwrap_err();
    assert_eq!((status.message(), server.asks().len()), ("busy", 2), "consumed");
}

// === pushback ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_says_when_a_call_is_sent_again() {
    let policy = RetryPolicy::new().backoff(NEVER, NEVER, 1.0).retry_on([Code::Unavailable]);
    for act in [pushed(14, "200"), Act::Begin(0, End::Pushback(14, "200"))] {
        // The trailers of an unsafe call are not waited for; those of a safe one are.
        let Some((stage, server)) = one(with(GET, policy.clone()), first(act)).await else { return };
        let (result, took) = timed(get(stage.channel(), SOON)).await;
        assert_eq!(served(&result.unwrap()).1, 2);
        assert!(took >= Duration::from_millis(200) && took < SOON, "{took:?}");
        assert_eq!(server.asks().len(), 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_says_that_a_call_is_not_sent_again() {
    for never in ["-1", "soon"] {
        let Some((stage, server)) = one(steady(), move |_| pushed(14, never)).await else { return };
        let status = get(stage.channel(), DEADLINE).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "pushed back"));
        assert_eq!(server.asks().len(), 1, "{never}");
    }
}

// === an attempt's own time ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_takes_too_long_goes_on_elsewhere_and_counts_against_its_instance() {
    let (slow, good) = (Scripted::start(|_| Act::Hang).await, Scripted::good().await);
    let options = with("/", RetryPolicy::new().attempt_timeout(Duration::from_millis(100)))
        .failures_to_eject(2)
        .ejection(NEVER, NEVER);
    let Some(stage) = two(options, &slow, &good).await else { return };
    for _ in 0..2 {
        let reply = get(stage.channel(), SOON).await.unwrap();
        assert_eq!(served(&reply), ("spare".to_owned(), 2));
        // With the second its connection goes too.
        wait_for("the attempt is cancelled", || slow.cancelled() > 0).await;
    }
    // A steady client suspects nobody: only the two time-outs can have done it.
    crate::common::until_bound_to(&stage.client, "spare").await;
    wait_for("it is ejected", || slow.open() == 0).await;
    assert_eq!(slow.asks().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_has_begun_in_time_however_long_it_is() {
    let options = with("/", RetryPolicy::new().attempt_timeout(Duration::from_millis(200)))
        .safe_method("/counter.v1.Counter/Watch");
    let Some((stage, server)) = one(options, |_| Act::Begin(1, End::Hang)).await else { return };
    let mut stream = CounterClient::new(stage.channel()).watch(WatchRequest::default()).await.unwrap();
    stream.get_mut().message().await.unwrap().expect("the first");
    let more = tokio::time::timeout(Duration::from_millis(600), stream.get_mut().message()).await;
    assert!(more.is_err(), "it goes on: {more:?}");
    assert_eq!(server.asks().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_no_other_may_follow_is_left_alone() {
    let answer = |_: &Ask| Act::Answer.after(Duration::from_millis(300));
    let timeout = Duration::from_millis(100);
    let unsafe_method = with("/", RetryPolicy::new().attempt_timeout(timeout));
    let Some((stage, server)) = one(unsafe_method, answer).await else { return };
    assert_eq!(served(&increment(stage.channel(), SOON).await.unwrap()).1, 1);
    assert_eq!(server.asks().len(), 1);

    let two_attempts = with("/", RetryPolicy::new().attempt_timeout(timeout).max_attempts(2));
    let Some((stage, server)) = one(two_attempts, answer).await else { return };
    assert_eq!(served(&get(stage.channel(), SOON).await.unwrap()).1, 2);
    assert_eq!(server.asks().len(), 2, "the second was the last");
}

// === throttling ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throttled_calls_are_not_resent_until_others_have_succeeded() {
    let well = Arc::new(AtomicBool::new(false));
    let is_well = well.clone();
    let script = move |_: &Ask| if is_well.load(Ordering::SeqCst) { Act::Answer } else { busy() };
    let options = steady().retry_throttling(4, 0.5).retry_budget(0.0, 0);
    let Some((stage, server)) = one(options, script).await else { return };
    let asks_of = async |ok: bool| {
        let before = server.asks().len();
        let result = get(stage.channel(), DEADLINE).await;
        assert_eq!(result.is_ok(), ok, "{result:?}");
        server.asks().len() - before
    };
    assert_eq!(asks_of(false).await, 2, "of four tokens three are left, and then half");
    assert_eq!(asks_of(false).await, 1);
    well.store(true, Ordering::SeqCst);
    for _ in 0..5 {
        assert_eq!(asks_of(true).await, 1);
    }
    well.store(false, Ordering::SeqCst);
    assert_eq!(asks_of(false).await, 2, "three and a half are left: one of which to go");
}

// === service config ===

fn config(json: &str) -> ServiceOptions {
    steady().service_config(ServiceConfig::from_json(json).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_configs_retry_policy_holds() {
    let json = r#"{"methodConfig": [{
        "name": [{"service": "counter.v1.Counter", "method": "Increment"}],
        "retryPolicy": {"maxAttempts": 3, "initialBackoff": ".01s", "maxBackoff": "0.02s", "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE", 8]}
    }], "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}}"#;
    let Some((stage, server)) = one(config(json), |_| Act::Status(8, "full", vec![])).await else { return };
    let status = increment(stage.channel(), DEADLINE).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, "full"));
    assert_eq!(server.asks().len(), 3);
    for _ in 0..2 {
        increment(stage.channel(), DEADLINE).await.unwrap_err();
    }
    assert_eq!(server.asks().len(), 3 + 2 + 1, "seven tokens, six, five: half");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_configs_timeout_bounds_calls_and_streams_and_the_server_is_told() {
    let json = r#"{"methodConfig": [{"name": [{"service": "counter.v1.Counter"}], "timeout": "0.3s"}]}"#;
    let script = |ask: &Ask| if ask.path.ends_with("/Watch") { Act::Begin(1, End::Hang) } else { Act::Hang };
    let Some((stage, server)) = one(config(json), script).await else { return };
    let mut client = CounterClient::new(stage.channel());
    // None of its own, a longer one, and a shorter one.
    for own in [None, Some(NEVER), Some(Duration::from_millis(100))] {
        let mut request = Request::new(GetRequest::default());
        if let Some(own) = own {
            request.set_timeout(own);
        }
        let (result, took) = timed(client.get(request)).await;
        assert_eq!(kind(&result.unwrap_err()), CallErrorKind::DeadlineExceeded);
        assert!(took < SOON, "{took:?}");
        let told = server.asks().last().unwrap().header("grpc-timeout").expect("told").to_owned();
        let millis = Duration::from_millis(if own.is_some_and(|it| it < DEADLINE) { 100 } else { 300 });
        let (number, unit) = told.split_at(told.len() - 1);
        assert_eq!(unit, "u", "{told}");
        let told = Duration::from_micros(number.parse().unwrap());
        assert!(told <= millis && told > millis / 2, "{told:?}");
    }
    let mut stream = client.watch(WatchRequest::default()).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("the first");
    let (end, took) = timed(stream.message()).await;
    assert_eq!(end.unwrap_err().code(), Code::DeadlineExceeded);
    assert!(took < SOON, "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_wait_for_ready_wait_until_their_deadline_and_others_do_not() {
    let json = r#"{"methodConfig": [{"name": [{"service": "counter.v1.Counter", "method": "Get"}],
        "waitForReady": true}]}"#;
    let options = config(json).fail_fast_after(Duration::from_millis(50));
    let Some(stage) = Stage::with(options, &[]).await else { return };
    let waiting = tokio::spawn(get(stage.channel(), SOON));
    let status = increment(stage.channel(), SOON).await.unwrap_err();
    assert!(matches!(kind(&status), CallErrorKind::NothingUsable { .. }), "{status:?}");
    assert!(!waiting.is_finished());
    let (result, took) = timed(get(stage.channel(), Duration::from_millis(200))).await;
    assert_eq!(kind(&result.unwrap_err()), CallErrorKind::DeadlineExceeded);
    assert!(took < SOON, "{took:?}");
    let server = Scripted::good().await;
    register(stage.consul.registry(), "counter", "late", server.port).await;
    assert_eq!(served(&waiting.await.unwrap().unwrap()), ("late".to_owned(), 1));
}
