//! The client.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http02::HeaderValue;
use tokio::time::Instant;

use super::{
    BlockingIndex, ConfigError, ConsulConfig, Denied, HealthAnswer, HealthQuery, RegistryError, access,
    agents::Contact,
    config, instances,
    lanes::Place,
    listed::Listed,
    pool::{AgentFailure, Pool},
    query,
    quiet::Quiet,
    refusal::refusal,
    repeat::{self, Kept},
    secrets::Answer,
    token::Token,
    transport::{self, Call, Credentials},
};

/// Asks one Consul agent, or the first of several that answers
/// ([`ConsulConfig::more_agents`]). Clones are cheap and share their connections.
///
/// Each request under way has a connection of its own, a blocking one for as long
/// as it blocks. An agent takes 200 from one address
/// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#http_max_conns_per_client>)
/// and resets what goes beyond. Reads that do not block are sixteen at once at the
/// most, eight about any one other datacenter, and more queue; blocking ones are for the caller to count.
///
/// Every method may be cancelled by dropping its future, which closes the
/// connection it waits on.
#[derive(Clone)]
pub struct ConsulClient {
    inner: Arc<Inner>,
}

struct Inner {
    pool: Pool,
    kept: Kept,
    quiet: Quiet,
    #[cfg(any(test, feature = "testkit"))]
    without: super::Without,
    token: Token,
    authorization: Option<HeaderValue>,
    /// User and password, to be kept out of errors.
    auth: Option<Arc<str>>,
    /// The agent has said that it knows no ACLs.
    acls_off: AtomicBool,
    namespace: Option<String>,
    request_timeout: Duration,
    max_answer_bytes: usize,
    listed: Listed,
}

// === impl ConsulClient ===

impl ConsulClient {
    /// Reads the files that `config` names and prepares the connections; makes
    /// none yet. Takes some 40 ms for TLS: make one and clone it.
    ///
    /// # Errors
    /// Names the setting that cannot be used.
    pub fn new(config: ConsulConfig) -> Result<Self, ConfigError> {
        let http = config::http_client(&config)?;
        let token = Token::new(&config)?;
        let authorization = config::authorization(&config, &http)?;
        let pool = Pool::new(&config, &http);
        Ok(Self {
            inner: Arc::new(Inner {
                kept: Kept::new(pool.addresses().count()),
                quiet: Quiet::default(),
                #[cfg(any(test, feature = "testkit"))]
                without: config.without,
                pool,
                token,
                authorization,
                auth: config.auth.map(|it| it.value.into()),
                acls_off: AtomicBool::new(false),
                namespace: config.namespace,
                request_timeout: config.request_timeout,
                max_answer_bytes: config.max_answer_bytes,
                listed: Listed::new(),
            }),
        })
    }

    /// The agent's address as a URL, without a slash at the end; of several, the
    /// first one's.
    pub fn address(&self) -> &str {
        self.inner.pool.address(0)
    }

    /// The addresses of all agents, in the order of preference.
    pub fn agents(&self) -> impl Iterator<Item = &str> {
        self.inner.pool.addresses().map(|it| &**it)
    }

    /// The usable instances as they are now.
    ///
    /// # Errors
    /// Where the registry gives no answer to go by. An unknown service is no
    /// error: it has no instances.
    pub async fn healthy_instances(&self, query: &HealthQuery) -> Result<HealthAnswer, RegistryError> {
        Ok(self.health(query, None).await?)
    }

