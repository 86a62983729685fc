//! Reading a registration with the rules that Consul 1.8.7 was seen to have.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Map, Value};

use super::{
    catalog::Health,
    duration::{self, Signed},
};

/// TCP and GRPC checks run no more often; a smaller interval is taken without a
/// word. Measured with Consul 1.8.7.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// What a TCP or GRPC check without a time-out gets.
/// <https://developer.hashicorp.com/consul/docs/services/usage/checks>
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// `DeregisterCriticalServiceAfter` is never shorter.
/// <https://developer.hashicorp.com/consul/api-docs/agent/check>
const SHORTEST_DEREGISTER: Duration = Duration::from_secs(60);

/// A service as it was registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Definition {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) tags: Vec<String>,
    pub(crate) address: String,
    pub(crate) tagged: BTreeMap<String, (String, i64)>,
    pub(crate) meta: BTreeMap<String, String>,
    pub(crate) port: i64,
    pub(crate) weights: (i64, i64),
    pub(crate) tag_override: bool,
    pub(crate) checks: Vec<CheckDefinition>,
}

/// A check as it was registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckDefinition {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) notes: String,
    pub(crate) status: Option<Health>,
    pub(crate) kind: CheckKind,
    pub(crate) deregister_after: Option<Duration>,
    pub(crate) successes: u64,
    pub(crate) failures: u64,
}

/// How a check learns its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CheckKind {
    /// Somebody must say so within this time.
    Ttl(Duration),
    /// By connecting.
    Tcp(Probe),
    /// By `grpc.health.v1`.
    Grpc(Probe),
}

/// A check that runs by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) target: String,
    pub(crate) interval: Duration,
    pub(crate) timeout: Duration,
}

/// A JSON value and the field it stands in, for the error's sake.
struct Field<'a>(&'a str, &'a Value);

#[derive(Default)]
struct RawCheck {
    id: String,
    name: String,
    notes: String,
    status: String,
    tcp: String,
    grpc: String,
    unsupported: Option<String>,
    interval: Option<Signed>,
    timeout: Option<Signed>,
    ttl: Option<Signed>,
    deregister_after: Option<Signed>,
    successes: i64,
    failures: i64,
    /// Something in it differs from nothing.
    any: bool,
}

// === impl Definition ===

impl Definition {
    /// Reads the body of a registration, or says what is wrong with it (a 400).
    pub(crate) fn read(body: &[u8]) -> Result<Self, String> {
        // Go's decoder, and so Consul, ignores what follows the first value.
        let mut values = serde_json::Deserializer::from_slice(body).into_iter::<Value>();
        let value = match values.next() {
            None => Err("EOF".to_owned()),
            Some(value) => value.map_err(|error| error.to_string()),
        };
        let (mut definition, checks) = value
            .and_then(|value| Self::fields(&value))
            .map_err(|why| format!("Request decode failed: {why}"))?;
        if definition.name.is_empty() {
            return Err("Missing service name".to_owned());
        }
        if definition.id.is_empty() {
            definition.id.clone_from(&definition.name);
        }
        if let Some((key, value)) = definition.meta.iter().find(|(key, _)| !is_meta_key(key)) {
            return Err(format!(
                "Invalid Service Meta: Couldn't load metadata pair ('{key}', '{value}'): Key contains invalid characters"
            ));
        }
        if ["0.0.0.0", "::", "[::]"].contains(&definition.address.as_str()) {
            return Err("Invalid service address".to_owned());
        }
        if definition.weights.0 < 1 {
            return Err("Invalid Weights: Passing must be greater than 0".to_owned());
        }
        let many = checks.len() > 1;
        for (position, raw) in checks.into_iter().enumerate() {
            let mut check = raw.check()?;
            if check.id.is_empty() {
                check.id = format!("service:{}", definition.id);
                if many {
                    check.id = format!("{}:{}", check.id, position + 1);
                }
            }
            if check.name.is_empty() {
                check.name = format!("Service '{}' check", definition.name);
            }
            definition.checks.push(check);
        }
        Ok(definition)
    }

