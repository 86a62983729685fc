//! The client.

use std::{fmt, sync::Arc, time::Duration};

use consulrs::client::{ConsulClient as Consulrs, ConsulClientSettings};
use http02::{HeaderMap, header::RETRY_AFTER};
use rustify::clients::reqwest::Client as HttpClient;
use tokio::sync::OnceCell;
use url::form_urlencoded;

use super::{
    BlockingIndex, ConfigError, ConsulConfig, HealthAnswer, HealthQuery, RegistryError, ServiceRegistration,
    config, instances, name, query,
    transport::{self, Answer, Call, Credentials},
};

/// How much of a refusal's text an error shows.
const EXCERPT: usize = 300;

/// Asks one Consul agent. Clones are cheap and share their connections.
///
/// Each request under way has a connection of its own, a blocking one for as long
/// as it blocks. An agent takes 200 from one address
/// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#http_max_conns_per_client>)
/// and resets what goes beyond.
///
/// Every method may be cancelled by dropping its future, which closes the
/// connection it waits on.
#[derive(Clone)]
pub struct ConsulClient {
    inner: Arc<Inner>,
}

struct Inner {
    consulrs: Consulrs,
    credentials: Credentials,
    namespace: Option<String>,
    request_timeout: Duration,
    max_answer_bytes: usize,
    own_datacenter: OnceCell<String>,
}

// === impl ConsulClient ===

impl ConsulClient {
    /// Reads the files that `config` names and prepares the connections; makes
    /// none yet. Takes some 40 ms for TLS: make one and clone it.
    ///
    /// # Errors
    /// Names the setting that cannot be used.
    pub fn new(config: ConsulConfig) -> Result<Self, ConfigError> {
        let address = config.address.url();
        let http = config::http_client(&config)?;
        let token = config::token(&config)?;
        let authorization = config::authorization(&config, &http)?;
        // Written out, because its builder reads what is not set from the environment.
        let settings = ConsulClientSettings {
            address: address.clone(),
            ca_certs: Vec::new(),
            client_cert: None,
            client_key: None,
            token: None,
            verify: config.tls_verify,
            version: 1,
        };
        Ok(Self {
            inner: Arc::new(Inner {
                consulrs: Consulrs { http: HttpClient::new(&address, http), settings },
                credentials: Credentials { token, authorization },
                namespace: config.namespace,
                request_timeout: config.request_timeout,
                max_answer_bytes: config.max_answer_bytes,
                own_datacenter: OnceCell::new(),
            }),
        })
    }

    /// The agent's address as a URL, without a slash at the end.
    pub fn address(&self) -> &str {
        &self.inner.consulrs.http.base
    }

    /// The usable instances as they are now.
    ///
    /// # Errors
    /// Where the registry gives no answer to go by. An unknown service is no
    /// error: it has no instances.
    pub async fn healthy_instances(&self, query: &HealthQuery) -> Result<HealthAnswer, RegistryError> {
        self.health(query, None, self.inner.request_timeout).await
    }

    /// The usable instances as soon as something has changed since `after`, or
    /// after `wait` (1 ms to 10 min, and up to a sixteenth more). Without an index
    /// the answer comes at once. An answer need not mean a change.
    ///
    /// It gives up after 17/16 of `wait` and the configuration's request time-out,
    /// because Consul adds up to `wait`/16 so as not to answer everybody at once
    /// (<https://developer.hashicorp.com/consul/api-docs/features/blocking>).
    ///
    /// # Errors
    /// As [`healthy_instances`](Self::healthy_instances). Begin again without an
    /// index after one.
    pub async fn watch_instances(
        &self,
        query: &HealthQuery,
        after: BlockingIndex,
        wait: Duration,
    ) -> Result<HealthAnswer, RegistryError> {
        let mut patience = self.inner.request_timeout;
        if after.get().is_some() {
            let wait = query::bounded(wait);
            patience = patience.saturating_add(wait + wait / 16);
        }
        self.health(query, Some((after, wait)), patience).await
    }

