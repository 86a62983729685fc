//! From the body of a health answer to instances. Pure.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use serde::Deserialize;
use serde_json::Value;

use super::{RegistryError, SkipReason, SkippedEntry, secrets::Answer};
use crate::instance::{Instance, Snapshot};

/// The largest weight that Consul takes
/// (<https://developer.hashicorp.com/consul/docs/services/configuration/services-configuration-reference#weights>).
const HEAVIEST: i64 = 65_535;

/// What is wanted of an answer beyond what the registry has sorted out itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) warning: bool,
    pub(super) meta: &'a [(String, String)],
    /// The answer is about another datacenter than the agent's.
    pub(super) from_afar: bool,
}

/// Reads a body: the usable instances, and the entries that name nothing to
/// connect to. An error means that the body is no list of entries at all: another
/// thing, or a list of other things, as of somebody who answers in Consul's place.
pub(super) fn read(
    answer: &Answer,
    wanted: Wanted<'_>,
) -> Result<(Snapshot, Vec<SkippedEntry>), RegistryError> {
    let (instances, places, skipped) = (Vec::new(), HashMap::new(), Vec::new());
    let mut reading = Reading { answer, wanted, others: 0, entries: 0, instances, places, skipped };
    answer.list("a list of health entries", |entry| reading.take(&entry))?;
    if reading.others > 0 && reading.entries == 0 {
        return Err(answer.not_understood("a list without a single health entry in it"));
    }
    let instances = reading.instances.into_iter().map(Arc::new).collect();
    Ok((Snapshot { instances }, reading.skipped))
}

