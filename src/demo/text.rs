//! Durations and times of day as people write and read them.

use std::{
    error::Error,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Reads `300ms`, `2s`, `1.5s`, `2m` or `1h`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("{text:?} is not a duration: write a number and ms, s, m or h, for example 300ms or 2s");
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit {
        "ms" => number / 1000.0,
        "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(wrong()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// As [`parse_duration`], without zero: for a wait that must be one.
pub(crate) fn parse_positive_duration(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err(format!("{text:?} is no time at all: write more than zero, for example 2s")),
        duration => Ok(duration),
    }
}

/// `<0.1 ms`, `0.8 ms`, `12 ms`, `1.32 s`, `2 min 5 s`: three digits are all that a reader wants.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let ms = seconds * 1000.0;
    // The bounds are where rounding would give another digit.
    if ms < 0.05 {
        "<0.1 ms".to_owned()
    } else if ms < 9.95 {
        format!("{ms:.1} ms")
    } else if ms < 999.5 {
        format!("{ms:.0} ms")
    } else if seconds < 9.995 {
        format!("{seconds:.2} s")
    } else if seconds < 119.5 {
        format!("{seconds:.0} s")
    } else {
        let whole = seconds.round() as u64;
        format!("{} min {} s", whole / 60, whole % 60)
    }
}

/// Milliseconds to three places, for machines.
pub(crate) fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// An error and what led to it, in one line.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        // Some crates repeat their source in their own words.
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = error.source();
    }
    text
}

/// `1 call`, `2 calls`.
pub(crate) fn count(n: u64, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

/// The time of day, UTC, to the millisecond: `14:03:07.250`.
pub(crate) fn time_of_day() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs() % 86_400;
    format!("{:02}:{:02}:{:02}.{:03}", seconds / 3600, seconds / 60 % 60, seconds % 60, since.subsec_millis())
}

/// Unlike that of another run, on this machine or elsewhere: time and process.
pub(crate) fn run_id() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", since.as_micros(), std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_with_their_unit() {
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("0s"), Ok(Duration::ZERO));
    }

    #[test]
    fn a_wrong_duration_is_refused_with_what_would_be_right() {
        for text in ["", "2", "s", "-1s", "2 s", "2d", "1..5s", "99999999999999999999999h"] {
            let error = parse_duration(text).unwrap_err();
            assert!(error.contains("for example 300ms"), "{error}");
        }
        assert!(parse_positive_duration("0ms").is_err());
    }

    #[test]
    fn durations_are_written_with_the_digits_that_matter() {
        let cases = [
            (12, "<0.1 ms"),
            (820, "0.8 ms"),
            (9_960, "10 ms"),
            (12_300, "12 ms"),
            (999_600, "1.00 s"),
            (1_320_000, "1.32 s"),
            (25_000_000, "25 s"),
            (125_000_000, "2 min 5 s"),
        ];
        for (us, text) in cases {
            assert_eq!(duration(Duration::from_micros(us)), text);
        }
    }
}
