//! The task behind a [`Resolver`](super::Resolver).

use std::{
    future::{Future, pending},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tower::util::rng::Rng;

use super::{
    RegistryDoubt, Reply, Resolved, ResolverSettings, Without,
    doubt::Stir,
    episodes::Episodes,
    order::{Asked, Order},
    pace::{Backoff, Spacing},
    turns::Turn,
};
use crate::{
    client::registry::{self, Asking, Listing, Registry},
    consul::{BlockingIndex, HealthAnswer, IndexStep, RegistryError},
    instance::Snapshot,
};

/// The longest that a registry's wish to be left alone is heeded. Our bound: a
/// faulty header must not blind us for a day.
const LONGEST_QUIET: Duration = Duration::from_secs(300);
/// How often a registry is asked that does not let queries wait, or that is cut
/// off from its leader and would not say that it is back. Our choice.
const DOUBTFUL: Duration = Duration::from_secs(1);

type Outcome = Result<Listing, RegistryError>;

pub(super) struct Task<R> {
    registry: Arc<dyn Registry>,
    service: Arc<str>,
    wait: Duration,
    requests: mpsc::Receiver<Reply>,
    published: watch::Sender<Resolved>,
    index: BlockingIndex,
    order: Order,
    turn: Turn,
    spacing: Spacing,
    /// When the spacing lets the next question go.
    free_at: Instant,
    backoff: Backoff<R>,
    /// Until then the registry wants to be left alone.
    quiet_until: Option<Instant>,
    episodes: Episodes,
    stir: Stir,
    without: Without,
}

/// A question under way.
struct Question {
    asked: Asked,
    /// Since when and for how long at least it waits for news, if it does.
    blocking: Option<(Instant, Duration)>,
    answer: Asking,
}

/// How long an answer took that was to bring news, and was to take without any.
#[derive(Clone, Copy)]
struct Waited {
    took: Duration,
    at_least: Duration,
}

/// What an answer means.
struct Heard {
    next: Next,
    /// The list is another one than before.
    changed: bool,
}

/// What an answer means for the blocking question.
#[derive(PartialEq, Eq)]
enum Next {
    /// It may go on waiting where it does.
    Stay,
    /// The index it waits beyond is worth nothing.
    Restart,
}

// === impl Task ===

impl<R: Rng> Task<R> {
    pub(super) fn new(
        registry: Arc<dyn Registry>,
        service: Arc<str>,
        settings: ResolverSettings,
        requests: mpsc::Receiver<Reply>,
        published: watch::Sender<Resolved>,
        rng: R,
    ) -> Self {
        Self {
            registry,
            service,
            wait: settings.wait,
            requests,
            published,
            index: BlockingIndex::NONE,
            order: Order::default(),
            turn: settings.turns.join(),
            spacing: Spacing::new(settings.spacing),
            free_at: Instant::now(),
            backoff: Backoff::new(settings.backoff_min, settings.backoff_max, rng),
            quiet_until: None,
            episodes: Episodes::default(),
            stir: Stir::default(),
            without: settings.without,
        }
    }

    /// Runs until the resolver is dropped.
    pub(super) async fn run(mut self) {
        // Either a blocking question is under way, or one is due.
        let mut blocking = None;
        let mut due = self.turn.begin(Instant::now());
        let mut refresh: Option<Question> = None;
        let mut waiting: Vec<Reply> = Vec::new();
        loop {
            tokio::select! {
                request = self.requests.recv() => {
                    let Some(reply) = request else { return };
                    if let Some(left) = self.quiet_for() {
                        let _ = reply.send(Err(RegistryError::RateLimited { retry_after: Some(left) }));
                        continue;
                    }
                    waiting.push(reply);
                    if refresh.is_none() {
                        refresh = Some(self.question(BlockingIndex::NONE, self.wait));
                    }
                }
                (asked, _, outcome) = ended(&mut refresh) => {
                    match outcome {
                        Ok(listing) => {
                            let was_failing = self.published.borrow().error.is_some();
                            // The registry is there: no reason to go on waiting for it.
                            let heard = self.answered(asked, None, &listing.answer);
                            if heard.next == Next::Restart || was_failing {
                                blocking = None;
                                due = self.free_after(&listing);
                            }
                            let resolved = self.published.borrow().clone();
                            reply_all(&mut waiting, &Ok(resolved));
                        }
                        Err(error) => {
                            // The blocking question would not notice for long.
                            blocking = None;
                            due = self.failed(&error);
                            reply_all(&mut waiting, &Err(error));
                        }
                    }
                }
                (asked, waited, outcome) = ended(&mut blocking) => {
                    due = match outcome {
                        Ok(listing) => {
                            let changed = self.answered(asked, waited, &listing.answer).changed;
                            self.due_after(&listing, changed)
                        }
                        Err(error) => self.failed(&error),
                    };
                }
                () = self.turn.granted() => due = due.min(self.free_at),
                () = sleep_until(due), if blocking.is_none() => {
                    let (after, wait) = self.turn.question(self.index, self.wait);
                    blocking = Some(self.question(after, wait));
                }
            }
        }
    }

    fn question(&mut self, after: BlockingIndex, wait: Duration) -> Question {
        let behind = self.published.borrow().doubt.is_some_and(RegistryDoubt::is_behind);
        let wait = if behind { wait.min(DOUBTFUL) } else { wait };
        let blocking = after.get().map(|_| (Instant::now(), wait));
        let begins = self.order.is_new();
        let (service, seen) = (self.service.clone(), after.get());
        let answer = self.registry.ask(registry::Question { service, seen, wait, begins });
        Question { asked: self.order.ask(), blocking, answer }
    }

    /// The earliest time to ask again after a good answer.
    fn free_after(&mut self, listing: &Listing) -> Instant {
        let now = Instant::now();
        let again_in = if self.stir.is_idle() { listing.again_in.max(DOUBTFUL) } else { listing.again_in };
        self.free_at = self.spacing.take(now).max(now + again_in);
        if self.without.spacing {
            self.free_at = now;
        }
        self.free_at
    }

    /// When to ask after an answer to the blocking question: soon with a seat, or
    /// where there is nothing to wait beyond; later where others have the seats.
    fn due_after(&mut self, listing: &Listing, changed: bool) -> Instant {
        let free_at = self.free_after(listing);
        self.turn.answered(changed);
        if self.index.get().is_none() || self.turn.sit() {
            return free_at;
        }
        free_at.max(Instant::now() + self.turn.read_again_in(self.backoff.random()))
    }

    fn quiet_for(&self) -> Option<Duration> {
        let left = self.quiet_until?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Takes a good answer, unless it has been overtaken. It was `waited` for, where
    /// it was to bring news.
    fn answered(&mut self, asked: Asked, waited: Option<Waited>, answer: &HealthAnswer) -> Heard {
        let now = Instant::now();
        self.backoff.reset();
        self.quiet_until = None;
        let failing_since = self.published.borrow().failing_since;
        let news = answer.index > self.index.get();
        if let Some(waited) = waited {
            self.stir.answered(waited.took, news);
        }
        let idle = self.stir.is_idle().then_some(RegistryDoubt::NotBlocking);
        let doubt = RegistryDoubt::of(answer).or(idle);
        self.episodes.answered(answer, doubt, failing_since.map(|since| now - since));
        let taken = self.order.takes(asked, answer.index);
        let without = self.without;
        let mut changed = false;
        self.published.send_if_modified(|resolved| {
            let confirmed = resolved.came(answer, doubt, now);
            changed = taken && resolved.take(answer, now, without);
            confirmed || changed
        });
        if self.without.index_reset {
            if news {
                self.index.answered(answer.index);
            }
            return Heard { next: Next::Stay, changed };
        }
        if !taken {
            // What is newer came from a question that was asked later; asking at once
            // tells whether the index has fallen since.
            self.index.reset();
            return Heard { next: Next::Restart, changed };
        }
        let next = match self.index.answered(answer.index) {
            IndexStep::Reset => Next::Restart,
            // A query that ends early and without news has been given up by a
            // restored snapshot, whose index is lower: waiting beyond the old one
            // would hide what happens until the next wait is over.
            IndexStep::Same if waited.is_some_and(|it| it.took < it.at_least) => {
                self.index.reset();
                Next::Restart
            }
            IndexStep::Advanced | IndexStep::Same => Next::Stay,
        };
        Heard { next, changed }
    }

    /// Notes a failure: when to ask again.
    fn failed(&mut self, error: &RegistryError) -> Instant {
        let now = Instant::now();
        if !self.without.index_reset {
            self.index.reset();
        }
        self.turn.leave();
        self.episodes.failed(error);
        let without = self.without;
        self.published.send_if_modified(|resolved| resolved.failed(error, now, without));
        let mut due = now + self.backoff.failed();
        if let Some(quiet) = error.retry_after() {
            let quiet = quiet.min(LONGEST_QUIET);
            self.quiet_until = Some(now + quiet);
            due += quiet;
        }
        due
    }
}

// === impl Resolved ===

impl Resolved {
    /// Notes that a good answer came, from where, and how far it can be trusted.
    /// True where that is news.
    fn came(&mut self, answer: &HealthAnswer, doubt: Option<RegistryDoubt>, now: Instant) -> bool {
        self.answers += 1;
        self.answered_at = Some(now);
        if let Some(RegistryDoubt::Behind { last_contact }) = doubt {
            let since = now.checked_sub(last_contact).unwrap_or(now);
            self.failing_since.get_or_insert(since);
        } else {
            self.failing_since = None;
        }
        let other_doubt = std::mem::replace(&mut self.doubt, doubt) != doubt;
        let back = self.error.take().is_some();
        // Other registries have none.
        let agent = Some(&answer.agent).filter(|it| !it.is_empty());
        let other_agent = self.agent.as_ref() != agent;
        if other_agent {
            self.agent = agent.cloned();
        }
        back || other_doubt || other_agent
    }

    /// Takes over what a good answer says. True where that is news.
    fn take(&mut self, answer: &HealthAnswer, now: Instant, without: Without) -> bool {
        let empty = answer.snapshot.instances.is_empty();
        let denied = std::mem::replace(&mut self.denied, answer.denied) != self.denied;
        // A list that the token may not read is not empty, it is unknown.
        let hidden_since = (empty && self.denied.is_some()).then(|| self.hidden_since.unwrap_or(now));
        let hidden = std::mem::replace(&mut self.hidden_since, hidden_since).is_some();
        let keeps = !(empty && without.keep_on_empty);
        let empty_since = (empty && keeps && hidden_since.is_none()).then(|| self.empty_since.unwrap_or(now));
        let was_empty = std::mem::replace(&mut self.empty_since, empty_since).is_some();
        let other = if !keeps {
            self.snapshot.replace(Snapshot::default()) != Some(Snapshot::default())
        } else if empty {
            self.snapshot.get_or_insert_default();
            false
        } else {
            let other = self.snapshot.as_ref() != Some(&answer.snapshot);
            if other {
                self.snapshot = Some(answer.snapshot.clone());
            }
            other
        };
        denied || hidden != hidden_since.is_some() || was_empty != empty_since.is_some() || other
    }

    /// Notes a failure. True where it is another one than before.
    fn failed(&mut self, error: &RegistryError, now: Instant, without: Without) -> bool {
        self.failing_since.get_or_insert(now);
        self.doubt = None;
        if without.keep_on_error {
            self.snapshot = Some(Snapshot::default());
            self.empty_since = None;
        }
        let before = self.error.replace(error.clone());
        let kind = std::mem::discriminant::<RegistryError>;
        match (&before, error) {
            // A kind for everything: what it says tells them apart.
            (Some(RegistryError::Other { source: old }), RegistryError::Other { source: new }) => {
                old.to_string() != new.to_string()
            }
            _ => before.as_ref().map(kind) != Some(kind(error)),
        }
    }
}

/// Waits for the question under way and clears it; for ever where there is none.
async fn ended(question: &mut Option<Question>) -> (Asked, Option<Waited>, Outcome) {
    match question {
        Some(Question { asked, blocking, answer }) => {
            let outcome = answer.await;
            let waited = blocking.map(|(since, wait)| {
                let at_least = outcome.as_ref().ok().and_then(|it| it.waited_for).unwrap_or(wait);
                Waited { took: since.elapsed(), at_least }
            });
            let asked = *asked;
            *question = None;
            (asked, waited, outcome)
        }
        None => pending().await,
    }
}

fn reply_all(waiting: &mut Vec<Reply>, outcome: &Result<Resolved, RegistryError>) {
    for reply in waiting.drain(..) {
        // Who asked may have gone.
        let _ = reply.send(outcome.clone());
    }
}

const _: () = {
    const fn spawnable<F: Future<Output = ()> + Send + 'static>(
        _: fn(Task<tower::util::rng::HasherRng>) -> F,
    ) {
    }
    spawnable(Task::run);
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{consul::Denied, instance::Instance};

    #[derive(Clone, Debug)]
    enum Step {
        Answered { names: Vec<String>, denied: bool, leaderless: bool },
        Failed,
    }

    fn step() -> impl Strategy<Value = Step> {
        let names = prop::collection::vec("[abc]", 0..3);
        prop_oneof![
            3 => (names, any::<bool>(), any::<bool>())
                .prop_map(|(names, denied, leaderless)| Step::Answered { names, denied, leaderless }),
            1 => Just(Step::Failed),
        ]
    }

    proptest! {
        #[test]
        fn what_is_known_is_replaced_by_a_list_with_entries_and_by_nothing_else(
            steps in prop::collection::vec(step(), 0..40),
        ) {
            let (mut resolved, now, without) = (Resolved::default(), Instant::now(), Without::default());
            let mut known = Vec::new();
            for step in steps {
                match step {
                    Step::Answered { names, denied, leaderless } => {
                        let instances = names.iter().map(|it| Arc::new(Instance::new(it, it, 80, "dc1")));
                        let mut answer = HealthAnswer::of(Snapshot { instances: instances.collect() });
                        answer.denied = denied.then_some(Denied::Part);
                        answer.known_leader = Some(!leaderless);
                        resolved.came(&answer, RegistryDoubt::of(&answer), now);
                        resolved.take(&answer, now, without);
                        prop_assert_eq!(resolved.empty_since.is_some(), names.is_empty() && !denied);
                        prop_assert_eq!(resolved.hidden_since.is_some(), names.is_empty() && denied);
                        prop_assert_eq!(resolved.failing_since.is_some(), leaderless);
                        prop_assert!(resolved.error.is_none());
                        if !names.is_empty() {
                            known = names;
                        }
                    }
                    Step::Failed => {
                        resolved.failed(&RegistryError::NoLeader, now, without);
                        prop_assert!(resolved.error.is_some() && resolved.failing_since.is_some());
                    }
                }
                let now_known = resolved.snapshot.iter().flat_map(|it| &it.instances);
                prop_assert_eq!(now_known.map(|it| it.name.clone()).collect::<Vec<_>>(), known.clone());
            }
        }
    }
}
