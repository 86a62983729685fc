//! What can go wrong on a connection, one file a hazard: real sockets, a real
//! Consul that calls every instance passing whatever becomes of it.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "../common/mod.rs"]
mod common;
mod stage;

mod bad_neighbours;
mod cut_streams;
mod deadlines;
mod endings;
mod frozen;
mod full_connections;
mod going_away;
mod hedges;
mod many_at_once;
mod observers;
#[cfg(target_os = "linux")]
mod one_write;
mod policies;
mod refused_streams;
mod request_bodies;
mod statuses;
mod tls;
mod updates;
