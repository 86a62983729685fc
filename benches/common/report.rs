//! What is printed around the figures.

use std::fs;

/// Prints whether a bar is held.
pub(crate) fn bar(what: &str, value: f64, most: f64) {
    let verdict = if value <= most { "held" } else { "MISSED" };
    println!("bar: {what}: {value:.3} <= {most:.3} {verdict}");
}

/// How busy the machine is, with whatever runs beside us.
pub(crate) fn load() -> String {
    let all = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    all.split_whitespace().next().unwrap_or("?").to_owned()
}

/// Says how this was built and how busy the machine is.
pub(crate) fn preface() {
    let profile = if cfg!(debug_assertions) { "dev" } else { "optimised" };
    let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
    println!("{profile} profile, {cores} cores, load {}", load());
}
