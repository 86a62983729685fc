//! What the token may not read.
//!
//! Consul leaves out what a token may not read and says nothing of it: an empty
//! list may be a refused one. From 1.11 on a header tells
//! (<https://developer.hashicorp.com/consul/api-docs/api-structure#results-filtered-by-acls>).
//! Before, only the question behind Consul's own user interface does, which asks
//! for rights one by one. It belongs to no documented API: whatever it answers
//! that is not understood means that nothing is known.

use std::{fmt, time::Duration};

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{ConsulClient, HealthAnswer, HealthQuery, RegistryError, secrets::Answer};

pub(super) const PATH: &str = "v1/internal/acl/authorize";

/// How long the question may take: the empty list waits for it.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// While rights are missing, how soon they are asked about again. A right that is
/// given back wakes no blocking query (seen with Consul 1.8.7), so none waits
/// longer than this either.
const AGAIN: Duration = Duration::from_secs(10);

/// What the token may not read of a service's instances.
///
/// To find instances a token needs `service:read` on the service and `node:read`
/// on their nodes. Consul answers 200 with an empty list where either is missing,
/// and the list then tells nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Denied {
    /// The service.
    Service,
    /// The nodes. A token for some nodes only counts as this while the list is
    /// empty: nobody can tell then whether others would be in it.
    Nodes,
    /// The service and the nodes.
    Both,
    /// Something; the registry does not say what.
    Part,
}

/// Finds out about empty lists: once at the beginning of each, and again while
/// something is denied.
#[derive(Debug, Default)]
pub(crate) struct AccessProbe {
    empty: Mutex<Option<Empty>>,
}

#[derive(Debug)]
struct Empty {
    denied: Option<Denied>,
    asked_at: Instant,
}

// === impl AccessProbe ===

impl AccessProbe {
    /// The wait of the next question, which would wait for `wait` otherwise.
    pub(crate) fn wait(&self, wait: Duration) -> Duration {
        let denied = self.empty.lock().as_ref().is_some_and(|it| it.denied.is_some());
        if denied { wait.min(AGAIN) } else { wait }
    }

    /// Begins anew.
    pub(crate) fn forget(&self) {
        *self.empty.lock() = None;
    }

    /// Says in an empty `answer` what is denied, asking about it where need be.
    pub(crate) async fn complete(
        &self,
        client: &ConsulClient,
        query: &HealthQuery,
        answer: &mut HealthAnswer,
    ) {
        if !answer.is_empty() {
            *self.empty.lock() = None;
            return;
        }
        if self.is_due(Instant::now()) {
            match client.denied(query).await {
                Ok(denied) => {
                    if let Some(empty) = &mut *self.empty.lock() {
                        empty.denied = denied;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "the registry does not tell what the token may read");
                }
            }
        }
        let denied = self.empty.lock().as_ref().and_then(|it| it.denied);
        answer.denied = denied.or(answer.denied);
    }

    fn is_due(&self, now: Instant) -> bool {
        let mut empty = self.empty.lock();
        match &mut *empty {
            None => {
                *empty = Some(Empty { denied: None, asked_at: now });
                true
            }
            Some(empty) if empty.denied.is_some() && now.duration_since(empty.asked_at) >= AGAIN => {
                empty.asked_at = now;
                true
            }
            Some(_) => false,
        }
    }
}

// === impl Denied ===

impl Denied {
    fn of(service: bool, nodes: bool) -> Option<Self> {
        match (service, nodes) {
            (true, true) => None,
            (false, true) => Some(Self::Service),
            (true, false) => Some(Self::Nodes),
            (false, false) => Some(Self::Both),
        }
    }
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Service => "the token may not read the service",
            Self::Nodes => "the token may not read the nodes",
            Self::Both => "the token may not read the service and the nodes",
            Self::Part => "the token may not read all of the answer",
        })
    }
}

/// The rights to ask for.
pub(super) fn question(service: &str) -> Value {
    json!([
        { "Resource": "service", "Access": "read", "Segment": service },
        { "Resource": "node", "Access": "read", "Segment": "" },
    ])
}

