//! The registries a worker listens to: one resolver for each datacenter asked.

use std::sync::Arc;

use tokio::{task::JoinSet, time::Instant};
use tokio_stream::{StreamExt, StreamMap, wrappers::WatchStream};

use super::listing::Listing;
use crate::{
    client::{
        error::in_brief,
        registry::{ConsulQuery, Registry},
        resolver::{Cause, Resolved, Resolver, ResolverSettings},
        status::UNNAMED,
    },
    consul::{ConsulClient, HealthQuery, RegistryError},
};

/// One datacenter and how to ask about it.
pub(crate) struct Source {
    pub(crate) name: String,
    registry: Arc<dyn Registry>,
    resolver: Option<Resolver>,
    /// What the registry said last; kept for the status.
    pub(crate) last: Resolved,
    /// Since when the registry has been told to be lost. It outlives the asking, so
    /// that what is told lost is told back before it is told lost again.
    pub(crate) lost_since: Option<Instant>,
    /// Since when its list has been told to be empty; likewise.
    empty_since: Option<Instant>,
}

impl Source {
    fn new(name: String, registry: Arc<dyn Registry>) -> Self {
        Self {
            name,
            registry,
            resolver: None,
            last: Resolved::default(),
            lost_since: None,
            empty_since: None,
        }
    }
}

/// What is wrong, and with whom.
pub(crate) fn trouble(error: &RegistryError, asked: Option<&str>) -> String {
    match asked {
        Some(address) => format!("{} (asked at {address})", in_brief(error)),
        None => in_brief(error),
    }
}

/// How the other datacenters become known.
#[derive(Clone)]
pub(crate) enum Others {
    None,
    /// Consul's list, in its order or in the given one.
    Agent {
        client: ConsulClient,
        query: HealthQuery,
        wanted: Option<Vec<String>>,
    },
    /// Other registries, by name.
    Registries(Vec<(String, Arc<dyn Registry>)>),
}

/// What is to be told of a registry.
pub(crate) enum Loss {
    Began(Cause),
    /// It began then.
    Ended(Instant),
}

/// What is to be told of a list.
pub(crate) enum Emptied {
    Began,
    /// It began then.
    Ended(Instant),
}

/// What a source has to say.
pub(crate) enum News {
    /// The registry's word about one datacenter.
    Answer(usize, Resolved),
    /// One query of a look-up has ended, with this error if any.
    LookedUp(Option<RegistryError>),
    /// The list of datacenters has come, or has not.
    Listed(Result<Vec<String>, RegistryError>),
}

/// All sources of one service. Index 0 is the own datacenter.
pub(crate) struct Sources {
    service: Arc<str>,
    settings: ResolverSettings,
    list: Vec<Source>,
    answers: StreamMap<usize, WatchStream<Resolved>>,
    others: Others,
    lookups: JoinSet<Option<RegistryError>>,
    listing: JoinSet<Result<Vec<String>, RegistryError>>,
    listed: Listing,
}

