//! Judging results: every row of `docs/judging.md`, made to happen on real sockets.
//!
//! Each row is asked twice: the table itself, about what a bare tonic channel
//! reports, and a client, about what its caller sees. Nothing here needs a server
//! of tonic's, so `tests/client_only` runs the same tests with tonic's `server`
//! feature off, which changes the codes of most errors and must change no verdict.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod backend;
#[path = "../common/hostile.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod hostile;
#[path = "../common/proxy.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod proxy;
#[path = "../common/scripted.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod scripted;
mod stage;
mod table;

mod connections;
mod ours;
mod statuses;
mod streams;
mod unreached;
