//! Where the agent is and how to talk to it.

mod address;
mod environment;
mod error;
mod http;
#[cfg(test)]
mod tests;

use std::{
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use super::agents::MOST_AGENTS;
pub(super) use address::Address;
pub use error::ConfigError;
#[cfg(any(test, feature = "testkit"))]
pub(super) use http::token_of;
pub(super) use http::{KEPT_FOR, authorization, http_client, token, token_in};

/// The longest that anything is waited for: timers do not reach for ever. A year.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// How to reach a Consul agent. A time longer than a year counts as a year.
///
/// ```
/// # use std::time::Duration;
/// # use tonic_failover::consul::ConsulConfig;
/// let config = ConsulConfig::new("127.0.0.1:8500")?.request_timeout(Duration::from_secs(2));
/// # Ok::<_, tonic_failover::consul::ConfigError>(())
/// ```
///
/// Files are read, and values other than the address checked, by
/// [`ConsulClient::new`](super::ConsulClient::new).
#[derive(Clone)]
#[must_use]
pub struct ConsulConfig {
    pub(super) address: Address,
    pub(super) more_agents: Vec<Address>,
    pub(super) token: Option<Given<String>>,
    pub(super) token_file: Option<Given<PathBuf>>,
    pub(super) auth: Option<Given<String>>,
    pub(super) ca_cert: Option<Given<PathBuf>>,
    pub(super) ca_path: Option<Given<PathBuf>>,
    pub(super) client_cert: Option<Given<PathBuf>>,
    pub(super) client_key: Option<Given<PathBuf>>,
    pub(super) tls_verify: bool,
    pub(super) namespace: Option<String>,
    pub(super) connect_timeout: Duration,
    pub(super) request_timeout: Duration,
    pub(super) max_answer_bytes: usize,
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) without: super::Without,
}

/// A value together with the name of the setting or variable it was given by.
#[derive(Clone)]
pub(super) struct Given<T> {
    pub(super) setting: &'static str,
    pub(super) value: T,
}

// === impl ConsulConfig ===

impl ConsulConfig {
    /// An agent at `address`: `127.0.0.1:8500`, `localhost:8500`, `[::1]:8500`, or
    /// a URL with `http://` or `https://`, where the port may be left to the
    /// scheme. Everything else has its default; the environment is not looked at.
    ///
    /// # Errors
    /// Where the address is none of these. Unix sockets and paths behind the
    /// address are not supported; user and password go into
    /// [`basic_auth`](Self::basic_auth).
    pub fn new(address: &str) -> Result<Self, ConfigError> {
        Address::parse("address", address).map(Self::at)
    }