    /// The datacenters that the agent knows: its own first, the others by their
    /// round-trip time. One that is down stays in the list.
    ///
    /// # Errors
    /// Where the registry gives no answer to go by.
    pub async fn datacenters(&self) -> Result<Vec<String>, RegistryError> {
        let answer = self.call(Call::get("v1/catalog/datacenters", String::new()), None).await?;
        serde_json::from_slice(&answer.body).map_err(RegistryError::not_understood)
    }

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

    async fn health(
        &self,
        query: &HealthQuery,
        block: Option<(BlockingIndex, Duration)>,
        patience: Duration,
    ) -> Result<HealthAnswer, RegistryError> {
        let from_afar = match query.datacenter_name() {
            Some(asked) => asked != self.own_datacenter().await?,
            None => false,
        };
        let call = Call::get(query.path(), query.query(self.inner.namespace.as_deref(), block));
        let answer = self.call_within(call, query.datacenter_name(), patience).await?;
        let wanted =
            instances::Wanted { warning: query.wants_warning(), meta: query.wanted_meta(), from_afar };
        let (snapshot, skipped) =
            instances::read(&answer.body, wanted).map_err(RegistryError::not_understood)?;
        let headers = &answer.headers;
        Ok(HealthAnswer {
            snapshot,
            index: number(headers, "x-consul-index").filter(|it| *it > 0),
            known_leader: flag(headers, "x-consul-knownleader"),
            last_contact: number(headers, "x-consul-lastcontact").map(Duration::from_millis),
            filtered_by_acl: flag(headers, "x-consul-results-filtered-by-acls") == Some(true),
            skipped,
        })
    }

    /// The datacenter of the agent, asked for once.
    async fn own_datacenter(&self) -> Result<&str, RegistryError> {
        let own = self.inner.own_datacenter.get_or_try_init(|| async {
            let all = self.datacenters().await?;
            all.into_iter().next().ok_or_else(|| RegistryError::not_understood("no datacenter at all"))
        });
        own.await.map(String::as_str)
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
        self.call(Call::put(path, query, body), None).await.map(drop)
    }

    async fn call(&self, call: Call, datacenter: Option<&str>) -> Result<Answer, RegistryError> {
        self.call_within(call, datacenter, self.inner.request_timeout).await
    }

    async fn call_within(
        &self,
        call: Call,
        datacenter: Option<&str>,
        patience: Duration,
    ) -> Result<Answer, RegistryError> {
        let Inner { consulrs, credentials, max_answer_bytes, .. } = &*self.inner;
        let answer =
            transport::exchange(&consulrs.http, credentials, call, patience, *max_answer_bytes).await?;
        match answer.status {
            200..300 => Ok(answer),
            _ => Err(refusal(&answer, datacenter)),
        }
    }
}

/// The address alone.
impl fmt::Debug for ConsulClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsulClient").field("address", &self.address()).finish_non_exhaustive()
    }
}

fn checked(id: &str) -> Result<&str, RegistryError> {
    match name::check(id) {
        Ok(()) => Ok(id),
        Err(error) => Err(RegistryError::Unsendable { reason: error.to_string() }),
    }
}

/// What an answer that is no success means. Consul says most things with 500 and
/// a sentence.
fn refusal(answer: &Answer, datacenter: Option<&str>) -> RegistryError {
    let body = excerpt(&answer.body);
    let retry_after = number(&answer.headers, RETRY_AFTER.as_str()).map(Duration::from_secs);
    match answer.status {
        403 => RegistryError::Forbidden { message: body },
        404 => RegistryError::NotFound,
        429 => RegistryError::RateLimited { retry_after },
        503 if retry_after.is_some() => RegistryError::RateLimited { retry_after },
        500 if body.contains("No cluster leader") => RegistryError::NoLeader,
        500 if body.contains("No known Consul servers") => RegistryError::NoServers,
        500 if body.contains("No path to datacenter") => {
            RegistryError::NoPath { datacenter: datacenter.unwrap_or_default().to_owned() }
        }
        code => RegistryError::Status { code, body },
    }
}

/// The beginning of `body`, fit for one line.
fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let text = text.trim();
    let mut short: String =
        text.chars().take(EXCERPT).map(|it| if it.is_control() { ' ' } else { it }).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

fn flag(headers: &HeaderMap, name: &str) -> Option<bool> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<ConsulClient>();
    shareable::<RegistryError>();
};