/// Takes one entry after the other; a bad one costs only itself.
struct Reading<'a> {
    answer: &'a Answer,
    wanted: Wanted<'a>,
    /// How many have the shape of an entry, good or bad, and how many have not.
    entries: usize,
    others: usize,
    instances: Vec<Instance>,
    places: HashMap<String, usize>,
    skipped: Vec<SkippedEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    node: Node,
    service: Service,
    #[serde(default)]
    checks: Option<Vec<CheckState>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Node {
    #[serde(default)]
    node: String,
    #[serde(default)]
    address: Option<String>,
    #[serde(default)]
    datacenter: Option<String>,
    #[serde(default)]
    tagged_addresses: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Service {
    #[serde(rename = "ID", default)]
    id: String,
    #[serde(default)]
    service: String,
    #[serde(default)]
    address: Option<String>,
    #[serde(default)]
    tagged_addresses: Option<BTreeMap<String, TaggedAddress>>,
    #[serde(default)]
    port: i64,
    #[serde(default)]
    tags: Option<Vec<String>>,
    #[serde(default)]
    meta: Option<BTreeMap<String, String>>,
    #[serde(default)]
    weights: Option<Weights>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct TaggedAddress {
    #[serde(default)]
    address: String,
    #[serde(default)]
    port: i64,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Weights {
    #[serde(default = "one")]
    passing: i64,
    #[serde(default = "one")]
    warning: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckState {
    #[serde(rename = "CheckID", default)]
    id: String,
    #[serde(default)]
    status: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Passing,
    Warning,
    Unusable,
}

// === impl Reading ===

impl Reading<'_> {
    fn take(&mut self, json: &Value) {
        *(if json["Service"].is_object() { &mut self.entries } else { &mut self.others }) += 1;
        let entry = match Entry::deserialize(json) {
            Ok(entry) => entry,
            Err(error) => {
                let text = |of: &str, key: &str| json[of][key].as_str().unwrap_or_default();
                let reason = SkipReason::NotUnderstood(error.to_string());
                self.skip(text("Service", "ID"), text("Node", "Node"), reason);
                return;
            }
        };
        let health = entry.health();
        if health == Health::Unusable || (health == Health::Warning && !self.wanted.warning) {
            return;
        }
        let meta = entry.service.meta.as_ref();
        let has = |(key, value): &(String, String)| meta.and_then(|it| it.get(key)) == Some(value);
        if !self.wanted.meta.iter().all(has) {
            return;
        }
        match entry.endpoint(self.wanted.from_afar) {
            Ok((host, port)) => self.keep(entry.into_instance(&host, port, health)),
            Err(reason) => self.skip(&entry.service.id, &entry.node.node, reason),
        }
    }

    /// What is told of it goes into the log.
    fn skip(&mut self, id: &str, node: &str, reason: SkipReason) {
        let told = |text: &str| self.answer.told(text);
        let reason = match reason {
            SkipReason::Address(address) => SkipReason::Address(told(&address)),
            SkipReason::NotUnderstood(what) => SkipReason::NotUnderstood(told(&what)),
            reason @ (SkipReason::Port(_) | SkipReason::NoAddress) => reason,
        };
        self.skipped.push(SkippedEntry { id: told(id), node: told(node), reason });
    }

    /// Two entries with one address are one process; the healthier describes it.
    fn keep(&mut self, instance: Instance) {
        let authority = instance.id.authority().to_owned();
        match self.places.get(&authority) {
            None => {
                self.places.insert(authority, self.instances.len());
                self.instances.push(instance);
            }
            Some(&place) if self.instances[place].warning && !instance.warning => {
                self.instances[place] = instance;
            }
            Some(_) => {}
        }
    }
}

// === impl Entry ===

impl Entry {
    /// The worst of its checks, the node's among them. A state that is not known
    /// is not trusted.
    fn health(&self) -> Health {
        let mut health = Health::Passing;
        for check in self.checks.iter().flatten() {
            let maintenance =
                check.id == "_node_maintenance" || check.id.starts_with("_service_maintenance:");
            match check.status.as_str() {
                _ if maintenance => return Health::Unusable,
                "passing" => {}
                "warning" => health = Health::Warning,
                _ => return Health::Unusable,
            }
        }
        health
    }

    /// Where to connect to, in Consul's own order
    /// (<https://developer.hashicorp.com/consul/docs/agent/config/config-files#translate_wan_addrs>):
    /// from afar the service's WAN address; the service's address; from afar the
    /// node's WAN address; the node's address. The service goes before the node
    /// even from afar, since every node has a WAN address, also one that nobody set.
    fn endpoint(&self, from_afar: bool) -> Result<(String, u16), SkipReason> {
        let (service, node) = (&self.service, &self.node);
        let service_wan =
            service.tagged_addresses.as_ref().and_then(|it| it.get("wan")).filter(|_| from_afar);
        let node_wan = node.tagged_addresses.as_ref().and_then(|it| it.get("wan")).filter(|_| from_afar);
        let candidates = [
            service_wan.map(|it| it.address.as_str()),
            service.address.as_deref(),
            node_wan.map(String::as_str),
            node.address.as_deref(),
        ];
        let address =
            candidates.into_iter().flatten().find(|it| !it.is_empty()).ok_or(SkipReason::NoAddress)?;
        let host = host(address).ok_or_else(|| SkipReason::Address(address.to_owned()))?;
        let port = service_wan.map(|it| it.port).filter(|it| *it != 0).unwrap_or(service.port);
        match u16::try_from(port) {
            Ok(port) if port != 0 => Ok((host, port)),
            _ => Err(SkipReason::Port(port)),
        }
    }

    fn into_instance(self, host: &str, port: u16, health: Health) -> Instance {
        let Self { node, service, .. } = self;
        let name = [service.id, service.service].into_iter().find(|it| !it.is_empty()).unwrap_or_default();
        let mut instance = Instance::new(name, host, port, node.datacenter.unwrap_or_default());
        instance.node = node.node;
        for tag in service.tags.into_iter().flatten() {
            if !tag.is_empty() && !instance.tags.contains(&tag) {
                instance.tags.push(tag);
            }
        }
        instance.meta = service.meta.unwrap_or_default();
        instance.warning = health == Health::Warning;
        let weights = service.weights.unwrap_or(Weights { passing: 1, warning: 1 });
        let weight = if instance.warning { weights.warning } else { weights.passing };
        // Consul takes 0 for warning instances; who asks for those wants to use them.
        instance.weight = u32::try_from(weight.clamp(1, HEAVIEST)).unwrap_or(1);
        instance
    }
}

/// `address` where it is an IP address (without brackets) or can be a host name.
fn host(address: &str) -> Option<String> {
    let bare = address.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(address);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return (!ip.is_unspecified()).then(|| ip.to_string());
    }
    let shaped = address.len() <= 253
        && address.bytes().all(|it| it.is_ascii_alphanumeric() || b"-._".contains(&it))
        && address.trim_end_matches('.').split('.').all(|label| !label.is_empty());
    shaped.then(|| address.to_owned())
}

fn one() -> i64 {
    1
}
