//! Transactions: <https://developer.hashicorp.com/consul/api-docs/txn>
//!
//! One that writes is never repeated without a word: who asks says whether it may be put to a second
//! agent although the first may have done it.

use std::time::Duration;

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize};

use super::{
    ConsulClient, RegistryError,
    agents::Contact,
    kv::{KvEntry, Raw},
    refusal::refusal,
    secrets::Answer,
    transport::Call,
};

/// The words of Consul 1.8.7 that prove of a failure that nothing was written, nor ever will be.
///
/// A server without a leader, or one that an agent could not connect to, has passed nothing on,
/// and Consul itself sends the request again after them (`canRetry` in its `agent/consul/rpc.go`). The
/// third is raft's for a request that came too late to be looked at. Leadership that was lost while
/// a write was under way, and connections that broke, prove nothing.
const PROOFS: [&str; 4] =
    ["No cluster leader", "No known Consul servers", "rpc error getting client", "node is not the leader"];

/// Operations that are done together or not at all, in their order.
#[derive(Clone, Debug, Default)]
#[must_use]
pub(crate) struct Txn {
    operations: Vec<Operation>,
    writes: bool,
}

/// What is to become of a transaction that an agent gave no answer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// The next agent gets it: doing it twice is as good as once.
    GoesOn,
    /// It is not sent again.
    IsTold,
}

/// Consul's word on a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TxnAnswer {
    /// It was done. The keys as they are now, without the values of those that were written;
    /// none of those that were deleted or that the token may not read.
    Done(Vec<KvEntry>),
    /// It was not: what stood against it, at least one.
    Refused(Vec<TxnError>),
}

/// Why an operation stands against its transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TxnError {
    /// Its place, from 0.
    pub(crate) operation: usize,
    pub(crate) what: Objection,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Objection {
    /// The key is not of the index given, or not there.
    Stale,
    /// There is no such key.
    Missing,
    /// The token may not do this.
    Denied,
    /// What Consul said, cut short.
    Other(String),
}

/// No answer that counts.
#[derive(Clone, Debug)]
pub(crate) struct TxnFailure {
    pub(crate) error: RegistryError,
    /// It was not done, and will not be.
    pub(crate) undone: bool,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum Operation {
    Kv(KvOperation),
}

#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
struct KvOperation {
    verb: &'static str,
    key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "is_zero")]
    flags: u64,
    #[serde(skip_serializing_if = "is_zero")]
    index: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Body {
    results: Option<Vec<RawResult>>,
    errors: Option<Vec<RawError>>,
}

#[derive(Deserialize)]
struct RawResult {
    #[serde(rename = "KV")]
    kv: Option<Raw>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RawError {
    op_index: usize,
    what: String,
}

// === impl Txn ===

impl Txn {
    /// Stands against it unless `key` was last written at `index`.
    pub(crate) fn check_index(self, key: impl Into<String>, index: u64) -> Self {
        self.with(KvOperation { verb: "check-index", key: key.into(), index, ..KvOperation::default() })
    }

    /// Reads `key`; stands against it where there is none.
    pub(crate) fn get(self, key: impl Into<String>) -> Self {
        self.with(KvOperation { verb: "get", key: key.into(), ..KvOperation::default() })
    }

    /// Writes `key`, whatever it holds. Consul leaves a key at its index to which the very
    /// same is written again.
    pub(crate) fn set(self, key: impl Into<String>, flags: u64, value: &[u8]) -> Self {
        self.writing("set", key.into(), 0, flags, Some(value))
    }

    /// Writes `key` if it was last written at `index`; with 0, if it is not there.
    pub(crate) fn cas(self, key: impl Into<String>, index: u64, flags: u64, value: &[u8]) -> Self {
        self.writing("cas", key.into(), index, flags, Some(value))
    }

    /// Deletes all keys that begin with `prefix`.
    pub(crate) fn delete_tree(self, prefix: impl Into<String>) -> Self {
        self.writing("delete-tree", prefix.into(), 0, 0, None)
    }

    fn writing(
        mut self,
        verb: &'static str,
        key: String,
        index: u64,
        flags: u64,
        value: Option<&[u8]>,
    ) -> Self {
        self.writes = true;
        let value = value.map(|it| BASE64_STANDARD.encode(it));
        self.with(KvOperation { verb, key, value, flags, index, namespace: None })
    }

    fn with(mut self, operation: KvOperation) -> Self {
        self.operations.push(Operation::Kv(operation));
        self
    }

