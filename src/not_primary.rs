//! What a standby says to a call, as it crosses the wire: UNAVAILABLE with a
//! `google.rpc.ErrorInfo` of our own domain.
//!
//! | reason | said when | the call |
//! |---|---|---|
//! | `NOT_PRIMARY` | instead of running the call | never ran: it may always be sent elsewhere |
//! | `PRIMARY_LOST` | in a response that had begun | ran, in part at least |
//!
//! Both name the primary where it is known, in the metadata `instance`, `address` and `token`. What
//! comes over the wire is read strictly: whatever is not as it should be says nothing.

use std::collections::HashMap;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{
    instance::InstanceId,
    role::{FencingToken, Primary},
};

/// `ErrorInfo.domain` of everything that this crate says.
const DOMAIN: &str = "tonic-failover";
const NOT_PRIMARY: &str = "NOT_PRIMARY";
const PRIMARY_LOST: &str = "PRIMARY_LOST";

/// The longest details that are looked at, in bytes. Ours have a tenth of it; an HTTP/2 header block
/// is mostly bounded at 16 KiB.
const LONGEST_DETAILS: usize = 8 * 1024;
/// The longest name of an instance that is believed, in bytes. Our choice.
const LONGEST_NAME: usize = 256;
/// The longest host: a name in DNS has 255 bytes at the most (RFC 1035, section 2.3.4).
const LONGEST_HOST: usize = 255;

/// An instance refuses a call because it is not the primary. The call has not run.
///
/// A handler that finds out by itself, when its write is refused, returns this too: but only where it
/// is certain that nothing was written.
///
/// ```
/// use tonic::{Code, Status};
/// use tonic_failover::NotPrimary;
///
/// let status = Status::from(NotPrimary::new(None));
/// assert_eq!(status.code(), Code::Unavailable);
/// assert_eq!(NotPrimary::of(&status), Some(NotPrimary::new(None)));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotPrimary {
    /// Who is, where that is known.
    pub primary: Option<Primary>,
}

/// An instance ends a response that had begun, because it is the primary no longer. The call ran, in
/// part at least: it is never sent again by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrimaryLost {
    /// Who is primary now, where that is known.
    pub primary: Option<Primary>,
}

// === impl NotPrimary ===

impl NotPrimary {
    /// A refusal that names the primary, if it is known.
    pub fn new(primary: Option<Primary>) -> Self {
        Self { primary }
    }

    /// Reads a status. `None` where it says anything else. Never panics, whatever the status holds.
    pub fn of(status: &Status) -> Option<Self> {
        read(status, NOT_PRIMARY).map(Self::new)
    }

    /// Whether a status says this, or [`PrimaryLost`]: both are news about roles, and no fault of the
    /// instance that says it.
    pub(crate) fn or_no_longer(status: &Status) -> bool {
        Self::of(status).is_some() || PrimaryLost::of(status).is_some()
    }
}

impl From<NotPrimary> for Status {
    fn from(refusal: NotPrimary) -> Self {
        let words = "NOT_PRIMARY: this instance is not the primary, and has not run the call";
        write(NOT_PRIMARY, words, refusal.primary.as_ref())
    }
}

// === impl PrimaryLost ===

impl PrimaryLost {
    /// An end that names the new primary, if it is known.
    pub fn new(primary: Option<Primary>) -> Self {
        Self { primary }
    }

    /// Reads a status. `None` where it says anything else. Never panics, whatever the status holds.
    pub fn of(status: &Status) -> Option<Self> {
        read(status, PRIMARY_LOST).map(Self::new)
    }
}

impl From<PrimaryLost> for Status {
    fn from(end: PrimaryLost) -> Self {
        let words = "PRIMARY_LOST: this instance is the primary no longer; the call had begun";
        write(PRIMARY_LOST, words, end.primary.as_ref())
    }
}