    fn fields(value: &Value) -> Result<(Self, Vec<RawCheck>), String> {
        let mut it = Self {
            id: String::new(),
            name: String::new(),
            tags: Vec::new(),
            address: String::new(),
            tagged: BTreeMap::new(),
            meta: BTreeMap::new(),
            port: 0,
            weights: (1, 1),
            tag_override: false,
            checks: Vec::new(),
        };
        let (mut first, mut more) = (None, Vec::new());
        for field in Field("body", value).object()? {
            match field.key().as_str() {
                "id" => it.id = field.text()?,
                "name" => it.name = field.text()?,
                "tags" => it.tags = field.list()?.iter().map(Field::text).collect::<Result<_, _>>()?,
                "address" => it.address = field.text()?,
                "taggedaddresses" | "tagged_addresses" => it.tagged = field.tagged()?,
                "meta" => {
                    let pairs = field.object()?.into_iter();
                    it.meta = pairs
                        .map(|pair| Ok((pair.0.to_owned(), pair.text()?)))
                        .collect::<Result<_, String>>()?;
                }
                "port" => it.port = field.number()?,
                "weights" => it.weights = field.weights()?,
                "enabletagoverride" | "enable_tag_override" => it.tag_override = field.flag()?,
                "check" => first = Some(RawCheck::read(&field)?),
                "checks" => more = field.list()?.iter().map(RawCheck::read).collect::<Result<_, _>>()?,
                // Taken and without meaning here.
                "kind" | "token" | "proxy" | "connect" | "namespace" => {}
                _ => return Err(field.unknown()),
            }
        }
        // A `Check` with nothing in it counts as absent, one in `Checks` does not.
        let first = first.filter(|check| check.any);
        Ok((it, first.into_iter().chain(more).collect()))
    }
}

// === impl RawCheck ===

impl RawCheck {
    fn read(field: &Field<'_>) -> Result<Self, String> {
        let mut it = Self::default();
        for field in field.object()? {
            match field.key().as_str() {
                "checkid" | "check_id" => it.id = field.text()?,
                "name" => it.name = field.text()?,
                "notes" => it.notes = field.text()?,
                "status" => it.status = field.text()?,
                "tcp" => it.tcp = field.text()?,
                "grpc" => it.grpc = field.text()?,
                "interval" => it.interval = field.duration()?,
                "timeout" => it.timeout = field.duration()?,
                "ttl" => it.ttl = field.duration()?,
                "deregistercriticalserviceafter" | "deregister_critical_service_after" => {
                    it.deregister_after = field.duration()?;
                }
                "successbeforepassing" | "success_before_passing" => it.successes = field.number()?,
                "failuresbeforecritical" | "failures_before_critical" => it.failures = field.number()?,
                "http"
                | "scriptargs"
                | "args"
                | "script_args"
                | "dockercontainerid"
                | "docker_container_id"
                | "aliasnode"
                | "alias_node"
                | "aliasservice"
                | "alias_service" => {
                    it.unsupported = Some(field.0.to_owned());
                }
                "grpcusetls" | "grpc_use_tls" => {
                    if field.flag()? {
                        it.unsupported = Some(field.0.to_owned());
                    }
                }
                "header" | "method" | "body" | "shell" | "tlsskipverify" | "tls_skip_verify"
                | "proxyhttp" | "proxygrpc" | "outputmaxsize" | "output_max_size" => {}
                _ => return Err(field.unknown()),
            }
            let zero = matches!(field.1, Value::Null) || field.1 == "" || field.1 == 0 || field.1 == false;
            it.any |= !zero && field.duration() != Ok(Some(Signed::Plus(Duration::ZERO)));
        }
        Ok(it)
    }

    fn check(self) -> Result<CheckDefinition, String> {
        if let Some(field) = self.unsupported {
            return Err(format!(
                "Invalid check: {field} checks are not run by the embedded agent: TTL, TCP or GRPC"
            ));
        }
        let interval = self.interval.and_then(Signed::positive);
        let ttl = self.ttl.and_then(Signed::positive);
        let probes = !self.tcp.is_empty() || !self.grpc.is_empty();
        if interval.is_some() && ttl.is_some() {
            return Err("Invalid check: Interval and TTL cannot both be specified".to_owned());
        }
        let kind = match (probes, interval, ttl) {
            (true, Some(interval), _) => {
                let interval = interval.max(SHORTEST_INTERVAL);
                let timeout = self.timeout.and_then(Signed::positive).unwrap_or(CHECK_TIMEOUT);
                let probe = |target| Probe { target, interval, timeout };
                if self.tcp.is_empty() {
                    CheckKind::Grpc(probe(self.grpc))
                } else {
                    CheckKind::Tcp(probe(self.tcp))
                }
            }
            (true, None, _) => {
                return Err("Invalid check: Interval must be > 0 for Script, HTTP, or TCP checks".to_owned());
            }
            (false, _, Some(ttl)) => CheckKind::Ttl(ttl),
            (false, _, None) => return Err("Invalid check: TTL must be > 0 for TTL checks".to_owned()),
        };
        let status = match self.status.as_str() {
            "" => None,
            given => Some(
                Health::read(given)
                    .ok_or("Status for checks must 'passing', 'warning', 'critical'".to_owned())?,
            ),
        };
        let deregister_after = self.deregister_after.and_then(Signed::positive);
        Ok(CheckDefinition {
            id: self.id,
            name: self.name,
            notes: self.notes,
            status,
            kind,
            deregister_after: deregister_after.map(|after| after.max(SHORTEST_DEREGISTER)),
            successes: self.successes.max(0).unsigned_abs(),
            failures: self.failures.max(0).unsigned_abs(),
        })
    }
}

