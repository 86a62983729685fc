//! What the agent itself has registered: to be read back before it is changed.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{ConsulClient, RegistryError, client, transport::Call};

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
    /// What the first agent has registered under this service id; `None`: nothing. The agent
    /// answers for itself, with a leader or without.
    ///
    /// # Errors
    /// Where the agent refuses (the token needs `service:read`) or cannot be asked.
    pub async fn agent_service(&self, id: &str) -> Result<Option<AgentService>, RegistryError> {
        let path = format!("v1/agent/service/{}", client::checked(id)?);
        match self.ask_first(|query| Call::get(path, query)).await {
            Ok(answer) => answer.json().map(Some),
            Err(RegistryError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
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
