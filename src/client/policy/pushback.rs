//! What a server says about sending a call again (gRFC A6, "Pushback").

use std::time::Duration;

use http::{HeaderMap, HeaderName};

use crate::client::answer::Answer;

const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// A server's word on another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushback {
    /// It said nothing.
    Unsaid,
    /// After exactly so long.
    After(Duration),
    /// Not at all.
    Never,
}

impl Pushback {
    /// What stands beside the status: in the trailers, or in the headers where
    /// there is nothing else.
    pub(crate) fn of(answer: &Answer) -> Self {
        match answer {
            Answer::Begun { response, .. } => Self::read(response.headers()),
            Answer::Whole { response, .. } => match response.body().trailers().map(Self::read) {
                Some(said) if said != Self::Unsaid => said,
                _ => Self::read(response.headers()),
            },
        }
    }

    /// Negative and unreadable values ask for no other attempt; so do several.
    fn read(headers: &HeaderMap) -> Self {
        let mut values = headers.get_all(PUSHBACK).iter();
        let Some(value) = values.next() else { return Self::Unsaid };
        if values.next().is_some() {
            return Self::Never;
        }
        let millis = value.to_str().ok().and_then(|value| value.parse::<i32>().ok());
        match millis.map(u64::try_from) {
            Some(Ok(millis)) => Self::After(Duration::from_millis(millis)),
            Some(Err(_)) | None => Self::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn said(values: &[&'static str]) -> Pushback {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(PUSHBACK, HeaderValue::from_static(value));
        }
        Pushback::read(&headers)
    }

    #[test]
    fn what_is_negative_or_no_number_says_not_to() {
        assert_eq!(said(&[]), Pushback::Unsaid);
        assert_eq!(said(&["0"]), Pushback::After(Duration::ZERO));
        assert_eq!(said(&["2147483647"]), Pushback::After(Duration::from_millis(2_147_483_647)));
        for never in ["-1", "-2147483648", "2147483648", "1.5", "soon", "", "0x10", "1 "] {
            assert_eq!(said(&[never]), Pushback::Never, "{never:?}");
        }
        assert_eq!(said(&["10", "20"]), Pushback::Never, "which of them?");
    }
}
