//! No call outlives its deadline, wherever it is then.

use std::time::Duration;

use h2::Reason;
use tonic::{Code, Request};
use tonic_failover::{
    client::{CallError, CallErrorKind},
    demo::pb::{GetRequest, WatchRequest, counter_client::CounterClient},
};

use crate::{
    common::{
        DEADLINE, options, register,
        scripted::{Act, Ask, End, Scripted},
        until,
    },
    stage::{Stage, get, increment, kind, served, timed, watch},
};

/// How late an end may be on a busy machine.
const LATE: Duration = Duration::from_millis(400);
const SHORT: Duration = Duration::from_millis(400);

fn in_time(took: Duration, deadline: Duration) {
    assert!(
        took + Duration::from_millis(5) >= deadline && took < deadline + LATE,
        "{took:?} of {deadline:?}"
    );
}

fn grpc_timeout(ask: &Ask) -> Option<Duration> {
    let text = ask.header("grpc-timeout")?;
    let (number, unit) = text.split_at(text.len() - 1);
    let number: u64 = number.parse().unwrap();
    Some(match unit {
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => panic!("{text}"),
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_whose_deadline_has_passed_when_it_is_made_is_never_sent() {
    let server = Scripted::good().await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    for _ in 0..20 {
        for safe in [true, false] {
            let nothing = Duration::ZERO;
            let answer = if safe {
                get(stage.channel(), nothing).await
            } else {
                increment(stage.channel(), nothing).await
            };
            let status = answer.unwrap_err();
            assert_eq!(kind(&status), CallErrorKind::DeadlineExceeded);
            let error = CallError::of(&status).unwrap();
            assert_eq!((error.attempts(), error.may_have_run()), (0, false));
            assert_eq!(status.message(), "deadline exceeded before the call was sent");
        }
    }
    get(stage.channel(), DEADLINE).await.unwrap();
    assert_eq!(server.asks().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_not_answered_ends_at_its_deadline() {
    let server = Scripted::start(|_| Act::Hang).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    for safe in [true, false] {
        let call = async {
            if safe { get(stage.channel(), SHORT).await } else { increment(stage.channel(), SHORT).await }
        };
        let (result, took) = timed(call).await;
        in_time(took, SHORT);
        let status = result.unwrap_err();
        assert_eq!(kind(&status), CallErrorKind::DeadlineExceeded);
        let error = CallError::of(&status).unwrap();
        assert!(error.may_have_run());
        assert_eq!(error.instance().unwrap().name, "a");
    }
    // It may be a little late at the server, and never more than was asked for.
    for ask in server.asks() {
        assert!(grpc_timeout(&ask).unwrap() <= SHORT);
    }
    assert_eq!(server.asks().len(), 2, "a deadline is never a reason to resend");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waited_for_its_first_instance_tells_the_server_what_is_left() {
    let server = Scripted::good().await;
    let Some(stage) = Stage::set(&[]).await else { return };
    let call = tokio::spawn(get(stage.channel(), DEADLINE));
    tokio::time::sleep(Duration::from_millis(500)).await;
    register(stage.consul.registry(), "counter", "a", server.port).await;
    call.await.unwrap().unwrap();
    let told = grpc_timeout(&server.asks()[0]).expect("a deadline");
    assert!(told <= DEADLINE - Duration::from_millis(490), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resent_call_tells_the_server_what_is_left() {
    let server = Scripted::start(|ask| match ask.number {
        1 => Act::Status(14, "busy", vec![]).after(Duration::from_millis(300)),
        _ => Act::Answer,
    })
    .await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    get(stage.channel(), DEADLINE).await.unwrap();
    let asks = server.asks();
    assert_eq!(asks.len(), 2);
    assert!(grpc_timeout(&asks[1]).unwrap() <= DEADLINE - Duration::from_millis(290), "{:?}", asks[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_the_pauses_between_attempts() {
    let server = Scripted::start(|_| Act::Reset(Reason::REFUSED_STREAM)).await;
    let Some(stage) = Stage::with(options().max_attempts(100), &[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let (result, took) = timed(get(stage.channel(), SHORT)).await;
    in_time(took, SHORT);
    assert_eq!(kind(&result.unwrap_err()), CallErrorKind::DeadlineExceeded);
    assert!(server.asks().len() < 20, "{}", server.asks().len());
}

async fn watch_within(
    stage: &Stage,
    timeout: Duration,
) -> tonic::Streaming<tonic_failover::demo::pb::CounterReply> {
    let mut request = Request::new(WatchRequest::default());
    request.set_timeout(timeout);
    CounterClient::new(stage.channel()).watch(request).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_a_stream_in_its_middle() {
    let server = Scripted::start(|_| Act::Begin(1, End::Hang)).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let (status, took) = timed(async {
        let mut stream = watch_within(&stage, SHORT).await;
        stream.message().await.unwrap().expect("the first");
        stream.message().await.unwrap_err()
    })
    .await;
    in_time(took, SHORT);
    assert_eq!(kind(&status), CallErrorKind::DeadlineExceeded);
}

/// The messages have long come: they are just not read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_a_stream_that_is_read_slowly() {
    let server = Scripted::start(|_| Act::Begin(1000, End::Hang)).await;
    let Some(stage) = Stage::set(&[("a", server.port)]).await else { return };
    let stage = stage.ready(1).await;
    let (status, took) = timed(async {
        let mut stream = watch_within(&stage, SHORT).await;
        loop {
            match stream.message().await {
                Ok(message) => drop(message.expect("no end")),
                Err(status) => return status,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    // What tonic has decoded in one go comes first.
    in_time(took, SHORT);
    assert_eq!(kind(&status), CallErrorKind::DeadlineExceeded);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_bounds_calls_without_a_deadline_and_cuts_no_stream() {
    let server = Scripted::start(|ask| match ask.number {
        1 => Act::Hang,
        2 => Act::Begin(0, End::Hang),
        3 => Act::Hang,
        _ => Act::Begin(1, End::Hang),
    })
    .await;
    let Some(stage) = Stage::with(options().default_timeout(SHORT), &[("a", server.port)]).await else {
        return;
    };
    let stage = stage.ready(1).await;
    let mut client = CounterClient::new(stage.channel());
    for what in ["before the headers", "in the body of a single message"] {
        let (result, took) = timed(client.get(GetRequest::default())).await;
        in_time(took, SHORT);
        assert_eq!(kind(&result.unwrap_err()), CallErrorKind::DeadlineExceeded, "{what}");
    }
    let (result, took) = timed(watch(stage.channel())).await;
    in_time(took, SHORT);
    assert_eq!(result.unwrap_err().code(), Code::DeadlineExceeded, "a stream that does not begin");

    let mut stream = watch(stage.channel()).await.unwrap().into_inner();
    stream.message().await.unwrap().expect("the first");
    let silence = tokio::time::timeout(3 * SHORT, stream.message()).await;
    assert!(silence.is_err(), "a stream without a deadline was cut: {silence:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_on_an_instance_does_not_count_as_a_wait_for_one() {
    let wait = Duration::from_secs(1);
    let (first, second) = (Scripted::start(|_| Act::Hang).await, Scripted::good().await);
    let options = options().spares(0).fail_fast_after(wait);
    let Some(stage) = Stage::with(options, &[]).await else { return };
    let call = tokio::spawn(get(stage.channel(), DEADLINE * 5));
    until(&stage.client, "Consul has answered", |c| c.status().datacenters.iter().any(|d| d.answered)).await;
    register(stage.consul.registry(), "counter", "first", first.port).await;
    stage.until_ready(1).await;
    tokio::time::sleep(wait).await;
    register(stage.consul.registry(), "counter", "second", second.port).await;
    until(&stage.client, "both are known", |c| c.status().datacenters[0].known == 2).await;
    assert_eq!((first.asks().len(), second.connections()), (1, 0));
    // It has to be connected to: the call waits once more.
    first.health(Act::Hang);
    first.cut();
    assert_eq!(served(&call.await.unwrap().unwrap()), ("second".to_owned(), 2));
}
