//! The list of datacenters, which all services of a client ask for together.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};
use tower::util::rng::{HasherRng, Rng};

use super::{
    ConsulClient, RegistryError, agents::Contact, pool::AgentFailure, secrets::Answer, transport::Call,
};

/// The bound of the delay after a first failure, and of any that the registry did not
/// ask for: as for other reads. Our choice.
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// The longest that a wish to be left alone is heeded, as with other reads. Our choice.
const LONGEST_QUIET: Duration = Duration::from_secs(300);
/// How long those wait for the name of the agent's own datacenter who can do without. Our
/// choice: an agent knows it by heart.
const NAME_WITHIN: Duration = Duration::from_secs(1);

/// What is known of the list, and when it may be asked for again.
pub(super) struct Listed {
    /// One asks, and whoever comes meanwhile shares what it hears.
    turn: Semaphore,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State<R = HasherRng> {
    /// The agent's own datacenter.
    own: Option<String>,
    last: Option<(Instant, Result<Vec<String>, RegistryError>)>,
    failures: u32,
    /// After a failure: not before then.
    again_at: Option<Instant>,
    rng: R,
}

// === impl ConsulClient ===

impl ConsulClient {
    /// The datacenters that the agent knows: its own first, the others by their
    /// round-trip time. One that is down stays in the list.
    ///
    /// # Errors
    /// Where the registry gives no answer to go by.
    pub async fn datacenters(&self) -> Result<Vec<String>, RegistryError> {
        Ok(self.list_datacenters().await?)
    }

    /// As [`datacenters`](Self::datacenters), for many who ask: those who come while one
    /// asks share its answer, and after a failure nobody asks before the back-off is over
    /// or the registry's wish to be left alone has been heeded.
    pub(crate) async fn shared_datacenters(&self) -> Result<Vec<String>, RegistryError> {
        let Listed { turn, state } = self.listed();
        let begun = Instant::now();
        let _turn = turn.acquire().await.expect("the semaphore is never closed");
        let known = state.lock().known(begun, Instant::now());
        if let Some(known) = known {
            return known;
        }
        let list = self.datacenters().await;
        state.lock().note(list.clone(), Instant::now());
        list
    }

    /// The datacenter of the agent. `None` where it cannot be found out soon: a question
    /// about a datacenter does not depend on it.
    pub(super) async fn own_datacenter(&self) -> Option<String> {
        let known = self.listed().own();
        if known.is_some() {
            return known;
        }
        self.shared_datacenters_soon().await.ok()?.into_iter().next()
    }

    /// As [`shared_datacenters`](Self::shared_datacenters), for those who can do without.
    pub(crate) async fn shared_datacenters_soon(&self) -> Result<Vec<String>, RegistryError> {
        let list = timeout(NAME_WITHIN, self.shared_datacenters()).await;
        list.unwrap_or_else(|_| {
            let silent = RegistryError::TimedOut { after: NAME_WITHIN };
            self.listed().state.lock().note(Err(silent.clone()), Instant::now());
            Err(silent)
        })
    }

    async fn list_datacenters(&self) -> Result<Vec<String>, AgentFailure> {
        let pool = self.pool();
        let place = pool.enter(None).await?;
        let mut search = pool.search(false);
        loop {
            let call = Call::get("v1/catalog/datacenters", String::new());
            let answer = self.call_within(search.agent, call, None, self.request_timeout()).await;
            let list = answer.and_then(|it| datacenters(&it));
            if !matches!(list, Err(RegistryError::TimedOut { .. })) {
                place.answered();
            }
            if let Some(list) = pool.judge(&mut search, list, |_| Contact::Unknown) {
                return list.map_err(|error| pool.failure(search.agent, error));
            }
        }
    }
}

/// A list of datacenters.
pub(super) fn datacenters(answer: &Answer) -> Result<Vec<String>, RegistryError> {
    answer.json()
}

// === impl Listed ===

impl Listed {
    pub(super) fn new() -> Self {
        let state = State { own: None, last: None, failures: 0, again_at: None, rng: HasherRng::new() };
        Self { turn: Semaphore::new(1), state: Mutex::new(state) }
    }

    /// An answer about the agent's own datacenter names it.
    pub(super) fn learn(&self, name: &str) {
        let mut state = self.state.lock();
        if state.own.is_none() && !name.is_empty() {
            state.own = Some(name.to_owned());
        }
    }

