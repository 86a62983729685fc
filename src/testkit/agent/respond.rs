//! One request through the faults that concern every request.

use std::{future::pending, sync::Arc};

use axum::{Router, body::Body, response::IntoResponse};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Request, Response, StatusCode, header::RETRY_AFTER};
use hyper::body::Incoming;
use tower::ServiceExt;

use super::{
    catalog::Subject,
    faults::{Effect, Table},
    node::Node,
};

const CHUNK: Bytes = Bytes::from_static(&[b' '; 16 * 1024]);

pub(crate) async fn respond(node: &Arc<Node>, router: Router, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path();
    node.tally.request(path);
    let health = path.starts_with("/v1/health/");
    if let Some(slow) = node.faults.of(health, slowness) {
        node.faults.hold(Some(slow), |faults| faults.of(health, slowness).is_some()).await;
    }
    held(&node.faults, health).await;
    if let Some(answer) = instead(node, health) {
        return answer;
    }
    let Ok(answer) = router.oneshot(request.map(Body::new)).await;
    held(&node.faults, health).await;
    instead(node, health).unwrap_or(answer)
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
        Effect::Status(code, body) => Some((*code, body.clone()).into_response()),
        Effect::RateLimit(after) => {
            let after = [(RETRY_AFTER, after.as_secs().max(1).to_string())];
            Some((StatusCode::TOO_MANY_REQUESTS, after, "rate limit exceeded").into_response())
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

/// `[`, spaces, `]`.
fn oversized(bytes: usize) -> Response<Body> {
    let spaces = bytes.saturating_sub(2);
    let rest = spaces % CHUNK.len();
    let chunks = std::iter::once(Bytes::from_static(b"["))
        .chain(std::iter::repeat_n(CHUNK, spaces / CHUNK.len()))
        .chain([CHUNK.slice(..rest), Bytes::from_static(b"]")]);
    Body::from_stream(stream::iter(chunks.map(Ok::<_, std::convert::Infallible>))).into_response()
}
