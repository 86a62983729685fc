//! What all requests of a client share: the agents, which of them to ask, and the
//! places for reads.

use std::{error::Error, future::Future, sync::Arc, time::Duration};

use consulrs::client::{ConsulClient as Consulrs, ConsulClientSettings};
use parking_lot::Mutex;
use rustify::clients::reqwest::Client as HttpClient;
use tokio::{sync::watch, time::Instant};
use tower::util::rng::{HasherRng, Rng};

use super::{
    BlockingIndex, ConsulConfig, RegistryError,
    agents::{self, Agents, Contact, Fault, Tried},
    lanes::{Lanes, Place},
};

pub(super) struct Pool {
    /// At least one.
    agents: Vec<Agent>,
    chosen: Mutex<Chosen>,
    lanes: Lanes,
    #[cfg(any(test, feature = "testkit"))]
    without: super::Without,
}

struct Agent {
    consulrs: Consulrs,
    address: Arc<str>,
    /// Told when the agent is found to fail, to those who wait at it.
    gone: watch::Sender<()>,
}

/// Which agent to ask.
struct Chosen {
    agents: Agents,
    rng: HasherRng,
}

/// One read's way from agent to agent.
pub(super) struct Search<T> {
    pub(super) agent: usize,
    tried: Tried,
    from_afar: bool,
    /// The best answer of those whose servers are cut off from the leader, and whose it is.
    behind: Option<(usize, T)>,
    /// What the others failed with.
    failures: Vec<(usize, Fault, RegistryError)>,
}

/// A question that failed, and the address of the agent whose failure it is; `None` where
/// none was asked.
pub(crate) struct AgentFailure {
    pub(crate) agent: Option<Arc<str>>,
    pub(crate) error: RegistryError,
}

// === impl Pool ===

impl Pool {
    pub(super) fn new(config: &ConsulConfig, http: &reqwest::Client) -> Self {
        let agents: Vec<_> = [&config.address]
            .into_iter()
            .chain(&config.more_agents)
            .map(|address| Agent::new(address.url(), http.clone(), config.tls_verify))
            .collect();
        Self {
            chosen: Mutex::new(Chosen { agents: Agents::new(agents.len()), rng: HasherRng::new() }),
            agents,
            lanes: Lanes::new(config.request_timeout),
            #[cfg(any(test, feature = "testkit"))]
            without: config.without,
        }
    }

    pub(super) fn address(&self, agent: usize) -> &Arc<str> {
        &self.agents[agent].address
    }

