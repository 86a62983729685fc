//! How calls are spread, chosen, bounded and moved away: real processes and real
//! sockets, found by a list that is held by hand, or by a real Consul.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "../common/mod.rs"]
mod common;
mod healthy;
mod stage;

mod bounds;
mod choices;
mod drains;
mod health;
mod panics;
mod shares;
