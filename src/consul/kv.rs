//! Reading keys: <https://developer.hashicorp.com/consul/api-docs/kv>
//!
//! These reads take no place among those of the client: whoever keeps a lease asks few things at once,
//! and must not queue behind others.

use std::time::Duration;

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::Deserialize;
use url::form_urlencoded;

use super::{
    BlockingIndex, ConsulClient, RegistryError, agents::Contact, query, refusal::refusal, secrets::Answer,
    transport::Call,
};

/// One key and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KvEntry {
    pub(crate) key: String,
    pub(crate) value: Vec<u8>,
    /// A number that goes with the value; Consul makes nothing of it.
    pub(crate) flags: u64,
    /// Consul's count of changes when the key was last written.
    pub(crate) modify_index: u64,
}

/// The keys that a question was about, as they were at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KvAnswer {
    /// None, too, where the token may not read them: Consul filters a list without a word.
    pub(crate) entries: Vec<KvEntry>,
    /// What to wait beyond next, marked with its agent where there are several.
    pub(crate) index: Option<u64>,
}

/// An entry as it stands in JSON.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Raw {
    key: String,
    #[serde(default)]
    flags: u64,
    /// In Base64, null where it is empty.
    #[serde(default)]
    value: Option<String>,
    modify_index: u64,
}

#[derive(Clone, Copy)]
enum Which {
    One,
    /// All that begin with it.
    Below,
}

// === impl ConsulClient ===

impl ConsulClient {
    /// The key, as the leader knows it; `patience` is what each agent has for it.
    ///
    /// # Errors
    /// Where the registry gives no answer to go by: [`RegistryError::Forbidden`] where the token
    /// may not read it, whether it is there or not.
    pub(crate) async fn kv_get(
        &self,
        key: &str,
        patience: Duration,
    ) -> Result<Option<KvEntry>, RegistryError> {
        let answer = self.kv(key, Which::One, None, patience).await?;
        Ok(answer.entries.into_iter().next())
    }

    /// All keys that begin with `prefix`, as the leader knows them: at once, or as soon as
    /// something has changed since the index, or after the time (1 ms to 10 min, and up to a
    /// sixteenth more). `patience` is what each agent has for it beyond that.
    ///
    /// # Errors
    /// Where the registry gives no answer to go by.
    pub(crate) async fn kv_list(
        &self,
        prefix: &str,
        block: Option<(BlockingIndex, Duration)>,
        patience: Duration,
    ) -> Result<KvAnswer, RegistryError> {
        self.kv(prefix, Which::Below, block, patience).await
    }

    async fn kv(
        &self,
        key: &str,
        which: Which,
        block: Option<(BlockingIndex, Duration)>,
        patience: Duration,
    ) -> Result<KvAnswer, RegistryError> {
        let (after, wait) = block.unwrap_or_default();
        let pool = self.pool();
        let mut search = pool.search(false);
        loop {
            let block = pool.block(search.agent, after, query::bounded(wait));
            let outcome = self.kv_at(search.agent, key, which, block, patience).await;
            // In its default mode the leader alone answers.
            if let Some(outcome) = pool.judge(&mut search, outcome, |_| Contact::InTouch) {
                return outcome;
            }
        }
    }

    async fn kv_at(
        &self,
        agent: usize,
        key: &str,
        which: Which,
        (after, wait): (BlockingIndex, Duration),
        patience: Duration,
    ) -> Result<KvAnswer, RegistryError> {
        let (pool, waits) = (self.pool(), after.get().is_some());
        let patience = if waits { patience.saturating_add(wait + wait / 16) } else { patience };
        let call = Call::get(format!("v1/kv/{key}"), question(self.namespace(), which, after, wait));
        let answer = self.answer_within(agent, call, patience);
        let answer = if waits { pool.while_it_is_there(agent, answer).await? } else { answer.await? };
        let mut answer = read(&answer)?;
        answer.index = pool.index(agent, answer.index);
        Ok(answer)
    }
}

fn question(namespace: Option<&str>, which: Which, after: BlockingIndex, wait: Duration) -> String {
    let mut pairs = form_urlencoded::Serializer::new(String::new());
    if let Which::Below = which {
        pairs.append_key_only("recurse");
    }
    if let Some(namespace) = namespace {
        pairs.append_pair("ns", namespace);
    }
    if let Some(index) = after.get() {
        pairs.append_pair("index", &index.to_string());
        pairs.append_pair("wait", &format!("{}ms", wait.as_millis()));
    }
    pairs.finish()
}

/// Reads an answer of any status. 404 with an index is Consul's word for no such key;
/// without one it is somebody else's.
pub(super) fn read(answer: &Answer) -> Result<KvAnswer, RegistryError> {
    let index = answer.number("x-consul-index").filter(|it| *it > 0);
    let entries = match answer.status() {
        200 => {
            let raw: Vec<Raw> = answer.exact()?;
            raw.into_iter().map(|it| it.entry(answer)).collect::<Result<_, _>>()?
        }
        404 if index.is_some() => Vec::new(),
        _ => return Err(refusal(answer, None)),
    };
    Ok(KvAnswer { entries, index })
}

// === impl Raw ===

impl Raw {
    pub(super) fn entry(self, answer: &Answer) -> Result<KvEntry, RegistryError> {
        let value = BASE64_STANDARD.decode(self.value.unwrap_or_default());
        let value = value.map_err(|error| answer.not_understood(error))?;
        Ok(KvEntry { key: self.key, value, flags: self.flags, modify_index: self.modify_index })
    }
}