impl Sources {
    pub(crate) fn new(
        service: Arc<str>,
        own: Arc<dyn Registry>,
        others: Others,
        settings: ResolverSettings,
    ) -> Self {
        let mut list = vec![Source::new(UNNAMED.to_owned(), own)];
        if let Others::Registries(others) = &others {
            list.extend(others.iter().map(|(name, other)| Source::new(name.clone(), other.clone())));
        }
        Self {
            service,
            settings,
            list,
            answers: StreamMap::new(),
            others,
            lookups: JoinSet::new(),
            listing: JoinSet::new(),
            listed: Listing::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether other datacenters were configured, known already or not.
    pub(crate) fn may_have_others(&self) -> bool {
        !matches!(self.others, Others::None)
    }

    /// The place of a datacenter that is known by this name.
    pub(crate) fn place(&self, name: &str) -> Option<usize> {
        self.list.iter().position(|source| source.name == name)
    }

    /// Others are told by the agent, who has not told them yet.
    pub(crate) fn awaits_list(&self) -> bool {
        matches!(self.others, Others::Agent { .. }) && !self.listed.is_told()
    }

    pub(crate) fn get(&self, tier: usize) -> &Source {
        &self.list[tier]
    }

    /// Starts asking about a datacenter. True where it was not asked before.
    pub(crate) fn ask(&mut self, tier: usize) -> bool {
        let source = &mut self.list[tier];
        if source.resolver.is_some() {
            return false;
        }
        let (registry, service) = (source.registry.clone(), self.service.clone());
        let resolver = Resolver::spawn(registry, service, &source.name, self.settings.clone());
        self.answers.insert(tier, WatchStream::new(resolver.watch()));
        source.resolver = Some(resolver);
        true
    }

    /// Stops asking about it. True where it was asked.
    pub(crate) fn unask(&mut self, tier: usize) -> bool {
        self.answers.remove(&tier);
        self.list[tier].last = Resolved::default();
        self.list[tier].resolver.take().is_some()
    }

    /// What happens next. Cancel safe. What a look-up found comes before its end.
    pub(crate) async fn next(&mut self) -> News {
        tokio::select! {
            biased;
            Some((tier, resolved)) = self.answers.next() => {
                if tier == 0
                    && let Some(first) = resolved.snapshot.as_ref().and_then(|s| s.instances.first())
                {
                    self.list[0].name.clone_from(&first.datacenter);
                }
                News::Answer(tier, resolved)
            }
            Some(result) = self.lookups.join_next() => News::LookedUp(result.ok().flatten()),
            // The task does not panic, and is aborted only with this.
            Some(Ok(list)) = self.listing.join_next() => News::Listed(list),
            else => std::future::pending().await,
        }
    }

    // === one fresh look ===

    /// Asks the registries of these datacenters once, at once.
    pub(crate) fn look_up(&mut self, tiers: impl Iterator<Item = usize>) {
        for tier in tiers {
            if let Some(resolver) = self.list.get(tier).and_then(|s| s.resolver.as_ref()) {
                let refresh = resolver.refresh();
                self.lookups.spawn(async move { refresh.await.err() });
            }
        }
    }

    pub(crate) fn is_looking_up(&self) -> bool {
        !self.lookups.is_empty()
    }

    // === which datacenters there are ===

    /// Asks for the list of datacenters, where that is how they become known and it
    /// is due. Returns when to try again, if that is later.
    pub(crate) fn want_list(&mut self, needed: bool, now: Instant) -> Option<Instant> {
        let Others::Agent { client, wanted, .. } = &self.others else { return None };
        if !self.listing.is_empty() {
            return None;
        }
        let due = self.listed.due(needed, now)?;
        if due > now {
            return Some(due);
        }
        let (client, given) = (client.clone(), wanted.is_some());
        self.listing.spawn(async move {
            if given { client.shared_datacenters_soon().await } else { client.shared_datacenters().await }
        });
        None
    }

    /// Takes the list over. Where the others are others than before, or in another
    /// order, returns for each its place before if it had one: those are asked on.
    /// Round-trip times vary: where any of the others are `serving` calls, those that are
    /// known keep their order and new ones come after them. One that is not listed
    /// any more stays until that is certain.
    pub(crate) fn set_list(
        &mut self,
        result: Result<Vec<String>, RegistryError>,
        serving: &[usize],
        now: Instant,
    ) -> Option<Vec<Option<usize>>> {
        let Others::Agent { wanted, .. } = &self.others else { return None };
        let told = match result {
            Ok(names) if !names.is_empty() => Some(names),
            Ok(_) => None,
            Err(error) => {
                tracing::debug!(%error, "the agent does not tell its datacenters");
                None
            }
        };
        if let Some(own) = told.as_ref().and_then(|names| names.first()) {
            self.list[0].name.clone_from(own);
        }
        let known: Vec<_> = self.list[1..].iter().map(|it| it.name.clone()).collect();
        let serving: Vec<_> = serving.iter().filter_map(|tier| known.get(tier.checked_sub(1)?)).collect();
        let names = match (wanted.clone(), told) {
            // A list that was given needs no agent to tell it.
            (Some(wanted), told) => {
                self.listed.given(told.is_some(), now);
                wanted
            }
            (None, Some(names)) => {
                let missing = self.listed.taken(&names, &known, &serving, now);
                #[cfg(any(test, feature = "testkit"))]
                let missing = if self.settings.without.confirmation { Vec::new() } else { missing };
                let stays = |name: &&String| names.contains(name) || missing.contains(name);
                let kept = known.iter().filter(|name| !serving.is_empty() && stays(name));
                kept.chain(&names).chain(&missing).cloned().collect()
            }
            (None, None) => {
                self.listed.failed(now);
                return None;
            }
        };
        let mut others: Vec<String> = Vec::new();
        for name in names {
            if name != self.list[0].name && !others.contains(&name) {
                others.push(name);
            }
        }
        if known == others { None } else { Some(self.rearrange(others)) }
    }

    fn rearrange(&mut self, others: Vec<String>) -> Vec<Option<usize>> {
        let Others::Agent { client, query, .. } = self.others.clone() else { return Vec::new() };
        let mut before: Vec<_> = self.list.split_off(1).into_iter().map(Some).collect();
        let mut answers: Vec<_> = (1..=before.len()).map(|tier| self.answers.remove(&tier)).collect();
        let mut from = Vec::new();
        for name in others {
            let old = before.iter().position(|s| s.as_ref().is_some_and(|s| s.name == name));
            if let Some(answers) = old.and_then(|old| answers[old].take()) {
                self.answers.insert(self.list.len(), answers);
            }
            self.list.push(old.and_then(|old| before[old].take()).unwrap_or_else(|| {
                let (client, query) = (client.clone(), query.clone().datacenter(name.clone()));
                Source::new(name, Arc::new(ConsulQuery::new(client, query)))
            }));
            from.push(old.map(|old| old + 1));
        }
        from
    }

    pub(crate) fn note(&mut self, tier: usize, resolved: Resolved) -> Resolved {
        std::mem::replace(&mut self.list[tier].last, resolved)
    }

    /// Notes whether the registry is lost by the word noted last. Returns since when it
    /// was, where that begins or ends now.
    pub(crate) fn note_loss(&mut self, tier: usize) -> Option<Loss> {
        let source = &mut self.list[tier];
        match (&source.last.episode, source.lost_since) {
            (Some(episode), None) => {
                source.lost_since = Some(episode.since);
                Some(Loss::Began(episode.cause.clone()))
            }
            // A resolver that has heard nothing yet does not know.
            (None, Some(since)) if source.last.answers > 0 => {
                source.lost_since = None;
                Some(Loss::Ended(since))
            }
            _ => None,
        }
    }
}

impl Sources {
    /// Notes whether the list is empty by the word noted last, though instances were
    /// known. A list that is hidden or not to be had ends nothing.
    pub(crate) fn note_empty(&mut self, tier: usize) -> Option<Emptied> {
        let source = &mut self.list[tier];
        let last = &source.last;
        let known = last.snapshot.as_ref().is_some_and(|it| !it.instances.is_empty());
        match (last.empty_since, source.empty_since) {
            (Some(since), None) if known => {
                source.empty_since = Some(since);
                Some(Emptied::Began)
            }
            (None, Some(since)) if known && last.error.is_none() && last.hidden_since.is_none() => {
                source.empty_since = None;
                Some(Emptied::Ended(since))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        client::{resolver::Episode, worker::listing::LIST_AGE},
        consul::ConsulConfig,
    };

    #[tokio::test]
    async fn a_datacenter_that_stays_is_asked_on_when_the_list_changes() {
        let client = ConsulClient::new(ConsulConfig::new("127.0.0.1:1").unwrap()).unwrap();
        let query = HealthQuery::new("counter").unwrap();
        let own = Arc::new(ConsulQuery::new(client.clone(), query.clone()));
        let others = Others::Agent { client, query, wanted: None };
        let mut sources = Sources::new("counter".into(), own, others, ResolverSettings::default());
        let mut now = Instant::now();
        let set = |names: &[&str], sources: &mut Sources, now| {
            let names = names.iter().map(|&name| name.to_owned()).collect();
            sources.set_list(Ok(names), &[], now)
        };
        assert_eq!(set(&["dc1", "dc2", "dc3"], &mut sources, now), Some(vec![None, None]));
        assert!(sources.ask(1) && sources.ask(2));
        assert_eq!(set(&["dc1", "dc2", "dc3"], &mut sources, now), None);
        assert_eq!(
            set(&["dc1", "dc3", "dc4", "dc2", "dc3"], &mut sources, now),
            Some(vec![Some(2), None, Some(1)])
        );
        let names: Vec<_> = sources.list.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["dc1", "dc3", "dc4", "dc2"]);
        assert_eq!([1, 2, 3].map(|tier| sources.ask(tier)), [false, true, false], "which are asked anew");
        assert_eq!(
            set(&["dc1", "dc2"], &mut sources, now),
            Some(vec![Some(3), Some(1), Some(2)]),
            "what is listed no more goes behind the others at first"
        );
        assert_eq!(sources.set_list(Ok(Vec::new()), &[], now + LIST_AGE), None);
        assert_eq!(sources.set_list(Err(RegistryError::NoServers), &[], now + LIST_AGE), None);
        assert_eq!(set(&["dc1", "dc2"], &mut sources, now + LIST_AGE), None, "that was no confirmation");
        now += 2 * LIST_AGE;
        assert_eq!(set(&["dc1", "dc2"], &mut sources, now), Some(vec![Some(1)]));
        assert_eq!(sources.answers.keys().copied().collect::<Vec<_>>(), [1]);
        let in_use = ["dc1", "dc4", "dc3", "dc2"].map(str::to_owned).to_vec();
        assert_eq!(sources.set_list(Ok(in_use), &[1], now), Some(vec![Some(1), None, None]));
        let names: Vec<_> = sources.list.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["dc1", "dc2", "dc4", "dc3"]);
        let alone =
            |later, sources: &mut Sources| sources.set_list(Ok(vec!["dc1".to_owned()]), &[1], now + later);
        assert_eq!(alone(LIST_AGE, &mut sources), None);
        assert_eq!(alone(2 * LIST_AGE, &mut sources), Some(vec![Some(1)]), "the one that serves calls stays");
        assert_eq!(alone(9 * LIST_AGE, &mut sources), None);
    }

    #[tokio::test]
    async fn what_is_told_lost_is_told_back_before_it_is_told_lost_again() {
        let config = ConsulConfig::new("127.0.0.1:1").unwrap();
        let (client, query) = (ConsulClient::new(config).unwrap(), HealthQuery::new("counter").unwrap());
        let own = Arc::new(ConsulQuery::new(client, query));
        let settings = ResolverSettings::default();
        let mut sources = Sources::new("counter".into(), own, Others::None, settings);
        let since = Instant::now();
        let lost = Resolved {
            episode: Some(Arc::new(Episode { since, cause: Cause::Behind(Duration::ZERO) })),
            answers: 1,
            ..Resolved::default()
        };
        let well = Resolved { answers: 2, ..Resolved::default() };
        let mut told = |word: Option<Resolved>| {
            match word {
                Some(word) => drop(sources.note(0, word)),
                // Not asked any more, and then asked anew: nothing is known yet.
                None => drop(sources.unask(0)),
            }
            match sources.note_loss(0) {
                Some(Loss::Began(_)) => "lost",
                Some(Loss::Ended(began)) if began == since => "back",
                Some(Loss::Ended(_)) => "back from another",
                None => "",
            }
        };
        assert_eq!(told(Some(well.clone())), "");
        assert_eq!(told(Some(lost.clone())), "lost");
        assert_eq!(told(None), "", "nobody knows");
        assert_eq!(told(Some(lost.clone())), "", "the same, as far as was told");
        assert_eq!(told(None), "");
        assert_eq!(told(Some(well.clone())), "back");
        assert_eq!(told(Some(well)), "");
        assert_eq!(told(Some(lost)), "lost");
    }
}
