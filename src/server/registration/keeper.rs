//! Keeps the instance registered: turn after turn, each a look at what the agent has and
//! what follows from it.
//!
//! ```text
//!  the agent has      before the first success   afterwards
//!  nothing            register                   register again: it has forgotten
//!  what is wanted     -                          -
//!  this process's,    register                   register again: the role has changed, or
//!   not as wanted                                 somebody has changed the entry
//!  another's          register: it is an older   leave it alone until it is gone
//!                      process of this instance
//! ```
//! Then the heartbeat, if the probe succeeds. While it fails nothing is registered anew.

use std::time::Duration;

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tower::util::rng::{HasherRng, Rng};
use tracing::{debug, info, warn};

use super::{
    RegistrationStatus,
    entry::{Entry, Found, Sign},
};
use crate::{
    consul::{AgentService, ConsulClient, RegistryError},
    role::Role,
};

/// So many heartbeats fit into the TTL, so that one lost is no matter.
const BEATS: u32 = 3;
/// How often an instance that Consul checks makes sure that it is still registered. Our
/// choice: it costs one local request.
const AFFIRM: Duration = Duration::from_secs(2);
/// The bounds of the delay after the first failure and after any. Our choice: the agent is
/// on this very host, and an instance that it has forgotten is seen by nobody.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(2);
/// The longest that a wish to be left alone is heeded. Our choice.
const LONGEST_QUIET: Duration = Duration::from_secs(30);
/// How long leaving may take: an instance must be able to stop without Consul.
pub(super) const FAREWELL: Duration = Duration::from_secs(2);
/// How long a registration that is under way is waited for before it is left: one that is
/// dropped may still be carried out, even after the deregistration that follows.
const UNDER_WAY: Duration = Duration::from_secs(1);

/// The task.
pub(super) struct Keeper {
    pub(super) consul: ConsulClient,
    pub(super) entry: Entry,
    pub(super) alive: Option<watch::Receiver<bool>>,
    pub(super) role: Option<watch::Receiver<Role>>,
    pub(super) status: watch::Sender<RegistrationStatus>,
    pub(super) rng: HasherRng,
    /// It may be registered: it has been asked for.
    pub(super) asked: bool,
    /// It was registered once.
    pub(super) established: bool,
    pub(super) failures: u32,
}

// === impl Keeper ===

