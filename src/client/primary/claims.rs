//! Who is primary, from what is said and from what is seen: pure, asked with `now`.
//!
//! | word | how far it is believed |
//! |---|---|
//! | an instance has run a call | until it refuses one, or another claims a greater token |
//! | an instance has refused a call | whatever claimed it to be primary until then counts no more |
//! | the registry's tag, another instance's hint | of several the greatest token's; one call tries it, and the others follow |
//! | neither | the instances are tried in turn, each left alone for [`SPACING`], unless there is a new word for it; two in a row are not heeded |
//!
//! Nothing that a peer says is kept for an instance that the registry does not list: it is never dialled.
//! So a liar can cost one call's attempt at each known instance, and no more. With ever greater tokens it can have
//! each tried twice as often while none is known, but keep none from its turn.

use std::{collections::HashMap, ops::RangeInclusive, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{FencingToken, Instance, InstanceId, Primary};

/// How long an instance that was tried is left alone, while no primary is known: a quarter of the time for
/// which one has been searched, within these bounds; up to as much again is added by lot. Our choice: a
/// hand-over, which takes tens of milliseconds, is noticed within half of that, and the takeover from a primary
/// that died, which takes two seconds, within a twentieth.
const SPACING: RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(50);

/// The tag of a primary, and the value of [`ROLE`].
const PRIMARY: &str = "primary";
/// The key of the role in a registration's metadata.
const ROLE: &str = "role";
/// The key of its term's token.
const TOKEN: &str = "token";

/// Of a claim; one without a token is less than any.
pub(crate) type Token = Option<FencingToken>;

/// All claims to be the primary of one service.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    known: Vec<Known>,
    hinted: HashMap<InstanceId, FencingToken>,
    denied: HashMap<InstanceId, Denial>,
    proven: Option<Proven>,
    /// Named by an instance, and not known.
    sought: Option<Primary>,
    /// Since when instances are tried; `None` while one is proven.
    searched_since: Option<Instant>,
    /// Those that were tried.
    rests: HashMap<InstanceId, Rest>,
}

/// An instance that was tried is left alone.
#[derive(Clone, Copy, Debug)]
struct Rest {
    until: Instant,
    /// It was tried before its turn, as the leader. The next time it is tried in its turn, whatever is said of it:
    /// those who name each other with ever greater tokens must not keep the others from being tried.
    favoured: bool,
    /// A new word has cut it short.
    cut: bool,
}

/// An instance that the registry lists.
#[derive(Debug)]
struct Known {
    instance: Arc<Instance>,
    /// What the registry claims for it.
    claim: Option<Token>,
}

/// It has said itself that it is not the primary.
#[derive(Clone, Copy, Debug)]
struct Denial {
    /// Claims up to this one are refuted.
    token: Token,
    /// When the call was sent that it refused.
    asked: Instant,
}

/// It has run a call, or was long enough about it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Proven {
    id: InstanceId,
    /// The connection: on another there may be another process.
    serial: u64,
    since: Instant,
}

/// An attempt at an instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt<'a> {
    pub(crate) id: &'a InstanceId,
    /// The connection.
    pub(crate) serial: u64,
    pub(crate) sent: Instant,
}

/// Who leads.
#[derive(Clone, Debug)]
pub(crate) struct Leader {
    pub(crate) instance: Arc<Instance>,
    pub(crate) token: Token,
    /// The connection on which all calls may go there; `None` while one is to try it first.
    pub(crate) open: Option<u64>,
}

/// Two primaries of one term.
#[derive(Clone, Debug)]
pub(crate) struct Rivals {
    pub(crate) instances: [Arc<Instance>; 2],
    pub(crate) token: FencingToken,
}

// === impl Claims ===

