//! What can go wrong on a connection, one file a hazard: real sockets, a real
//! Consul that calls every instance passing whatever becomes of it.

#[path = "../common/mod.rs"]
mod common;
mod stage;

mod bad_neighbours;
mod going_away;
mod refused_streams;
mod statuses;
