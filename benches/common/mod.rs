//! What the benches share: servers as processes of their own, and statistics.

#![allow(dead_code, reason = "each bench is a crate of its own and uses a part")]

pub(crate) mod backend;
pub(crate) mod report;
pub(crate) mod stats;

/// The role of this process where it is not the bench itself. The arguments
/// belong to cargo, so it comes in the environment.
pub(crate) const ROLE: &str = "BENCH_ROLE";

/// An option of the bench's command line: `--runs 5`.
pub(crate) fn option(name: &str, default: usize) -> usize {
    let mut args = std::env::args().skip_while(|arg| arg != name).skip(1);
    args.next().and_then(|value| value.parse().ok()).unwrap_or(default)
}
