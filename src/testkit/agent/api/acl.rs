//! `/v1/internal/acl/authorize`, which Consul documents nowhere: whether the token
//! has single rights. Measured with 1.8.7.

use std::sync::Arc;

use axum::{Json, extract::State};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{
    super::{faults::Effect, node::Node},
    query::{Params, Query},
    read::route,
    refusal::Refusal,
};

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "PascalCase", default)]
#[derive(Default)]
pub(crate) struct Right {
    resource: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    segment: String,
    access: String,
    #[serde(skip_deserializing)]
    allow: bool,
}

pub(crate) async fn authorize(
    State(node): State<Arc<Node>>,
    params: Params,
    body: Bytes,
) -> Result<Json<Vec<Right>>, Refusal> {
    // Any server can tell, with or without a leader.
    let query = Query { stale: true, ..Query::read(&params)? };
    let target = route(&node, &query).await?;
    let filters = |of: &dyn Fn(&str) -> bool| {
        target.faults.is(|effect| matches!(effect, Effect::Filtered(service) if of(service)))
    };
    if !filters(&|_| true) {
        return Err(Refusal::unauthorized("ACL support disabled"));
    }
    let mut rights: Vec<Right> = serde_json::from_slice(&body).map_err(|error| {
        Refusal::bad_request(format!("Bad request: Failed to decode request body: {error}"))
    })?;
    for right in &mut rights {
        right.allow = right.resource != "service" || !filters(&|service| service == right.segment);
    }
    Ok(Json(rights))
}
