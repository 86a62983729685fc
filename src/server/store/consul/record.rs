//! What the keys hold. Pure.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::keys::Keys;
use crate::{
    consul::KvEntry,
    instance::InstanceId,
    role::{FencingToken, Primary},
    server::store::{Holder, LeaseRecord, Nonce, StoreError, Stored, Version},
};

/// What comes before the sequence of a stored value; a line's end comes behind it.
const SEQUENCE: &[u8] = b"sequence ";

/// The holder's key.
#[derive(Debug, Deserialize, Serialize)]
struct HolderText {
    instance: String,
    /// `host:port`.
    address: String,
    nonce: String,
    token: u64,
    #[serde(default)]
    released: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    successor: Option<String>,
    /// Not there in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    length_ms: Option<u64>,
}

/// A lease as its keys say, and the highest token in them.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) record: LeaseRecord,
    pub(super) highest: u64,
    /// The key with the greatest number, above which there is none.
    pub(super) last: Option<String>,
}

/// Reads the keys of the lease. A holder that is not understood is none, nor is one whose
/// term's key is gone: nothing can be written in that term any more.
pub(super) fn read(keys: &Keys, entries: &[KvEntry]) -> Read {
    let find = |key: &str| entries.iter().find(|it| it.key == key);
    let version = |it: Option<&KvEntry>| it.map_or(Version::ABSENT, |it| Version::new(it.modify_index));
    let (holder, heartbeat) = (find(&keys.holder()), find(&keys.heartbeat()));
    let mut record = LeaseRecord::empty();
    record.holder_version = version(holder);
    record.heartbeat_version = version(heartbeat);
    let (mut highest, mut last) = (highest(entries), last(entries));
    if let Some(text) = holder.and_then(text) {
        highest = highest.max(text.token);
        if text.token == u64::MAX {
            last = Some(keys.holder());
        }
        record.holder = text.holder().filter(|it| find(&keys.term(it.primary.token, &it.nonce)).is_some());
        if record.holder.is_some() {
            record.released = text.released;
            record.successor = text.successor;
        }
    }
    Read { record, highest, last }
}

/// What the holder's key says, where it is understood.
pub(super) fn holder(entry: &KvEntry) -> Option<Holder> {
    text(entry)?.holder()
}

fn text(entry: &KvEntry) -> Option<HolderText> {
    serde_json::from_slice(&entry.value).ok()
}

/// The highest token beside the keys.
pub(super) fn highest(entries: &[KvEntry]) -> u64 {
    entries.iter().map(|it| it.flags).max().unwrap_or_default()
}

/// A key whose flags are the greatest number.
pub(super) fn last(entries: &[KvEntry]) -> Option<String> {
    entries.iter().find(|it| it.flags == u64::MAX).map(|it| it.key.clone())
}

/// The holder's key while it holds the lease.
pub(super) fn held(holder: &Holder) -> Vec<u8> {
    written(holder, false, None)
}

/// The holder's key when it has given the lease up.
pub(super) fn released(holder: &Holder, successor: Option<&str>) -> Vec<u8> {
    written(holder, true, successor)
}

fn written(holder: &Holder, released: bool, successor: Option<&str>) -> Vec<u8> {
    let Holder { primary, nonce, .. } = holder;
    let text = HolderText {
        instance: primary.instance.clone(),
        address: primary.address.authority().to_owned(),
        nonce: nonce.as_str().to_owned(),
        token: primary.token.get(),
        released,
        successor: successor.map(str::to_owned),
        length_ms: holder.length_ms(),
    };
    serde_json::to_vec(&text).expect("strings and numbers are always JSON")
}

// === impl HolderText ===

impl HolderText {
    fn holder(&self) -> Option<Holder> {
        let address = address(&self.address)?;
        let primary = Primary::new(&*self.instance, address, FencingToken::new(self.token));
        Some(Holder::new(primary, Nonce::new(&self.nonce)).with_length_ms(self.length_ms))
    }
}

fn address(authority: &str) -> Option<InstanceId> {
    let (host, port) = authority.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host);
    Some(InstanceId::new(host, port.parse().ok()?)).filter(|_| !host.is_empty())
}

/// A value as its key holds it.
pub(super) fn wrapped(sequence: u64, value: &[u8]) -> Vec<u8> {
    [SEQUENCE, sequence.to_string().as_bytes(), b"\n", value].concat()
}