impl Claims {
    /// The registry has spoken: these are known, and what it says of them counts where that is said.
    pub(crate) fn listed(&mut self, known: impl Iterator<Item = (Arc<Instance>, bool)>) {
        let before = self.leading();
        let counted = |(instance, counts): (Arc<Instance>, bool)| Known {
            claim: if counts { claim(&instance) } else { None },
            instance,
        };
        self.known = known.map(counted).collect();
        let (known, hinted) = (&self.known, &mut self.hinted);
        let find = |id: &InstanceId| known.iter().find(|it| it.instance.id == *id);
        hinted.retain(|id, _| find(id).is_some());
        // A denial without a token is of the tag that was there; a new one is a new claim.
        self.denied
            .retain(|id, denial| find(id).is_some_and(|it| denial.token.is_some() || it.claim.is_some()));
        self.rests.retain(|id, _| find(id).is_some());
        self.proven = self.proven.take().filter(|proven| find(&proven.id).is_some());
        if let Some(sought) = self.sought.take() {
            self.hear(sought);
        }
        self.heed(before);
    }

    /// An instance has refused a call.
    pub(crate) fn refused(&mut self, attempt: Attempt<'_>, hint: Option<Primary>) {
        let Attempt { id, sent, .. } = attempt;
        let before = self.leading();
        // What it says of itself is that it refuses, whatever it is called.
        if let Some(hint) = hint
            && hint.address != *id
            && self.whom(&hint).as_ref() != Some(id)
        {
            self.hear(hint);
            self.heed(before);
        }
        // What was sent before the proof says nothing of the time after it.
        if self.proven.as_ref().is_some_and(|proven| proven.id == *id && proven.since > sent) {
            return;
        }
        self.proven = self.proven.take().filter(|proven| proven.id != *id);
        self.deny(id.clone(), self.claimed(id).flatten(), sent);
        self.hinted.remove(id);
    }

    /// An instance has answered a call as only the primary does.
    pub(crate) fn answered(&mut self, attempt: Attempt<'_>, now: Instant) {
        let Attempt { id, serial, sent } = attempt;
        let is_old = |since: Instant| since >= sent;
        if self.denied.get(id).is_some_and(|denial| is_old(denial.asked))
            || self.proven.as_ref().is_some_and(|proven| proven.id != *id && is_old(proven.since))
        {
            return;
        }
        self.denied.remove(id);
        self.proven = Some(Proven { id: id.clone(), serial, since: now });
        self.sought = None;
        self.searched_since = None;
        self.rests.values_mut().for_each(|rest| rest.favoured = false);
        // Whatever claimed others until now is out of date.
        let others: Vec<_> =
            self.known.iter().map(|it| &it.instance.id).filter(|it| *it != id).cloned().collect();
        for other in others {
            if let Some(token) = self.claimed(&other) {
                self.deny(other.clone(), token, sent);
                self.hinted.remove(&other);
            }
        }
    }

    /// An attempt at the leader goes on for longer than a refusal takes.
    pub(crate) fn not_refused(&mut self, attempt: Attempt<'_>) {
        let Attempt { id, serial, sent } = attempt;
        let leads =
            self.leader().is_some_and(|leader| leader.instance.id == *id && leader.open != Some(serial));
        if leads && self.denied.get(id).is_none_or(|denial| denial.asked < sent) {
            // Its refusal may come yet, and is no old news then.
            self.proven = Some(Proven { id: id.clone(), serial, since: sent });
        }
    }

    /// Who leads, as far as is known. Of equals the one that has run calls.
    pub(crate) fn leader(&self) -> Option<Leader> {
        let standing = |it: &Known| {
            let id = &it.instance.id;
            let proven = self.proven.as_ref().filter(|proven| proven.id == *id);
            let claimed =
                self.claimed(id).filter(|token| self.denied.get(id).is_none_or(|it| *token > it.token));
            let token = if proven.is_some() { Some(claimed.flatten()) } else { claimed }?;
            Some(Leader { instance: it.instance.clone(), token, open: proven.map(|proven| proven.serial) })
        };
        self.known.iter().filter_map(standing).max_by_key(|leader| (leader.token, leader.open.is_some()))
    }

