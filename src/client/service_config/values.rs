//! Single values of a service config, each read and checked by itself, so that
//! an error stands at its path. JSON as protobuf writes it
//! (<https://protobuf.dev/programming-guides/json/>).

use std::{fmt, time::Duration};

use serde::{
    Deserialize, Deserializer,
    de::{Error, Visitor},
};
use tonic::Code;

use crate::client::policy::thousandths;

/// A number, also as a string. JSON has none that is not finite.
struct Number;

impl Visitor<'_> for Number {
    type Value = f64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number")
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<f64, E> {
        Ok(value as f64)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<f64, E> {
        Ok(value as f64)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<f64, E> {
        Ok(value)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<f64, E> {
        // Written as JSON writes it: what else Rust takes for a number (`inf`, `+5`, `.5`) is none to others.
        let number = value.parse::<serde_json::Number>().ok();
        number.and_then(|it| it.as_f64()).ok_or_else(|| E::custom(format_args!("{value:?} is no number")))
    }
}

fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    from.deserialize_any(Number)
}

/// A whole number from `low` on, up to `high`.
fn whole<'de, D: Deserializer<'de>>(from: D, low: u32, high: u32) -> Result<u32, D::Error> {
    let value = number(from)?;
    if value.fract() != 0.0 {
        return Err(D::Error::custom(format_args!("{value} is no whole number")));
    }
    if value < f64::from(low) {
        return Err(D::Error::custom(format_args!("{value} is below {low}")));
    }
    if value > f64::from(high) {
        return Err(D::Error::custom(format_args!("{value} is above {high}")));
    }
    // Within the bounds of a u32, and whole.
    Ok(value as u32)
}

/// `choiceCount` (gRFC A48): among how many the least busy one is chosen.
pub(super) struct OfTwo;

impl<'de> Deserialize<'de> for OfTwo {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match whole(from, 2, u32::MAX)? {
            2 => Ok(Self),
            more => Err(D::Error::custom(format_args!("{more} is not supported: 2"))),
        }
    }
}

/// `maxAttempts`: 2 or more.
pub(super) struct Attempts(pub(super) u32);

impl<'de> Deserialize<'de> for Attempts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        whole(from, 2, u32::MAX).map(Self)
    }
}

/// `maxTokens`: 1 to 1000.
pub(super) struct MaxTokens(pub(super) u32);

impl<'de> Deserialize<'de> for MaxTokens {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        whole(from, 1, 1000).map(Self)
    }
}

/// `tokenRatio`: more than nothing, of which three decimals count.
pub(super) struct TokenRatio(pub(super) f64);

impl<'de> Deserialize<'de> for TokenRatio {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = number(from)?;
        if thousandths(value) == 0 {
            return Err(D::Error::custom(format_args!("{value} is below 0.001")));
        }
        Ok(Self(value))
    }
}

/// `backoffMultiplier`: more than nothing.
pub(super) struct Multiplier(pub(super) f64);

impl<'de> Deserialize<'de> for Multiplier {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = number(from)?;
        if value <= 0.0 {
            return Err(D::Error::custom(format_args!("{value} is not above 0")));
        }
        Ok(Self(value))
    }
}

/// A duration in seconds, such as `1.5s`; none is negative here.
pub(super) struct Seconds(pub(super) Duration);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        seconds(&text).map(Self).ok_or_else(|| {
            D::Error::custom(format_args!("{text:?} is no duration: seconds with an s, like \"0.1s\""))
        })
    }
}

/// The same, and more than nothing.
pub(super) struct Time(pub(super) Duration);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let Seconds(time) = Seconds::deserialize(from)?;
        if time.is_zero() {
            return Err(D::Error::custom("must be more than 0s"));
        }
        Ok(Self(time))
    }
}

