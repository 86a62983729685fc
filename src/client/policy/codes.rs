//! A set of status codes.

use std::fmt;

use tonic::Code;

/// Codes that some rule is about.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Codes(u32);

impl Codes {
    pub(crate) fn contains(self, code: Code) -> bool {
        self.0 & bit(code) != 0
    }
}

/// There are 17 codes, from 0.
fn bit(code: Code) -> u32 {
    1 << (code as i32)
}

impl FromIterator<Code> for Codes {
    fn from_iter<I: IntoIterator<Item = Code>>(codes: I) -> Self {
        Self(codes.into_iter().fold(0, |set, code| set | bit(code)))
    }
}

impl fmt::Debug for Codes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries((0..17).map(Code::from_i32).filter(|code| self.contains(*code))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_it_was_made_of_and_nothing_else() {
        let set: Codes = [Code::Unavailable, Code::Aborted].into_iter().collect();
        for code in (0..17).map(Code::from_i32) {
            assert_eq!(set.contains(code), matches!(code, Code::Unavailable | Code::Aborted), "{code:?}");
        }
        assert_eq!(format!("{set:?}"), "{Aborted, Unavailable}");
    }
}
