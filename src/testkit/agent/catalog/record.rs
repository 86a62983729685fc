//! One service, one check, the node, and how real Consul 1.8.7 writes them.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use serde_json::{Value, json};
use tokio::time::Instant;

use super::super::definition::{CheckDefinition, CheckKind, Definition};

/// The index at which the node of a fresh agent came.
const NODE_INDEX: u64 = 10;
const NO_REASON: &str =
    "Maintenance mode is enabled for this service, but no reason was provided. This is a default message.";

/// The status of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Passing,
    Warning,
    Critical,
}

/// The machine that an agent stands for.
#[derive(Clone, Debug)]
pub(crate) struct NodeRecord {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) datacenter: String,
}

/// A registered service. Two are equal when a watcher could not tell them apart.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    /// Without the checks, which have their own life.
    pub(crate) definition: Definition,
    pub(crate) checks: BTreeMap<String, Check>,
    /// Consul's own entry: in the catalog, not among the agent's services.
    pub(crate) internal: bool,
    created: u64,
    modified: u64,
}

/// A check of a service.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    /// `None` for maintenance.
    pub(crate) kind: Option<CheckKind>,
    name: String,
    notes: String,
    status: Health,
    /// The agent's last output; the catalog has that of the last change.
    pub(crate) output: String,
    catalog_output: String,
    service_tags: Vec<String>,
    deregister_after: Option<Duration>,
    critical_since: Option<Instant>,
    created: u64,
    modified: u64,
}

// === impl Health ===

impl Health {
    pub(crate) fn read(text: &str) -> Option<Self> {
        match text {
            "passing" => Some(Self::Passing),
            "warning" => Some(Self::Warning),
            "critical" => Some(Self::Critical),
            _ => None,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Passing => "passing",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

// === impl NodeRecord ===

impl NodeRecord {
    /// Whether the node's only metadata is this; a key asked for alone means an
    /// empty value.
    pub(crate) fn has_meta(&self, key: &str, value: &str) -> bool {
        key == "consul-network-segment" && value.is_empty()
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "ID": self.id, "Node": self.name, "Address": "127.0.0.1", "Datacenter": self.datacenter,
            "TaggedAddresses": {
                "lan": "127.0.0.1", "lan_ipv4": "127.0.0.1", "wan": "127.0.0.1", "wan_ipv4": "127.0.0.1",
            },
            "Meta": { "consul-network-segment": "" },
            "CreateIndex": NODE_INDEX, "ModifyIndex": NODE_INDEX + 2,
        })
    }

    pub(crate) fn serf_health(&self) -> Value {
        json!({
            "Node": self.name, "CheckID": "serfHealth", "Name": "Serf Health Status", "Status": "passing",
            "Notes": "", "Output": "Agent alive and reachable", "ServiceID": "", "ServiceName": "",
            "ServiceTags": [], "Type": "", "Definition": {},
            "CreateIndex": NODE_INDEX, "ModifyIndex": NODE_INDEX,
        })
    }
}

// === impl Service ===

impl Service {
    pub(crate) fn new(definition: Definition, index: u64) -> Self {
        let definition = Definition { checks: Vec::new(), ..definition };
        Self { definition, checks: BTreeMap::new(), internal: false, created: index, modified: index }
    }

    /// The entry that every server makes for itself.
    pub(crate) fn server(index: u64) -> Self {
        let meta = [
            ("non_voter", "false"),
            ("raft_version", "3"),
            ("serf_protocol_current", "2"),
            ("serf_protocol_max", "5"),
            ("serf_protocol_min", "1"),
            ("version", "1.8.7"),
        ];
        let definition = Definition {
            id: "consul".to_owned(),
            name: "consul".to_owned(),
            tags: Vec::new(),
            address: String::new(),
            tagged: BTreeMap::new(),
            meta: meta.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            // https://developer.hashicorp.com/consul/docs/install/ports
            port: 8300,
            weights: (1, 1),
            tag_override: false,
            checks: Vec::new(),
        };
        Self { internal: true, ..Self::new(definition, index) }
    }

