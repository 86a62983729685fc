//! The settings.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use tokio::sync::{Mutex, watch};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tower::util::rng::HasherRng;

use super::{
    Inner, Registration, RegistrationError, RegistrationHealth, RegistrationStatus,
    entry::{Entry, NONCE, PRIMARY, ROLE, STANDBY, Sign, TOKEN},
    keeper::Keeper,
    leaving::{Before, Leaving},
};
use crate::{
    consul::{ConsulClient, ConsulConfig},
    instance::InstanceId,
    server::{
        RoleSource,
        life::{self, Life},
        probe::Probe,
        store::Nonce,
    },
};

/// The TTL's bounds. Our choice: a machine that is busy for a moment must not lose a shorter
/// one, and a longer one is no sign of life.
const TTL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(24 * 60 * 60));
/// The interval's bounds. Consul silently makes a second of less.
const INTERVAL: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60 * 60));
/// The least that Consul takes
/// (<https://developer.hashicorp.com/consul/api-docs/agent/check#deregistercriticalserviceafter>).
const CRITICAL: Duration = Duration::from_secs(60);
/// Our choice: Consul counts nanoseconds in 63 bits, which is less than 300 years, and refuses more.
const LONGEST_CRITICAL: Duration = Duration::from_secs(366 * 24 * 60 * 60);
/// As long as leaving may wait for callers and calls, each. Our choice.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);
/// Consul's bounds of metadata, and the pairs of them that are ours
/// (<https://developer.hashicorp.com/consul/docs/services/configuration/services-configuration-reference#meta>).
const LONGEST_KEY: usize = 128;
const LONGEST_VALUE: usize = 512;
const MOST_PAIRS: usize = 64 - 3;

/// Makes a [`Registration`]; see [`Registration::builder`].
#[must_use]
pub struct RegistrationBuilder {
    consul: ConsulConfig,
    service: String,
    id: String,
    address: InstanceId,
    tags: Vec<String>,
    meta: BTreeMap<String, String>,
    weights: Option<(u16, u16)>,
    sign: Sign,
    deregister_critical_after: Option<Duration>,
    life: Option<Life>,
    role: Option<RoleSource>,
    names: Vec<String>,
    before: Option<Before>,
    settle: Duration,
    drain: Duration,
}

// === impl RegistrationBuilder ===

impl RegistrationBuilder {
    pub(super) fn new(consul: ConsulConfig, service: String, id: String, address: InstanceId) -> Self {
        Self {
            consul,
            service,
            id,
            address,
            tags: Vec::new(),
            meta: BTreeMap::new(),
            weights: None,
            sign: Sign::Heartbeat(Duration::from_secs(1)),
            deregister_critical_after: Some(CRITICAL),
            life: None,
            role: None,
            names: Vec::new(),
            before: None,
            settle: Duration::from_millis(500),
            drain: Duration::from_secs(5),
        }
    }

    /// Adds a tag. Default: none.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Adds metadata. Keys have letters, digits, `-` and `_`, at most 128 of them; values at most
    /// 512 bytes; there may be 61. `nonce`, `role` and `token` are the registration's own. Default: none.
    pub fn meta(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.meta.insert(key.into(), value.into());
        self
    }

    /// Its share of the calls among its peers while passing (at least 1) and while in warning.
    /// Default: Consul's, 1 and 1.
    pub fn weights(mut self, passing: u16, warning: u16) -> Self {
        self.weights = Some((passing, warning));
        self
    }

    /// The instance says itself that it lives, three times within `ttl` (100 ms to a day); after so
    /// long a silence it is critical. It takes the place of [`tcp_check`](Self::tcp_check) and
    /// [`grpc_check`](Self::grpc_check). Default: this, with 1 s.
    pub fn heartbeat(mut self, ttl: Duration) -> Self {
        self.sign = Sign::Heartbeat(ttl);
        self
    }

    /// The agent finds out by connecting every `interval` (1 s to an hour). It does not
    /// notice a process that stands still, and [`alive`](Self::alive) has no part in it but that nothing
    /// is registered anew while the probe fails. Default: not so, but by [`heartbeat`](Self::heartbeat).
    pub fn tcp_check(mut self, interval: Duration) -> Self {
        self.sign = Sign::Tcp(interval);
        self
    }

