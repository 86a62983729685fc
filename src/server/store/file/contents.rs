//! What is in the files of a lease: small JSON objects, and values behind a line of JSON.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hasher},
};

use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    instance::InstanceId,
    role::{FencingToken, Primary},
    server::store::{Claim, Holder, Nonce, Stored, Version},
};

/// The longest small file that is read; anything longer is none of ours. Our choice.
pub(super) const LONGEST: usize = 64 * 1024;

/// The longest line before a value: three numbers of 20 digits and their names.
pub(super) const LONGEST_HEAD: usize = 256;

#[derive(Debug, Serialize, Deserialize)]
struct ClaimFile {
    token: u64,
    instance: String,
    address: String,
    nonce: String,
    /// Not there in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    length_ms: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct HeartbeatFile {
    token: u64,
    /// Unlike any other of the term, so that equal files are the same renewal.
    beat: u64,
    /// The term had begun when it was written: renewals say so, the first heartbeat does not.
    #[serde(default)]
    begun: bool,
}

/// What a release says.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Released {
    pub(super) successor: Option<String>,
}

/// How a term began.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Start {
    /// The term whose values it took over.
    pub(super) base: Option<u64>,
    /// Which writes they were from.
    pub(super) values: BTreeMap<String, Written>,
}

/// Which write a value is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) token: u64,
    pub(super) sequence: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    #[serde(flatten)]
    written: Written,
    /// Tells a file that was cut.
    length: usize,
}

// === the small files ===

/// Numbers, strings and maps of them: there is nothing that JSON cannot say.
fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// Of a claim to the term of `token`.
pub(super) fn claim(token: u64, claim: &Claim) -> Vec<u8> {
    json(&ClaimFile {
        token,
        instance: claim.instance.clone(),
        address: claim.address.authority().to_owned(),
        nonce: claim.nonce.as_str().to_owned(),
        length_ms: claim.holder(FencingToken::new(token)).length_ms(),
    })
}

/// Who claims the term of `token`, where that can be read.
pub(super) fn holder(token: u64, content: &[u8]) -> Option<Holder> {
    let file: ClaimFile = read(content)?;
    let (host, port) = file.address.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let address = InstanceId::new(host, port.parse().ok()?);
    let primary = Primary::new(file.instance, address, FencingToken::new(token));
    let holder = Holder::new(primary, Nonce::new(&file.nonce)).with_length_ms(file.length_ms);
    (file.token == token).then_some(holder)
}

/// Of the renewal that is called `beat`, in a term that has begun or is about to.
pub(super) fn heartbeat(token: u64, beat: u64, begun: bool) -> Vec<u8> {
    json(&HeartbeatFile { token, beat, begun })
}

/// Whether a heartbeat proves that the term of `token` has begun.
pub(super) fn proves_begun(token: u64, content: &[u8]) -> bool {
    read(content).is_some_and(|file: HeartbeatFile| file.token == token && file.begun)
}

/// Of the end of a term, for `successor` first.
pub(super) fn released(successor: Option<&str>) -> Vec<u8> {
    json(&Released { successor: successor.map(str::to_owned) })
}

/// Of the beginning of a term.
pub(super) fn start(start: &Start) -> Vec<u8> {
    json(start)
}

/// What a small file says, where it can be read.
pub(super) fn read<T: DeserializeOwned>(content: &[u8]) -> Option<T> {
    serde_json::from_slice(content).ok()
}

/// The version of the part of the lease that these files make up: equal files are the same
/// write, since each write says something of its own. Never compared beyond one process.
pub(super) fn version(token: u64, files: [Option<&[u8]>; 2]) -> Version {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(token);
    for file in files {
        hasher.write_u64(file.map_or(u64::MAX, |content| content.len() as u64));
        hasher.write(file.unwrap_or_default());
    }
    Version::new(hasher.finish().max(1))
}

// === values ===