    /// Takes over a new definition and says which checks it has no more. Checks
    /// that stay keep their status, whatever the definition says about it.
    pub(crate) fn update(
        &mut self,
        definition: &Definition,
        replace: bool,
        index: u64,
        now: Instant,
    ) -> Vec<String> {
        let mut gone = Vec::new();
        if replace {
            let stays = |id: &String| definition.checks.iter().any(|it| it.id == *id);
            gone.extend(self.checks.keys().filter(|id| !stays(id)).cloned());
            self.checks.retain(|id, _| stays(id));
        }
        let bare = Definition { checks: Vec::new(), ..definition.clone() };
        if self.definition != bare {
            self.definition = bare;
            self.modified = index;
        }
        for check in &definition.checks {
            let fresh = Check::new(check, &self.definition.tags, index, now);
            let next = match self.checks.get(&check.id) {
                Some(known) => known.redefined(fresh),
                None => fresh,
            };
            self.checks.insert(check.id.clone(), next);
        }
        gone
    }

    /// Switches maintenance on; false where it is on already.
    pub(crate) fn maintain(&mut self, reason: &str, index: u64) -> bool {
        let id = maintenance_id(&self.definition.id);
        if self.checks.contains_key(&id) {
            return false;
        }
        let check = Check {
            kind: None,
            name: "Service Maintenance Mode".to_owned(),
            notes: if reason.is_empty() { NO_REASON.to_owned() } else { reason.to_owned() },
            status: Health::Critical,
            output: String::new(),
            catalog_output: String::new(),
            service_tags: self.definition.tags.clone(),
            deregister_after: None,
            critical_since: None,
            created: index,
            modified: index,
        };
        self.checks.insert(id, check);
        true
    }

    /// Drops the checks that are named; false where there is none.
    pub(crate) fn drop_checks(&mut self, named: impl Fn(&str) -> bool) -> bool {
        let before = self.checks.len();
        self.checks.retain(|id, _| !named(id));
        before != self.checks.len()
    }

    pub(crate) fn fall(&mut self, index: u64) {
        (self.created, self.modified) = (index, index);
        for check in self.checks.values_mut() {
            (check.created, check.modified) = (index, index);
        }
    }

    pub(crate) fn passes(&self) -> bool {
        self.checks.values().all(|check| check.status == Health::Passing)
    }

    pub(crate) fn has_tag(&self, tag: &str) -> bool {
        self.definition.tags.iter().any(|own| own.to_lowercase() == tag.to_lowercase())
    }

    pub(crate) fn in_catalog(&self, id: &str) -> Value {
        let it = &self.definition;
        let mut json = json!({
            "ID": id, "Service": it.name, "Tags": it.tags, "Address": it.address, "Port": it.port,
            "Meta": if it.meta.is_empty() { Value::Null } else { json!(it.meta) },
            "Weights": { "Passing": it.weights.0, "Warning": it.weights.1 },
            "EnableTagOverride": it.tag_override,
            "Proxy": { "MeshGateway": {}, "Expose": {} }, "Connect": {},
            "CreateIndex": self.created, "ModifyIndex": self.modified,
        });
        self.add_tagged(&mut json);
        json
    }

    pub(crate) fn in_agent(&self, id: &str) -> Value {
        let it = &self.definition;
        let mut json = json!({
            "ID": id, "Service": it.name, "Tags": it.tags, "Address": it.address, "Port": it.port,
            "Meta": it.meta, "Weights": { "Passing": it.weights.0, "Warning": it.weights.1 },
            "EnableTagOverride": it.tag_override,
        });
        self.add_tagged(&mut json);
        json
    }