    /// Which of the candidates (their ids, the preferred first) one call may try now, or from when on one may.
    pub(crate) fn next(&self, candidates: &[&InstanceId], now: Instant) -> Result<usize, Option<Instant>> {
        let leader = self.favourite();
        let rest = |id: &InstanceId| self.rests.get(id).filter(|rest| !rest.cut).map(|rest| rest.until);
        let turn = |&(_, id): &(usize, &&InstanceId)| (leader.as_ref() != Some(*id), rest(id));
        let free = candidates.iter().enumerate().filter(|(_, id)| rest(id).is_none_or(|until| until <= now));
        match free.min_by_key(turn) {
            Some((place, _)) => Ok(place),
            None => Err(candidates.iter().filter_map(|id| rest(id)).min()),
        }
    }

    /// One call tries it. `random` in 0..1.
    pub(crate) fn trying(&mut self, id: &InstanceId, random: f64, now: Instant) {
        let searched = now.saturating_duration_since(*self.searched_since.get_or_insert(now));
        let rest = (searched / 4).clamp(*SPACING.start(), *SPACING.end());
        let favoured = self.favourite().as_ref() == Some(id);
        let until = now + rest.mul_f64(1.0 + random);
        self.rests.insert(id.clone(), Rest { until, favoured, cut: false });
    }

    /// The leader, if it may be tried before its turn.
    fn favourite(&self) -> Option<InstanceId> {
        let leader = self.leader()?.instance.id.clone();
        self.rests.get(&leader).is_none_or(|rest| !rest.favoured).then_some(leader)
    }

    /// Whom an instance named, and the registry does not list.
    pub(crate) fn sought(&self) -> Option<&Primary> {
        self.sought.as_ref()
    }

    /// Two for which the registry claims one term: one lease gives it to one alone.
    pub(crate) fn rivals(&self) -> Option<Rivals> {
        let term = |it: &Known| it.claim.flatten().map(|token| (it.instance.clone(), token));
        let terms: Vec<_> = self.known.iter().filter_map(term).collect();
        terms.iter().enumerate().find_map(|(place, (one, token))| {
            let (other, _) = terms[place + 1..].iter().find(|(it, term)| it.id != one.id && term == token)?;
            Some(Rivals { instances: [one.clone(), other.clone()], token: *token })
        })
    }

    fn leading(&self) -> Option<(InstanceId, Token)> {
        self.leader().map(|leader| (leader.instance.id.clone(), leader.token))
    }

    /// Who has become the leader by a new word may be tried at once, though it was tried a moment ago.
    fn heed(&mut self, before: Option<(InstanceId, Token)>) {
        if let Some(leader) = self.leading().filter(|leader| before.as_ref() != Some(leader))
            && let Some(rest) = self.rests.get_mut(&leader.0)
        {
            rest.cut |= !rest.favoured;
        }
    }

    /// The greatest claim for it, refuted or not.
    fn claimed(&self, id: &InstanceId) -> Option<Token> {
        let listed = self.known.iter().find(|it| it.instance.id == *id).and_then(|it| it.claim);
        listed.max(self.hinted.get(id).copied().map(Some))
    }

    fn deny(&mut self, id: InstanceId, token: Token, asked: Instant) {
        let denial = self.denied.entry(id).or_insert(Denial { token, asked });
        *denial = Denial { token: denial.token.max(token), asked: denial.asked.max(asked) };
    }

    /// By its address; where an instance calls itself otherwise than the registry does, by its name.
    fn whom(&self, hint: &Primary) -> Option<InstanceId> {
        let by_address = self.known.iter().find(|it| it.instance.id == hint.address);
        let by_name = || self.known.iter().find(|it| it.instance.name == hint.instance);
        by_address.or_else(by_name).map(|it| it.instance.id.clone())
    }

    fn hear(&mut self, hint: Primary) {
        match self.whom(&hint) {
            Some(id) => {
                let token = self.hinted.entry(id).or_insert(hint.token);
                *token = (*token).max(hint.token);
            }
            None => self.sought = Some(hint),
        }
    }
}

/// What the registry says of an instance.
fn claim(instance: &Instance) -> Option<Token> {
    let meta = |key: &str| instance.meta.get(key).map(String::as_str);
    let is_primary = instance.tags.iter().any(|tag| tag == PRIMARY) || meta(ROLE) == Some(PRIMARY);
    is_primary.then(|| meta(TOKEN).and_then(|token| token.parse().ok()).map(FencingToken::new))
}

#[cfg(test)]
mod tests;