/// Of a value.
pub(super) fn value(written: Written, value: &[u8]) -> Vec<u8> {
    let mut content = json(&Head { written, length: value.len() });
    content.push(b'\n');
    content.extend_from_slice(value);
    content
}

/// The version of a value: of a write, each of which is one of a kind.
pub(super) fn value_version(written: Written) -> Version {
    let both = [Some(&written.sequence.to_be_bytes()[..]), None];
    version(written.token, both)
}

/// The value in a file, or why it is none.
pub(super) fn stored(content: Vec<u8>) -> Result<Stored, &'static str> {
    let (written, begins) = head(&content)?;
    let content = Bytes::from(content);
    let token = FencingToken::new(written.token);
    Ok(Stored::new(value_version(written), token, written.sequence, content.slice(begins..)))
}

/// Which write a file is from; its beginning is enough.
pub(super) fn written(beginning: &[u8]) -> Result<Written, &'static str> {
    first_line(beginning).map(|(head, _)| head.written)
}

fn head(content: &[u8]) -> Result<(Written, usize), &'static str> {
    let (head, begins) = first_line(content)?;
    if content.len() - begins != head.length {
        return Err("it is longer or shorter than its first line says");
    }
    Ok((head.written, begins))
}

fn first_line(content: &[u8]) -> Result<(Head, usize), &'static str> {
    if content.is_empty() {
        return Err("it is empty");
    }
    let end = content.iter().take(LONGEST_HEAD).position(|byte| *byte == b'\n');
    let end = end.ok_or("it does not begin with a line that says what it is")?;
    let head = read(&content[..end]).ok_or("its first line is not what it should be")?;
    Ok((head, end + 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(content in prop::collection::vec(any::<u8>(), 0..300), token in any::<u64>()) {
            let _ = (holder(token, &content), stored(content.clone()), read::<Start>(&content), read::<Released>(&content));
        }

        #[test]
        fn a_value_is_read_as_it_was_written_and_not_when_it_was_cut(
            bytes in prop::collection::vec(any::<u8>(), 0..300), token in any::<u64>(), sequence in any::<u64>(), cut in 1_usize..50,
        ) {
            let content = value(Written { token, sequence }, &bytes);
            let read = stored(content.clone()).unwrap();
            prop_assert_eq!((read.token.get(), read.sequence, &read.value[..]), (token, sequence, &bytes[..]));
            prop_assert!(stored(content[..content.len().saturating_sub(cut)].to_vec()).is_err());
        }
    }

    #[test]
    fn a_claim_is_read_as_it_was_written() {
        for (host, port) in [("10.0.0.7", 50051), ("::1", 1), ("counter.example", 65535)] {
            let written = Claim::new("counter-a", InstanceId::new(host, port), Nonce::new("n"));
            let read = holder(7, &claim(7, &written)).unwrap();
            assert_eq!(read.primary, Primary::new("counter-a", written.address, FencingToken::new(7)));
            assert_eq!(read.nonce, written.nonce);
            assert_eq!(holder(8, &claim(7, &Claim::new("a", read.primary.address, written.nonce))), None);
        }
    }

    #[test]
    fn a_claim_of_an_earlier_version_is_read_and_says_no_length() {
        let content = br#"{"token":7,"instance":"a","address":"10.0.0.7:1","nonce":"n"}"#;
        assert_eq!(holder(7, content).unwrap().length, None);
        let written = Claim::new("a", InstanceId::new("h", 1), Nonce::new("n"));
        let exact = std::time::Duration::from_micros(2_000_001);
        let read = holder(7, &claim(7, &written.with_length(exact))).unwrap();
        assert_eq!(read.length, Some(std::time::Duration::from_millis(2_001)), "never less");
    }

    #[test]
    fn the_longest_line_before_a_value_is_read() {
        let content = value(Written { token: u64::MAX, sequence: u64::MAX }, b"x");
        assert!(content.len() < LONGEST_HEAD && stored(content).is_ok());
    }
}