    pub(super) fn failure(&self, agent: usize, error: RegistryError) -> AgentFailure {
        AgentFailure { agent: Some(Arc::clone(self.address(agent))), error }
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = &Arc<str>> {
        self.agents.iter().map(|it| &it.address)
    }

    pub(super) fn http(&self, agent: usize) -> &HttpClient {
        &self.agents[agent].consulrs.http
    }

    /// Waits until there is room for one more read: about `datacenter`, or the agents' own.
    pub(super) async fn enter(&self, datacenter: Option<&str>) -> Result<Place, AgentFailure> {
        #[cfg(any(test, feature = "testkit"))]
        let datacenter = datacenter.filter(|_| !self.without.lanes);
        self.lanes.enter(datacenter).await.map_err(|error| AgentFailure { agent: None, error })
    }

    /// What to wait beyond at this agent, and how long.
    pub(super) fn block(
        &self,
        agent: usize,
        after: BlockingIndex,
        wait: Duration,
    ) -> (BlockingIndex, Duration) {
        if self.agents.len() == 1 {
            return (after, wait);
        }
        // So that those who moved to a substitute together do not move back together.
        let share = if agent == 0 { 0.0 } else { self.chosen.lock().rng.next_f64() / 2.0 };
        (agents::unmarked(agent, after), wait.mul_f64(1.0 - share))
    }

    /// The index of an answer, for whoever asked.
    pub(super) fn index(&self, agent: usize, index: Option<u64>) -> Option<u64> {
        if self.agents.len() == 1 { index } else { agents::marked(agent, index?) }
    }

    /// Begins to look for an agent that answers a read.
    pub(super) fn search<T>(&self, from_afar: bool) -> Search<T> {
        let tried = Tried::default();
        let agent = self.chosen.lock().agents.choose(tried, Instant::now());
        #[cfg(any(test, feature = "testkit"))]
        let agent = if self.without.next_agent { Some(0) } else { agent };
        let agent = agent.expect("there is an agent, and none has been tried");
        Search { agent, tried, from_afar, behind: None, failures: Vec::new() }
    }

    /// Notes how the agent of `search` did, where an answer's `contact` with the leader
    /// counts as well. `None`: another one is to be asked.
    pub(super) fn judge<T>(
        &self,
        search: &mut Search<T>,
        outcome: Result<T, RegistryError>,
        contact: impl FnOnce(&T) -> Contact,
    ) -> Option<Result<T, RegistryError>> {
        let agent = search.agent;
        match outcome {
            Ok(answer) => match contact(&answer) {
                Contact::CutOff(age) if self.agents.len() > 1 => {
                    self.cut_off(agent, age);
                    let (now, agents) = (Instant::now(), &self.chosen.lock().agents);
                    if search.behind.as_ref().is_none_or(|best| agents.knows_more(agent, best.0, now)) {
                        search.behind = Some((agent, answer));
                    }
                }
                contact => {
                    self.chosen.lock().agents.answered(agent, contact == Contact::InTouch);
                    self.convict(search);
                    return Some(Ok(answer));
                }
            },
            Err(error) => {
                let fault = agents::fault(&error, search.from_afar);
                match fault {
                    Fault::Agent => self.failed(agent, &error),
                    // An agent that is known to fail stays so until it answers well.
                    Fault::Suspect => {}
                    Fault::Elsewhere | Fault::Question => self.chosen.lock().agents.answered(agent, false),
                }
                search.failures.push((agent, fault, error));
                if fault == Fault::Question {
                    return Some(self.conclude(search));
                }
            }
        }
        search.tried.add(agent);
        let next = {
            let (now, agents) = (Instant::now(), &mut self.chosen.lock().agents);
            match &search.behind {
                Some((agent, _)) => agents.choose_better(search.tried, *agent, now),
                None => agents.choose(search.tried, now),
            }
        };
        #[cfg(any(test, feature = "testkit"))]
        let next = next.filter(|_| !self.without.next_agent);
        match next {
            Some(next) => search.agent = next,
            None => return Some(self.conclude(search)),
        }
        None
    }

    /// Another agent answers well what these answered badly: it was their fault.
    fn convict<T>(&self, search: &mut Search<T>) {
        for (agent, fault, error) in search.failures.drain(..) {
            if fault == Fault::Suspect {
                self.failed(agent, &error);
                if let Some(quiet) = error.retry_after() {
                    self.chosen.lock().agents.leave_alone(agent, quiet, Instant::now());
                }
            }
        }
    }

    /// No agent is left to ask: the best of what was heard, and from whom.
    fn conclude<T>(&self, search: &mut Search<T>) -> Result<T, RegistryError> {
        let agents = &mut self.chosen.lock().agents;
        if let Some((agent, answer)) = search.behind.take() {
            agents.follow(agent);
            return Ok(answer);
        }
        // What all say is nobody's fault.
        let suspects = search.failures.iter().filter(|it| it.1 == Fault::Suspect);
        suspects.for_each(|it| agents.answered(it.0, false));
        let told = search.failures.drain(..).max_by_key(|it| agents::standing(&it.2));
        let (agent, _, error) = told.expect("no agent is left, and none has answered");
        search.agent = agent;
        Err(error)
    }

    fn cut_off(&self, agent: usize, age: Duration) {
        let first = {
            let chosen = &mut *self.chosen.lock();
            chosen.agents.cut_off(agent, age, chosen.rng.next_f64(), Instant::now())
        };
        if first {
            let address = self.address(agent);
            tracing::warn!(%address, ?age, "an agent's server is cut off from its leader; another is asked");
        }
    }

    fn failed(&self, agent: usize, error: &RegistryError) {
        let first = {
            let chosen = &mut *self.chosen.lock();
            chosen.agents.failed(agent, chosen.rng.next_f64(), Instant::now())
        };
        if self.agents.len() > 1 {
            let Agent { address, gone, .. } = &self.agents[agent];
            if first {
                tracing::warn!(%address, %error, "an agent fails; the next one is asked");
            }
            // One cut connection says little about the others.
            if !matches!(error, RegistryError::Reset { .. } | RegistryError::Interrupted { .. }) {
                gone.send_replace(());
            }
        }
    }

    /// Waits for news at an agent, until another question finds that it fails.
    pub(super) async fn while_it_is_there<T>(
        &self,
        agent: usize,
        answer: impl Future<Output = Result<T, RegistryError>>,
    ) -> Result<T, RegistryError> {
        let mut gone = self.agents[agent].gone.subscribe();
        tokio::select! {
            answer = answer => answer,
            // The sender lives as long as the pool, which this borrows.
            _ = gone.changed() => {
                let source: Box<dyn Error + Send + Sync> = "another question found that the agent fails".into();
                Err(RegistryError::Interrupted { source: source.into() })
            }
        }
    }
}

// === impl AgentFailure ===

impl From<AgentFailure> for RegistryError {
    fn from(failure: AgentFailure) -> Self {
        failure.error
    }
}

// === impl Agent ===

impl Agent {
    fn new(address: String, http: reqwest::Client, verify: bool) -> Self {
        // Written out, because its builder reads what is not set from the environment.
        let settings = ConsulClientSettings {
            address: address.clone(),
            ca_certs: Vec::new(),
            client_cert: None,
            client_key: None,
            token: None,
            verify,
            version: 1,
        };
        Self {
            consulrs: Consulrs { http: HttpClient::new(&address, http), settings },
            address: address.into(),
            gone: watch::Sender::new(()),
        }
    }
}