    /// The usable instances as soon as something has changed since `after`, or
    /// after `wait` (1 ms to 10 min, and up to a sixteenth more). Without an index
    /// the answer comes at once. An answer need not mean a change.
    ///
    /// It gives up after 17/16 of `wait` and the configuration's request time-out,
    /// because Consul adds up to `wait`/16 so as not to answer everybody at once
    /// (<https://developer.hashicorp.com/consul/api-docs/features/blocking>).
    ///
    /// Where another agent is asked than the one that the index came from, the
    /// answer comes at once, and its index has fallen or grown beyond all that the
    /// other agent gives.
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
        Ok(self.watch(query, after, wait).await?)
    }

    /// As [`watch_instances`](Self::watch_instances), and says of a failure which of
    /// the agents it was.
    pub(crate) async fn watch(
        &self,
        query: &HealthQuery,
        after: BlockingIndex,
        wait: Duration,
    ) -> Result<HealthAnswer, AgentFailure> {
        self.health(query, Some((after, wait))).await
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
        let _place = self.inner.pool.enter(self.lane(datacenter).as_deref()).await?;
        let agent = self.inner.pool.search::<()>(false).agent;
        match self.call_within(agent, call, datacenter, patience).await {
            Ok(answer) => access::read(&answer),
            Err(RegistryError::Status { code: 401, body }) if body.contains("ACL support disabled") => {
                self.inner.acls_off.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn health(
        &self,
        query: &HealthQuery,
        block: Option<(BlockingIndex, Duration)>,
    ) -> Result<HealthAnswer, AgentFailure> {
        let Inner { pool, quiet, .. } = &*self.inner;
        if let Some((agent, left)) = quiet.left(query.datacenter_name(), Instant::now()) {
            return Err(pool.failure(agent, RegistryError::RateLimited { retry_after: Some(left) }));
        }
        if query.datacenter_name().is_some() {
            self.own_datacenter().await;
        }
        let lane = self.lane(query.datacenter_name());
        let from_afar = lane.is_some();
        let (after, wait) = block.unwrap_or_default();
        let enter = || pool.enter(lane.as_deref());
        // First, so that an agent is chosen by what those before have met with.
        let mut place = if after.get().is_none() { Some(enter().await?) } else { None };
        let mut search = pool.search(from_afar);
        loop {
            let block = pool.block(search.agent, after, query::bounded(wait));
            if block.0.get().is_some() {
                place = None;
            } else if place.is_none() {
                place = Some(enter().await?);
            }
            let mut outcome = self.health_at(search.agent, query, block, from_afar).await;
            // Whoever cut it off while it waited, for want of patience as a proxy does, has said
            // nothing about the agent; that is asked at once, and without an index, since
            // it may have come back with lower ones.
            if block.0.get().is_some()
                && outcome.as_ref().is_err_and(repeat::was_cut_off)
                && let Ok(read) = enter().await
            {
                place = Some(read);
                outcome = self.health_at(search.agent, query, Default::default(), from_afar).await;
            }
            match place.take() {
                Some(it) if matches!(outcome, Err(RegistryError::TimedOut { .. })) => it.unanswered(),
                it => place = it.inspect(Place::answered),
            }
            // What is said of another datacenter's leader says nothing of the agent.
            let contact = |answer: &HealthAnswer| match answer.behind() {
                _ if from_afar => Contact::Unknown,
                Some(age) => Contact::CutOff(age),
                None => Contact::InTouch,
            };
            if let Some(outcome) = pool.judge(&mut search, outcome, contact) {
                if let (None, Ok(answer)) = (query.datacenter_name(), &outcome)
                    && let Some(first) = answer.snapshot.instances.first()
                {
                    self.inner.listed.learn(&first.datacenter);
                }
                return outcome.map_err(|error| {
                    #[cfg(any(test, feature = "testkit"))]
                    if self.inner.without.quiet {
                        return pool.failure(search.agent, error);
                    }
                    if let Some(wish) = error.retry_after() {
                        quiet.note(search.agent, query.datacenter_name(), wish, Instant::now());
                    }
                    pool.failure(search.agent, error)
                });
            }
        }
    }

    /// The datacenter that reads about `datacenter` share places with, unless it is known
    /// to be the agent's own.
    fn lane(&self, datacenter: Option<&str>) -> Option<String> {
        let asked = datacenter?;
        (self.inner.listed.own().as_deref() != Some(asked)).then(|| asked.to_owned())
    }

    async fn health_at(
        &self,
        agent: usize,
        query: &HealthQuery,
        (after, wait): (BlockingIndex, Duration),
        from_afar: bool,
    ) -> Result<HealthAnswer, RegistryError> {
        let pool = &self.inner.pool;
        let waits = after.get().is_some();
        let mut patience = self.inner.request_timeout;
        if waits {
            patience = patience.saturating_add(wait + wait / 16);
        }
        let call = Call::get(query.path(), query.query(self.inner.namespace.as_deref(), Some((after, wait))));
        let answer = self.call_within(agent, call, query.datacenter_name(), patience);
        let answer =
            if waits { self.inner.pool.while_it_is_there(agent, answer).await? } else { answer.await? };
        let wanted =
            instances::Wanted { warning: query.wants_warning(), meta: query.wanted_meta(), from_afar };
        let mut answer = HealthAnswer::read(&answer, wanted)?;
        answer.agent = Arc::clone(pool.address(agent));
        answer.index = pool.index(agent, answer.index);
        Ok(answer)
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    pub(super) fn listed(&self) -> &Listed {
        &self.inner.listed
    }

    pub(super) fn namespace(&self) -> Option<&str> {
        self.inner.namespace.as_deref()
    }

    pub(super) fn request_timeout(&self) -> Duration {
        self.inner.request_timeout
    }

    pub(super) async fn call_within(
        &self,
        agent: usize,
        call: Call,
        datacenter: Option<&str>,
        patience: Duration,
    ) -> Result<Answer, RegistryError> {
        let answer = self.answer_within(agent, call, patience).await?;
        match answer.status() {
            200..300 => Ok(answer),
            _ => Err(refusal(&answer, datacenter)),
        }
    }

    /// The answer, whatever its status.
    pub(super) async fn answer_within(
        &self,
        agent: usize,
        call: Call,
        patience: Duration,
    ) -> Result<Answer, RegistryError> {
        let started = Instant::now();
        let credentials = self.credentials().await;
        let mut answer = self.exchange(agent, call.clone(), &credentials, patience).await?;
        if answer.status() == 403 {
            // The token may have been exchanged while this was under way. A refused
            // request has done nothing, so it may be sent again.
            let now = self.credentials().await;
            if now.token != credentials.token {
                let left = patience.saturating_sub(started.elapsed());
                answer = self.exchange(agent, call, &now, left).await?;
            }
        }
        Ok(answer)
    }

    async fn exchange(
        &self,
        agent: usize,
        call: Call,
        credentials: &Credentials,
        patience: Duration,
    ) -> Result<Answer, RegistryError> {
        let Inner { pool, kept, max_answer_bytes, acls_off, .. } = &*self.inner;
        let (again, sent) = (call.repeatable(), Instant::now());
        let send = |call, patience| {
            transport::exchange(pool.http(agent), credentials, call, patience, *max_answer_bytes)
        };
        let mut outcome = send(call, patience).await;
        if let (Err(RegistryError::Reset { .. }), Some(call)) = (&outcome, again)
            && kept.repeats(agent, sent, Instant::now())
        {
            outcome = send(call, patience.saturating_sub(sent.elapsed())).await;
        }
        if outcome.is_ok() {
            kept.answered(agent, Instant::now());
        }
        // Whoever answers next may have other settings; and a 403 comes of ACLs alone.
        if outcome.as_ref().map_or(true, |answer| answer.status() == 403) {
            acls_off.store(false, Ordering::Relaxed);
        }
        outcome
    }

    async fn credentials(&self) -> Credentials {
        let Inner { authorization, auth, token, .. } = &*self.inner;
        let (authorization, auth) = (authorization.clone(), auth.clone());
        Credentials { token: token.now().await, authorization, auth, known: token.known() }
    }
}

/// The address alone.
impl fmt::Debug for ConsulClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsulClient").field("address", &self.address()).finish_non_exhaustive()
    }
}

const _: () = {
    const fn shareable<T: Clone + Send + Sync + 'static>() {}
    shareable::<ConsulClient>();
    shareable::<RegistryError>();
};