    /// Consul adds two for every service whose address is an IP address.
    fn add_tagged(&self, json: &mut Value) {
        let it = &self.definition;
        let mut tagged = it.tagged.clone();
        let family = match it.address.parse() {
            Ok(IpAddr::V4(_)) => Some("ipv4"),
            Ok(IpAddr::V6(_)) => Some("ipv6"),
            Err(_) => None,
        };
        for side in ["lan", "wan"] {
            let Some(family) = family else { continue };
            tagged.entry(format!("{side}_{family}")).or_insert_with(|| (it.address.clone(), it.port));
        }
        if !tagged.is_empty() {
            let entry = |(address, port)| json!({ "Address": address, "Port": port });
            json["TaggedAddresses"] = tagged.into_iter().map(|(name, it)| (name, entry(it))).collect();
        }
    }
}

impl PartialEq for Service {
    fn eq(&self, other: &Self) -> bool {
        self.definition == other.definition && self.checks == other.checks
    }
}

// === impl Check ===

impl Check {
    fn new(definition: &CheckDefinition, tags: &[String], index: u64, now: Instant) -> Self {
        let status = definition.status.unwrap_or(Health::Critical);
        Self {
            kind: Some(definition.kind.clone()),
            name: definition.name.clone(),
            notes: definition.notes.clone(),
            status,
            output: String::new(),
            catalog_output: String::new(),
            service_tags: tags.to_vec(),
            deregister_after: definition.deregister_after,
            critical_since: (status == Health::Critical).then_some(now),
            created: index,
            modified: index,
        }
    }

    fn redefined(&self, fresh: Self) -> Self {
        let mut next = Self {
            status: self.status,
            output: self.output.clone(),
            catalog_output: self.catalog_output.clone(),
            critical_since: self.critical_since,
            created: self.created,
            ..fresh
        };
        if next == *self {
            next.modified = self.modified;
        }
        next
    }

    /// True where the status changed.
    pub(crate) fn set(&mut self, status: Health, output: &str, index: u64, now: Instant) -> bool {
        output.clone_into(&mut self.output);
        if self.status == status {
            return false;
        }
        self.status = status;
        self.modified = index;
        output.clone_into(&mut self.catalog_output);
        self.critical_since = (status == Health::Critical).then_some(now);
        true
    }

    pub(crate) fn overdue(&self, now: Instant) -> bool {
        let since = self.critical_since.zip(self.deregister_after);
        since.is_some_and(|(since, after)| now.saturating_duration_since(since) >= after)
    }

    pub(crate) fn in_catalog(&self, id: &str, of: (&String, &Service), node: &NodeRecord) -> Value {
        self.json(id, of, node, &self.catalog_output, (self.created, self.modified))
    }

    pub(crate) fn in_agent(&self, id: &str, of: (&String, &Service), node: &NodeRecord) -> Value {
        self.json(id, of, node, &self.output, (0, 0))
    }

    fn json(
        &self,
        id: &str,
        (service_id, service): (&String, &Service),
        node: &NodeRecord,
        output: &str,
        (created, modified): (u64, u64),
    ) -> Value {
        let kind = match self.kind {
            None => "maintenance",
            Some(CheckKind::Ttl(_)) => "ttl",
            Some(CheckKind::Tcp(_)) => "tcp",
            Some(CheckKind::Grpc(_)) => "grpc",
        };
        json!({
            "Node": node.name, "CheckID": id, "Name": self.name, "Status": self.status.as_str(),
            "Notes": self.notes, "Output": output,
            "ServiceID": service_id, "ServiceName": service.definition.name,
            "ServiceTags": self.service_tags, "Type": kind, "Definition": {},
            "CreateIndex": created, "ModifyIndex": modified,
        })
    }
}

impl PartialEq for Check {
    fn eq(&self, other: &Self) -> bool {
        let seen = |it: &Self| {
            (it.name.clone(), it.notes.clone(), it.status, it.catalog_output.clone(), it.service_tags.clone())
        };
        seen(self) == seen(other) && self.kind == other.kind
    }
}

pub(crate) fn maintenance_id(service: &str) -> String {
    format!("_service_maintenance:{service}")
}
