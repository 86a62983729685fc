use std::{convert::Infallible, time::Duration};

use futures_util::FutureExt;
use http_body_util::{BodyExt, StreamBody};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::advance,
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tower::{ServiceExt, service_fn, util::BoxCloneService};

use super::*;
use crate::{FencingToken, InstanceId, NotPrimary, Primary, PrimaryLost, Role};

const SECOND: Duration = Duration::from_secs(1);

fn primary(token: u64, left: Duration) -> Role {
    Role::Primary { token: FencingToken::new(token), until: Instant::now() + left }
}

fn standby(token: u64) -> Role {
    let primary = Primary::new("b", InstanceId::new("10.0.0.8", 1), FencingToken::new(token));
    Role::Standby { primary: Some(primary) }
}

fn request(path: &'static str) -> Request<Body> {
    Request::builder().uri(path).body(Body::empty()).unwrap()
}

const CALL: &str = "/counter.v1.Counter/Increment";

type Mock = BoxCloneService<Request<Body>, Response<Body>, Infallible>;

/// Answers with the token that it finds, in a header.
fn service() -> Mock {
    service_fn(|request: Request<Body>| async move {
        let token = request.extensions().get::<FencingToken>().map(|it| it.get().to_string());
        let response = Response::builder().header("token", token.unwrap_or_default());
        Ok(response.body(Body::empty()).unwrap())
    })
    .boxed_clone()
}

fn status(response: &Response<Body>) -> Option<Status> {
    Status::from_header_map(response.headers())
}

#[tokio::test(start_paused = true)]
async fn only_a_primary_within_its_time_runs_calls_and_the_handler_sees_its_token() {
    let (role, watched) = watch::channel(Role::Unknown);
    let fence = FenceLayer::new(&watched).layer(service());
    let call = || fence.clone().oneshot(request(CALL)).map(Result::unwrap);
    let refusal = async || NotPrimary::of(&status(&call().await).expect("a status")).expect("a refusal");

    assert_eq!(refusal().await, NotPrimary::new(None), "it does not know");
    role.send_replace(standby(4));
    assert_eq!(refusal().await.primary.map(|it| it.token.get()), Some(4), "it says who is");
    role.send_replace(primary(5, SECOND));
    let response = call().await;
    assert_eq!((status(&response).is_none(), &response.headers()["token"]), (true, &"5".parse().unwrap()));
    advance(SECOND - Duration::from_millis(1)).await;
    assert!(status(&call().await).is_none());
    advance(Duration::from_millis(1)).await;
    assert_eq!(refusal().await, NotPrimary::new(None), "its time is over, and there was no news");
    // As a renewal does it, which wakes nobody.
    role.send_if_modified(|role| {
        *role = primary(5, SECOND);
        false
    });
    assert!(status(&call().await).is_none());
}

#[tokio::test(start_paused = true)]
async fn health_and_reflection_are_let_through_by_a_standby() {
    let (_role, watched) = watch::channel(Role::Unknown);
    let fence = FenceLayer::new(watched).layer(service());
    for (path, passes) in [
        ("/grpc.health.v1.Health/Check", true),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", true),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", true),
        ("/grpc.health.v1.HealthX/Check", false),
        ("/grpc.reflectionx/Check", false),
        ("/", false),
    ] {
        let response = fence.clone().oneshot(request(path)).await.unwrap();
        assert_eq!(status(&response).is_none(), passes, "{path}");
        assert_eq!(response.headers().get("token").is_some(), passes, "{path}");
    }
}

