//! `/v1/health`: <https://developer.hashicorp.com/consul/api-docs/health>

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};

use super::{
    super::{
        catalog::{Choice, Subject},
        filter::Filter,
        node::Node,
    },
    query::{Params, Query},
    read::read,
    refusal::Refusal,
};

pub(crate) async fn unnamed() -> Refusal {
    Refusal::bad_request("Missing service name")
}

/// All instances here are on one node, so `near` orders nothing.
pub(crate) async fn service(
    State(node): State<Arc<Node>>,
    Path(name): Path<String>,
    params: Params,
) -> Result<Response, Refusal> {
    let query = Query::read(&params)?;
    let passing = params.flag("passing").ok_or_else(|| Refusal::bad_request("Invalid value for ?passing"))?;
    let node_meta = params.all("node-meta").map(|pair| {
        let (key, value) = pair.split_once(':').unwrap_or((pair, ""));
        (key.to_owned(), value.to_owned())
    });
    let choice = Choice {
        passing,
        tags: params.all("tag").map(str::to_owned).collect(),
        node_meta: node_meta.collect(),
        filter: Filter::parse(params.get("filter").unwrap_or_default()).map_err(Refusal::servers)?,
    };
    read(&node, &query, Subject::Service(&name), |catalog| {
        Json(catalog.health(&name, &choice)).into_response()
    })
    .await
}
