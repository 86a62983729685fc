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
/// The longest that an agent's wish to be left alone is heeded. Our choice.
const LONGEST_QUIET: Duration = Duration::from_secs(300);
/// How long one question may try an agent that has failed before another does.
const TRIAL: Duration = Duration::from_secs(2);
/// How much later than the agent in use another one's server must have heard of the leader
/// to be asked in its place, where all are cut off from it. Our choice: more than two answers
/// on a busy host are apart.
const FRESHER: Duration = Duration::from_secs(1);

/// How the agents do, in the order of preference.
#[derive(Debug)]
pub(super) struct Agents {
    all: Vec<Health>,
    /// The one that was followed last although its server was cut off.
    followed: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Health {
    failures: u32,
    rests_until: Option<Instant>,
    /// It answers, and its server is cut off from the leader: when that last heard of it.
    behind: Option<Instant>,
}

/// What an answer says of the agent's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contact {
    Unknown,
    InTouch,
    /// It is cut off from the leader, for so long.
    CutOff(Duration),
}

/// How much an agent is worth being asked: the less the better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// It is not known to fail.
    Awake,
    /// It rests because its server is cut off, and answers all the same; how old that is.
    Behind(Duration),
    /// It rests because it fails; for how long yet.
    Failing(Duration),
}

/// The agents that one question has been put to in vain.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tried(u16);

// === impl Agents ===

impl Agents {
    pub(super) fn new(agents: usize) -> Self {
        Self { all: vec![Health::default(); agents], followed: None }
    }

    /// The agent to ask now: the first that does not rest; else, of those whose servers
    /// are cut off from the leader, the one that knows most; else the one that has
    /// rested most of its time. `None`: all have been tried. One that has failed
    /// before is tried by one question at a time.
    pub(super) fn choose(&mut self, tried: Tried, now: Instant) -> Option<usize> {
        let (chosen, _) = self.best(tried, now)?;
        Some(self.put_to(chosen, now))
    }

    /// The agent to ask where `answered` gave an answer that is as good as its server, which
    /// is cut off: one that may know better. Those that fail are left in peace.
    pub(super) fn choose_better(&mut self, tried: Tried, answered: usize, now: Instant) -> Option<usize> {
        let (chosen, rank) = self.best(tried, now)?;
        (rank < self.age(answered, now)).then(|| self.put_to(chosen, now))
    }

    fn best(&self, tried: Tried, now: Instant) -> Option<(usize, Rank)> {
        let left = (0..self.all.len()).filter(|at| !tried.has(*at));
        left.map(|at| (at, self.rank(at, now))).min_by_key(|it| it.1)
    }

    fn rank(&self, agent: usize, now: Instant) -> Rank {
        let Health { rests_until, behind, .. } = self.all[agent];
        match rests_until.map(|at| at.saturating_duration_since(now)) {
            None | Some(Duration::ZERO) => Rank::Awake,
            Some(_) if behind.is_some() => self.age(agent, now),
            Some(left) => Rank::Failing(left),
        }
    }

    /// How old the answers of an agent are whose server is cut off.
    fn age(&self, agent: usize, now: Instant) -> Rank {
        let age = self.all[agent].behind.map_or(Duration::ZERO, |it| now.saturating_duration_since(it));
        // Two that are about as old must not take turns.
        let ahead = if self.followed == Some(agent) { FRESHER } else { Duration::ZERO };
        Rank::Behind(age.saturating_sub(ahead))
    }

    fn put_to(&mut self, agent: usize, now: Instant) -> usize {
        let health = &mut self.all[agent];
        if health.failures > 0 {
            health.rests_until = Some(health.rests_until.map_or(now, |at| at.max(now)).max(now + TRIAL));
        }
        agent
    }

    /// Whether `agent`, whose server is cut off as that of `other` is, has enough newer
    /// answers to be followed in its place.
    pub(super) fn knows_more(&self, agent: usize, other: usize, now: Instant) -> bool {
        self.age(agent, now) < self.age(other, now)
    }

    /// It did not answer as an agent should: it rests for a random part of a bound
    /// that doubles. True where it was in use until now.
    pub(super) fn failed(&mut self, agent: usize, random: f64, now: Instant) -> bool {
        let health = &mut self.all[agent];
        let bound = FIRST_REST.saturating_mul(2_u32.saturating_pow(health.failures)).min(LONGEST_REST);
        health.failures = health.failures.saturating_add(1);
        health.rests_until = Some(now + bound.mul_f64(random));
        health.behind = None;
        health.failures == 1
    }

