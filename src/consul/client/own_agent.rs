//! What the first agent alone is told: about instances on its own node.

use url::form_urlencoded;

use super::ConsulClient;
use crate::consul::{RegistryError, ServiceRegistration, name, transport::Call};

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

    async fn put(&self, path: String, body: Vec<u8>) -> Result<(), RegistryError> {
        // The serializer cannot be moved between threads, so it ends before the call.
        let query = {
            let mut query = form_urlencoded::Serializer::new(String::new());
            if let Some(namespace) = &self.inner.namespace {
                query.append_pair("ns", namespace);
            }
            query.finish()
        };
        self.call_within(0, Call::put(path, query, body), None, self.inner.request_timeout).await.map(drop)
    }
}

fn checked(id: &str) -> Result<&str, RegistryError> {
    match name::check(id) {
        Ok(()) => Ok(id),
        Err(error) => Err(RegistryError::Unsendable { reason: error.to_string() }),
    }
}