impl Keeper {
    /// Keeps it registered until `stop`, then takes it out.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let until = loop {
            let begun = Instant::now();
            let late = async {
                stop.cancelled().await;
                sleep(UNDER_WAY).await;
            };
            let done = tokio::select! {
                done = self.turn() => done,
                () = late => break Instant::now() + FAREWELL.saturating_sub(UNDER_WAY),
            };
            let next = match done {
                Ok(()) => {
                    self.failures = 0;
                    begun + self.period()
                }
                Err(error) => {
                    let delay = self.delay(&error);
                    self.tell(RegistrationStatus::Lost { error });
                    Instant::now() + delay
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => break Instant::now() + FAREWELL,
                () = self.news() => {}
                () = sleep_until(next) => {}
            }
        };
        self.leave(until).await;
    }

    async fn turn(&mut self) -> Result<(), RegistryError> {
        let alive = is_alive(self.alive.as_mut());
        if !alive && !self.established {
            return Ok(());
        }
        let role = self.role.as_mut().map(current);
        let wanted = self.entry.wanted(role.as_ref(), Instant::now());
        let found = self.within(self.consul.agent_service(&self.entry.id)).await?;
        let found = self.entry.compare(found, &wanted);
        let register = match found {
            Found::AsWanted => false,
            Found::Another(by) if self.established => {
                self.tell(RegistrationStatus::Displaced { by });
                return Ok(());
            }
            Found::Nothing if !alive => {
                self.tell(RegistrationStatus::Silent);
                return Ok(());
            }
            Found::Nothing => {
                if self.established {
                    info!(instance = %self.entry.id, "the agent has forgotten the instance: registering it again");
                }
                true
            }
            Found::Outdated => true,
            Found::Another(by) => {
                debug!(instance = %self.entry.id, ?by, "taking the place of an older process");
                true
            }
        };
        let definition = self.entry.definition(&wanted);
        let definition =
            definition.map_err(|error| RegistryError::Unsendable { reason: error.to_string() })?;
        if register {
            self.asked = true;
            self.within(self.consul.register(&definition)).await?;
            self.established = true;
        }
        if !alive {
            self.tell(RegistrationStatus::Silent);
            return Ok(());
        }
        if matches!(self.entry.sign, Sign::Heartbeat(_)) {
            let check = definition.check_id();
            match self.within(self.consul.pass_check(&check)).await {
                // Somebody has taken the check away, or the agent has forgotten all just now.
                Err(error) if is_unknown_check(&error) => {
                    self.within(self.consul.register(&definition)).await?;
                    self.within(self.consul.pass_check(&check)).await?;
                }
                done => done?,
            }
        }
        self.tell(RegistrationStatus::Registered);
        Ok(())
    }

    /// Tries until `until` to take the instance out.
    async fn leave(&mut self, until: Instant) {
        if !self.asked {
            return self.tell(RegistrationStatus::Left { instead: None });
        }
        loop {
            let error = match timeout_at(until, self.take_out()).await {
                Ok(Ok(instead)) => return self.tell(RegistrationStatus::Left { instead }),
                Ok(Err(error)) => error,
                Err(_) => RegistryError::TimedOut { after: FAREWELL },
            };
            let delay = self.delay(&error).min(FIRST_DELAY);
            if Instant::now() + delay >= until {
                return self.tell(RegistrationStatus::LeftBehind { error });
            }
            sleep(delay).await;
        }
    }

    /// Takes the instance out, if what is there is this process's: gives what is there
    /// instead, if it is not. Between the look and the deregistration another process may
    /// register itself, for the agent knows no deregistration with a condition.
    async fn take_out(&self) -> Result<Option<AgentService>, RegistryError> {
        let wanted = self.entry.wanted(None, Instant::now());
        let found = self.consul.agent_service(&self.entry.id).await?;
        match self.entry.compare(found, &wanted) {
            Found::Nothing => Ok(None),
            Found::Another(by) => Ok(Some(by)),
            Found::AsWanted | Found::Outdated => self.consul.deregister(&self.entry.id).await.map(|()| None),
        }
    }

    /// The role or the probe has changed.
    async fn news(&mut self) {
        let changed = async |channel: Option<bool>| match channel {
            Some(true) => {}
            // Nobody will say anything any more.
            _ => std::future::pending().await,
        };
        let role = async {
            let it = match &mut self.role {
                Some(role) => Some(role.changed().await.is_ok()),
                None => None,
            };
            changed(it).await;
        };
        let alive = async {
            let it = match &mut self.alive {
                Some(alive) => Some(alive.changed().await.is_ok()),
                None => None,
            };
            changed(it).await;
        };
        tokio::select! { () = role => {}, () = alive => {} }
    }

    /// Within the patience for one request: a heartbeat must be tried again within the TTL.
    async fn within<T>(
        &self,
        asked: impl Future<Output = Result<T, RegistryError>>,
    ) -> Result<T, RegistryError> {
        let Sign::Heartbeat(ttl) = self.entry.sign else { return asked.await };
        let patience = (ttl / 2).max(Duration::from_millis(250));
        timeout(patience, asked).await.unwrap_or(Err(RegistryError::TimedOut { after: patience }))
    }

    fn period(&self) -> Duration {
        match self.entry.sign {
            Sign::Heartbeat(ttl) => ttl / BEATS,
            Sign::Tcp(_) | Sign::Grpc(_) => AFFIRM,
        }
    }

    /// Full jitter: many instances of one host must not come back to its agent at once.
    fn delay(&mut self, error: &RegistryError) -> Duration {
        let bound = FIRST_DELAY.saturating_mul(1 << self.failures.min(10)).min(LONGEST_DELAY);
        self.failures = self.failures.saturating_add(1);
        let quiet = error.retry_after().unwrap_or_default().min(LONGEST_QUIET);
        bound.mul_f64(self.rng.next_f64()).max(quiet)
    }

    /// One line an episode, and one change of the status.
    fn tell(&self, next: RegistrationStatus) {
        if !self.status.borrow().is_other_than(&next) {
            return;
        }
        let (service, instance, agent) = (&self.entry.service, &self.entry.id, self.consul.address());
        match &next {
            RegistrationStatus::Registered | RegistrationStatus::Left { instead: None } => {
                info!(%service, %instance, %agent, "{next}");
            }
            _ => warn!(%service, %instance, %agent, "{next}"),
        }
        self.status.send_replace(next);
    }
}

/// A probe that has ended says nothing, and who is not known to be alive is not called so.
fn is_alive(alive: Option<&mut watch::Receiver<bool>>) -> bool {
    alive.is_none_or(|it| it.has_changed().is_ok() && *it.borrow_and_update())
}

/// The role as of now; a lease that has ended knows none.
fn current(role: &mut watch::Receiver<Role>) -> Role {
    if role.has_changed().is_err() { Role::Unknown } else { role.borrow_and_update().clone() }
}

/// Consul answers a heartbeat for a check that it does not know with 404, before
/// 1.11 with 500. Registering once too often does no harm.
fn is_unknown_check(error: &RegistryError) -> bool {
    matches!(error, RegistryError::NotFound | RegistryError::Status { code: 500, .. })
}