fn write(reason: &str, words: &str, primary: Option<&Primary>) -> Status {
    let (mut metadata, mut message) = (HashMap::new(), words.to_owned());
    if let Some(primary) = primary.filter(|primary| is_sound(primary)) {
        metadata.insert("instance".to_owned(), primary.instance.clone());
        metadata.insert("address".to_owned(), primary.address.to_string());
        metadata.insert("token".to_owned(), primary.token.to_string());
        message.push_str(&format!("; the primary is {primary}"));
    }
    let details = ErrorDetails::with_error_info(reason, DOMAIN, metadata);
    Status::with_error_details(Code::Unavailable, message, details)
}

/// What `reason` says of the primary, where the status is of that reason.
fn read(status: &Status, reason: &str) -> Option<Option<Primary>> {
    let details = status.details().len();
    if status.code() != Code::Unavailable || details == 0 || details > LONGEST_DETAILS {
        return None;
    }
    let info = status.get_details_error_info()?;
    if info.domain != DOMAIN || info.reason != reason {
        return None;
    }
    let value = |key: &str| info.metadata.get(key).map(String::as_str);
    let primary = || {
        let (instance, token) = (value("instance")?, number(value("token")?)?);
        let address = address(value("address")?)?;
        Some(Primary::new(instance, address, FencingToken::new(token))).filter(is_sound)
    };
    Some(primary())
}

/// Whether it crosses the wire: what is not is never named to a caller.
pub(crate) fn is_sound(primary: &Primary) -> bool {
    let name = &primary.instance;
    !name.is_empty() && name.len() <= LONGEST_NAME && address(primary.address.authority()).is_some()
}

/// Digits alone: `parse` takes a sign as well.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

