//! Which key is what.

use super::InvalidConsulStore;
use crate::{
    role::FencingToken,
    server::store::{Nonce, StoreError},
};

/// Our bound: of Consul's refusals only the beginning is read, and it names several keys.
const LONGEST: usize = 128;
/// The bounds that [`Write::key`](crate::server::store::Write::key) gives.
const LONGEST_STATE: usize = 64;

/// The keys of one lease, all of them below one prefix.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
}

// === impl Keys ===

impl Keys {
    pub(super) fn new(prefix: String) -> Result<Self, InvalidConsulStore> {
        let problem = if prefix.is_empty() {
            "is empty"
        } else if prefix.len() > LONGEST {
            "is longer than 128 letters"
        } else if prefix.starts_with('/') || prefix.ends_with('/') {
            "begins or ends with a slash"
        } else if !prefix.bytes().all(|it| it == b'/' || is_plain(it)) {
            "holds something else than letters, digits, `-`, `_`, `.` and `/`"
        } else if prefix.split('/').any(|part| matches!(part, "" | "." | "..")) {
            "has a part between slashes that is empty, `.` or `..`"
        } else {
            return Ok(Self { prefix });
        };
        let prefix = prefix.chars().take(LONGEST).collect();
        Err(InvalidConsulStore::Prefix { prefix, problem })
    }

    /// What all of them begin with.
    pub(super) fn all(&self) -> String {
        format!("{}/", self.prefix)
    }

    /// What those of the lease begin with.
    pub(super) fn lease(&self) -> String {
        format!("{}/lease/", self.prefix)
    }

    pub(super) fn holder(&self) -> String {
        format!("{}/lease/holder", self.prefix)
    }

    pub(super) fn heartbeat(&self) -> String {
        format!("{}/lease/heartbeat", self.prefix)
    }

    /// What the key of a term begins with.
    pub(super) fn terms(&self) -> String {
        format!("{}/lease/term/", self.prefix)
    }

    /// The key that is there in this term alone: no two terms have the same name.
    pub(super) fn term(&self, token: FencingToken, nonce: &Nonce) -> String {
        format!("{}/lease/term/{token}-{}", self.prefix, safe(nonce.as_str()))
    }

    /// What those of the state begin with.
    pub(super) fn states(&self) -> String {
        format!("{}/state/", self.prefix)
    }

    /// The key of a value.
    pub(super) fn state(&self, key: &str) -> Result<String, StoreError> {
        let good =
            (1..=LONGEST_STATE).contains(&key.len()) && !key.starts_with('.') && key.bytes().all(is_plain);
        if good {
            return Ok(format!("{}/state/{key}", self.prefix));
        }
        let shown: String = key.chars().take(LONGEST_STATE).collect();
        let reason = format!(
            "{shown:?} is no key: 1 to 64 letters, digits, `-`, `_` or `.`, not beginning with `.`, make one"
        );
        Err(StoreError::Refused { reason })
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

/// A nonce as a part of a key: as it is, or its bytes in hexadecimal behind a dot.
fn safe(nonce: &str) -> String {
    let plain = |it: u8| it.is_ascii_alphanumeric() || matches!(it, b'-' | b'_');
    if (1..=LONGEST_STATE).contains(&nonce.len()) && nonce.bytes().all(plain) {
        return nonce.to_owned();
    }
    let digits = nonce.bytes().map(|it| format!("{it:02x}"));
    std::iter::once(".".to_owned()).chain(digits).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn two_terms_never_have_one_key(
            (one, other) in ("(?s).{0,8}|[a-f0-9.-]{0,8}", "(?s).{0,8}|[a-f0-9.-]{0,8}"),
            (first, second) in (0..20_u64, 0..20_u64),
        ) {
            let keys = Keys::new("a".to_owned()).unwrap();
            let key = |term, nonce: &str| keys.term(FencingToken::new(term), &Nonce::new(nonce));
            prop_assert_eq!(key(first, &one) == key(second, &other), first == second && one == other);
        }
    }

    #[test]
    fn a_prefix_that_would_not_arrive_is_refused_with_what_is_wrong() {
        for (prefix, problem) in [
            ("", "is empty"),
            ("/a", "begins or ends with a slash"),
            ("a/", "begins or ends with a slash"),
            ("a//b", "has a part"),
            ("a/../b", "has a part"),
            ("a b", "holds something else"),
            ("ä", "holds something else"),
            ("a?b", "holds something else"),
            ("a%2fb", "holds something else"),
            ("a\n", "holds something else"),
            (&"a".repeat(129), "is longer"),
        ] {
            let error = Keys::new(prefix.to_owned()).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("`services/counter`"), "{prefix:?}: {error}");
        }
        for prefix in ["a", "services/counter", "A-b_c.d/0"] {
            assert!(Keys::new(prefix.to_owned()).is_ok(), "{prefix}");
        }
    }

    #[test]
    fn a_key_of_the_state_that_is_none_is_refused() {
        let keys = Keys::new("a".to_owned()).unwrap();
        for key in ["", ".", "..", ".a", "a/b", "a b", "ä", &"a".repeat(65)] {
            assert!(matches!(keys.state(key), Err(StoreError::Refused { .. })), "{key:?}");
        }
        assert_eq!(keys.state("counter.v1").unwrap(), "a/state/counter.v1");
    }
}
