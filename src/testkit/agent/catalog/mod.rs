//! What one datacenter knows: services, checks and the indexes of their changes.
//! No clock and no IO in here.

mod pairs;
mod record;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    definition::{CheckDefinition, CheckKind, Definition},
    filter::Filter,
};
use record::{Check, Service};

pub(crate) use pairs::Pairs;
pub(crate) use record::{Health, NodeRecord};

/// The index of a fresh agent. A real one's is 10 to 13 by the time it answers.
const FIRST_INDEX: u64 = 12;
/// What a fallen index falls to: lower than any that a fresh agent gives.
const FALLEN_INDEX: u64 = 6;

/// The state.
#[derive(Debug)]
pub(crate) struct Catalog {
    node: NodeRecord,
    /// The last change of anything: services and keys are counted as one.
    last: u64,
    /// The last change of any service.
    index: u64,
    /// When a service last lost its last instance.
    extinction: Option<u64>,
    /// How often the index has fallen.
    epoch: u64,
    services: BTreeMap<String, Service>,
    /// When each service last changed, by its name in lower case, since names are
    /// found in any case.
    names: BTreeMap<String, u64>,
    pairs: Pairs,
}

/// What a blocking query watches.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Subject<'a> {
    /// The instances of one service.
    Service(&'a str),
    /// The list of services.
    Services,
    /// One key.
    Key(&'a str),
    /// All keys that begin with this.
    Keys(&'a str),
}

/// Which instances are asked for.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// Only those all of whose checks pass.
    pub(crate) passing: bool,
    /// All of these tags, in any case.
    pub(crate) tags: Vec<String>,
    pub(crate) node_meta: Vec<(String, String)>,
    pub(crate) filter: Filter,
}

/// What a registration sets going.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) checks: Vec<CheckDefinition>,
    pub(crate) gone: Vec<String>,
}

// === impl Catalog ===

impl Catalog {
    pub(crate) fn new(node: NodeRecord) -> Self {
        let server = Service::server(FIRST_INDEX - 2);
        let names = [("consul".to_owned(), FIRST_INDEX - 2)].into();
        let services = [("consul".to_owned(), server)].into();
        let (index, pairs) = (FIRST_INDEX, Pairs::default());
        Self { node, last: index, index, extinction: None, epoch: 0, services, names, pairs }
    }

    /// Forgets everything, as an agent in memory does when it is restarted.
    pub(crate) fn forget(&mut self) {
        let epoch = self.epoch + 1;
        *self = Self { epoch, ..Self::new(self.node.clone()) };
    }

    /// Lets every index fall, as after the restore of a snapshot.
    pub(crate) fn fall(&mut self) {
        self.epoch += 1;
        (self.last, self.index) = (FALLEN_INDEX, FALLEN_INDEX);
        self.pairs.fall(FALLEN_INDEX);
        self.extinction = self.extinction.map(|_| FALLEN_INDEX);
        self.names.values_mut().for_each(|index| *index = FALLEN_INDEX);
        for service in self.services.values_mut() {
            service.fall(FALLEN_INDEX);
        }
    }

    /// The index that an answer about `subject` carries: never 0.
    pub(crate) fn index_of(&self, subject: Subject<'_>) -> u64 {
        match subject {
            Subject::Services => self.index,
            Subject::Key(key) => self.pairs.index_of(key),
            Subject::Keys(prefix) => self.pairs.index_below(prefix),
            Subject::Service(name) if self.instances(name).next().is_some() => {
                self.names.get(&name.to_lowercase()).copied().unwrap_or(self.index)
            }
            // Nothing tells when something that is not there last changed, so it
            // is when anything last went, or else changed at all.
            Subject::Service(_) => self.extinction.unwrap_or(self.index),
        }
    }

    pub(crate) fn pairs(&self) -> &Pairs {
        &self.pairs
    }

    /// Changes keys. Each request to do so is counted, whether anything comes of it or not.
    pub(crate) fn change<T>(&mut self, how: impl FnOnce(&mut Pairs, u64) -> T) -> T {
        self.last += 1;
        how(&mut self.pairs, self.last)
    }

    /// Differs after every fall of the index.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Takes a service in, or changes it: an unchanged one moves no index.
    pub(crate) fn register(&mut self, definition: Definition, replace: bool, now: Instant) -> Started {
        let index = self.last + 1;
        let id = definition.id.clone();
        // A check's id belongs to one service at a time.
        let moved = |check: &str| definition.checks.iter().any(|it| it.id == check);
        let mut touched = Vec::new();
        for (other, service) in &mut self.services {
            if *other != id && service.drop_checks(moved) {
                touched.push(service.definition.name.clone());
            }
        }
        let before = self.services.get(&id);
        let mut service = match before {
            Some(known) => known.clone(),
            None => Service::new(definition.clone(), index),
        };
        let gone = service.update(&definition, replace, index, now);
        if before != Some(&service) {
            let old_name = before.map(|known| known.definition.name.clone());
            touched.extend(old_name.filter(|old| *old != definition.name));
            touched.push(definition.name);
            self.services.insert(id, service);
        }
        self.touch(&touched);
        Started { checks: definition.checks, gone }
    }

