//! The words that discovery, the client and the server half share.

use std::{collections::BTreeMap, fmt, net::SocketAddr, sync::Arc};

/// Where an instance listens: its identity for everything that this crate
/// keeps about it (connections, ejection, status).
///
/// Two catalog entries with the same address and port are one instance,
/// whatever their service ids say: there is one process to connect to.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(Arc<str>);

impl InstanceId {
    /// The id of whatever listens on `host` and `port`. `host` is an IPv4 or
    /// bare IPv6 address or a host name; IPv6 literals get their brackets here.
    pub fn new(host: &str, port: u16) -> Self {
        if host.contains(':') {
            Self(format!("[{host}]:{port}").into())
        } else {
            Self(format!("{host}:{port}").into())
        }
    }

    /// `host:port`, with brackets around an IPv6 literal: usable as the
    /// authority of a URI.
    pub fn authority(&self) -> &str {
        &self.0
    }

    /// The host, without brackets.
    pub fn host(&self) -> &str {
        let host = self.0.rsplit_once(':').map_or(&*self.0, |(host, _)| host);
        host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host)
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.0.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or_default()
    }
}

impl From<SocketAddr> for InstanceId {
    fn from(address: SocketAddr) -> Self {
        Self::new(&address.ip().to_string(), address.port())
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One running copy of a service, as the registry describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Instance {
    /// Address and port to connect to.
    pub id: InstanceId,
    /// The id under which it is registered, for example `counter-1`. What logs,
    /// events and [`ServiceStatus`](crate::client::ServiceStatus) call it.
    pub name: String,
    /// The datacenter it is registered in.
    pub datacenter: String,
    /// The node it runs on, as the registry calls it.
    pub node: String,
    /// Tags, in the registry's order, without empty ones and repetitions.
    pub tags: Vec<String>,
    /// Service metadata.
    pub meta: BTreeMap<String, String>,
    /// Its share of the calls among its peers; 1 unless the registry says otherwise.
    pub weight: u32,
    /// True where it is to be used only after the others: in Consul, where a check
    /// is in the warning state (such instances are in a snapshot only when asked
    /// for); in DNS, where the priority is not the first.
    pub warning: bool,
}

impl Instance {
    /// An instance with no tags, no metadata and weight 1. `host` as in
    /// [`InstanceId::new`].
    pub fn new(name: impl Into<String>, host: &str, port: u16, datacenter: impl Into<String>) -> Self {
        Self {
            id: InstanceId::new(host, port),
            name: name.into(),
            datacenter: datacenter.into(),
            node: String::new(),
            tags: Vec::new(),
            meta: BTreeMap::new(),
            weight: 1,
            warning: false,
        }
    }
}

/// `name@datacenter`, long names cut and control characters escaped.
impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", Shown(&self.name), Shown(&self.datacenter))
    }
}

/// How much of a name is shown. Our choice: a label in DNS, which the names of datacenters
/// and most services are, has 63 characters at the most.
const LONGEST_SHOWN: usize = 100;

/// A name that others gave, as a line shows it: cut, with nothing in it that ends the
/// line, moves a terminal's cursor, or turns the direction of writing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown<'a>(pub(crate) &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut letters = self.0.chars();
        for letter in letters.by_ref().take(LONGEST_SHOWN) {
            let hides = matches!(letter, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
            if hides || letter.is_control() {
                write!(f, "{}", letter.escape_default())?;
            } else {
                write!(f, "{letter}")?;
            }
        }
        if letters.next().is_some() { f.write_str("…") } else { Ok(()) }
    }
}

/// The instances of one service in one datacenter, as the registry gave them
/// in one answer: usable ones only, one entry an address, in the registry's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The instances.
    pub instances: Vec<Arc<Instance>>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_name_of_any_kind_is_shown_in_one_short_line(name in "(?s).{0,300}", datacenter in "[\\x00-\\x7f]{0,300}") {
            let shown = Instance::new(name, "a", 1, datacenter).to_string();
            // Ten letters for each that is escaped.
            prop_assert!(shown.chars().count() <= 2 * (10 * LONGEST_SHOWN + 1) + 1, "{shown}");
            prop_assert!(!shown.contains(char::is_control), "{shown:?}");
        }

        #[test]
        fn an_ordinary_name_is_shown_as_it_is(name in "[a-zA-Z0-9é_. -]{0,100}") {
            prop_assert_eq!(Shown(&name).to_string(), name);
        }
    }

    #[test]
    fn an_id_gives_host_and_port_back() {
        for host in ["10.0.0.7", "::1", "fe80::1%eth0", "web1", ""] {
            let id = InstanceId::new(host, 4000);
            assert_eq!((id.host(), id.port()), (host, 4000), "{id}");
        }
        let address: SocketAddr = "[::1]:80".parse().unwrap();
        assert_eq!(InstanceId::from(address), InstanceId::new("::1", 80));
    }

    #[test]
    fn what_is_cut_says_so() {
        assert_eq!(Shown(&"x".repeat(101)).to_string(), format!("{}…", "x".repeat(100)));
        assert_eq!(Shown("a\u{1b}[2Jb\nc\u{202e}").to_string(), "a\\u{1b}[2Jb\\nc\\u{202e}");
    }
}