    /// What the process's environment says, in Consul's own variables
    /// (<https://developer.hashicorp.com/consul/commands#environment-variables>):
    ///
    /// | variable | is | default |
    /// |---|---|---|
    /// | `CONSUL_HTTP_ADDR` | the address, as for [`new`](Self::new) | `http://127.0.0.1:8500` |
    /// | `CONSUL_HTTP_SSL` | `true`: HTTPS, whatever the address says | `false` |
    /// | `CONSUL_HTTP_TOKEN` | the ACL token | none |
    /// | `CONSUL_HTTP_TOKEN_FILE` | a file with the token; it goes before `CONSUL_HTTP_TOKEN` | none |
    /// | `CONSUL_HTTP_AUTH` | `user:password` for HTTP's basic authentication | none |
    /// | `CONSUL_CACERT`, `CONSUL_CAPATH` | a file, or a folder of files, of CA certificates in PEM | Mozilla's roots |
    /// | `CONSUL_CLIENT_CERT`, `CONSUL_CLIENT_KEY` | the client's certificate and key in PEM | none |
    /// | `CONSUL_HTTP_SSL_VERIFY` | `false`: any certificate will do | `true` |
    /// | `CONSUL_NAMESPACE` | the namespace (Consul Enterprise) | none |
    ///
    /// An empty variable counts as absent, as it does to Consul.
    /// `CONSUL_TLS_SERVER_NAME` is refused where HTTPS is used, because the
    /// certificate is always held against the address.
    ///
    /// # Errors
    /// Names the first variable whose value cannot be used, and what would be right.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_vars(|name| std::env::var_os(name))
    }

    /// As [`from_env`](Self::from_env), with `lookup` in place of the process's
    /// environment.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_vars(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, ConfigError> {
        environment::read(lookup)
    }

    /// Further agents of the same datacenter, in the order of preference, for when
    /// the first is gone, stands still or is cut off from its servers, or its server from
    /// the leader; 15 at most.
    /// The form of an address is that for [`new`](Self::new). Called again, it adds
    /// to them. Default: none.
    ///
    /// A read that one agent fails or answers badly is put to the next at once, without
    /// an index. An agent that failed rests, and so does one that answered badly what
    /// another answers well: for a random part of 1 s, then of 2 s and so on up
    /// to 30 s. Then one read tries it, and when that is answered the others follow,
    /// each when its own long poll ends. Each agent may take as long as
    /// [`request_timeout`](Self::request_timeout) says. Registering and passing
    /// checks concern the first agent alone.
    ///
    /// # Errors
    /// Where an address cannot be used, or there are too many.
    pub fn more_agents<S: AsRef<str>>(
        mut self,
        addresses: impl IntoIterator<Item = S>,
    ) -> Result<Self, ConfigError> {
        for address in addresses {
            let address = address.as_ref();
            let agent = Address::parse("more_agents", address)?;
            if agent != self.address && !self.more_agents.contains(&agent) {
                self.more_agents.push(agent);
            }
            if self.more_agents.len() >= MOST_AGENTS {
                let problem = format!("there may be {MOST_AGENTS} agents in all");
                return Err(ConfigError::new("more_agents", address, problem));
            }
        }
        Ok(self)
    }

    /// The ACL token sent with every request. Default: none.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(Given { setting: "token", value: token.into() });
        self
    }

    /// A file that holds the token; white space around it is dropped. It goes before
    /// [`token`](Self::token). It is read again for each request, so that a token
    /// can be exchanged; where it cannot be used then, the one read before stays.
    /// Default: none.
    pub fn token_file(mut self, file: impl AsRef<Path>) -> Self {
        self.token_file = Some(Given { setting: "token_file", value: file.as_ref().into() });
        self
    }

    /// `user:password` for HTTP's basic authentication, for an agent behind a
    /// proxy. Default: none.
    pub fn basic_auth(mut self, user_and_password: impl Into<String>) -> Self {
        self.auth = Some(Given { setting: "basic_auth", value: user_and_password.into() });
        self
    }

    /// A PEM file with the certificates to trust instead of Mozilla's roots.
    /// Default: none.
    pub fn ca_cert(mut self, file: impl AsRef<Path>) -> Self {
        self.ca_cert = Some(Given { setting: "ca_cert", value: file.as_ref().into() });
        self
    }

    /// A folder of PEM files to trust instead of Mozilla's roots. Default: none.
    pub fn ca_path(mut self, folder: impl AsRef<Path>) -> Self {
        self.ca_path = Some(Given { setting: "ca_path", value: folder.as_ref().into() });
        self
    }

    /// PEM files with the client's certificate (and what leads from it to the CA)
    /// and with its key (PKCS#8, RSA or EC). Default: none.
    pub fn client_cert(mut self, cert: impl AsRef<Path>, key: impl AsRef<Path>) -> Self {
        self.client_cert = Some(Given { setting: "client_cert", value: cert.as_ref().into() });
        self.client_key = Some(Given { setting: "client_cert's key", value: key.as_ref().into() });
        self
    }

    /// Whether the agent's certificate must be trusted. `false` lets anybody
    /// answer in Consul's place. Default: `true`.
    pub fn tls_verify(mut self, verify: bool) -> Self {
        self.tls_verify = verify;
        self
    }

    /// The namespace of all requests; an agent without Consul Enterprise answers
    /// with 400. Default: none.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into()).filter(|it| !it.is_empty());
        self
    }

    /// How long finding the agent and connecting to it may take. Default: 1 s.
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.connect_timeout = limit.min(FOR_EVER);
        self
    }

    /// How long a request may take from connecting to the end of the answer; a
    /// blocking one may take so much longer than the time it asked to wait.
    /// Default: 5 s.
    pub fn request_timeout(mut self, limit: Duration) -> Self {
        self.request_timeout = limit.min(FOR_EVER);
        self
    }

    /// The largest answer to be read, in bytes. Default: 16 MiB, some 30,000
    /// instances.
    pub fn max_answer_bytes(mut self, limit: usize) -> Self {
        self.max_answer_bytes = limit;
        self
    }

    /// Neither connecting nor finding the agent may take longer.
    pub(crate) fn connecting_within(mut self, limit: Duration) -> Self {
        self.connect_timeout = self.connect_timeout.min(limit);
        self
    }

    fn at(address: Address) -> Self {
        Self {
            address,
            more_agents: Vec::new(),
            token: None,
            token_file: None,
            auth: None,
            ca_cert: None,
            ca_path: None,
            client_cert: None,
            client_key: None,
            tls_verify: true,
            namespace: None,
            connect_timeout: Duration::from_secs(1),
            request_timeout: Duration::from_secs(5),
            max_answer_bytes: 16 << 20,
            #[cfg(any(test, feature = "testkit"))]
            without: super::Without::default(),
        }
    }
}

/// Without token, user and password.
impl fmt::Debug for ConsulConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn path(given: &Option<Given<PathBuf>>) -> Option<&Path> {
            given.as_ref().map(|it| it.value.as_path())
        }
        f.debug_struct("ConsulConfig")
            .field("address", &self.address.url())
            .field("more_agents", &self.more_agents.iter().map(Address::url).collect::<Vec<_>>())
            .field("token", &self.token.as_ref().map(|_| "(hidden)"))
            .field("token_file", &path(&self.token_file))
            .field("basic_auth", &self.auth.as_ref().map(|_| "(hidden)"))
            .field("ca_cert", &path(&self.ca_cert))
            .field("ca_path", &path(&self.ca_path))
            .field("client_cert", &path(&self.client_cert))
            .field("client_key", &path(&self.client_key))
            .field("tls_verify", &self.tls_verify)
            .field("namespace", &self.namespace)
            .field("connect_timeout", &self.connect_timeout)
            .field("request_timeout", &self.request_timeout)
            .field("max_answer_bytes", &self.max_answer_bytes)
            .finish()
    }
}
