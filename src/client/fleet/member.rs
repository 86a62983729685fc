//! One instance as the fleet knows it: its connection, and its record.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::Instance;

/// A connection that lives shorter than this and serves no call counts as a
/// failed attempt when it is lost, after a few in a row: a server that accepts,
/// answers and dies must not be dialled in a hot loop. One that served was
/// worth dialling, however short a server keeps its connections.
const SHORT_LIFE: Duration = Duration::from_secs(1);
const SHORT_LIVES: u32 = 3;

/// How long the longest rest is while no instance at all is usable. Our choice:
/// calls with a deadline of a second must live to see the next attempt.
const LONGEST_REST_WHILE_STARVING: Duration = Duration::from_millis(500);

/// How ejection grows: gRPC's connection back-off (factor 1.6, jitter a fifth).
const GROWTH: f64 = 1.6;
const JITTER: f64 = 0.2;

/// For each such time in use, one of the times that it was ejected from use is
/// forgiven: the interval of gRFC A50, whose ejection time shrinks in the same way.
const FORGIVEN_AFTER: Duration = Duration::from_secs(10);

/// For how long a failed instance is left alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ejection {
    pub(crate) first: Duration,
    pub(crate) at_most: Duration,
}

impl Ejection {
    /// After the `failures`-th failure in a row (from 1); `random` in 0..1.
    pub(crate) fn after(&self, failures: u32, random: f64) -> Duration {
        let exponent = i32::try_from(failures.saturating_sub(1)).unwrap_or(i32::MAX).min(64);
        let full = self.first.as_secs_f64() * GROWTH.powi(exponent);
        let full = full.min(self.at_most.as_secs_f64());
        Duration::from_secs_f64(full * (1.0 - JITTER + 2.0 * JITTER * random))
    }
}

/// The connection to an instance.
#[derive(Debug)]
pub(crate) enum Link<C> {
    Idle,
    Dialling { since: Instant, attempt: u64 },
    Ready { conn: C, since: Instant },
}

/// What an instance says of itself, where that is watched; the better the lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Health {
    Serving,
    /// It has not said yet.
    Unknown,
    NotServing,
}

/// Who is dialled before whom. Preference decides among those that have not failed; those
/// that have come behind them, the longest untried first: all of them are tried before any is
/// tried twice, so that no number of silent ones keeps calls from the one that would answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Turn {
    /// It served and was lost, and is not known to have failed: the likeliest to answer.
    Lost {
        rank: (bool, u64),
    },
    Untried {
        rank: (bool, u64),
    },
    Failed {
        attempt: u64,
    },
}

#[derive(Clone, Copy, Debug)]
struct Rest {
    since: Instant,
    until: Instant,
}

/// One instance.
#[derive(Debug)]
pub(crate) struct Member<C> {
    pub(crate) instance: Arc<Instance>,
    /// Its place in the client's own order; lower is preferred.
    pub(crate) rank: (bool, u64),
    pub(crate) link: Link<C>,
    failures: u32,
    /// How often it was ejected from use, unless forgiven. A probe's answer does not
    /// end this row as it ends that of failures to connect: what answers probes well
    /// and calls badly must not be back ever so soon.
    ejections: u32,
    short_lives: u32,
    /// Its connection was lost, and it has not been dialled since.
    was_lost: bool,
    /// The number of the latest attempt; 0 where there was none.
    attempt: u64,
    ejected: Option<Rest>,
    last_failure: Option<String>,
    /// Connected, and kept only while there is nothing better.
    pub(crate) doubted: bool,
    /// Connected, and on the registry's list no longer: the last resort until one that
    /// is listed is ready.
    pub(crate) unlisted: bool,
    /// Better than any other, for what it is and not for how it answers.
    pub(crate) preferred: bool,
    pub(crate) health: Health,
}

impl<C> Member<C> {
    pub(crate) fn new(instance: Arc<Instance>, rank: (bool, u64)) -> Self {
        Self {
            instance,
            rank,
            link: Link::Idle,
            failures: 0,
            ejections: 0,
            short_lives: 0,
            was_lost: false,
            attempt: 0,
            ejected: None,
            last_failure: None,
            doubted: false,
            unlisted: false,
            preferred: false,
            health: Health::Serving,
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.link, Link::Ready { .. })
    }

    /// Ready, and on the list.
    pub(crate) fn is_ready_by_list(&self) -> bool {
        self.is_ready() && !self.unlisted
    }

    /// The same, and may be serving for all that is known.
    pub(crate) fn serves(&self) -> bool {
        self.is_ready_by_list() && self.health != Health::NotServing
    }

    /// The same, and not in doubt.
    pub(crate) fn is_sound(&self) -> bool {
        self.serves() && !self.doubted
    }

    /// How good it is for calls; the better the lower.
    pub(crate) fn grade(&self) -> (bool, Health, bool, bool) {
        (!self.preferred, self.health, self.doubted, self.instance.warning)
    }

    pub(crate) fn is_ejected(&self, now: Instant) -> bool {
        self.ejected.is_some_and(|rest| rest.until > now)
    }

