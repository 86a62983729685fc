//! The table at the end. Pure.

use serde_json::{Value, json};

use super::tally::{Act, Tally};
use crate::demo::text;

const HEAD: [&str; 8] =
    ["act", "calls", "resent", "slow", "failed", "calls went to", "rebound in", "longest call"];
/// These columns hold words, the others numbers.
const WORDS: [usize; 2] = [0, 5];

/// One line for each act, under a line of titles.
pub(crate) fn table(tally: &Tally) -> Vec<String> {
    let mut rows = vec![HEAD.map(str::to_owned)];
    for (number, act) in tally.acts().iter().enumerate() {
        let (sums, longest) = tally.sums_of(number);
        // The last one is where the calls stayed, the first one what the act began.
        let went_to = tally.rebinds(number).last().map_or("-".to_owned(), |rebind| rebind.to.clone());
        let took = tally.rebinds(number).next().map_or("-".to_owned(), |rebind| text::duration(rebind.took));
        rows.push([
            act.title.clone(),
            (sums.answered + sums.failed).to_string(),
            sums.resent.to_string(),
            sums.slow.to_string(),
            sums.failed.to_string(),
            went_to,
            took,
            text::duration(longest),
        ]);
    }
    let sums = tally.sums;
    rows.push([
        "in all".to_owned(),
        (sums.answered + sums.failed).to_string(),
        sums.resent.to_string(),
        sums.slow.to_string(),
        sums.failed.to_string(),
        String::new(),
        String::new(),
        String::new(),
    ]);
    layout(&rows)
}

/// The same for machines.
pub(crate) fn json(tally: &Tally) -> Vec<Value> {
    let row = |(number, act): (usize, &Act)| {
        let (sums, longest) = tally.sums_of(number);
        let rebinds = tally.rebinds(number);
        let rebinds = rebinds.map(|it| json!({ "to": it.to, "took_ms": text::ms(it.took) }));
        json!({
            "act": act.title, "answered": sums.answered, "resent": sums.resent, "slow": sums.slow,
            "failed": sums.failed, "longest_ms": text::ms(longest),
            "rebinds": rebinds.collect::<Vec<_>>(),
        })
    };
    tally.acts().iter().enumerate().map(row).collect()
}

/// Words to the left, numbers to the right, each column as wide as it must be.
fn layout<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| {
            if WORDS.contains(&column) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;
    use crate::demo::calls::{Answer, Method};

    #[test]
    fn numbers_stand_under_each_other() {
        let mut tally = Tally::default();
        let now = Instant::now();
        tally.open("1  kill counter-a");
        let call = tally.begin(Method::Get, "1".into(), now);
        let answer = Answer { instance: "counter-b".into(), datacenter: "dc1".into(), attempts: 2 };
        tally.end(call, now + Duration::from_millis(41), Ok(answer));
        tally.rebound("counter-b@dc1".into(), Duration::from_micros(800), now);
        tally.open("2  rest");
        assert_eq!(
            table(&tally),
            [
                "act                calls  resent  slow  failed  calls went to  rebound in  longest call",
                "1  kill counter-a      1       1     0       0  counter-b@dc1      0.8 ms         41 ms",
                "2  rest                0       0     0       0  -                       -       <0.1 ms",
                "in all                 1       1     0       0",
            ]
        );
    }
}
