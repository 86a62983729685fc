//! What a call costs through the whole stack, against a raw tonic `Channel`.
//!
//! `cargo bench --bench call_path`, `-- --pairs 400` for narrower intervals. The
//! server is a process of its own; slices of about 400 calls of the one kind and the
//! other lie side by side, and what is printed are the medians of their ratios:
//! on a machine whose neighbours come and go nothing else is worth quoting.
//! `docs/benchmarks.md` says more.

#![allow(clippy::unwrap_used, reason = "a measurement may fail")]

#[path = "../common/mod.rs"]
mod common;
mod memory;
mod pairs;
mod scenes;
mod stack;

use std::env;

use common::{ROLE, backend, option, report};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> Outcome {
    if let Ok(role) = env::var(ROLE) {
        return match role.split(' ').next() {
            Some("server") => backend::serve(&role),
            _ => memory::act(&role),
        };
    }
    let pairs = option("--pairs", 300);
    let only = env::args().skip_while(|arg| arg != "--only").nth(1);
    if let Some(what) = only.as_deref().filter(|only| only.starts_with("profile")) {
        return scenes::profile(what, option("--callers", 16), option("--slices", 100));
    }
    let wanted = |scene: &str| only.as_deref().is_none_or(|only| only == scene);
    report::preface();
    if wanted("cost") {
        scenes::cost(pairs)?;
    }
    if wanted("stages") {
        scenes::stages()?;
    }
    if wanted("balance") {
        scenes::balance(pairs)?;
    }
    if wanted("burst") {
        scenes::burst(option("--bursts", 12))?;
    }
    if wanted("memory") {
        memory::measure(option("--processes", 5))?;
    }
    println!("load {} at the end", report::load());
    Ok(())
}