    /// The agent finds out by asking `grpc.health.v1` every `interval` (1 s to an hour), without
    /// TLS. As to [`alive`](Self::alive), see [`tcp_check`](Self::tcp_check). Default: not so, but by
    /// [`heartbeat`](Self::heartbeat).
    pub fn grpc_check(mut self, interval: Duration) -> Self {
        self.sign = Sign::Grpc(interval);
        self
    }

    /// How long it may be critical before the agent takes it out, 1 min to 366 days; the agent
    /// looks only every 30 s. A process that still runs registers itself again when its probe succeeds.
    /// `None`: never. Default: 1 min.
    pub fn deregister_critical_after(mut self, limit: impl Into<Option<Duration>>) -> Self {
        self.deregister_critical_after = limit.into();
        self
    }

    /// There are heartbeats only while `probe` finds that the instance serves, and nothing is registered before
    /// it has found so once. In place of an [`alive_while`](Self::alive_while) before. Default: always.
    pub fn alive(mut self, probe: &Probe) -> Self {
        self.life = Some(Life::Probe(probe.clone()));
        self
    }

    /// As [`alive`](Self::alive), by the application's own judgement. Where its sender is gone, the
    /// instance is not known to serve. Default: always.
    pub fn alive_while(mut self, alive: watch::Receiver<bool>) -> Self {
        self.life = Some(Life::Told(alive));
        self
    }

    /// Shows the instance's role: the tag `primary` or `standby`, and in the metadata `role`
    /// (`primary`, `standby` or `unknown`) and, of a primary, `token`. The check keeps its status when the role
    /// changes. Default: nothing is said of roles.
    pub fn follow(mut self, role: impl Into<RoleSource>) -> Self {
        self.role = Some(role.into());
        self
    }

    /// Names a gRPC service that [`health_service`](Registration::health_service) answers for, for
    /// example `counter.v1.Counter`, besides the server as a whole. Default: none.
    pub fn serves(mut self, grpc_service: impl Into<String>) -> Self {
        self.names.push(grpc_service.into());
        self
    }

    /// What leaving begins with, for 2 s at the most: giving up a lease, for example, before
    /// callers are sent elsewhere. It runs where [`leave`](Registration::leave) does. Default: nothing.
    pub fn before_leaving(mut self, first: impl Future<Output = ()> + Send + 'static) -> Self {
        self.before = Some(Box::pin(first));
        self
    }

    /// How long callers have to move when Consul has been told, before the server stops. News
    /// reaches those who wait for it in 2 to 22 ms, as measured; the rest is for their connecting
    /// elsewhere. Those who poll, by DNS for example, may want more. Up to an hour. Default: 500 ms.
    pub fn settle(mut self, time: Duration) -> Self {
        self.settle = time;
        self
    }

    /// How long calls in flight have to end when the server has been told to stop; see
    /// [`drained`](Registration::drained). Up to an hour. Default: 5 s, so that all of it ends within the 10 s after which
    /// Docker kills.
    pub fn drain(mut self, limit: Duration) -> Self {
        self.drain = limit;
        self
    }

