//! Durations as Go writes them: `1m30s`, `500ms`, `-5s`.

use std::time::Duration;

/// A duration with its sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signed {
    /// Zero or more.
    Plus(Duration),
    /// Below zero; nothing here cares how far.
    Minus,
}

// === impl Signed ===

impl Signed {
    /// The duration where it is above zero.
    pub(crate) fn positive(self) -> Option<Duration> {
        match self {
            Self::Plus(it) if !it.is_zero() => Some(it),
            _ => None,
        }
    }
}

/// Reads `text`, or says in Go's words what is wrong with it.
/// <https://pkg.go.dev/time#ParseDuration>
pub(crate) fn parse(text: &str) -> Result<Signed, String> {
    let invalid = || format!("time: invalid duration {text:?}");
    let (minus, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Ok(Signed::Plus(Duration::ZERO));
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|it: char| !it.is_ascii_digit() && it != '.').unwrap_or(rest.len());
        let (number, after) = rest.split_at(end);
        let number: f64 = number.parse().map_err(|_| invalid())?;
        let end = after.find(|it: char| it.is_ascii_digit() || it == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        seconds += number
            * match unit {
                "ns" => 1e-9,
                "us" | "µs" => 1e-6,
                "ms" => 1e-3,
                "s" => 1.0,
                "m" => 60.0,
                "h" => 3600.0,
                "" => return Err(format!("time: missing unit in duration {text:?}")),
                _ => return Err(format!("time: unknown unit {unit:?} in duration {text:?}")),
            };
        rest = after;
    }
    let length = Duration::try_from_secs_f64(seconds).map_err(|_| invalid())?;
    Ok(if minus && !length.is_zero() { Signed::Minus } else { Signed::Plus(length) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let millis = |text| match parse(text).unwrap() {
            Signed::Plus(it) => it.as_millis(),
            Signed::Minus => panic!("{text} is above zero"),
        };
        assert_eq!(millis("2s"), 2_000);
        assert_eq!(millis("1m1.5s"), 61_500);
        assert_eq!(millis("100ms"), 100);
        assert_eq!(millis("0"), 0);
        assert_eq!(parse("-5s"), Ok(Signed::Minus));
        assert_eq!(parse("2").unwrap_err(), r#"time: missing unit in duration "2""#);
        assert_eq!(parse("1x").unwrap_err(), r#"time: unknown unit "x" in duration "1x""#);
        assert_eq!(parse("abc").unwrap_err(), r#"time: invalid duration "abc""#);
        assert_eq!(parse("").unwrap_err(), r#"time: invalid duration """#);
        assert!(parse("9999999999999999999999h").is_err());
    }
}