    /// The agent's own datacenter, where it is known.
    pub(super) fn own(&self) -> Option<String> {
        self.state.lock().own.clone()
    }
}

// === impl State ===

impl<R: Rng> State<R> {
    /// What whoever asks since `begun` is told without asking.
    fn known(&self, begun: Instant, now: Instant) -> Option<Result<Vec<String>, RegistryError>> {
        let (at, last) = self.last.as_ref()?;
        let left = self.again_at.map_or(Duration::ZERO, |again| again.saturating_duration_since(now));
        match last {
            Err(RegistryError::RateLimited { retry_after: Some(_) }) if !left.is_zero() => {
                Some(Err(RegistryError::RateLimited { retry_after: Some(left) }))
            }
            last => (*at > begun || !left.is_zero()).then(|| last.clone()),
        }
    }

    fn note(&mut self, list: Result<Vec<String>, RegistryError>, now: Instant) {
        match &list {
            Ok(names) => {
                self.own = names.first().cloned().or(self.own.take());
                (self.failures, self.again_at) = (0, None);
            }
            // Of many that were under way together.
            Err(error) if error.retry_after().is_none() && self.again_at.is_some_and(|at| at > now) => {}
            Err(error) => {
                let bound = FIRST_DELAY.saturating_mul(2_u32.saturating_pow(self.failures));
                let delay = bound.min(LONGEST_DELAY).mul_f64(self.rng.next_f64());
                let quiet = error.retry_after().unwrap_or_default().min(LONGEST_QUIET);
                self.failures = self.failures.saturating_add(1);
                // What was asked for before holds, whatever a question says that was asked earlier.
                self.again_at = self.again_at.max(Some(now + quiet + delay));
            }
        }
        self.last = Some((now, list));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Always(u64);

    impl Rng for Always {
        fn next_u64(&mut self) -> u64 {
            self.0
        }
    }

    fn state(random: u64) -> State<Always> {
        State { own: None, last: None, failures: 0, again_at: None, rng: Always(random) }
    }

    #[test]
    fn after_a_failure_nobody_asks_until_a_delay_is_over_whose_bound_doubles() {
        let (mut state, mut now) = (state(u64::MAX), Instant::now());
        for bound in [200, 400, 800, 1600, 3200, 5000, 5000].map(Duration::from_millis) {
            state.note(Err(RegistryError::NotFound), now);
            let early = state.known(now, now + bound - Duration::from_millis(1));
            assert!(matches!(early, Some(Err(RegistryError::NotFound))), "{bound:?}");
            now += bound;
            assert!(state.known(now, now).is_none(), "{bound:?}");
        }
        state.note(Ok(vec!["dc1".to_owned()]), now);
        assert!(state.known(now, now).is_none(), "who asks later asks anew");
        state.note(Err(RegistryError::NotFound), now);
        assert!(state.known(now, now + FIRST_DELAY).is_none(), "the first delay again");
        assert_eq!(state.own.as_deref(), Some("dc1"), "that does not change");
    }

    #[test]
    fn failures_of_one_moment_count_once_and_the_longest_wish_holds() {
        let (mut state, now) = (state(u64::MAX), Instant::now());
        for _ in 0..60 {
            state.note(Err(RegistryError::NotFound), now);
        }
        assert_eq!(state.failures, 1);
        let wish =
            |seconds| Err(RegistryError::RateLimited { retry_after: Some(Duration::from_secs(seconds)) });
        state.note(wish(60), now);
        state.note(wish(1), now);
        state.note(Err(RegistryError::NotFound), now);
        let later = now + Duration::from_secs(50);
        assert!(state.known(later, later).is_some());
        state.note(wish(86_400), later);
        assert!(state.known(later, later + 2 * LONGEST_QUIET).is_none(), "no header blinds us for a day");
    }

    #[test]
    fn who_comes_while_one_asks_shares_what_it_hears() {
        let (mut state, begun) = (state(0), Instant::now());
        state.note(Ok(vec!["dc1".to_owned()]), begun + FIRST_DELAY);
        let shared = state.known(begun, begun + FIRST_DELAY);
        assert_eq!(shared.and_then(Result::ok), Some(vec!["dc1".to_owned()]));
        assert!(state.known(begun + 2 * FIRST_DELAY, begun + 2 * FIRST_DELAY).is_none());
    }
}