    /// Takes a service out and says which checks went with it; none where the
    /// service is unknown.
    pub(crate) fn deregister(&mut self, id: &str) -> Vec<String> {
        if self.services.get(id).is_none_or(|service| service.internal) {
            return Vec::new();
        }
        let Some(service) = self.services.remove(id) else { return Vec::new() };
        let name = service.definition.name.clone();
        self.touch(std::slice::from_ref(&name));
        if self.instances(&name).next().is_none() {
            self.extinction = Some(self.index);
        }
        service.checks.into_keys().collect()
    }

    /// Switches a service's maintenance; false where it is unknown.
    pub(crate) fn maintain(&mut self, id: &str, reason: Option<&str>) -> bool {
        let index = self.last + 1;
        let Some(service) = self.services.get_mut(id) else { return false };
        let changed = match reason {
            Some(reason) => service.maintain(reason, index),
            None => service.drop_checks(|check| check == record::maintenance_id(id)),
        };
        if changed {
            let name = service.definition.name.clone();
            self.touch(&[name]);
        }
        true
    }

    /// How long a TTL check lasts; `None` where there is no such TTL check.
    pub(crate) fn ttl(&self, check: &str) -> Option<Duration> {
        match self.check(check)?.kind {
            Some(CheckKind::Ttl(ttl)) => Some(ttl),
            _ => None,
        }
    }

    /// Gives a check its status. An unchanged one moves no index, and its new
    /// output is the agent's alone, as in a real one for five minutes.
    pub(crate) fn set(&mut self, check: &str, status: Health, output: &str, now: Instant) {
        let index = self.last + 1;
        let Some(service) = self.services.values_mut().find(|it| it.checks.contains_key(check)) else {
            return;
        };
        let Some(known) = service.checks.get_mut(check) else { return };
        if known.set(status, output, index, now) {
            let name = service.definition.name.clone();
            self.touch(&[name]);
        }
    }

    /// Lets a TTL check expire.
    pub(crate) fn expire(&mut self, check: &str, now: Instant) {
        let output = match self.check(check).map(|it| it.output.as_str()) {
            Some("") | None => "TTL expired".to_owned(),
            Some(last) if last.starts_with("TTL expired") => last.to_owned(),
            Some(last) => format!("TTL expired (last output before timeout follows): {last}"),
        };
        self.set(check, Health::Critical, &output, now);
    }

    /// The services that have been critical for longer than they may be.
    pub(crate) fn overdue(&self, now: Instant) -> Vec<String> {
        let overdue =
            self.services.iter().filter(|(_, service)| service.checks.values().any(|it| it.overdue(now)));
        overdue.map(|(id, _)| id.clone()).collect()
    }

    /// `/v1/health/service/:name`.
    pub(crate) fn health(&self, name: &str, choice: &Choice) -> Value {
        if !choice.node_meta.iter().all(|(key, value)| self.node.has_meta(key, value)) {
            return json!([]);
        }
        let chosen = self.instances(name).filter(|(_, service)| {
            (!choice.passing || service.passes())
                && choice.tags.iter().all(|tag| service.has_tag(tag))
                && choice.filter.matches(&service.definition.tags, &service.definition.meta)
        });
        let entry = |(id, service): (&String, &Service)| {
            let own =
                service.checks.iter().map(|(check, it)| it.in_catalog(check, (id, service), &self.node));
            let checks: Vec<_> = std::iter::once(self.node.serf_health()).chain(own).collect();
            json!({ "Node": self.node.json(), "Service": service.in_catalog(id), "Checks": checks })
        };
        chosen.map(entry).collect()
    }

    /// `/v1/catalog/services`.
    pub(crate) fn services(&self) -> Value {
        let mut all: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for service in self.services.values() {
            let tags = all.entry(&service.definition.name).or_default();
            for tag in &service.definition.tags {
                if !tags.contains(&tag.as_str()) {
                    tags.push(tag);
                }
            }
        }
        json!(all)
    }

    /// `/v1/agent/services`.
    pub(crate) fn agent_services(&self) -> Value {
        let own = self.services.iter().filter(|(_, service)| !service.internal);
        json!(own.map(|(id, service)| (id, service.in_agent(id))).collect::<BTreeMap<_, _>>())
    }

    /// `/v1/agent/service/:id`, without its hash.
    pub(crate) fn agent_service(&self, id: &str) -> Option<Value> {
        self.services.get(id).filter(|it| !it.internal).map(|it| it.in_agent(id))
    }

    /// `/v1/agent/checks`.
    pub(crate) fn agent_checks(&self) -> Value {
        let all = self.services.iter().flat_map(|(id, service)| {
            service
                .checks
                .iter()
                .map(move |(check, it)| (check, it.in_agent(check, (id, service), &self.node)))
        });
        json!(all.collect::<BTreeMap<_, _>>())
    }

    pub(crate) fn node(&self) -> &NodeRecord {
        &self.node
    }

    fn check(&self, id: &str) -> Option<&Check> {
        self.services.values().find_map(|service| service.checks.get(id))
    }

    fn instances(&self, name: &str) -> impl Iterator<Item = (&String, &Service)> {
        let name = name.to_lowercase();
        self.services.iter().filter(move |(_, service)| service.definition.name.to_lowercase() == name)
    }

    fn touch(&mut self, names: &[String]) {
        if names.is_empty() {
            return;
        }
        self.last += 1;
        self.index = self.last;
        for name in names {
            self.names.insert(name.to_lowercase(), self.index);
        }
    }
}