/// A service whose responses' messages come from outside.
fn streaming() -> (mpsc::Sender<&'static str>, Mock) {
    let (sender, receiver) = mpsc::channel(8);
    let receiver = std::sync::Arc::new(parking_lot::Mutex::new(Some(receiver)));
    let service = service_fn(move |_| {
        let messages = ReceiverStream::new(receiver.lock().take().expect("called once"));
        let frames = messages
            .map(|text: &'static str| Ok::<_, Status>(Frame::data(Bytes::from_static(text.as_bytes()))));
        async move { Ok(Response::new(Body::new(StreamBody::new(frames)))) }
    });
    (sender, service.boxed_clone())
}

use http_body::Frame;

async fn next(body: &mut Body) -> Result<String, Status> {
    let frame = body.frame().await.expect("it goes on").expect("no error");
    match frame.into_data() {
        Ok(data) => Ok(String::from_utf8(data.to_vec()).unwrap()),
        Err(frame) => Err(Status::from_header_map(frame.trailers_ref().unwrap()).expect("a status")),
    }
}

/// A stream of which one message has been read, and the role behind it.
async fn begun() -> (watch::Sender<Role>, mpsc::Sender<&'static str>, FenceLayer, Body) {
    let (role, watched) = watch::channel(primary(3, SECOND));
    let fence = FenceLayer::new(watched);
    let (sender, service) = streaming();
    let mut body = fence.layer(service).oneshot(request(CALL)).await.unwrap().into_body();
    sender.send("one").await.unwrap();
    assert_eq!(next(&mut body).await.unwrap(), "one");
    (role, sender, fence, body)
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_with_the_role_and_says_who_has_it() {
    let (role, sender, fence, mut body) = begun().await;
    assert!(body.frame().now_or_never().is_none());
    role.send_replace(standby(4));
    // What comes later is the new primary's to say.
    sender.send("two").await.unwrap();
    let end = next(&mut body).await.unwrap_err();
    assert_eq!(end.code(), tonic::Code::Unavailable);
    assert_eq!(PrimaryLost::of(&end).expect("machine-readable").primary.map(|it| it.token.get()), Some(4));
    assert_eq!(NotPrimary::of(&end), None, "a client must not send it again");
    assert!(body.frame().await.is_none() && body.is_end_stream());
    assert_eq!(fence.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_the_time_passes_without_any_news_and_not_while_it_is_renewed() {
    let (role, sender, _fence, mut body) = begun().await;
    let waiting = tokio::spawn(async move { next(&mut body).await });
    for _ in 0..3 {
        advance(SECOND / 2).await;
        role.send_if_modified(|role| {
            *role = primary(3, SECOND);
            false
        });
    }
    let since = Instant::now();
    let end = waiting.await.unwrap().unwrap_err();
    assert_eq!((PrimaryLost::of(&end), since.elapsed()), (Some(PrimaryLost::new(None)), SECOND));
    drop(sender);
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_whoever_tells_the_role_has_ended() {
    let (role, _sender, _fence, mut body) = begun().await;
    drop(role);
    let since = Instant::now();
    assert!(PrimaryLost::of(&next(&mut body).await.unwrap_err()).is_some());
    assert_eq!(since.elapsed(), SECOND, "the last word held so long");
}

#[tokio::test(start_paused = true)]
async fn a_term_that_begins_anew_does_not_carry_the_streams_of_the_one_before() {
    let (role, _sender, _fence, mut body) = begun().await;
    role.send_replace(primary(5, SECOND));
    assert!(PrimaryLost::of(&next(&mut body).await.unwrap_err()).is_some());
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_after_the_role_was_lost_is_passed_on() {
    let (role, watched) = watch::channel(primary(3, SECOND));
    let (go, gone) = oneshot::channel::<()>();
    let gone = gone.shared();
    let service = service_fn(move |_| {
        let gone = gone.clone();
        async move {
            gone.await.unwrap();
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            let frames = [Frame::data(Bytes::from_static(b"done")), Frame::trailers(trailers)];
            let frames = tokio_stream::iter(frames.map(Ok::<_, Status>));
            Ok::<_, Infallible>(Response::new(Body::new(StreamBody::new(frames))))
        }
    });
    let answer = tokio::spawn(FenceLayer::new(watched).layer(service).oneshot(request(CALL)));
    tokio::task::yield_now().await;
    role.send_replace(standby(4));
    go.send(()).unwrap();
    let whole = answer.await.unwrap().unwrap().into_body().collect().await.unwrap();
    assert_eq!(whole.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(whole.to_bytes(), "done");
}

#[tokio::test(start_paused = true)]
async fn a_closed_fence_refuses_until_the_next_term_and_is_idle_when_its_calls_have_ended() {
    let (role, sender, fence, mut body) = begun().await;
    let (go, gone) = oneshot::channel::<()>();
    let gone = gone.shared();
    let slow = service_fn(move |_| {
        let gone = gone.clone();
        async move {
            gone.await.unwrap();
            Ok::<_, Infallible>(Response::new(Body::empty()))
        }
    });
    let slow = tokio::spawn(fence.layer(slow).oneshot(request(CALL)));
    tokio::task::yield_now().await;
    assert_eq!(fence.in_flight(), 2);
    fence.close();
    let call = || fence.layer(service()).oneshot(request(CALL)).map(Result::unwrap);
    let refused = async || status(&call().await).is_some_and(|it| NotPrimary::of(&it).is_some());
    assert!(refused().await);
    assert!(PrimaryLost::of(&next(&mut body).await.unwrap_err()).is_some(), "streams need not be waited for");
    assert_eq!(fence.in_flight(), 1);
    assert!(fence.idle().now_or_never().is_none());
    go.send(()).unwrap();
    drop(slow.await.unwrap());
    fence.idle().await;

    fence.open();
    assert!(!refused().await, "it was taken back");
    fence.close();
    role.send_replace(standby(4));
    assert!(refused().await);
    role.send_replace(primary(5, SECOND));
    assert!(!refused().await, "another term");
    drop(sender);
}
