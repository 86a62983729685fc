//! `/v1/txn`: <https://developer.hashicorp.com/consul/api-docs/txn>, of keys alone.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    super::{catalog::Pairs, node::Node},
    kv::LARGEST_VALUE,
    query::{Params, Query},
    read::{leaderless, route},
    refusal::Refusal,
};

/// More operations are refused.
const MOST_OPERATIONS: usize = 64;

#[derive(Deserialize)]
struct Operation {
    #[serde(rename = "KV")]
    kv: Option<Kv>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", default)]
#[derive(Default)]
struct Kv {
    verb: String,
    key: String,
    value: Option<String>,
    flags: u64,
    index: u64,
    session: String,
}

pub(crate) async fn txn(
    State(node): State<Arc<Node>>,
    params: Params,
    body: Bytes,
) -> Result<Response, Refusal> {
    if body.len() > LARGEST_VALUE {
        let text = format!(
            "Request body({} bytes) too large, max size: {LARGEST_VALUE} bytes. See \
             https://www.consul.io/docs/agent/options.html#txn_max_req_len.",
            body.len()
        );
        return Err(Refusal::too_large(text));
    }
    let operations = read(&body)?;
    if operations.len() > MOST_OPERATIONS {
        let text =
            format!("Transaction contains too many operations ({} > {MOST_OPERATIONS})", operations.len());
        return Err(Refusal::too_large(text));
    }
    let writes = operations.iter().any(|(kv, _)| kv.writes());
    let mut query = Query::read(&params)?;
    // Only what reads may be answered by any server.
    query.stale &= !writes;
    let target = route(&node, &query).await.map_err(Refusal::bare)?;
    let outcome = if writes {
        target.change(|pairs, index| run(pairs, &operations, index))
    } else {
        run(&mut target.catalog.lock().pairs().clone(), &operations, 0)
    };
    let (status, results, errors) = match outcome {
        Ok(results) => (StatusCode::OK, json!(results), Value::Null),
        Err(errors) => (StatusCode::CONFLICT, Value::Null, json!(errors)),
    };
    let leaderless = leaderless(&target.faults);
    let contact = leaderless.map_or(0, |(_, since)| since.elapsed().as_millis());
    let (known, contact) = (leaderless.is_none(), u64::try_from(contact).unwrap_or(u64::MAX));
    let mut answer = json!({ "Results": results, "Errors": errors });
    if !writes {
        for (name, value) in [
            ("Index", json!(0)),
            ("LastContact", json!(contact)),
            ("KnownLeader", json!(known)),
            ("ConsistencyLevel", json!("")),
        ] {
            answer[name] = value;
        }
    }
    let mut answer = (status, Json(answer)).into_response();
    if !writes {
        let headers = answer.headers_mut();
        headers
            .insert("x-consul-knownleader", HeaderValue::from_static(if known { "true" } else { "false" }));
        headers.insert("x-consul-lastcontact", HeaderValue::from(contact));
    }
    Ok(answer)
}

/// Operations with their values.
fn read(body: &[u8]) -> Result<Vec<(Kv, Bytes)>, Refusal> {
    let failed = |error: String| Refusal::bad_request(format!("Failed to parse body: {error}"));
    let operations: Vec<Operation> =
        serde_json::from_slice(body).map_err(|error| failed(error.to_string()))?;
    let each = operations.into_iter().map(|operation| {
        let kv = operation.kv.unwrap_or_default();
        let value = BASE64_STANDARD.decode(kv.value.as_deref().unwrap_or_default());
        let value = value.map_err(|error| failed(format!("failed to decode value: {error}")))?;
        Ok((kv, value.into()))
    });
    each.collect()
}

/// Does all of them, or none.
fn run(pairs: &mut Pairs, operations: &[(Kv, Bytes)], index: u64) -> Result<Vec<Value>, Vec<Value>> {
    let (mut tried, mut results, mut errors) = (pairs.clone(), Vec::new(), Vec::new());
    for (place, (kv, value)) in operations.iter().enumerate() {
        match kv.run(&mut tried, value, index) {
            Ok(told) => results.extend(told.into_iter().map(|it| json!({ "KV": it }))),
            Err(what) => errors.push(json!({ "OpIndex": place, "What": what })),
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    *pairs = tried;
    Ok(results)
}

// === impl Kv ===

impl Kv {
    fn writes(&self) -> bool {
        ["set", "delete", "delete-cas", "delete-tree", "cas", "lock", "unlock"].contains(&self.verb.as_str())
    }

    /// What it tells, or why it cannot be done.
    fn run(&self, pairs: &mut Pairs, value: &Bytes, index: u64) -> Result<Vec<Value>, String> {
        let Self { verb, key, flags, index: expected, session, .. } = self;
        if key.is_empty() && verb != "delete-tree" {
            return Err("Must provide key".to_owned());
        }
        let told = |pairs: &Pairs| pairs.get(key).map(|it| it.without_value(key)).into_iter().collect();
        match verb.as_str() {
            "set" => {
                pairs.set(key, value.clone(), *flags, index);
                Ok(told(pairs))
            }
            "cas" if pairs.set_if(key, value.clone(), *flags, *expected, index) => Ok(told(pairs)),
            "cas" => Err(format!("failed to set key {key:?}, index is stale")),
            "get" => match pairs.get(key) {
                Some(pair) => Ok(vec![pair.json(key)]),
                None => Err(format!("key {key:?} doesn't exist")),
            },
            "get-tree" => Ok(pairs.below(key).map(|(key, pair)| pair.json(key)).collect()),
            "check-index" => match pairs.modified(key) {
                0 => Err(format!("failed to check index, key {key:?} doesn't exist")),
                is if is == *expected => Ok(told(pairs)),
                is => Err(format!(
                    "failed index check for key {key:?}, current modify index {is} != {expected}"
                )),
            },
            "check-not-exists" if pairs.get(key).is_none() => Ok(Vec::new()),
            "check-not-exists" => Err(format!("key {key:?} exists")),
            // Nobody has a session here.
            "check-session" if pairs.get(key).is_none() => {
                Err(format!("failed to check session, key {key:?} doesn't exist"))
            }
            "check-session" if session.is_empty() => Ok(told(pairs)),
            "check-session" => {
                Err(format!("failed session check for key {key:?}, current session \"\" != {session:?}"))
            }
            "delete" => {
                pairs.delete(key, index);
                Ok(Vec::new())
            }
            "delete-cas" if pairs.delete_if(key, *expected, index) => Ok(Vec::new()),
            "delete-cas" => Err(format!("failed to delete key {key:?}, index is stale")),
            "delete-tree" => {
                pairs.delete_below(key, index);
                Ok(Vec::new())
            }
            "lock" | "unlock" if session.is_empty() => Err("missing session".to_owned()),
            "lock" if session.len() != 36 => {
                Err("failed session lookup: index error: UUID must be 36 characters".to_owned())
            }
            "lock" => Err(format!("invalid session {session:?}")),
            "unlock" => {
                Err(format!("failed to unlock key {key:?}, lock isn't held, or is held by another session"))
            }
            other => Err(format!("unknown KV verb {other:?}")),
        }
    }
}
