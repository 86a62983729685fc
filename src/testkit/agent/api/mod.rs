//! The HTTP API, one file for each part of it.

mod acl;
mod agent;
mod catalog;
mod health;
mod kv;
mod query;
mod read;
mod refusal;
mod txn;

use std::sync::Arc;

use axum::{
    Router,
    routing::{get, post, put},
};

use super::node::Node;

pub(crate) fn router(node: Arc<Node>) -> Router {
    Router::new()
        .route("/v1/health/service/", get(health::unnamed))
        .route("/v1/health/service/{*name}", get(health::service))
        .route("/v1/catalog/datacenters", get(catalog::datacenters))
        .route("/v1/catalog/services", get(catalog::services))
        .route("/v1/status/leader", get(catalog::leader))
        .route("/v1/agent/self", get(agent::about))
        .route("/v1/agent/services", get(agent::services))
        .route("/v1/agent/checks", get(agent::checks))
        .route("/v1/agent/service/", get(agent::no_service))
        .route("/v1/agent/service/{*id}", get(agent::service))
        .route("/v1/agent/service/register", put(agent::register))
        .route("/v1/agent/service/deregister/{*id}", put(agent::deregister))
        .route("/v1/agent/service/maintenance/", put(agent::unnamed))
        .route("/v1/agent/service/maintenance/{*id}", put(agent::maintenance))
        .route("/v1/agent/check/pass/{*id}", put(agent::pass))
        .route("/v1/agent/check/warn/{*id}", put(agent::warn))
        .route("/v1/agent/check/fail/{*id}", put(agent::fail))
        .route("/v1/agent/check/update/{*id}", put(agent::update))
        .route("/v1/kv/", get(kv::get_all).put(kv::put_unnamed).delete(kv::delete_all))
        .route("/v1/kv/{*key}", get(kv::get).put(kv::put).delete(kv::delete))
        .route("/v1/txn", put(txn::txn))
        .route("/v1/internal/acl/authorize", post(acl::authorize))
        .with_state(node)
}
