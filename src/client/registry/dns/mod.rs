//! DNS as a registry.

mod lookup;

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use hickory_resolver::{
    Resolver, TokioResolver,
    config::{ConnectionConfig, NameServerConfig, ProtocolConfig, ResolveHosts, ResolverConfig},
    net::{NetError, runtime::TokioRuntimeProvider},
};
use tokio::time::timeout;

use self::lookup::Lookups;
use super::{Asking, Question, Registry, RegistryError};

/// A registry that asks DNS: the service's name is the name asked for.
///
/// It is asked again when the answer's shortest TTL has run out, within a
/// [floor](DnsBuilder::floor) and a [ceiling](DnsBuilder::ceiling), and at once when
/// a call has failed; nothing is cached here. A name that does not exist
/// (NXDOMAIN), a server's failure and silence are errors, so what was known last
/// stays in use; a name without records of the kind asked for is an empty list. A
/// failure of any part fails the whole, since a list that lacks an instance
/// takes it away.
///
/// ```no_run
/// use tonic_failover::client::{ServiceOptions, Services, registry::Dns};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let name = "counter.example.com";
/// let services = Services::builder(Dns::hosts(50051).build()?).service(ServiceOptions::new(name)).build()?;
/// println!("{}", services.grpc_client(name)?.ready().await?.instance().expect("ready"));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Dns {
    resolver: TokioResolver,
    settings: Settings,
}

/// Builds [`Dns`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DnsBuilder {
    servers: Vec<SocketAddr>,
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    kind: Kind,
    ipv4_only: bool,
    datacenter: Arc<str>,
    floor: Duration,
    ceiling: Duration,
    timeout: Duration,
}

/// Where the ports come from.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Hosts(u16),
    Srv,
}

/// Why [`DnsBuilder::build`] gives nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidDns {
    /// A setting is impossible.
    #[error("{setting} = {value} is not usable: {expected}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// What was given.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// The system does not say whom to ask.
    #[error("the system's DNS settings cannot be used: name the servers with `server`")]
    System {
        /// What is wrong with them.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

// === impl Dns ===

impl Dns {
    /// Asks for the addresses (A and AAAA) of the name; all listen on `port`.
    pub fn hosts(port: u16) -> DnsBuilder {
        DnsBuilder::new(Kind::Hosts(port))
    }

    /// Asks for the SRV records of the name, for example
    /// `_grpc._tcp.counter.example.com`, and for the addresses of their targets.
    ///
    /// Targets of the lowest priority number are used first, all others after
    /// them (RFC 2782 would have each number by itself). A target that does not
    /// exist is left out.
    pub fn srv() -> DnsBuilder {
        DnsBuilder::new(Kind::Srv)
    }
}

impl Registry for Dns {
    fn ask(&self, question: Question) -> Asking {
        let lookups = Lookups::new(self.resolver.clone(), self.settings.clone());
        let after = self.settings.timeout;
        Box::pin(async move {
            match timeout(after, lookups.list(&question.service)).await {
                Ok(outcome) => outcome,
                Err(_) => Err(RegistryError::TimedOut { after }),
            }
        })
    }
}

impl fmt::Debug for Dns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dns").field("settings", &self.settings).finish_non_exhaustive()
    }
}

// === impl DnsBuilder ===

impl DnsBuilder {
    fn new(kind: Kind) -> Self {
        let settings = Settings {
            kind,
            ipv4_only: false,
            datacenter: "dns".into(),
            floor: Duration::from_secs(1),
            ceiling: Duration::from_secs(60),
            timeout: Duration::from_secs(5),
        };
        Self { servers: Vec::new(), settings }
    }

    /// Asks this server, over UDP and where an answer is cut short over TCP;
    /// several take turns. Default: the system's servers, its search list and
    /// its hosts file.
    pub fn server(mut self, address: SocketAddr) -> Self {
        self.servers.push(address);
        self
    }

    /// The shortest time between two questions that no failing call causes,
    /// whatever the TTL says. Default: 1 s.
    pub fn floor(mut self, time: Duration) -> Self {
        self.settings.floor = time;
        self
    }

    /// The longest time until the next question, whatever the TTL says.
    /// Default: 60 s.
    pub fn ceiling(mut self, time: Duration) -> Self {
        self.settings.ceiling = time;
        self
    }

    /// How long an answer may take, with all that belongs to it, up to 10 s. Default: 5 s.
    pub fn timeout(mut self, time: Duration) -> Self {
        self.settings.timeout = time;
        self
    }

    /// Asks for A records alone: for servers that do not answer the question
    /// for AAAA records. Default: for both.
    pub fn ipv4_only(mut self, yes: bool) -> Self {
        self.settings.ipv4_only = yes;
        self
    }

    /// What the instances' datacenter is called. Default: `dns`.
    pub fn datacenter(mut self, name: &str) -> Self {
        self.settings.datacenter = name.into();
        self
    }

    /// Checks the settings, and reads the system's. Asks nobody yet.
    ///
    /// # Errors
    /// Names the setting that cannot be used, and what would be right.
    pub fn build(self) -> Result<Dns, InvalidDns> {
        let Settings { kind, floor, ceiling, timeout, .. } = self.settings;
        let wrong = |setting, value: String, expected| Err(InvalidDns::Setting { setting, value, expected });
        if matches!(kind, Kind::Hosts(0)) {
            return wrong("port", "0".to_owned(), "1 to 65535");
        }
        if floor.is_zero() {
            return wrong("floor", format!("{floor:?}"), "more than nothing");
        }
        if ceiling < floor {
            return wrong("ceiling", format!("{ceiling:?}"), "no shorter than the floor");
        }
        if timeout.is_zero() || timeout > Duration::from_secs(10) {
            return wrong("timeout", format!("{timeout:?}"), "more than nothing, at most 10 s");
        }
        let system = |source: NetError| InvalidDns::System { source: source.into() };
        let mut builder = if self.servers.is_empty() {
            TokioResolver::builder_tokio().map_err(system)?
        } else {
            let servers = self.servers.into_iter().map(name_server).collect();
            let config = ResolverConfig::from_parts(None, Vec::new(), servers);
            let mut builder = Resolver::builder_with_config(config, TokioRuntimeProvider::default());
            builder.options_mut().use_hosts_file = ResolveHosts::Never;
            builder
        };
        let options = builder.options_mut();
        // Each question is about now; the records' TTL is kept to by not asking.
        options.cache_size = 0;
        // A lost packet must leave time for a second one.
        options.timeout = options.timeout.min(timeout / 3);
        Ok(Dns { resolver: builder.build().map_err(system)?, settings: self.settings })
    }
}

fn name_server(address: SocketAddr) -> NameServerConfig {
    let connections = [ProtocolConfig::Udp, ProtocolConfig::Tcp].map(|protocol| {
        let mut connection = ConnectionConfig::new(protocol);
        connection.port = address.port();
        connection
    });
    NameServerConfig::new(address.ip(), true, connections.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_settings_are_refused_by_name() {
        let second = Duration::from_secs(1);
        for (builder, words) in [
            (Dns::hosts(0), "port = 0"),
            (Dns::srv().floor(Duration::ZERO), "floor = 0ns"),
            (Dns::srv().floor(second).ceiling(second / 2), "ceiling = 500ms"),
            (Dns::srv().timeout(second * 11), "timeout = 11s"),
            (Dns::srv().timeout(Duration::ZERO), "timeout = 0ns"),
        ] {
            let error = builder.build().unwrap_err();
            assert!(error.to_string().starts_with(words), "{error}");
        }
    }
}
