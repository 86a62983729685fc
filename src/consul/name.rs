//! Names that can be put into a path and arrive as they were.

use std::fmt;

/// Our bound: far beyond any name in use, far below what a URL may hold.
const LONGEST: usize = 1024;

/// The name of a service, checked to reach Consul unchanged.
///
/// Spaces, `%`, `?`, `#` and letters beyond ASCII are fine, as they are to Consul.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceName(String);

/// Why a name cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name {name:?} {problem}")]
pub struct InvalidName {
    name: String,
    problem: &'static str,
}

// === impl ServiceName ===

impl ServiceName {
    /// Checks `name`.
    ///
    /// # Errors
    /// Where the name is empty, longer than 1,024 bytes, has control characters,
    /// or parts between slashes that are empty, `.` or `..`: HTTP would make
    /// another name of these.
    pub fn new(name: impl Into<String>) -> Result<Self, InvalidName> {
        let name = name.into();
        check(&name)?;
        Ok(Self(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Whether `name` survives the way into a path and out of it again.
pub(super) fn check(name: &str) -> Result<(), InvalidName> {
    let problem = if name.is_empty() {
        "is empty"
    } else if name.len() > LONGEST {
        "is longer than 1024 bytes"
    } else if name.chars().any(char::is_control) {
        "holds a control character"
    } else if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        "has a part between slashes that is empty, \".\" or \"..\""
    } else {
        return Ok(());
    };
    let name = if name.len() > LONGEST { name.chars().take(64).collect() } else { name.to_owned() };
    Err(InvalidName { name, problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_http_would_change_are_refused() {
        for bad in ["", ".", "..", "a/../b", "/a", "a/", "a//b", "a\nb", "a\u{7f}b", "a\u{85}b"] {
            assert!(ServiceName::new(bad).is_err(), "{bad:?}");
        }
        assert!(ServiceName::new("x".repeat(1025)).is_err());
    }

    #[test]
    fn names_that_consul_takes_are_taken() {
        for good in ["counter", "a b", "é", "a%b", "50%?#", "a/b", "...", "a.b", "a\\b", "%2e%2e"] {
            assert!(ServiceName::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_refusal_shows_the_name_and_what_is_wrong() {
        let error = ServiceName::new("a\nb").unwrap_err().to_string();
        assert_eq!(error, "the name \"a\\nb\" holds a control character");
    }
}
