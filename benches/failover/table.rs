//! The table of runs.

use super::run::{Fault, Run};

const HEAD: &str = "client | failed | executed though failed | executed twice | longest gap, ms | p50, ms | \
    p99, ms | slowest, ms | back after, ms | into the freeze";

pub(crate) fn head(fault: Fault, runs: usize) {
    println!("\n# {}, {runs} runs each: median (least..most)", fault.name());
    println!("{HEAD}");
}

/// The median of one column.
pub(crate) fn median(runs: &[Run], column: impl Fn(&Run) -> f64) -> f64 {
    spread(runs, column).1
}

/// The largest value of one column.
pub(crate) fn most(runs: &[Run], column: impl Fn(&Run) -> f64) -> f64 {
    spread(runs, column).2
}

pub(crate) fn back(run: &Run) -> f64 {
    run.back.unwrap_or(f64::INFINITY)
}

fn spread(runs: &[Run], column: impl Fn(&Run) -> f64) -> (f64, f64, f64) {
    let mut values: Vec<f64> = runs.iter().map(column).collect();
    values.sort_by(f64::total_cmp);
    match values.as_slice() {
        [] => (0.0, 0.0, 0.0),
        [first, .., last] => (*first, values[values.len() / 2], *last),
        [only] => (*only, *only, *only),
    }
}

pub(crate) fn row(name: &str, runs: &[Run]) {
    let text = |value: f64, places: usize| {
        if value.is_finite() { format!("{value:.places$}") } else { "never".to_owned() }
    };
    let cell = |column: &dyn Fn(&Run) -> f64, places| {
        let (least, mid, most) = spread(runs, column);
        if least == most {
            text(mid, places)
        } else {
            format!("{} ({}..{})", text(mid, places), text(least, places), text(most, places))
        }
    };
    let cells = [
        cell(&|it| it.failed, 0),
        cell(&|it| it.executed_though_failed, 0),
        cell(&|it| it.executed_twice, 0),
        cell(&|it| it.gap, 0),
        cell(&|it| it.p50, 1),
        cell(&|it| it.p99, 1),
        cell(&|it| it.slowest, 0),
        cell(&back, 0),
        cell(&|it| it.into_the_freeze, 0),
    ];
    println!("{name} | {}", cells.join(" | "));
    let mut codes: Vec<_> =
        runs.iter().flat_map(|it| &it.codes).map(|(code, n)| format!("{code} {n}")).collect();
    codes.sort();
    let dying = cell(&|it| it.sent_to_the_dying, 0);
    if dying != "0" {
        println!("  failures of {name} that a dying process had taken and no handler begun: {dying}");
    }
    if !codes.is_empty() {
        println!("  failures of {name}, by run: {}", codes.join(", "));
    }
}