    /// Until when it is left alone: not for long while nothing else is usable,
    /// for then nothing is gained by waiting.
    pub(crate) fn rests_until(&self, starving: bool) -> Option<Instant> {
        let until = self.ejected?.until;
        Some(if starving { until.min(self.ejected?.since + LONGEST_REST_WHILE_STARVING) } else { until })
    }

    /// It has failed, or was taken out, less than `within` ago.
    pub(crate) fn failed_since(&self, within: Duration, now: Instant) -> Option<Instant> {
        let since = self.ejected?.since;
        (now.saturating_duration_since(since) < within).then_some(since)
    }

    pub(crate) fn turn(&self) -> Turn {
        match self.rank {
            rank if self.was_lost => Turn::Lost { rank },
            rank if self.failures == 0 => Turn::Untried { rank },
            _ => Turn::Failed { attempt: self.attempt },
        }
    }

    /// An attempt begins.
    pub(crate) fn dialled(&mut self, attempt: u64, now: Instant) {
        self.link = Link::Dialling { since: now, attempt };
        self.attempt = attempt;
        self.was_lost = false;
    }

    pub(crate) fn last_failure(&self) -> Option<&str> {
        self.last_failure.as_deref()
    }

    /// Whether it has failed since it last answered.
    pub(crate) fn is_on_probation(&self) -> bool {
        self.failures > 0
    }

    /// A connection has answered. True where that ends an ejection.
    pub(crate) fn ready(&mut self, conn: C, health: Health, now: Instant) -> bool {
        self.link = Link::Ready { conn, since: now };
        self.doubted = false;
        self.health = health;
        self.ejected = None;
        self.last_failure = None;
        std::mem::take(&mut self.failures) > 0
    }

    /// It failed: left alone for a while. Returns for how long.
    pub(crate) fn eject(&mut self, cause: String, times: Ejection, random: f64, now: Instant) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let mut row = self.failures;
        if let Link::Ready { since, .. } = self.link {
            let forgiven = (now - since).as_secs() / FORGIVEN_AFTER.as_secs();
            let forgiven = u32::try_from(forgiven).unwrap_or(u32::MAX);
            self.ejections = self.ejections.saturating_sub(forgiven).saturating_add(1);
            row = row.max(self.ejections);
        }
        let rest = times.after(row, random);
        self.ejected = Some(Rest { since: now, until: now + rest });
        self.last_failure = Some(cause);
        self.link = Link::Idle;
        rest
    }

    /// Its connection ended. True where it may be dialled again at once.
    pub(crate) fn lost(&mut self, served: bool, now: Instant) -> bool {
        if let Link::Ready { since, .. } = self.link {
            let in_vain = !served && now - since < SHORT_LIFE;
            self.short_lives = if in_vain { self.short_lives + 1 } else { 0 };
        }
        self.link = Link::Idle;
        self.was_lost = self.short_lives < SHORT_LIVES;
        self.was_lost
    }

    /// The registry says that it has come back: what was before counts no more.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
        self.ejections = 0;
        self.short_lives = 0;
        self.ejected = None;
        self.last_failure = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: Ejection = Ejection { first: Duration::from_millis(500), at_most: Duration::from_secs(30) };

    #[test]
    fn ejection_grows_to_its_limit_and_is_varied_by_a_fifth() {
        assert_eq!(TIMES.after(1, 0.5), Duration::from_millis(500));
        assert_eq!(TIMES.after(2, 0.5), Duration::from_millis(800));
        assert_eq!(TIMES.after(1, 0.0), Duration::from_millis(400));
        assert_eq!(TIMES.after(1, 1.0), Duration::from_millis(600));
        assert_eq!(TIMES.after(u32::MAX, 0.5), Duration::from_secs(30));
    }

    #[tokio::test(start_paused = true)]
    async fn what_answers_probes_well_and_calls_badly_rests_longer_each_time_until_it_has_been_good() {
        let mut member = Member::new(Arc::new(Instance::new("a", "127.0.0.1", 1, "dc1")), (false, 0));
        let mut rests = Vec::new();
        for in_use in [1, 1, 1, 25, 100] {
            assert_eq!(member.ready(0, Health::Serving, Instant::now()), !rests.is_empty());
            tokio::time::advance(Duration::from_secs(in_use)).await;
            rests.push(member.eject("unavailable".into(), TIMES, 0.5, Instant::now()).as_millis());
        }
        assert_eq!(rests, [500, 800, 1280, 800, 500], "25 s forgive two of three");
    }

    #[tokio::test(start_paused = true)]
    async fn three_short_lives_in_a_row_end_the_right_to_an_immediate_redial() {
        let mut member = Member::new(Arc::new(Instance::new("a", "127.0.0.1", 1, "dc1")), (false, 0));
        let mut redialled = Vec::new();
        let short = (100, false);
        for (life, served) in [short, short, (5000, false), short, short, (100, true), short, short, short] {
            member.ready(0, Health::Serving, Instant::now());
            tokio::time::advance(Duration::from_millis(life)).await;
            redialled.push(member.lost(served, Instant::now()));
        }
        assert_eq!(redialled, [true, true, true, true, true, true, true, true, false]);
    }
}
