//! A call's deadline, from the `grpc-timeout` header (gRPC over HTTP/2, "Requests").

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// The longest that anything is waited for: timers do not reach for ever. A year.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// When a call must have ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    /// Set by the caller. Only then does it bind the response's body too, and
    /// travel to the server: a default must not cut a stream that may live long.
    explicit: bool,
}

impl Deadline {
    /// The deadline of a call that starts at `now`. A header that is not a
    /// timeout is left to the server to refuse, and the default holds.
    #[inline]
    pub(crate) fn of(header: Option<&HeaderValue>, default: Option<Duration>, now: Instant) -> Self {
        let explicit = header.and_then(parse);
        let after = explicit.or(default).unwrap_or(FOR_EVER).min(FOR_EVER);
        Self { at: now + after, explicit: explicit.is_some() }
    }

    /// As good as none.
    pub(crate) fn none(now: Instant) -> Self {
        Self { at: now + FOR_EVER, explicit: false }
    }

    /// Bounded by what the options say of the method: the sooner of the two
    /// holds, and takes the default's place (service_config.proto, `timeout`).
    #[inline]
    pub(crate) fn within(self, timeout: Option<Duration>, now: Instant) -> Self {
        let Some(timeout) = timeout else { return self };
        let bound = now + timeout.min(FOR_EVER);
        Self { at: if self.explicit { self.at.min(bound) } else { bound }, explicit: true }
    }

    #[inline]
    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// The instant that bounds the response's body, if any does.
    #[inline]
    pub(crate) fn of_body(&self, unary_response: bool) -> Option<Instant> {
        (self.explicit || unary_response).then_some(self.at)
    }

    /// Tells the server of an attempt that starts late what is left of the time.
    pub(crate) fn lower(&self, headers: &mut HeaderMap, now: Instant) {
        if self.explicit {
            headers.insert(GRPC_TIMEOUT, format(self.at.saturating_duration_since(now)));
        }
    }
}

/// `TimeoutValue TimeoutUnit`: at most eight digits and one of `HMSmun`.
fn parse(value: &HeaderValue) -> Option<Duration> {
    let value = value.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    })
}

/// The finest unit whose value has at most eight digits.
fn format(left: Duration) -> HeaderValue {
    const MOST: u128 = 99_999_999;
    let (n, unit) = if left.as_micros() <= MOST {
        (left.as_micros(), 'u')
    } else if left.as_millis() <= MOST {
        (left.as_millis(), 'm')
    } else {
        (u128::from(left.as_secs()).min(MOST), 'S')
    };
    HeaderValue::try_from(format!("{n}{unit}")).expect("digits and a letter are a header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(s: &str) -> Option<Duration> {
        parse(&HeaderValue::from_str(s).unwrap())
    }

    #[test]
    fn every_unit_is_read() {
        assert_eq!(parsed("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(parsed("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parsed("2S"), Some(Duration::from_secs(2)));
        assert_eq!(parsed("2m"), Some(Duration::from_millis(2)));
        assert_eq!(parsed("2u"), Some(Duration::from_micros(2)));
        assert_eq!(parsed("99999999n"), Some(Duration::from_nanos(99_999_999)));
    }

    #[test]
    fn what_is_no_timeout_is_not_read() {
        for bad in ["", "S", "1", "1s", "-1S", "+1S", "1.5S", "123456789S", "1 S", "1é"] {
            let value = HeaderValue::from_bytes(bad.as_bytes()).unwrap();
            assert_eq!(parse(&value), None, "{bad:?}");
        }
    }

    #[test]
    fn what_is_written_can_be_read_and_is_never_longer() {
        for millis in [0, 1, 999, 99_999, 100_000, 99_999_999, 100_000_000, 4_000_000_000] {
            let left = Duration::from_millis(millis);
            let read = parse(&format(left)).expect("readable");
            assert!(read <= left && left - read < Duration::from_secs(1), "{left:?} became {read:?}");
        }
    }

    #[tokio::test]
    async fn a_default_neither_travels_nor_cuts_a_stream() {
        let mut headers = HeaderMap::new();
        let now = Instant::now();
        let deadline = Deadline::of(None, Some(Duration::from_secs(1)), now);
        deadline.lower(&mut headers, now);
        assert!(headers.is_empty());
        assert_eq!(deadline.at(), now + Duration::from_secs(1));
        assert_eq!(deadline.of_body(false), None);
        assert_eq!(deadline.of_body(true), Some(deadline.at()));
    }

    #[tokio::test]
    async fn a_methods_timeout_bounds_the_calls_own_and_replaces_the_default() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut headers = HeaderMap::new();
        let none = Deadline::of(None, Some(second), now).within(Some(5 * second), now);
        assert_eq!((none.at(), none.of_body(false)), (now + 5 * second, Some(now + 5 * second)));
        none.lower(&mut headers, now);
        assert_eq!(headers.get(GRPC_TIMEOUT).and_then(parse), Some(5 * second), "the server is told");
        let own = Deadline::of(Some(&HeaderValue::from_static("2S")), None, now);
        assert_eq!(own.within(Some(5 * second), now).at(), now + 2 * second);
        assert_eq!(own.within(Some(second), now).at(), now + second);
        assert_eq!(own.within(None, now).at(), now + 2 * second);
    }

    #[tokio::test]
    async fn the_longest_timeout_there_is_does_not_overflow() {
        let longest = HeaderValue::from_static("99999999H");
        assert!(Deadline::of(Some(&longest), None, Instant::now()).at() > Instant::now());
    }
}
