//! What values may be called, in whatever store.

/// Our choice: with a prefix it is far below what stores and file systems take.
const LONGEST: usize = 64;

/// Why a name is none, for an error's text.
pub(in crate::server) const RULE: &str =
    "a key has 1 to 64 letters, digits, `-`, `_` or `.`, and does not begin with `.`";

/// Whether a value may be called so.
pub(in crate::server) fn is_key(key: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=LONGEST).contains(&key.len()) && !key.starts_with('.') && key.chars().all(letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_none_are_refused() {
        for key in ["", ".", "..", ".hidden", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(!is_key(key), "{key:?}");
        }
        for key in ["counter", "a", "A.b-c_9", &"x".repeat(64)] {
            assert!(is_key(key), "{key:?}");
        }
    }
}
