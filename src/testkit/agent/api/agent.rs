//! `/v1/agent`: <https://developer.hashicorp.com/consul/api-docs/agent>

use std::{
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
    sync::Arc,
};

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde_json::{Value, json};

use super::{
    super::{catalog::Health, definition::Definition, node::Node},
    query::Params,
    refusal::Refusal,
};

type Done = Result<(), Refusal>;

/// The part of a real answer that clients look at.
pub(crate) async fn about(State(node): State<Arc<Node>>) -> Json<Value> {
    let catalog = node.catalog.lock();
    let it = catalog.node();
    Json(json!({
        "Config": {
            "Datacenter": it.datacenter, "NodeName": it.name, "NodeID": it.id, "Revision": "",
            "Server": true, "Version": "1.8.7",
        },
        "Member": {
            "Name": it.name, "Addr": "127.0.0.1", "Port": 8301, "Status": 1,
            "Tags": { "dc": it.datacenter, "id": it.id, "role": "consul", "build": "1.8.7:", "segment": "" },
        },
        "Meta": { "consul-network-segment": "" },
    }))
}

pub(crate) async fn services(State(node): State<Arc<Node>>) -> Json<Value> {
    Json(node.catalog.lock().agent_services())
}

pub(crate) async fn service(
    State(node): State<Arc<Node>>,
    Path(id): Path<String>,
) -> Result<Response, Refusal> {
    let found = node.catalog.lock().agent_service(&id);
    let mut it = found.ok_or_else(|| Refusal::not_found(format!("unknown service ID: {id}")))?;
    // A real one hashes otherwise; all that counts is that it changes when the service does.
    let hash = format!("{:016x}", BuildHasherDefault::<DefaultHasher>::new().hash_one(it.to_string()));
    it["ContentHash"] = json!(hash);
    Ok(([("x-consul-contenthash", hash)], Json(it)).into_response())
}

pub(crate) async fn no_service() -> Refusal {
    Refusal::not_found("unknown service ID: ")
}

pub(crate) async fn checks(State(node): State<Arc<Node>>) -> Json<Value> {
    Json(node.catalog.lock().agent_checks())
}

pub(crate) async fn register(State(node): State<Arc<Node>>, params: Params, body: Bytes) -> Done {
    let definition = Definition::read(&body).map_err(Refusal::bad_request)?;
    node.register(definition, params.flag("replace-existing-checks").unwrap_or_default());
    Ok(())
}

/// An unknown service is as good as a deregistered one.
pub(crate) async fn deregister(State(node): State<Arc<Node>>, Path(id): Path<String>) {
    node.deregister(&id);
}

pub(crate) async fn unnamed() -> Refusal {
    Refusal::bad_request("Missing service ID")
}

pub(crate) async fn maintenance(
    State(node): State<Arc<Node>>,
    Path(id): Path<String>,
    params: Params,
) -> Done {
    let given = params.get("enable").ok_or_else(|| Refusal::bad_request("Missing value for enable"))?;
    let enable = params.flag("enable");
    let enable =
        enable.ok_or_else(|| Refusal::bad_request(format!("Invalid value for enable: {given:?}")))?;
    let reason = enable.then(|| params.get("reason").unwrap_or_default());
    let known = node.catalog.lock().maintain(&id, reason);
    node.changed();
    if known { Ok(()) } else { Err(Refusal::not_found(format!("No service registered with ID {id:?}"))) }
}

pub(crate) async fn pass(State(node): State<Arc<Node>>, Path(id): Path<String>, params: Params) -> Done {
    beat(&node, &id, Health::Passing, params.get("note").unwrap_or_default())
}

pub(crate) async fn warn(State(node): State<Arc<Node>>, Path(id): Path<String>, params: Params) -> Done {
    beat(&node, &id, Health::Warning, params.get("note").unwrap_or_default())
}

pub(crate) async fn fail(State(node): State<Arc<Node>>, Path(id): Path<String>, params: Params) -> Done {
    beat(&node, &id, Health::Critical, params.get("note").unwrap_or_default())
}

pub(crate) async fn update(State(node): State<Arc<Node>>, Path(id): Path<String>, body: Bytes) -> Done {
    let update: Value = serde_json::from_slice(&body)
        .map_err(|error| Refusal::bad_request(format!("Request decode failed: {error}")))?;
    let text = |key: &str| update[key].as_str().unwrap_or_default();
    let status = Health::read(text("Status"))
        .ok_or_else(|| Refusal::bad_request(format!("Invalid check status: '{}'", text("Status"))))?;
    beat(&node, &id, status, text("Output"))
}

fn beat(node: &Arc<Node>, check: &str, status: Health, note: &str) -> Done {
    if node.beat(check, status, note) {
        Ok(())
    } else {
        Err(Refusal::agent(format!("CheckID {check:?} does not have associated TTL")))
    }
}