    fn body(mut self, namespace: Option<&str>) -> Result<Vec<u8>, RegistryError> {
        for Operation::Kv(operation) in &mut self.operations {
            operation.namespace = namespace.map(str::to_owned);
        }
        serde_json::to_vec(&self.operations)
            .map_err(|error| RegistryError::Unsendable { reason: error.to_string() })
    }
}

// === impl ConsulClient ===

impl ConsulClient {
    /// Does a transaction, through the first agent that takes it; each has `patience` for it. One
    /// that provably has not passed it on hands it to the next. One that only reads is answered
    /// by a leader that has made sure that it still is.
    ///
    /// # Errors
    /// Where there is no word on it. Given up by dropping the future, it may have been done.
    pub(crate) async fn transact(
        &self,
        txn: Txn,
        unanswered: Unanswered,
        patience: Duration,
    ) -> Result<TxnAnswer, TxnFailure> {
        let query = if txn.writes { "" } else { "consistent" };
        let told = |error, undone| TxnFailure { error, undone };
        let body = txn.body(self.namespace()).map_err(|error| told(error, true))?;
        let pool = self.pool();
        let (mut search, mut doubt) = (pool.search(false), None);
        loop {
            let call = Call::put("v1/txn", query.to_owned(), body.clone());
            let outcome = self.transact_at(search.agent, call, patience).await;
            if let Err(TxnFailure { error, undone: false }) = &outcome {
                doubt.get_or_insert_with(|| error.clone());
            }
            let judged = pool.judge(&mut search, outcome.map_err(|it| it.error), |_| Contact::InTouch);
            match (judged, &doubt) {
                (Some(Ok(answer)), _) => return Ok(answer),
                (Some(Err(_)), Some(error)) => return Err(told(error.clone(), false)),
                (Some(Err(error)), None) => return Err(told(error, true)),
                (None, Some(error)) if unanswered == Unanswered::IsTold => {
                    return Err(told(error.clone(), false));
                }
                (None, _) => {}
            }
        }
    }

    async fn transact_at(
        &self,
        agent: usize,
        call: Call,
        patience: Duration,
    ) -> Result<TxnAnswer, TxnFailure> {
        let answer = self.answer_within(agent, call, patience).await;
        let answer = answer.map_err(|error| TxnFailure { undone: unsent(&error), error })?;
        read(&answer).map_err(|error| TxnFailure { undone: proves_undone(&answer), error })
    }
}

/// Whether a request that was not answered was not even sent.
fn unsent(error: &RegistryError) -> bool {
    use RegistryError::{Closed, Unasked, Unreachable, Unsendable};
    matches!(error, Unreachable { .. } | Unasked { .. } | Unsendable { .. } | Closed)
}

/// Whether an answer that is no word on the transaction proves that it was not done.
fn proves_undone(answer: &Answer) -> bool {
    match answer.status() {
        // Not 408, nor 409 of another form: those need not be Consul's own.
        400 | 401 | 403 | 404 | 405 | 413 | 414 | 429 => true,
        500 => PROOFS.iter().any(|it| answer.text().contains(it)),
        _ => false,
    }
}

/// Reads an answer of any status.
pub(super) fn read(answer: &Answer) -> Result<TxnAnswer, RegistryError> {
    match answer.status() {
        200 => {
            let body: Body = answer.exact()?;
            let raw = body.results.into_iter().flatten().filter_map(|it| it.kv);
            raw.map(|it| it.entry(answer)).collect::<Result<_, _>>().map(TxnAnswer::Done)
        }
        409 => {
            let body: Body = answer.exact()?;
            let errors: Vec<_> = body.errors.into_iter().flatten().map(|it| it.error(answer)).collect();
            if errors.is_empty() {
                return Err(answer.not_understood("a conflict without a reason"));
            }
            Ok(TxnAnswer::Refused(errors))
        }
        _ => Err(refusal(answer, None)),
    }
}

// === impl RawError ===

impl RawError {
    /// The words are those of Consul 1.8.7.
    fn error(self, answer: &Answer) -> TxnError {
        let what = self.what.as_str();
        let what = if what.contains("Permission denied") {
            Objection::Denied
        } else if what.starts_with("failed index check")
            || what.starts_with("failed to check index")
            || what.ends_with("index is stale")
        {
            Objection::Stale
        } else if what.starts_with("key ") && what.ends_with("doesn't exist") {
            Objection::Missing
        } else {
            Objection::Other(answer.told(what))
        };
        TxnError { operation: self.op_index, what }
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}
