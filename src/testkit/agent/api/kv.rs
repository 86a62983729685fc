//! `/v1/kv`: <https://developer.hashicorp.com/consul/api-docs/kv>. No sessions, so no locks.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header::CONTENT_TYPE};

use super::{
    super::{catalog::Subject, node::Node},
    query::{Params, Query},
    read::{read, route},
    refusal::Refusal,
};

/// The largest value that is taken:
/// <https://developer.hashicorp.com/consul/docs/agent/config/config-files#kv_max_value_size>
pub(super) const LARGEST_VALUE: usize = 512 * 1024;

type Answer = Result<Response, Refusal>;

/// The path without a key: of use for what begins with nothing, which is all.
pub(crate) async fn get_all(state: State<Arc<Node>>, params: Params) -> Answer {
    get(state, Path(String::new()), params).await
}

pub(crate) async fn put_unnamed() -> Refusal {
    Refusal::bad_request("Missing key name")
}

pub(crate) async fn delete_all(state: State<Arc<Node>>, params: Params) -> Answer {
    delete(state, Path(String::new()), params).await
}

pub(crate) async fn get(state: State<Arc<Node>>, key: Path<String>, params: Params) -> Answer {
    look(state, key, params).await.map_err(Refusal::bare)
}

async fn look(State(node): State<Arc<Node>>, Path(key): Path<String>, params: Params) -> Answer {
    let query = Query::read(&params)?;
    let missing = || StatusCode::NOT_FOUND.into_response();
    if params.has("keys") {
        return read(&node, &query, Subject::Keys(&key), |catalog| {
            let keys: Vec<_> = catalog.pairs().below(&key).map(|it| it.0).collect();
            if keys.is_empty() && !key.is_empty() { missing() } else { Json(keys).into_response() }
        })
        .await;
    }
    if params.has("recurse") {
        return read(&node, &query, Subject::Keys(&key), |catalog| {
            let pairs: Vec<_> = catalog.pairs().below(&key).map(|(key, pair)| pair.json(key)).collect();
            if pairs.is_empty() { missing() } else { Json(pairs).into_response() }
        })
        .await;
    }
    if key.is_empty() {
        return Err(Refusal::bad_request("Missing key name"));
    }
    let raw = params.has("raw");
    read(&node, &query, Subject::Key(&key), |catalog| match catalog.pairs().get(&key) {
        None => missing(),
        Some(pair) if raw => {
            let mut answer = pair.value.clone().into_response();
            answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
            answer
        }
        Some(pair) => Json([pair.json(&key)]).into_response(),
    })
    .await
}

pub(crate) async fn put(
    State(node): State<Arc<Node>>,
    Path(key): Path<String>,
    params: Params,
    body: Bytes,
) -> Answer {
    let query = Query::read(&params)?;
    conflicting(&params, &["cas", "acquire", "release"])?;
    let flags = number(&params, "flags")?.unwrap_or_default();
    let cas = number(&params, "cas")?;
    if params.has("acquire") || params.has("release") {
        return Err(Refusal::bad_request("the test agent knows no sessions"));
    }
    if body.len() > LARGEST_VALUE {
        return Err(Refusal::too_large(format!(
            "Request body({} bytes) too large, max size: {LARGEST_VALUE} bytes. See \
             https://www.consul.io/docs/agent/options.html#kv_max_value_size.",
            body.len()
        )));
    }
    let target = route(&node, &query).await.map_err(Refusal::bare)?;
    Ok(Json(target.change(|pairs, index| match cas {
        None => {
            pairs.set(&key, body, flags, index);
            true
        }
        Some(expected) => pairs.set_if(&key, body, flags, expected, index),
    }))
    .into_response())
}

pub(crate) async fn delete(State(node): State<Arc<Node>>, Path(key): Path<String>, params: Params) -> Answer {
    let query = Query::read(&params)?;
    conflicting(&params, &["recurse", "cas"])?;
    let recurse = params.has("recurse");
    if key.is_empty() && !recurse {
        return Err(Refusal::bad_request("Missing key name"));
    }
    let cas = number(&params, "cas")?;
    let target = route(&node, &query).await.map_err(Refusal::bare)?;
    Ok(Json(target.change(|pairs, index| match cas {
        _ if recurse => {
            pairs.delete_below(&key, index);
            true
        }
        None => {
            pairs.delete(&key, index);
            true
        }
        Some(expected) => pairs.delete_if(&key, expected, index),
    }))
    .into_response())
}

/// Go's words for what is none.
fn number(params: &Params, name: &str) -> Result<Option<u64>, Refusal> {
    let Some(text) = params.all(name).next() else { return Ok(None) };
    let wrong = |_| Refusal::agent(format!("strconv.ParseUint: parsing {text:?}: invalid syntax"));
    text.parse().map(Some).map_err(wrong)
}

fn conflicting(params: &Params, names: &[&str]) -> Result<(), Refusal> {
    if names.iter().filter(|it| params.has(it)).count() < 2 {
        return Ok(());
    }
    Err(Refusal::bad_request(format!("Conflicting flags: {}\n", params.encoded())))
}
