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
    episode::{Failure, Standing},
    lines::Lines,
    order::{Asked, Order},
    pace::{Backoff, Spacing},
    turns::{Moved, Turn},
};
use crate::{
    client::registry::{self, Asking, Listing, Registry},
    consul::{BlockingIndex, HealthAnswer, IndexStep, RegistryError},
};

/// The longest that a registry's wish to be left alone is heeded. Our bound: a
/// faulty header must not blind us for a day.
const LONGEST_QUIET: Duration = Duration::from_secs(300);
/// How often a registry is asked that does not let queries wait, or that is cut
/// off from its leader and would not say that it is back, or has only just come
/// back. Our choice.
const DOUBTFUL: Duration = Duration::from_secs(1);
/// The longest wait while a list is empty; before, no question waits longer than the
/// list has been empty. What empties it may end without waking anybody, as a right does
/// that is given back (seen with Consul 1.8.7), so what is over soon is known soon. Our
/// choice.
const EMPTY: Duration = Duration::from_secs(10);

/// How long after a question its connection may be closed at most to count as turned away.
/// Our choice: on a busy host this takes a while.
const TURNED_AWAY_WITHIN: Duration = Duration::from_secs(1);

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
    standing: Standing,
    lines: Lines,
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
            standing: Standing::default(),
            lines: Lines::default(),
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
                (asked, waited, outcome) = ended(&mut refresh) => {
                    match outcome {
                        Ok(listing) => {
                            let was_failing = self.published.borrow().error.is_some();
                            // The registry is there: no reason to go on waiting for it.
                            let heard = self.answered(asked, None, &listing.answer);
                            if heard.changed {
                                self.turn.changed();
                            }
                            let restart = heard.next == Next::Restart || was_failing;
                            if restart || waits_longer(&blocking, self.longest_wait()) {
                                blocking = None;
                                due = self.free_after(&listing);
                            }
                            let resolved = self.published.borrow().clone();
                            reply_all(&mut waiting, &Ok(resolved));
                        }
                        Err(error) => {
                            // The blocking question would not notice for long.
                            blocking = None;
                            due = self.failed(&error, waited);
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
                        Err(error) => self.failed(&error, waited),
                    };
                }
                moved = self.turn.moved() => match moved {
                    Moved::Granted => due = due.min(self.free_at),
                    Moved::Recalled => {
                        self.turn.sit();
                        if blocking.take().is_some() {
                            due = Instant::now() + self.turn.read_again_in(self.backoff.random());
                        }
                    }
                },
                () = sleep_until(due), if blocking.is_none() => {
                    let (after, wait) = self.turn.question(self.index, self.wait);
                    blocking = Some(self.question(after, wait));
                }
            }
        }
    }

    fn question(&mut self, after: BlockingIndex, wait: Duration) -> Question {
        let wait = wait.min(self.longest_wait());
        let blocking = after.get().map(|_| (Instant::now(), wait));
        let begins = self.order.is_new();
        let (service, seen) = (self.service.clone(), after.get());
        let answer = self.registry.ask(registry::Question { service, seen, wait, begins });
        Question { asked: self.order.ask(), blocking, answer }
    }

    /// How long a question may wait for news, by what was last heard.
    fn longest_wait(&self) -> Duration {
        if self.standing.episode().is_some() {
            DOUBTFUL
        } else if let Some(since) = self.published.borrow().empty_since {
            since.elapsed().clamp(DOUBTFUL, EMPTY).min(self.wait)
        } else {
            self.wait
        }
    }

    /// The earliest time to ask again after a good answer.
    fn free_after(&mut self, listing: &Listing) -> Instant {
        let now = Instant::now();
        // In doubt, what does not wait for news must not come at once.
        let in_doubt = self.standing.episode().is_some() && self.index.get().is_none();
        let slowly = self.stir.is_idle() || in_doubt;
        let again_in = if slowly { listing.again_in.max(DOUBTFUL) } else { listing.again_in };
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
        let now = Instant::now();
        let next = now + self.turn.read_again_in(self.backoff.random());
        let sooner = self.standing.episode().and_then(|_| self.turn.sooner(now, DOUBTFUL, next));
        free_at.max(sooner.unwrap_or(next))
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
        let news = answer.index > self.index.get();
        if let Some(waited) = waited {
            self.stir.answered(waited.took, waited.at_least, news);
        }
        // Other registries than Consul, which tell of no agent, need have none.
        if answer.index.is_none() && !answer.agent.is_empty() {
            self.stir.without_index();
        }
        let idle = self.stir.is_idle().then_some(RegistryDoubt::NotBlocking);
        let ended = self.standing.answered(answer, now);
        let settling = self.standing.is_settling().then_some(RegistryDoubt::Settling);
        let doubt = RegistryDoubt::of(answer).or(settling).or(idle);
        self.lines.answered(answer, doubt, ended.map(|it| now - it.since));
        let episode = self.standing.episode().cloned();
        // Without its leader a server learns nothing: what is older than what was heard
        // before, as of one that was restarted and knows its last snapshot alone, is no news.
        let outdated =
            matches!(doubt, Some(RegistryDoubt::Behind { .. })) && self.order.is_older(answer.index);
        let taken = !outdated && self.order.takes(asked, answer.index);
        let without = self.without;
        let mut changed = false;
        self.published.send_if_modified(|resolved| {
            let confirmed = resolved.came(answer, doubt, episode, now);
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
            // What is newer came from a question that was asked later, or from another
            // server; asking anew tells whether the index has fallen since.
            self.index.reset();
            return Heard { next: Next::Restart, changed };
        }
        let next = match self.index.answered(answer.index) {
            IndexStep::Reset => Next::Restart,
            // A query that ends early and without news has been given up by a
            // restored snapshot, whose index is lower: waiting beyond the old one
            // would hide what happens until the next wait is over.
            // And one that did not move with the list does not tell of its return.
            IndexStep::Same if changed || waited.is_some_and(|it| it.took < it.at_least) => {
                self.index.reset();
                Next::Restart
            }
            IndexStep::Advanced | IndexStep::Same => Next::Stay,
        };
        Heard { next, changed }
    }

    /// Notes a failure of a question that has `waited` for news, if it did: when to ask again.
    fn failed(&mut self, error: &RegistryError, waited: Option<Waited>) -> Instant {
        let now = Instant::now();
        if !self.without.index_reset {
            self.index.reset();
        }
        // A connection that is one too many is closed at once; one that has held may have
        // ended with the agent.
        let soon = waited.is_none_or(|it| it.took < TURNED_AWAY_WITHIN);
        self.turn.leave(soon && matches!(error, RegistryError::Reset { .. }));
        self.lines.failed(error);
        // What a question leaves there stays until the next one runs.
        let failure = Failure { error: error.clone(), asked: self.registry.address() };
        self.standing.failed(&failure, now);
        let (without, episode) = (self.without, self.standing.episode().cloned());
        self.published.send_if_modified(|resolved| resolved.failed(failure, episode, without));
        let delay = self.backoff.failed();
        if let Some(quiet) = error.retry_after() {
            self.quiet_until = Some(now + quiet.min(LONGEST_QUIET));
        }
        // Also where another question, asked before, has failed in another way.
        self.quiet_until.map_or(now, |until| until.max(now)) + delay
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

/// Whether the question would wait for longer than that.
fn waits_longer(question: &Option<Question>, than: Duration) -> bool {
    let wait = question.as_ref().and_then(|it| it.blocking).map(|(_, wait)| wait);
    wait.is_some_and(|it| it > than)
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