// === impl Field ===

impl<'a> Field<'a> {
    /// Consul takes its own names in any case.
    fn key(&self) -> String {
        self.0.to_ascii_lowercase()
    }

    fn unknown(&self) -> String {
        format!("json: unknown field {:?}", self.0)
    }

    fn wrong(&self, wanted: &str) -> String {
        let got = match self.1 {
            Value::Null => "null",
            Value::Bool(_) => "bool",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        format!("json: cannot unmarshal {got} into Go struct field .{} of type {wanted}", self.0)
    }

    fn object(&self) -> Result<Vec<Field<'a>>, String> {
        let fields = |it: &'a Map<String, Value>| it.iter().map(|(key, value)| Field(key, value)).collect();
        match self.1 {
            Value::Null => Ok(Vec::new()),
            Value::Object(it) => Ok(fields(it)),
            _ => Err(self.wrong("struct")),
        }
    }

    fn list(&self) -> Result<Vec<Field<'a>>, String> {
        match self.1 {
            Value::Null => Ok(Vec::new()),
            Value::Array(it) => Ok(it.iter().map(|value| Field(self.0, value)).collect()),
            _ => Err(self.wrong("[]string")),
        }
    }

    fn text(&self) -> Result<String, String> {
        match self.1 {
            Value::Null => Ok(String::new()),
            Value::String(it) => Ok(it.clone()),
            _ => Err(self.wrong("string")),
        }
    }

    fn flag(&self) -> Result<bool, String> {
        match self.1 {
            Value::Null => Ok(false),
            Value::Bool(it) => Ok(*it),
            _ => Err(self.wrong("bool")),
        }
    }

    fn number(&self) -> Result<i64, String> {
        match self.1 {
            Value::Null => Ok(0),
            Value::Number(it) => it.as_i64().ok_or_else(|| self.wrong("int")),
            _ => Err(self.wrong("int")),
        }
    }

    /// A Go duration, or a number of nanoseconds.
    fn duration(&self) -> Result<Option<Signed>, String> {
        match self.1 {
            Value::Null => Ok(None),
            Value::String(it) => duration::parse(it).map(Some),
            Value::Number(it) => match it.as_i64() {
                Some(nanos) if nanos < 0 => Ok(Some(Signed::Minus)),
                Some(nanos) => Ok(Some(Signed::Plus(Duration::from_nanos(nanos.unsigned_abs())))),
                None => Err(self.wrong("Duration")),
            },
            _ => Err(self.wrong("Duration")),
        }
    }

    /// A weight that is left out of `Weights` is 0.
    fn weights(&self) -> Result<(i64, i64), String> {
        if self.1.is_null() {
            return Ok((1, 1));
        }
        let mut weights = (0, 0);
        for field in self.object()? {
            match field.key().as_str() {
                "passing" => weights.0 = field.number()?,
                "warning" => weights.1 = field.number()?,
                _ => return Err(field.unknown()),
            }
        }
        Ok(weights)
    }

    fn tagged(&self) -> Result<BTreeMap<String, (String, i64)>, String> {
        let mut all = BTreeMap::new();
        for entry in self.object()? {
            let mut one = (String::new(), 0);
            for field in entry.object()? {
                match field.key().as_str() {
                    "address" => one.0 = field.text()?,
                    "port" => one.1 = field.number()?,
                    _ => return Err(field.unknown()),
                }
            }
            all.insert(entry.0.to_owned(), one);
        }
        Ok(all)
    }
}

fn is_meta_key(key: &str) -> bool {
    !key.is_empty() && key.chars().all(|it| it.is_ascii_alphanumeric() || it == '-' || it == '_')
}
