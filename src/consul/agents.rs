//! Which of several agents to ask: the first that is not known to fail. Pure: time
//! and chance come from outside.

use std::time::Duration;

use tokio::time::Instant;

use super::{BlockingIndex, RegistryError};

/// How many agents there may be; their numbers must fit above an index.
pub(super) const MOST_AGENTS: usize = 16;
/// Consul's index is a count of its changes, which stays far below this.
const INDEX_BITS: u32 = 56;
/// The bound of an agent's first rest after a failure, and of any. Our choice.
const FIRST_REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(30);
/// How long one question may try an agent that has failed before another does.
const TRIAL: Duration = Duration::from_secs(2);

/// How the agents do, in the order of preference.
#[derive(Debug)]
pub(super) struct Agents(Vec<Health>);

#[derive(Clone, Copy, Debug, Default)]
struct Health {
    failures: u32,
    rests_until: Option<Instant>,
}

/// The agents that one question has been put to in vain.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tried(u16);

// === impl Agents ===

impl Agents {
    pub(super) fn new(agents: usize) -> Self {
        Self(vec![Health::default(); agents])
    }

    /// The agent to ask now: the first that does not rest, else the one that has
    /// rested most of its time. `None`: all have been tried. One that has failed
    /// before is tried by one question at a time.
    pub(super) fn choose(&mut self, tried: Tried, now: Instant) -> Option<usize> {
        let left =
            |it: &Health| it.rests_until.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        let chosen = (0..self.0.len()).filter(|at| !tried.has(*at)).min_by_key(|at| left(&self.0[*at]))?;
        let health = &mut self.0[chosen];
        if health.failures > 0 {
            health.rests_until = Some(health.rests_until.map_or(now, |at| at.max(now)).max(now + TRIAL));
        }
        Some(chosen)
    }

    /// It did not answer as an agent should: it rests for a random part of a bound
    /// that doubles. True where it was in use until now.
    pub(super) fn failed(&mut self, agent: usize, random: f64, now: Instant) -> bool {
        let health = &mut self.0[agent];
        let bound = FIRST_REST.saturating_mul(2_u32.saturating_pow(health.failures)).min(LONGEST_REST);
        health.failures = health.failures.saturating_add(1);
        health.rests_until = Some(now + bound.mul_f64(random));
        health.failures == 1
    }

    pub(super) fn answered(&mut self, agent: usize) {
        self.0[agent] = Health::default();
    }
}

// === impl Tried ===

impl Tried {
    pub(super) fn add(&mut self, agent: usize) {
        self.0 |= 1 << agent;
    }

    fn has(self, agent: usize) -> bool {
        self.0 & (1 << agent) != 0
    }
}

/// An agent's index, marked with the agent: those of two agents cannot be compared,
/// and what falls back to the first agent looks like an index that falls. `None`
/// for one that no Consul has.
pub(super) fn marked(agent: usize, index: u64) -> Option<u64> {
    (index >> INDEX_BITS == 0).then_some(((agent as u64) << INDEX_BITS) | index)
}

/// What to wait beyond at `agent`: nothing, where the index is another agent's.
pub(super) fn unmarked(agent: usize, after: BlockingIndex) -> BlockingIndex {
    match after.get() {
        Some(index) if index >> INDEX_BITS == agent as u64 => {
            BlockingIndex::from(index & ((1 << INDEX_BITS) - 1))
        }
        _ => BlockingIndex::NONE,
    }
}

