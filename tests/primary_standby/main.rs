//! Primary and standby: two processes of the counter under one lease, on Consul and on files.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod acceptance;
#[path = "../common/mod.rs"]
mod common;
mod faults;
mod history;
mod mix;
mod starts;
mod workload;
mod world;