/// Up to nine decimals, and up to the longest duration that protobuf knows. The
/// whole part may be missing, as in gRFC A6's own example (`.1s`).
fn seconds(text: &str) -> Option<Duration> {
    const LONGEST: u64 = 315_576_000_000;
    let number = text.strip_suffix('s')?;
    let (whole, part) = match number.split_once('.') {
        Some((whole, part)) if !part.is_empty() => (whole, part),
        Some(_) => return None,
        None if number.is_empty() => return None,
        None => (number, ""),
    };
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !are_digits(whole) || !are_digits(part) || part.len() > 9 {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let nanos: u32 = format!("{part:0<9}").parse().ok()?;
    (whole <= LONGEST).then(|| Duration::new(whole, nanos))
}

/// A status code other than OK, by its number or by its name in capitals or not (gRFC A6, "Validation of
/// retryPolicy").
pub(super) struct Failure(pub(super) Code);

const NAMES: [(&str, Code); 16] = [
    ("CANCELLED", Code::Cancelled),
    ("UNKNOWN", Code::Unknown),
    ("INVALID_ARGUMENT", Code::InvalidArgument),
    ("DEADLINE_EXCEEDED", Code::DeadlineExceeded),
    ("NOT_FOUND", Code::NotFound),
    ("ALREADY_EXISTS", Code::AlreadyExists),
    ("PERMISSION_DENIED", Code::PermissionDenied),
    ("RESOURCE_EXHAUSTED", Code::ResourceExhausted),
    ("FAILED_PRECONDITION", Code::FailedPrecondition),
    ("ABORTED", Code::Aborted),
    ("OUT_OF_RANGE", Code::OutOfRange),
    ("UNIMPLEMENTED", Code::Unimplemented),
    ("INTERNAL", Code::Internal),
    ("UNAVAILABLE", Code::Unavailable),
    ("DATA_LOSS", Code::DataLoss),
    ("UNAUTHENTICATED", Code::Unauthenticated),
];

impl<'de> Deserialize<'de> for Failure {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct NameOrNumber;

        impl Visitor<'_> for NameOrNumber {
            type Value = Failure;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a status code's name or number")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Failure, E> {
                let found = NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
                found.map(|(_, code)| Failure(*code)).ok_or_else(|| {
                    E::custom(format_args!("{name:?} is no failure's code: one like \"UNAVAILABLE\""))
                })
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Failure, E> {
                let found = NAMES.iter().find(|(_, code)| u64::try_from(*code as i32) == Ok(number));
                found
                    .map(|(_, code)| Failure(*code))
                    .ok_or_else(|| E::custom(format_args!("{number} is no failure's code: 1 to 16")))
            }
        }

        from.deserialize_any(NameOrNumber)
    }
}

/// A field that gRPC knows and that would not hold here.
pub(super) struct Unsupported;

impl<'de> Deserialize<'de> for Unsupported {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(D::Error::custom(
            "not supported: set max_encoding_message_size and max_decoding_message_size of the generated client",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_protobuf_writes_them() {
        for (text, nanos) in [
            ("1s", 1_000_000_000),
            (".1s", 100_000_000),
            ("0.000000001s", 1),
            ("1.5s", 1_500_000_000),
            ("0s", 0),
            ("00.50s", 500_000_000),
        ] {
            assert_eq!(seconds(text), Some(Duration::from_nanos(nanos)), "{text}");
        }
        assert_eq!(seconds("315576000000s"), Some(Duration::from_secs(315_576_000_000)));
        for bad in [
            "",
            "s",
            ".s",
            "1",
            "1.s",
            "1ms",
            "-1s",
            "+1s",
            "1 s",
            "0.0000000001s",
            "315576000001s",
            "99999999999999999999s",
            "1e3s",
            "١s",
        ] {
            assert_eq!(seconds(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_number_in_a_string_is_written_as_json_writes_it() {
        for (text, is) in [("5", 5.0), ("-0.5", -0.5), ("1e2", 100.0), ("0.100", 0.1)] {
            assert_eq!(Number.visit_str::<serde::de::value::Error>(text), Ok(is), "{text}");
        }
        for bad in ["", "inf", "Infinity", "NaN", "+5", ".5", "5.", "05", " 5", "5 ", "0x5", "1e999", "١"] {
            assert!(Number.visit_str::<serde::de::value::Error>(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn every_code_but_ok_has_its_name_and_number() {
        for number in 1..17 {
            let (name, code) = NAMES.iter().find(|(_, code)| *code as i32 == number).expect("a name");
            for json in [format!("{name:?}"), format!("{:?}", name.to_lowercase()), number.to_string()] {
                let Failure(read) = serde_json::from_str(&json).unwrap();
                assert_eq!(read, *code, "{json}");
            }
        }
        for bad in ["\"OK\"", "0", "17", "-1", "\"UN AVAILABLE\"", "\"ok\"", "\"14\"", "1.5", "null", "[]"] {
            assert!(serde_json::from_str::<Failure>(bad).is_err(), "{bad}");
        }
    }
}
