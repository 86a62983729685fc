//! The settings of `demo backend`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};

use super::lease_at::{LeaseAt, parse_lease};
use crate::demo::text::{parse_duration, parse_positive_duration};

/// How `demo backend` serves and how it is found.
#[derive(Args, Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The instance's name: its id in Consul, and what every reply says.
    /// Default: service, host and port, for example counter-web1-4000.
    #[arg(long, env = "DEMO_NAME", value_parser = parse_name)]
    pub name: Option<String>,

    /// The service to register as.
    #[arg(long, env = "DEMO_SERVICE", default_value = "counter", value_parser = parse_name)]
    pub service: String,

    /// Where to listen; port 0 takes a free one.
    #[arg(long, env = "DEMO_LISTEN", default_value = "127.0.0.1:0", value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,

    /// The host under which clients reach this instance.
    /// Default: the address listened on, or on 0.0.0.0 the one this machine uses towards Consul.
    #[arg(long, env = "DEMO_ADVERTISE", value_name = "HOST", value_parser = parse_host)]
    pub advertise: Option<String>,

    /// How Consul learns that the instance lives.
    #[arg(long, env = "DEMO_CHECK", value_enum, default_value_t = CheckKind::Ttl)]
    pub check: CheckKind,

    /// Append to FILE one line before each request is handled and one after it was answered.
    #[arg(long, env = "DEMO_JOURNAL", value_name = "FILE")]
    pub journal: Option<PathBuf>,

    /// How long the handling of a request is made to take, for example 20ms.
    #[arg(long, env = "DEMO_WORK", default_value = "0s", value_name = "DURATION", value_parser = parse_duration)]
    pub work: Duration,

    /// Share the counter with the other instances of this lease, of which one at a time is primary and
    /// counts: consul or consul:PREFIX (below services/SERVICE by default), or file:DIR on one host.
    #[arg(long, env = "DEMO_LEASE", value_name = "STORE", value_parser = parse_lease)]
    pub lease: Option<LeaseAt>,

    /// How long a standby waits for a sign of the primary before it takes over.
    /// Default: the library's, 2s.
    #[arg(long, env = "DEMO_LEASE_LENGTH", value_name = "DURATION", value_parser = parse_positive_duration, requires = "lease")]
    pub lease_length: Option<Duration>,

    /// How often the primary gives one. Default: the library's, 400ms.
    #[arg(long, env = "DEMO_LEASE_RENEWAL", value_name = "DURATION", value_parser = parse_positive_duration, requires = "lease")]
    pub lease_renewal: Option<Duration>,

    /// How much sooner than its lease a primary stops by itself. Default: the library's, 300ms.
    #[arg(long, env = "DEMO_LEASE_MARGIN", value_name = "DURATION", value_parser = parse_positive_duration, requires = "lease")]
    pub lease_margin: Option<Duration>,

    /// Register nowhere: only those who know the address find this instance.
    #[arg(long)]
    pub no_consul: bool,

    /// Print a line for each request, with the instance and what came of it.
    #[arg(long)]
    pub access_log: bool,

    /// For tests: keep the state in FILE, as if nothing had to be fenced.
    #[arg(long, hide = true, value_name = "FILE")]
    pub unfenced: Option<PathBuf>,

    /// For tests: SIGUSR1 lets the listener accept nothing more, SIGUSR2 lets it go on.
    #[arg(long, hide = true)]
    pub blockable: bool,

    /// Also end when standard input is closed, so that the death of the parent ends it.
    #[arg(long, hide = true)]
    pub ends_with_stdin: bool,
}

/// How Consul learns that an instance lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[non_exhaustive]
pub enum CheckKind {
    /// The instance says so every 0.3 s; after 1 s of silence it is critical.
    Ttl,
    /// Consul connects to it every second.
    Tcp,
    /// Consul asks its grpc.health.v1 service every second.
    Grpc,
}

impl Options {
    /// The defaults of the command line, environment not read.
    pub fn new() -> Self {
        Self {
            name: None,
            service: "counter".to_owned(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            check: CheckKind::Ttl,
            journal: None,
            work: Duration::ZERO,
            lease: None,
            lease_length: None,
            lease_renewal: None,
            lease_margin: None,
            no_consul: false,
            access_log: false,
            unfenced: None,
            blockable: false,
            ends_with_stdin: false,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

/// Names end up in paths, ids and log lines.
fn parse_name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || text.len() > 64 || !text.chars().all(fits) {
        return Err(format!("{text:?} is no name: use 1 to 64 letters, digits, '-', '_' and '.'"));
    }
    Ok(text.to_owned())
}

fn parse_host(text: &str) -> Result<String, String> {
    let host = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.:%".contains(c);
    let name_with_port = host.contains(':') && host.parse::<std::net::Ipv6Addr>().is_err();
    if host.is_empty() || !host.chars().all(fits) || name_with_port {
        return Err(format!("{text:?} is no host: write an address or a name without a port"));
    }
    Ok(host.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn the_defaults_in_code_are_those_of_the_command_line() {
        let parsed = Line::parse_from(["backend"]).options;
        assert_eq!(format!("{parsed:?}"), format!("{:?}", Options::new()));
    }

    #[test]
    fn bad_values_are_refused_with_what_would_be_right() {
        let cases = [
            (["backend", "--name", "a b"], "letters, digits"),
            (["backend", "--advertise", "web1:4000"], "without a port"),
            (["backend", "--work", "20"], "for example 300ms"),
            (["backend", "--lease", "etcd"], "consul, consul:PREFIX or file:DIR"),
            (["backend", "--lease", "file:"], "consul, consul:PREFIX or file:DIR"),
        ];
        for (line, words) in cases {
            let error = Line::try_parse_from(line).err().unwrap().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(parse_host("[::1]").unwrap(), "::1");
    }
}
