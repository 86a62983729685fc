//! The client.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use consulrs::client::{ConsulClient as Consulrs, ConsulClientSettings};
use http02::{HeaderMap, HeaderValue, header::RETRY_AFTER};
use rustify::clients::reqwest::Client as HttpClient;
use tokio::{sync::OnceCell, time::Instant};
use url::form_urlencoded;

use super::{
    BlockingIndex, ConfigError, ConsulConfig, Denied, HealthAnswer, HealthQuery, RegistryError,
    ServiceRegistration, access, config, instances, name, query,
    token::Token,
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
    token: Token,
    authorization: Option<HeaderValue>,
    /// User and password, to be kept out of errors.
    auth: Option<Arc<str>>,
    /// The agent has said that it knows no ACLs.
    acls_off: AtomicBool,
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
        let token = Token::new(&config)?;
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
                token,
                authorization,
                auth: config.auth.map(|it| it.value.into()),
                acls_off: AtomicBool::new(false),
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

    /// What the token may not read of what `query` asks for, by Consul's internal
    /// question for single rights: an empty list does not tell. `None`: nothing,
    /// or ACLs are off, which is asked only once until the agent may be another.
    ///
    /// # Errors
    /// Where the registry gives no answer to go by within 1 s, which says nothing
    /// about the rights; and where a namespace is set, within which rights are not
    /// asked about.
    pub async fn denied(&self, query: &HealthQuery) -> Result<Option<Denied>, RegistryError> {
        if self.inner.acls_off.load(Ordering::Relaxed) {
            return Ok(None);
        }
        if self.inner.namespace.is_some() {
            let reason = "rights within a namespace are not asked about".to_owned();
            return Err(RegistryError::Unsendable { reason });
        }
        let body = access::question(query.service_name()).to_string().into_bytes();
        let datacenter = query.datacenter_name();
        let call = Call::post(access::PATH, query::in_datacenter(datacenter), body);
        let patience = self.inner.request_timeout.min(access::PATIENCE);
        match self.call_within(call, datacenter, patience).await {
            Ok(answer) => access::read(&answer.body).map_err(|error| self.not_understood(error)),
            Err(RegistryError::Status { code: 401, body }) if body.contains("ACL support disabled") => {
                self.inner.acls_off.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The datacenters that the agent knows: its own first, the others by their
    /// round-trip time. One that is down stays in the list.
    ///
    /// # Errors
    /// Where the registry gives no answer to go by.
    pub async fn datacenters(&self) -> Result<Vec<String>, RegistryError> {
        let answer = self.call(Call::get("v1/catalog/datacenters", String::new()), None).await?;
        serde_json::from_slice(&answer.body).map_err(|error| self.not_understood(error))
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
            instances::read(&answer.body, wanted).map_err(|error| self.not_understood(error))?;
        let headers = &answer.headers;
        let filtered = flag(headers, "x-consul-results-filtered-by-acls") == Some(true);
        Ok(HealthAnswer {
            snapshot,
            index: number(headers, "x-consul-index").filter(|it| *it > 0),
            known_leader: flag(headers, "x-consul-knownleader"),
            last_contact: number(headers, "x-consul-lastcontact").map(Duration::from_millis),
            filtered_by_acl: filtered,
            denied: filtered.then_some(Denied::Part),
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
        let started = Instant::now();
        let mut credentials = self.credentials().await;
        let mut answer = self.exchange(call.clone(), &credentials, patience).await?;
        if answer.status == 403 {
            // The token may have been exchanged while this was under way. A refused
            // request has done nothing, so it may be sent again.
            let now = self.credentials().await;
            if now.token != credentials.token {
                credentials = now;
                let left = patience.saturating_sub(started.elapsed());
                answer = self.exchange(call, &credentials, left).await?;
            }
        }
        match answer.status {
            200..300 => Ok(answer),
            _ => Err(refusal(&answer, datacenter, |text| credentials.hidden(text))),
        }
    }

    async fn exchange(
        &self,
        call: Call,
        credentials: &Credentials,
        patience: Duration,
    ) -> Result<Answer, RegistryError> {
        let Inner { consulrs, max_answer_bytes, acls_off, .. } = &*self.inner;
        let outcome =
            transport::exchange(&consulrs.http, credentials, call, patience, *max_answer_bytes).await;
        // Whoever answers next may have other settings; and a 403 comes of ACLs alone.
        if outcome.as_ref().map_or(true, |answer| answer.status == 403) {
            acls_off.store(false, Ordering::Relaxed);
        }
        outcome
    }

    /// An answer that nobody can read: why, without what it may repeat of the question.
    fn not_understood(&self, error: impl fmt::Display) -> RegistryError {
        let credentials = self.credentials_with(self.inner.token.last());
        RegistryError::not_understood(credentials.hidden(&error.to_string()))
    }

    fn credentials_with(&self, token: Option<HeaderValue>) -> Credentials {
        let Inner { authorization, auth, .. } = &*self.inner;
        Credentials { token, authorization: authorization.clone(), auth: auth.clone() }
    }

    async fn credentials(&self) -> Credentials {
        let token = self.inner.token.now().await;
        self.credentials_with(token)
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
pub(super) fn refusal(
    answer: &Answer,
    datacenter: Option<&str>,
    without_secrets: impl Fn(&str) -> String,
) -> RegistryError {
    let body = excerpt(&without_secrets(&String::from_utf8_lossy(&answer.body)));
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
fn excerpt(text: &str) -> String {
    let text = text.trim();
    let mut short: String =
        text.chars().take(EXCERPT).map(|it| if it.is_control() { ' ' } else { it }).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

pub(super) fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

pub(super) fn flag(headers: &HeaderMap, name: &str) -> Option<bool> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<ConsulClient>();
    shareable::<RegistryError>();
};
