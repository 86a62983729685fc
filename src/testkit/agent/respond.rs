//! One request through the faults that concern every request.

use std::{future::pending, sync::Arc};

use axum::{Router, body::Body, response::IntoResponse};
use bytes::Bytes;
use futures_util::stream;
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
};
use hyper::body::Incoming;
use tower::ServiceExt;

use super::{
    catalog::Subject,
    faults::{Effect, Table},
    node::Node,
};

const CHUNK: Bytes = Bytes::from_static(&[b' '; 16 * 1024]);

/// The connection is closed in place of an answer.
#[derive(Debug, thiserror::Error)]
#[error("the answer is lost on purpose")]
pub(crate) struct Lost;

pub(crate) async fn respond(
    node: &Arc<Node>,
    router: Router,
    request: Request<Incoming>,
) -> Result<Response<Body>, Lost> {
    let path = request.uri().path();
    node.tally.request(path);
    let health = path.starts_with("/v1/health/");
    if let Some(slow) = node.faults.of(health, slowness) {
        node.faults.hold(Some(slow), |faults| faults.of(health, slowness).is_some()).await;
    }
    held(&node.faults, health).await;
    if let Some(answer) = instead(node, health) {
        return Ok(answer);
    }
    let changes = request.method() != Method::GET;
    let Ok(answer) = router.oneshot(request.map(Body::new)).await;
    held(&node.faults, health).await;
    if changes && node.faults.is(|it| matches!(it, Effect::LoseAnswers)) {
        return Err(Lost);
    }
    Ok(instead(node, health).unwrap_or(answer))
}

/// Waits while the agent hangs, and for ever while its connections are to be cut.
async fn held(faults: &Table, health: bool) {
    faults
        .hold(None, |faults| faults.of(health, |it| matches!(it, Effect::Hang).then_some(())).is_some())
        .await;
    if faults.is(|it| matches!(it, Effect::Refuse | Effect::DropConnections)) {
        pending().await
    }
}

fn slowness(effect: &Effect) -> Option<std::time::Duration> {
    match effect {
        Effect::Slow(by) => Some(*by),
        _ => None,
    }
}

/// The answer that a fault gives instead of the right one.
fn instead(node: &Node, health: bool) -> Option<Response<Body>> {
    let mut answer = node.faults.of(health, |effect| match effect {
        Effect::Status(code, body) => Some(text(*code, body.clone())),
        Effect::RateLimit(after) => {
            let mut answer = text(StatusCode::TOO_MANY_REQUESTS, Bytes::new());
            answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(after.as_secs().max(1)));
            Some(answer)
        }
        Effect::Garbage => Some("<!doctype html><title>no agent here</title>".into_response()),
        Effect::Oversized(bytes) => Some(oversized(*bytes)),
        _ => None,
    })?;
    let ok = answer.status() == StatusCode::OK;
    let index = if ok { node.catalog.lock().index_of(Subject::Services) } else { 1 };
    let headers = answer.headers_mut();
    headers.insert("x-consul-index", HeaderValue::from(index));
    headers.insert("x-consul-knownleader", HeaderValue::from_static(if ok { "true" } else { "false" }));
    headers.insert("x-consul-lastcontact", HeaderValue::from(0));
    Some(answer)
}

/// As Go writes it: nothing is said about a body that is not there.
fn text(code: StatusCode, body: Bytes) -> Response<Body> {
    let empty = body.is_empty();
    let mut answer = Response::new(Body::from(body));
    *answer.status_mut() = code;
    if !empty {
        let plain = HeaderValue::from_static("text/plain; charset=utf-8");
        answer.headers_mut().insert(CONTENT_TYPE, plain);
    }
    answer
}

/// `[`, spaces, `]`.
fn oversized(bytes: usize) -> Response<Body> {
    let spaces = bytes.saturating_sub(2);
    let rest = spaces % CHUNK.len();
    let chunks = std::iter::once(Bytes::from_static(b"["))
        .chain(std::iter::repeat_n(CHUNK, spaces / CHUNK.len()))
        .chain([CHUNK.slice(..rest), Bytes::from_static(b"]")]);
    Body::from_stream(stream::iter(chunks.map(Ok::<_, std::convert::Infallible>))).into_response()
}
