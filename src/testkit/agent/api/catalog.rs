//! `/v1/catalog` and `/v1/status`:
//! <https://developer.hashicorp.com/consul/api-docs/catalog>

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};

use super::{
    super::{catalog::Subject, node::Node},
    query::{Params, Query},
    read::{leaderless, read},
    refusal::Refusal,
};

/// Without an index and never blocking. One that is down is still listed.
pub(crate) async fn datacenters(State(node): State<Arc<Node>>) -> Json<Vec<String>> {
    Json(node.datacenters())
}

pub(crate) async fn services(State(node): State<Arc<Node>>, params: Params) -> Result<Response, Refusal> {
    let query = Query::read(&params)?;
    read(&node, &query, Subject::Services, |catalog| Json(catalog.services()).into_response()).await
}

/// The leader's address, empty where there is none.
pub(crate) async fn leader(State(node): State<Arc<Node>>) -> Json<String> {
    let none = leaderless(&node.faults).is_some();
    Json(if none { String::new() } else { node.addr.to_string() })
}