/// The value that a key holds.
pub(super) fn stored(entry: &KvEntry) -> Result<Stored, StoreError> {
    let parts = || {
        let rest = entry.value.strip_prefix(SEQUENCE)?;
        let end = rest.iter().position(|it| *it == b'\n')?;
        let sequence = std::str::from_utf8(&rest[..end]).ok()?.parse().ok()?;
        Some((sequence, &rest[end + 1..]))
    };
    let (sequence, value) = parts().ok_or_else(|| StoreError::NotUnderstood {
        place: entry.key.clone(),
        reason: "it does not begin with a line `sequence` and a number".to_owned(),
    })?;
    let version = Version::new(entry.modify_index);
    Ok(Stored::new(version, FencingToken::new(entry.flags), sequence, Bytes::copy_from_slice(value)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys() -> Keys {
        Keys::new("p".to_owned()).unwrap()
    }

    fn entry(key: String, value: &[u8], flags: u64, modify_index: u64) -> KvEntry {
        KvEntry { key, value: value.to_vec(), flags, modify_index }
    }

    fn holder() -> Holder {
        let address = InstanceId::new("::1", 50051);
        Holder::new(Primary::new("counter-a", address, FencingToken::new(7)), Nonce::new("n"))
    }

    /// The keys as they are while `holder` holds the lease.
    fn entries(value: &[u8]) -> Vec<KvEntry> {
        let it = holder();
        vec![
            entry(keys().heartbeat(), b"n 1", 7, 12),
            entry(keys().holder(), value, 7, 11),
            entry(keys().term(it.primary.token, &it.nonce), b"counter-a", 7, 11),
        ]
    }

    proptest! {
        #[test]
        fn a_value_is_unwrapped_as_it_was_whatever_it_is(value: Vec<u8>, sequence: u64, flags: u64) {
            let stored = stored(&entry("k".to_owned(), &wrapped(sequence, &value), flags, 3)).unwrap();
            prop_assert_eq!(stored, Stored::new(Version::new(3), FencingToken::new(flags), sequence, value.into()));
        }

        #[test]
        fn what_somebody_else_wrote_is_no_panic(value: Vec<u8>, cut in 0..200_usize) {
            let _ = stored(&entry("k".to_owned(), &value, 0, 3));
            let mut cut_off = held(&holder());
            cut_off.truncate(cut);
            for garbage in [value, cut_off] {
                let read = read(&keys(), &entries(&garbage));
                prop_assert_eq!(read.record.holder_version, Version::new(11));
                prop_assert_eq!(read.highest, 7);
            }
        }
    }

    #[test]
    fn a_holder_is_read_as_it_was_written() {
        let it = holder();
        let read = read(&keys(), &entries(&held(&it)));
        let expected = LeaseRecord {
            holder: Some(it.clone()),
            holder_version: Version::new(11),
            heartbeat_version: Version::new(12),
            ..LeaseRecord::empty()
        };
        assert_eq!((read.record, read.highest), (expected.clone(), 7));
        let read = super::read(&keys(), &entries(&released(&it, Some("counter-b"))));
        let expected = LeaseRecord { released: true, successor: Some("counter-b".to_owned()), ..expected };
        assert_eq!(read.record, expected);
    }

    #[test]
    fn a_length_is_kept_through_a_release_and_an_earlier_versions_record_says_none() {
        let length = Some(std::time::Duration::from_millis(2_500));
        let it = Holder { length, ..holder() };
        for value in [held(&it), released(&it, None)] {
            assert_eq!(read(&keys(), &entries(&value)).record.holder.unwrap().length, length);
        }
        let earlier =
            br#"{"instance":"counter-a","address":"[::1]:50051","nonce":"n","token":7,"released":false}"#;
        assert_eq!(read(&keys(), &entries(earlier)).record.holder, Some(holder()));
    }

    #[test]
    fn nobody_holds_what_is_not_there_or_not_understood_or_without_its_terms_key() {
        assert_eq!(read(&keys(), &[]).record, LeaseRecord::empty());
        let it = holder();
        let good = held(&it);
        for garbage in ["", "{}", "null", r#"{"instance":"a","address":"a","nonce":"n","token":7}"#] {
            let read = read(&keys(), &entries(garbage.as_bytes()));
            assert_eq!(
                (read.record.holder, read.record.holder_version),
                (None, Version::new(11)),
                "{garbage}"
            );
        }
        let mut without = entries(&good);
        without.pop();
        assert_eq!(read(&keys(), &without).record.holder, None);
        let mut others = entries(&good);
        others.push(entry(keys().term(FencingToken::new(8), &it.nonce), b"", 8, 13));
        let read = read(&keys(), &others);
        assert_eq!((read.record.holder, read.highest), (Some(it), 8));
    }

    #[test]
    fn a_value_that_is_none_says_so() {
        for garbage in ["", "sequence", "sequence 1", "sequence x\n", "sequence -1\n", "17"] {
            let error = stored(&entry("p/state/k".to_owned(), garbage.as_bytes(), 0, 3)).unwrap_err();
            assert!(error.to_string().contains("p/state/k"), "{error}");
        }
    }
}