    /// Registers the instance, however long Consul is away, and keeps it registered. Takes
    /// some 40 ms for TLS, and needs no runtime.
    ///
    /// # Errors
    /// [`RegistrationError`]: a setting that cannot be used, or no thread. Never because of Consul's absence.
    pub fn start(self) -> Result<Registration, RegistrationError> {
        self.validate()?;
        let consul = ConsulClient::new(self.consul)?;
        let (sender, status) = watch::channel(RegistrationStatus::Pending);
        let (serving, serves) = watch::channel(true);
        let (stop, stopping) = (CancellationToken::new(), CancellationToken::new());
        let entry = Entry {
            service: self.service,
            id: self.id.clone(),
            address: self.address,
            tags: self.tags,
            meta: self.meta,
            weights: self.weights,
            sign: self.sign,
            deregister_critical_after: self.deregister_critical_after,
            nonce: Nonce::random(),
        };
        let (life, pulse) = life::start(self.life, RegistrationError::Thread)?;
        let (alive, probe) = life.unzip();
        let (role, lease) = self.role.map(|it| (it.role.clone(), it)).unzip();
        let rng = HasherRng::new();
        let keeper = Keeper {
            consul,
            entry,
            alive,
            role,
            status: sender,
            rng,
            asked: false,
            established: false,
            failures: 0,
        };
        let keeper = AbortOnDropHandle::new(pulse.spawn(keeper.run(stop.clone())));
        let health =
            RegistrationHealth { names: self.names.into(), serving: serves, stopping: stopping.clone() };
        let (before, settle, drain) = (Mutex::new(self.before), self.settle, self.drain);
        let leaving = Leaving { before, stop, settle, drain, serving, stopping };
        let inner = Inner {
            id: self.id,
            status,
            health,
            leaving,
            _keeper: keeper,
            _kept: (probe.flatten(), lease, pulse),
        };
        Ok(Registration { inner: Arc::new(inner) })
    }

    fn validate(&self) -> Result<(), RegistrationError> {
        for (setting, name) in [("service", &self.service), ("id", &self.id)] {
            crate::consul::ServiceName::new(name).map_err(|error| {
                refused(setting, name, format!("{error}: use letters, digits, '-', '_' and '.'"))
            })?;
        }
        self.validate_address()?;
        self.validate_times()?;
        if self.weights.is_some_and(|(passing, _)| passing == 0) {
            return Err(refused("weights", "0", "while passing it is at least 1"));
        }
        for tag in &self.tags {
            let of_role = self.role.is_some() && [PRIMARY, STANDBY].contains(&tag.as_str());
            if tag.is_empty() || of_role {
                let problem =
                    if of_role { "with follow(..) the role gives it" } else { "a tag is not empty" };
                return Err(refused("tag", tag, problem));
            }
        }
        for (key, value) in &self.meta {
            let fits = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            let problem = if [NONCE, ROLE, TOKEN].contains(&key.as_str()) {
                "this key is the registration's own"
            } else if key.is_empty() || key.len() > LONGEST_KEY || !key.chars().all(fits) {
                "Consul takes keys of 1 to 128 letters, digits, '-' and '_'"
            } else if key.starts_with("consul-") {
                "keys that begin with \"consul-\" are Consul's own"
            } else if value.len() > LONGEST_VALUE {
                "Consul takes values of up to 512 bytes"
            } else {
                continue;
            };
            return Err(refused("meta", key, problem));
        }
        match self.meta.len() {
            ..=MOST_PAIRS => Ok(()),
            many => Err(refused("meta", &many.to_string(), "there may be 61 pairs")),
        }
    }

    fn validate_address(&self) -> Result<(), RegistrationError> {
        let (host, port) = (self.address.host(), self.address.port());
        let unspecified = host.parse().is_ok_and(|ip: IpAddr| ip.is_unspecified());
        let problem = if unspecified || host.is_empty() {
            "others cannot connect to that: give the address or name by which they reach the instance"
        } else if port == 0 {
            "others cannot connect to port 0: bind first, and give the port that was taken"
        } else {
            return Ok(());
        };
        Err(refused("address", self.address.authority(), problem))
    }

    fn validate_times(&self) -> Result<(), RegistrationError> {
        let (setting, given, (least, most)) = match self.sign {
            Sign::Heartbeat(ttl) => ("heartbeat", ttl, TTL),
            Sign::Tcp(interval) => ("tcp_check", interval, INTERVAL),
            Sign::Grpc(interval) => ("grpc_check", interval, INTERVAL),
        };
        if given < least || given > most {
            let problem = format!("it is between {least:?} and {most:?}");
            return Err(refused(setting, &format!("{given:?}"), problem));
        }
        match self.deregister_critical_after {
            Some(after) if after < CRITICAL => {
                let problem = format!("Consul takes no less than {CRITICAL:?}; None is never");
                return Err(refused("deregister_critical_after", &format!("{after:?}"), problem));
            }
            Some(after) if after > LONGEST_CRITICAL => {
                let problem = format!("{LONGEST_CRITICAL:?} at the most; None is never");
                return Err(refused("deregister_critical_after", &format!("{after:?}"), problem));
            }
            _ => {}
        }
        for (setting, given) in [("settle", self.settle), ("drain", self.drain)] {
            if given > LONGEST_WAIT {
                return Err(refused(setting, &format!("{given:?}"), "an hour at the most"));
            }
        }
        Ok(())
    }
}

