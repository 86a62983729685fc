//! Calls that go to the primary alone: servers behind a fence whose role is set by hand, real sockets, and
//! registries that know of the role, lag behind it, or say nothing.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "../common/mod.rs"]
mod common;
mod node;
mod stage;

mod hints;
mod moves;
mod streams;
mod takeovers;