/// Whether another agent may do better: this one is gone, stands still, or is cut
/// off from its servers. About a question to another datacenter, silence and most
/// of what an agent passes on tell nothing of the agent itself.
pub(super) fn is_at_fault(error: &RegistryError, from_afar: bool) -> bool {
    match error {
        RegistryError::Unreachable { .. }
        | RegistryError::Reset { .. }
        | RegistryError::Interrupted { .. }
        | RegistryError::NoServers => true,
        RegistryError::TimedOut { .. } => !from_afar,
        RegistryError::Status { code: 502..=504, .. } => true,
        // The words are those of Consul 1.8.7 for a server that it cannot reach.
        RegistryError::Status { code: 500, body } => {
            let words = ["rpc error getting client", "EOF", "connection re", "i/o timeout"];
            !from_afar && words.iter().any(|it| body.contains(it))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_question_is_put_to_each_agent_at_most_once_and_first_to_one_that_does_not_rest(
            count in 1..=MOST_AGENTS,
            steps in prop::collection::vec((0..60_000_u64, 0.0..1.0, any::<u16>()), 1..40),
        ) {
            let (mut agents, mut now) = (Agents::new(count), Instant::now());
            for (later, random, failing) in steps {
                now += Duration::from_millis(later);
                let awake: Vec<bool> =
                    agents.0.iter().map(|it| it.rests_until.is_none_or(|at| at <= now)).collect();
                let (mut tried, mut asked) = (Tried::default(), Vec::new());
                let answered = loop {
                    let Some(agent) = agents.choose(tried, now) else { break false };
                    if asked.is_empty() {
                        let first = awake.iter().position(|it| *it);
                        prop_assert!(first.is_none_or(|it| it == agent), "{first:?} {agent}");
                    }
                    prop_assert!(!asked.contains(&agent));
                    asked.push(agent);
                    if failing & (1 << agent) == 0 {
                        agents.answered(agent);
                        break true;
                    }
                    agents.failed(agent, random, now);
                    tried.add(agent);
                    prop_assert!(agents.0[agent].rests_until.is_some_and(|it| it - now <= LONGEST_REST));
                };
                prop_assert!(answered || asked.len() == count);
            }
        }

        #[test]
        fn a_marked_index_is_unmarked_by_its_own_agent_alone(
            agent in 0..MOST_AGENTS,
            other in 0..MOST_AGENTS,
            index in 1_u64..,
        ) {
            match marked(agent, index) {
                Some(mark) => {
                    let back = unmarked(other, mark.into()).get();
                    prop_assert_eq!(back, Some(index).filter(|_| agent == other));
                }
                None => prop_assert!(index >> INDEX_BITS > 0),
            }
        }
    }

    fn all_but(tried: &[usize]) -> Tried {
        let mut all = Tried::default();
        tried.iter().for_each(|it| all.add(*it));
        all
    }

    #[test]
    fn the_first_is_asked_while_it_does_not_fail_and_again_after_its_rest() {
        let (mut agents, now) = (Agents::new(3), Instant::now());
        assert_eq!(agents.choose(Tried::default(), now), Some(0));
        assert!(agents.failed(0, 0.5, now), "it was in use");
        assert_eq!(agents.choose(all_but(&[0]), now), Some(1), "the question goes on at once");
        assert_eq!(agents.choose(Tried::default(), now), Some(1), "and so does the next");
        let later = now + FIRST_REST;
        assert_eq!(agents.choose(Tried::default(), later), Some(0), "one tries it");
        assert_eq!(agents.choose(Tried::default(), later), Some(1), "the others wait for the outcome");
        agents.answered(0);
        assert_eq!(agents.choose(Tried::default(), later), Some(0));
    }

    #[test]
    fn each_agent_is_tried_once_even_while_all_rest() {
        let (mut agents, now) = (Agents::new(2), Instant::now());
        agents.failed(0, 0.9, now);
        agents.failed(1, 0.1, now);
        assert_eq!(agents.choose(Tried::default(), now), Some(1), "the one that has rested most");
        assert_eq!(agents.choose(all_but(&[1]), now), Some(0));
        assert_eq!(agents.choose(all_but(&[0, 1]), now), None);
    }

    #[test]
    fn rests_grow_to_a_bound_and_are_random() {
        let (mut agents, now) = (Agents::new(1), Instant::now());
        for failures in 0..100 {
            assert_eq!(agents.failed(0, 1.0, now), failures == 0);
            let rest = agents.0[0].rests_until.unwrap() - now;
            assert_eq!(rest, (FIRST_REST * 2_u32.saturating_pow(failures).min(60)).min(LONGEST_REST));
        }
        agents.failed(0, 0.0, now);
        assert_eq!(agents.0[0].rests_until, Some(now));
    }

    #[test]
    fn an_index_is_used_with_its_own_agent_only_and_falls_on_the_way_back() {
        assert_eq!(marked(0, 42), Some(42));
        let second = marked(1, 42).unwrap();
        assert!(second > 1 << INDEX_BITS);
        assert_eq!(unmarked(1, second.into()).get(), Some(42));
        assert_eq!(unmarked(0, second.into()), BlockingIndex::NONE);
        assert_eq!(unmarked(1, BlockingIndex::from(42)), BlockingIndex::NONE);
        assert_eq!(unmarked(0, BlockingIndex::NONE), BlockingIndex::NONE);
        assert_eq!(marked(0, u64::MAX), None);
    }

    #[test]
    fn an_agent_answers_for_itself_and_not_for_another_datacenter() {
        let status = |code, body: &str| RegistryError::Status { code, body: body.to_owned() };
        let timed_out = || RegistryError::TimedOut { after: TRIAL };
        let dial = "rpc error getting client: failed to get conn: dial tcp: connection refused";
        for (error, near, far) in [
            (RegistryError::NoServers, true, true),
            (timed_out(), true, false),
            (status(500, dial), true, false),
            (status(500, "rpc error making call: EOF"), true, false),
            (status(503, ""), true, true),
            (status(500, "Failed to create boolean expression evaluator"), false, false),
            (RegistryError::NoLeader, false, false),
            (RegistryError::Forbidden { message: String::new() }, false, false),
            (RegistryError::NoPath { datacenter: "dc2".to_owned() }, false, false),
        ] {
            assert_eq!((is_at_fault(&error, false), is_at_fault(&error, true)), (near, far), "{error}");
        }
    }
}