/// `host:port`, as an [`InstanceId`] is written.
fn address(text: &str) -> Option<InstanceId> {
    let (host, port) = text.rsplit_once(':')?;
    let port = u16::try_from(number(port)?).ok().filter(|&port| port != 0)?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = match bare {
        Some(bare) => bare.contains(':').then_some(bare)?,
        None => (!host.contains(':')).then_some(host)?,
    };
    let fits = |c: char| c.is_ascii_graphic() && !"[]/@?#\\".contains(c);
    if host.is_empty() || host.len() > LONGEST_HOST || !host.chars().all(fits) {
        return None;
    }
    Some(InstanceId::new(host, port))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::HeaderMap;
    use proptest::prelude::*;

    use super::*;

    fn primary(instance: &str, host: &str, token: u64) -> Primary {
        Primary::new(instance, InstanceId::new(host, 50051), FencingToken::new(token))
    }

    /// As it arrives at the other side.
    fn over_the_wire(status: Status) -> Status {
        let mut headers = HeaderMap::new();
        status.add_header(&mut headers).unwrap();
        Status::from_header_map(&headers).unwrap()
    }

    #[test]
    fn a_refusal_arrives_as_it_was_meant() {
        for hint in
            [None, Some(primary("counter-a", "10.0.0.7", 3)), Some(primary("ä b", "fe80::1", u64::MAX))]
        {
            let status = over_the_wire(NotPrimary::new(hint.clone()).into());
            assert_eq!(status.code(), Code::Unavailable);
            assert!(status.message().starts_with("NOT_PRIMARY"), "{status:?}");
            assert_eq!(NotPrimary::of(&status), Some(NotPrimary::new(hint.clone())));
            assert_eq!(PrimaryLost::of(&status), None, "a call that never ran is told from one that did");
            let status = over_the_wire(PrimaryLost::new(hint.clone()).into());
            assert_eq!(PrimaryLost::of(&status), Some(PrimaryLost::new(hint)));
            assert_eq!(NotPrimary::of(&status), None);
        }
    }

    #[test]
    fn another_domain_code_or_reason_is_no_refusal() {
        let told = |code, reason: &str, domain: &str| {
            let details = ErrorDetails::with_error_info(reason, domain, HashMap::new());
            NotPrimary::of(&Status::with_error_details(code, "", details)).is_some()
        };
        assert!(told(Code::Unavailable, "NOT_PRIMARY", "tonic-failover"));
        assert!(!told(Code::Aborted, "NOT_PRIMARY", "tonic-failover"));
        assert!(!told(Code::Unavailable, "NOT_PRIMARY", "example.org"));
        assert!(!told(Code::Unavailable, "not_primary", "tonic-failover"));
        assert!(!told(Code::Unavailable, "PRIMARY_LOST", "tonic-failover"));
        assert!(NotPrimary::of(&Status::unavailable("NOT_PRIMARY")).is_none(), "words are no proof");
    }

    #[test]
    fn a_hint_that_is_not_as_it_should_be_is_no_hint_and_the_refusal_stays_one() {
        let hint = |instance: &str, address: &str, token: &str| {
            let metadata = [("instance", instance), ("address", address), ("token", token)];
            let metadata: HashMap<_, _> = metadata.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
            let details = ErrorDetails::with_error_info(NOT_PRIMARY, DOMAIN, metadata);
            let status = Status::with_error_details(Code::Unavailable, "", details);
            NotPrimary::of(&status).expect("a refusal").primary
        };
        assert_eq!(hint("a", "10.0.0.7:50051", "3"), Some(primary("a", "10.0.0.7", 3)));
        assert_eq!(hint("a", "[::1]:50051", "3"), Some(primary("a", "::1", 3)));
        let long = "x".repeat(300);
        for (instance, address, token) in [
            ("", "a:1", "3"),
            (&*long, "a:1", "3"),
            ("a", "a", "3"),
            ("a", "a:0", "3"),
            ("a", "a:65536", "3"),
            ("a", "a:+1", "3"),
            ("a", ":1", "3"),
            ("a", "::1:1", "3"),
            ("a", "[a]:1", "3"),
            ("a", "user@a:1", "3"),
            ("a", "a/b:1", "3"),
            ("a", "a b:1", "3"),
            ("a", &*format!("{long}:1"), "3"),
            ("a", "a:1", ""),
            ("a", "a:1", "+3"),
            ("a", "a:1", "-3"),
            ("a", "a:1", "18446744073709551616"),
        ] {
            assert_eq!(hint(instance, address, token), None, "{instance:?} {address:?} {token:?}");
        }
    }

    #[test]
    fn details_beyond_the_bound_are_not_read() {
        let info = |length: usize| {
            let metadata = HashMap::from([("filler".to_owned(), "x".repeat(length))]);
            let details = ErrorDetails::with_error_info(NOT_PRIMARY, DOMAIN, metadata);
            NotPrimary::of(&Status::with_error_details(Code::Unavailable, "", details)).is_some()
        };
        assert!(info(4096));
        assert!(!info(LONGEST_DETAILS));
    }

    proptest! {
        /// Whatever bytes there are where the details should be.
        #[test]
        fn rubbish_is_nothing_and_panics_nobody(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let status = Status::with_details(Code::Unavailable, "", Bytes::from(bytes));
            prop_assert!(NotPrimary::of(&status).is_none());
            prop_assert!(PrimaryLost::of(&status).is_none());
        }

        /// A real one with bytes changed, left out and added.
        #[test]
        fn what_was_changed_on_the_way_panics_nobody_and_names_nobody_odd(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..8),
        ) {
            let whole = Status::from(NotPrimary::new(Some(primary("counter-a", "10.0.0.7", 3))));
            let mut bytes = whole.details().to_vec();
            for (at, byte, how) in changes {
                let at = at.index(bytes.len().max(1)).min(bytes.len().saturating_sub(1));
                match how {
                    _ if bytes.is_empty() => bytes.push(byte),
                    0 => bytes[at] = byte,
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, byte),
                }
            }
            let read = NotPrimary::of(&Status::with_details(Code::Unavailable, "", Bytes::from(bytes)));
            if let Some(named) = read.and_then(|it| it.primary) {
                prop_assert!(is_sound(&named), "{named:?}");
            }
        }

        #[test]
        fn any_hint_that_is_sound_arrives(name in "[ -~é]{1,60}", host in "[a-z0-9.-]{1,60}", token in any::<u64>()) {
            let hint = Some(primary(&name, &host, token));
            let status = over_the_wire(NotPrimary::new(hint.clone()).into());
            prop_assert_eq!(NotPrimary::of(&status), Some(NotPrimary::new(hint)));
        }
    }
}