    /// It asked to be left alone for so long, and others answer.
    pub(super) fn leave_alone(&mut self, agent: usize, time: Duration, now: Instant) {
        let until = Some(now + time.min(LONGEST_QUIET));
        let health = &mut self.all[agent];
        health.rests_until = health.rests_until.max(until);
    }

    /// It answered, and its server has been cut off from the leader for so long: it
    /// rests as one that fails. True where it was in use until now.
    pub(super) fn cut_off(&mut self, agent: usize, age: Duration, random: f64, now: Instant) -> bool {
        let first = self.failed(agent, random, now);
        self.all[agent].behind = Some(now.checked_sub(age).unwrap_or(now));
        first
    }

    /// It answered as an agent should, and its server is known to be `in_touch` or
    /// nothing is known of that, which changes nothing where it was cut off.
    pub(super) fn answered(&mut self, agent: usize, in_touch: bool) {
        if in_touch || self.all[agent].behind.is_none() {
            self.all[agent] = Health::default();
        }
    }

    /// Its answer was followed although its server is cut off.
    pub(super) fn follow(&mut self, agent: usize) {
        self.followed = Some(agent);
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

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The agent's: it is gone, stands still, or is cut off from its servers.
    Agent,
    /// The agent's, if another answers the same question well.
    Suspect,
    /// Not that of the agent, which passes on what another datacenter says; another agent
    /// may know another way there.
    Elsewhere,
    /// No agent can help.
    Question,
}

/// Whose fault `error` is. About a question to another datacenter, silence and most of
/// what an agent passes on tell nothing of the agent itself.
pub(super) fn fault(error: &RegistryError, from_afar: bool) -> Fault {
    match error {
        RegistryError::Unreachable { .. }
        | RegistryError::Reset { .. }
        | RegistryError::Interrupted { .. }
        | RegistryError::NoServers
        | RegistryError::Status { code: 502..=504, .. } => Fault::Agent,
        RegistryError::Unsendable { .. } => Fault::Question,
        // It would be waited for as long elsewhere.
        RegistryError::TimedOut { .. } if from_afar => Fault::Question,
        RegistryError::TimedOut { .. } => Fault::Agent,
        _ if from_afar => Fault::Elsewhere,
        // The words are those of Consul 1.8.7 for a server that it cannot reach.
        RegistryError::Status { code: 500, body }
            if ["rpc error getting client", "EOF", "connection re", "i/o timeout"]
                .iter()
                .any(|it| body.contains(it)) =>
        {
            Fault::Agent
        }
        _ => Fault::Suspect,
    }
}

/// Which of several failures is told: the more, the more it says of the registry.
pub(super) fn standing(error: &RegistryError) -> u8 {
    match error {
        RegistryError::Unreachable { .. } => 0,
        RegistryError::Reset { .. } | RegistryError::Interrupted { .. } => 1,
        RegistryError::TimedOut { .. } | RegistryError::NoServers => 2,
        RegistryError::NotUnderstood { .. } | RegistryError::Status { .. } => 3,
        _ => 4,
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
                    agents.all.iter().map(|it| it.rests_until.is_none_or(|at| at <= now)).collect();
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
                        agents.answered(agent, false);
                        break true;
                    }
                    agents.failed(agent, random, now);
                    tried.add(agent);
                    prop_assert!(agents.all[agent].rests_until.is_some_and(|it| it - now <= LONGEST_REST));
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
        agents.answered(0, false);
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
            let rest = agents.all[0].rests_until.unwrap() - now;
            assert_eq!(rest, (FIRST_REST * 2_u32.saturating_pow(failures).min(60)).min(LONGEST_REST));
        }
        agents.failed(0, 0.0, now);
        assert_eq!(agents.all[0].rests_until, Some(now));
    }

    /// One question: which agents are asked, and whose answer is followed.
    fn ask(agents: &mut Agents, ages: &[Option<u64>], now: Instant) -> (Vec<usize>, usize) {
        let (mut tried, mut asked) = (Tried::default(), Vec::new());
        let mut agent = agents.choose(tried, now).unwrap();
        let mut best: Option<usize> = None;
        loop {
            asked.push(agent);
            tried.add(agent);
            let Some(age) = ages[agent] else {
                agents.answered(agent, true);
                return (asked, agent);
            };
            agents.cut_off(agent, Duration::from_millis(age), 1.0, now);
            let followed = best.filter(|best| !agents.knows_more(agent, *best, now)).unwrap_or(agent);
            best = Some(followed);
            match agents.choose_better(tried, followed, now) {
                Some(next) => agent = next,
                None => {
                    agents.follow(followed);
                    return (asked, followed);
                }
            }
        }
    }

    #[test]
    fn one_that_is_cut_off_rests_while_another_is_in_touch() {
        let (mut agents, now) = (Agents::new(2), Instant::now() + LONGEST_REST);
        assert_eq!(ask(&mut agents, &[Some(0), None], now), (vec![0, 1], 1));
        assert_eq!(ask(&mut agents, &[Some(500), None], now + FIRST_REST / 2), (vec![1], 1));
        // An answer that says nothing of the leader is no sign that it is back.
        agents.answered(0, false);
        assert_eq!(ask(&mut agents, &[Some(900), None], now + FIRST_REST / 2), (vec![1], 1));
        assert_eq!(ask(&mut agents, &[Some(2_000), None], now + 2 * TRIAL), (vec![0, 1], 1));
        assert_eq!(ask(&mut agents, &[None, None], now + 2 * LONGEST_REST), (vec![0], 0));
        assert_eq!(ask(&mut agents, &[None, None], now + 2 * LONGEST_REST), (vec![0], 0));
    }

    #[test]
    fn where_all_are_cut_off_the_freshest_is_followed_and_they_do_not_take_turns() {
        let (mut agents, start) = (Agents::new(3), Instant::now() + 10 * LONGEST_REST);
        // The leader was lost at about the same time by two, long before by the first.
        let ages = |seconds: u64, jitter: u64| {
            [Some(60_000 + 1000 * seconds), Some(1000 * seconds + jitter), Some(1000 * seconds)]
        };
        assert_eq!(ask(&mut agents, &ages(1, 20), start), (vec![0, 1, 2], 2), "once around");
        let mut asked = [0; 3];
        for second in 0..600 {
            // Whose answer comes a little sooner is chance.
            let jitter = if second % 2 == 0 { 0 } else { 40 };
            let now = start + Duration::from_secs(second);
            let (who, followed) = ask(&mut agents, &ages(second + 1, jitter), now);
            who.iter().for_each(|agent| asked[*agent] += 1);
            assert_eq!(followed, 2, "in second {second}: {who:?}");
            assert!(!who[1..].contains(&who[0]));
        }
        assert!(asked[2] > 590, "{asked:?}");
        assert!(asked[0] < 40 && asked[1] < 40, "they rest in between: {asked:?}");
        // One that is in touch again is found when it has rested.
        let healed = [None, ages(700, 0)[1], ages(700, 0)[2]];
        assert_eq!(ask(&mut agents, &healed, start + Duration::from_secs(700)), (vec![0], 0));
    }

    #[test]
    fn one_that_is_cut_off_goes_before_one_that_fails() {
        let (mut agents, now) = (Agents::new(2), Instant::now() + LONGEST_REST);
        agents.failed(0, 0.5, now);
        agents.cut_off(1, LONGEST_REST, 1.0, now);
        assert_eq!(agents.choose(Tried::default(), now), Some(1));
        assert_eq!(agents.choose_better(all_but(&[1]), 1, now), None, "it is left in peace");
        assert_eq!(agents.choose_better(all_but(&[1]), 1, now + LONGEST_REST), Some(0));
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
        use Fault::{Agent, Elsewhere, Question, Suspect};
        for (error, near, far) in [
            (RegistryError::NoServers, Agent, Agent),
            (timed_out(), Agent, Question),
            (status(500, dial), Agent, Elsewhere),
            (status(500, "rpc error making call: EOF"), Agent, Elsewhere),
            (status(503, ""), Agent, Agent),
            (status(500, "Failed to create boolean expression evaluator"), Suspect, Elsewhere),
            (RegistryError::NoLeader, Suspect, Elsewhere),
            (RegistryError::Forbidden { message: String::new() }, Suspect, Elsewhere),
            (RegistryError::NoPath { datacenter: "dc2".to_owned() }, Suspect, Elsewhere),
            (RegistryError::Unsendable { reason: String::new() }, Question, Question),
        ] {
            assert_eq!([false, true].map(|from_afar| fault(&error, from_afar)), [near, far], "{error}");
        }
    }
}
