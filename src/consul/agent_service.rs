//! What the agent itself has registered: put there, read back, kept alive and taken out.
//! All of it concerns the first agent alone.

use std::collections::BTreeMap;

use serde::Deserialize;
use url::form_urlencoded;

use super::{ConsulClient, RegistryError, ServiceRegistration, name, secrets::Answer, transport::Call};

/// A service as the agent that was asked has it registered, which is what it will put into
/// the catalog again whenever the two differ.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
#[non_exhaustive]
pub struct AgentService {
    /// The service's name.
    #[serde(rename = "Service")]
    pub name: String,
    /// Its id.
    #[serde(rename = "ID")]
    pub id: String,
    /// The address registered; empty where it is the agent's own.
    #[serde(default)]
    pub address: String,
    /// The port registered. Consul takes any number.
    #[serde(default)]
    pub port: i64,
    /// As they were given.
    #[serde(default, deserialize_with = "nothing_is_none")]
    pub tags: Vec<String>,
    /// As it was given.
    #[serde(default, deserialize_with = "nothing_is_none")]
    pub meta: BTreeMap<String, String>,
}

// === impl ConsulClient ===

impl ConsulClient {
    /// Registers an instance with the agent, or replaces what it had under this id.
    ///
    /// # Errors
    /// Where the agent refuses or cannot be asked.
    pub async fn register(&self, registration: &ServiceRegistration) -> Result<(), RegistryError> {
        let body = serde_json::to_vec(registration)
            .map_err(|error| RegistryError::Unsendable { reason: error.to_string() })?;
        self.put("v1/agent/service/register".to_owned(), body).await
    }

    /// Takes the instance with this service id out. Consul before 1.9 says nothing
    /// where there is none.
    ///
    /// # Errors
    /// Where the agent refuses or cannot be asked.
    pub async fn deregister(&self, id: &str) -> Result<(), RegistryError> {
        self.put(format!("v1/agent/service/deregister/{}", checked(id)?), Vec::new()).await
    }

    /// Says to the agent that the TTL check with this id is passing;
    /// [`ServiceRegistration::check_id`] tells the id. 200 proves only that the
    /// agent knows the check.
    ///
    /// # Errors
    /// Where the agent refuses (it does not know the check: 500, from 1.11 on 404)
    /// or cannot be asked.
    pub async fn pass_check(&self, id: &str) -> Result<(), RegistryError> {
        self.put(format!("v1/agent/check/pass/{}", checked(id)?), Vec::new()).await
    }

    /// What the first agent has registered under this service id; `None`: nothing. The agent
    /// answers for itself, with a leader or without.
    ///
    /// # Errors
    /// Where the agent refuses (the token needs `service:read`) or cannot be asked.
    pub async fn agent_service(&self, id: &str) -> Result<Option<AgentService>, RegistryError> {
        let path = format!("v1/agent/service/{}", checked(id)?);
        match self.ask_first(|query| Call::get(path, query)).await {
            Ok(answer) => answer.json().map(Some),
            Err(RegistryError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn put(&self, path: String, body: Vec<u8>) -> Result<(), RegistryError> {
        self.ask_first(|query| Call::put(path, query, body)).await.map(drop)
    }

    /// One request to the first agent, about what is its own.
    async fn ask_first(&self, call: impl FnOnce(String) -> Call) -> Result<Answer, RegistryError> {
        // The serializer cannot be moved between threads, so it ends before the call.
        let query = {
            let mut query = form_urlencoded::Serializer::new(String::new());
            if let Some(namespace) = self.namespace() {
                query.append_pair("ns", namespace);
            }
            query.finish()
        };
        self.call_within(0, call(query), None, self.request_timeout()).await
    }
}

fn checked(id: &str) -> Result<&str, RegistryError> {
    match name::check(id) {
        Ok(()) => Ok(id),
        Err(error) => Err(RegistryError::Unsendable { reason: error.to_string() }),
    }
}

/// Go writes nothing as `null`.
fn nothing_is_none<'de, D, T>(value: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(value)?.unwrap_or_default())
}