/// The answer, one entry for each right.
pub(super) fn read(answer: &Answer) -> Result<Option<Denied>, RegistryError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Right {
        resource: String,
        allow: bool,
    }
    let rights: Vec<Right> = answer.json()?;
    match &rights[..] {
        [service, nodes] if service.resource == "service" && nodes.resource == "node" => {
            Ok(Denied::of(service.allow, nodes.allow))
        }
        _ => Err(answer.not_understood("other rights than those asked about")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        consul::{ConsulConfig, secrets::Secrets},
        instance::Snapshot,
    };

    fn read(body: &[u8]) -> Result<Option<Denied>, RegistryError> {
        let headers = http02::HeaderMap::new();
        super::read(&Answer::new(200, headers, body.to_vec(), true, Secrets::default()))
    }

    #[test]
    fn each_right_is_read_from_its_own_entry() {
        let answer = |service: bool, nodes: bool| {
            json!([
                { "Resource": "service", "Segment": "x", "Access": "read", "Allow": service },
                { "Resource": "node", "Access": "read", "Allow": nodes },
            ])
            .to_string()
        };
        for (service, nodes, denied) in [
            (true, true, None),
            (false, true, Some(Denied::Service)),
            (true, false, Some(Denied::Nodes)),
            (false, false, Some(Denied::Both)),
        ] {
            assert_eq!(read(answer(service, nodes).as_bytes()).unwrap(), denied);
        }
    }

    #[test]
    fn what_is_not_understood_says_nothing() {
        let swapped = r#"[{"Resource":"node","Allow":false},{"Resource":"service","Allow":false}]"#;
        let odd = r#"[{"Resource":"service","Allow":"no"},{"Resource":"node","Allow":false}]"#;
        for body in ["", "null", "{}", "[]", "[1,2]", swapped, odd, &"[".repeat(10_000)] {
            assert!(read(body.as_bytes()).is_err(), "{body:.60}");
        }
    }

    proptest! {
        #[test]
        fn only_two_rights_in_the_order_asked_say_anything(
            entries in prop::collection::vec(("service|node|key", any::<bool>(), "[a-z]{0,3}"), 0..4),
        ) {
            let body: Vec<_> = entries
                .iter()
                .map(|(resource, allow, segment)| json!({"Resource": resource, "Allow": allow, "Segment": segment}))
                .collect();
            let read = read(json!(body).to_string().as_bytes());
            match &entries[..] {
                [(one, service, _), (two, nodes, _)] if one == "service" && two == "node" => {
                    let denied = read.unwrap();
                    prop_assert_eq!(denied.is_none(), *service && *nodes);
                    prop_assert_eq!(matches!(denied, Some(Denied::Service | Denied::Both)), !*service);
                    prop_assert_eq!(matches!(denied, Some(Denied::Nodes | Denied::Both)), !*nodes);
                }
                _ => prop_assert!(read.is_err()),
            }
        }

        #[test]
        fn any_bytes_are_an_answer_or_an_error(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&body);
        }
    }

    #[tokio::test]
    async fn an_agent_that_does_not_tell_is_no_error_and_is_asked_once() {
        let client = ConsulClient::new(ConsulConfig::new("127.0.0.1:1").unwrap()).unwrap();
        let (probe, query) = (AccessProbe::default(), HealthQuery::new("counter").unwrap());
        let empty = |denied| HealthAnswer {
            agent: "http://127.0.0.1:8500".into(),
            snapshot: Snapshot::default(),
            index: Some(1),
            known_leader: None,
            last_contact: None,
            filtered_by_acl: denied,
            denied: denied.then_some(Denied::Part),
            skipped: Vec::new(),
        };
        for denied in [false, true] {
            let mut answer = empty(denied);
            probe.complete(&client, &query, &mut answer).await;
            assert_eq!(answer, empty(denied));
            assert!(!probe.is_due(Instant::now() + 2 * AGAIN));
        }
    }

    #[test]
    fn what_is_denied_is_asked_about_again_after_a_while_and_waited_for_no_longer() {
        let (probe, now, minute) = (AccessProbe::default(), Instant::now(), Duration::from_secs(60));
        assert!(probe.is_due(now));
        assert_eq!(probe.wait(minute), minute);
        probe.empty.lock().as_mut().unwrap().denied = Some(Denied::Nodes);
        assert_eq!((probe.wait(minute), probe.wait(AGAIN / 2)), (AGAIN, AGAIN / 2));
        assert!(!probe.is_due(now + AGAIN / 2));
        assert!(probe.is_due(now + AGAIN));
        assert!(!probe.is_due(now + AGAIN));
    }
}