fn refused(setting: &'static str, value: &str, problem: impl Into<String>) -> RegistrationError {
    RegistrationError::Setting { setting, value: value.to_owned(), problem: problem.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::role::Role;

    fn builder(service: &str, id: &str, address: InstanceId) -> RegistrationBuilder {
        Registration::builder(ConsulConfig::new("127.0.0.1:1").unwrap(), service, id, address)
    }

    fn good() -> RegistrationBuilder {
        builder("counter", "a", InstanceId::new("10.0.0.7", 4000))
    }

    #[test]
    fn a_bad_setting_is_named_with_its_value_and_what_would_be_right() {
        let at = InstanceId::new;
        let ms = Duration::from_millis;
        let role = || watch::channel(Role::Unknown).1;
        let many = (0..62).fold(good(), |it, n| it.meta(n.to_string(), ""));
        for (bad, words) in [
            (builder("", "a", at("h", 1)), &["service cannot be \"\"", "letters"][..]),
            (builder("s", "a//b", at("h", 1)), &["id cannot be \"a//b\"", "letters"]),
            (builder("s", "a", at("0.0.0.0", 1)), &["address cannot be \"0.0.0.0:1\"", "reach"]),
            (builder("s", "a", at("::", 1)), &["address cannot be \"[::]:1\"", "reach"]),
            (builder("s", "a", at("", 1)), &["address cannot be \":1\"", "reach"]),
            (builder("s", "a", at("h", 0)), &["address cannot be \"h:0\"", "bind first"]),
            (good().heartbeat(ms(99)), &["heartbeat cannot be \"99ms\"", "between 100ms and"]),
            (good().heartbeat(Duration::MAX), &["heartbeat", "86400s"]),
            (good().tcp_check(ms(999)), &["tcp_check cannot be \"999ms\"", "between 1s and"]),
            (good().grpc_check(ms(0)), &["grpc_check cannot be \"0ns\"", "between 1s and"]),
            (good().deregister_critical_after(ms(59_999)), &["deregister_critical_after", "None is never"]),
            (good().deregister_critical_after(Duration::MAX), &["deregister_critical_after", "at the most"]),
            (good().settle(Duration::MAX), &["settle cannot be", "an hour"]),
            (good().drain(Duration::MAX), &["drain cannot be", "an hour"]),
            (good().weights(0, 1), &["weights cannot be \"0\"", "at least 1"]),
            (good().tag(""), &["tag cannot be \"\"", "not empty"]),
            (good().tag("primary").follow(role()), &["tag cannot be \"primary\"", "follow"]),
            (good().meta("nonce", "x"), &["meta cannot be \"nonce\"", "own"]),
            (good().meta("a b", "x"), &["meta cannot be \"a b\"", "letters"]),
            (good().meta("consul-x", "x"), &["meta cannot be \"consul-x\"", "Consul's own"]),
            (good().meta("x", "x".repeat(513)), &["meta cannot be \"x\"", "512 bytes"]),
            (many, &["meta cannot be \"62\"", "61 pairs"]),
        ] {
            let error = bad.start().unwrap_err().to_string();
            assert!(words.iter().all(|it| error.contains(it)), "{error}");
        }
    }

    #[test]
    fn it_starts_without_a_runtime_and_without_consul() {
        let it = good().tag("primary").deregister_critical_after(None).start().unwrap();
        assert_eq!(it.id(), "a");
        assert!(!it.status().has_ended());
    }

    #[test]
    fn an_id_can_be_made_of_service_host_and_port() {
        let id = Registration::default_id("my counter", &InstanceId::new("::1", 4000));
        assert_eq!(id, "my-counter---1-4000");
    }
}
