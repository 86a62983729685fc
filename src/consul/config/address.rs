//! The agent's address.

use std::net::Ipv6Addr;

use url::Url;

use super::ConfigError;

/// Where the agent listens: what is left of a valid address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::consul) struct Address {
    https: bool,
    authority: String,
}

const FORMS: &str =
    "host:port such as 127.0.0.1:8500 or [::1]:8500, or a URL such as http://consul.example:8500";

// === impl Address ===

impl Address {
    /// Where an agent listens unless told otherwise.
    pub(super) fn local() -> Self {
        Self { https: false, authority: "127.0.0.1:8500".to_owned() }
    }

    /// Reads `text`, the value of `setting`.
    pub(super) fn parse(setting: &str, text: &str) -> Result<Self, ConfigError> {
        read(text).map_err(|problem| ConfigError::new(setting, without_password(text), problem))
    }

    /// The same with TLS.
    pub(super) fn with_tls(self) -> Self {
        Self { https: true, ..self }
    }

    pub(super) fn is_https(&self) -> bool {
        self.https
    }

    /// Scheme, host and port, without a slash at the end.
    pub(in crate::consul) fn url(&self) -> String {
        format!("{}://{}", if self.https { "https" } else { "http" }, self.authority)
    }
}

fn read(text: &str) -> Result<Address, String> {
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) => (Some(scheme.to_ascii_lowercase()), rest),
        None => (None, text),
    };
    let https = match scheme.as_deref() {
        None | Some("http") => false,
        Some("https") => true,
        Some("unix") => {
            return Err(format!("Unix sockets are not supported; give {FORMS}"));
        }
        Some(_) => return Err(format!("only http:// and https:// are supported; give {FORMS}")),
    };
    let end = rest.find(['/', '?', '#', '\\']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if authority.contains('@') {
        return Err("user and password do not belong into the address; give them by CONSUL_HTTP_AUTH or \
                    basic_auth"
            .to_owned());
    }
    if !matches!(path, "" | "/") {
        return Err("nothing may follow host and port: a path prefix is not supported".to_owned());
    }
    let port = port_of(authority)?;
    if port.is_none() && scheme.is_none() {
        return Err(format!("the port is missing; give {FORMS}"));
    }
    let address = Address { https, authority: authority.to_owned() };
    // The URL's own reader has the last word, for what looks like a host and is none.
    match Url::parse(&address.url()) {
        Ok(url) if url.has_host() && !url.cannot_be_a_base() => Ok(address),
        _ => Err(format!("the host cannot be read; give {FORMS}")),
    }
}

/// The port of `host:port`, after a look at the host.
fn port_of(authority: &str) -> Result<Option<u16>, String> {
    let port = if let Some(rest) = authority.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or("the bracket before the host is not closed")?;
        host.parse::<Ipv6Addr>().map_err(|_| "what stands in the brackets is no IPv6 address")?;
        match port.strip_prefix(':') {
            Some(port) => Some(port),
            None if port.is_empty() => None,
            None => return Err(format!("what follows the brackets is no port; give {FORMS}")),
        }
    } else {
        let (host, port) = match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        };
        if port.is_some_and(|it| it.contains(':')) {
            return Err(format!("an IPv6 address needs brackets; give {FORMS}"));
        }
        if host.is_empty() {
            return Err(format!("the host is missing; give {FORMS}"));
        }
        if !host.bytes().all(|it| it.is_ascii_alphanumeric() || b"-._".contains(&it)) {
            return Err(format!("the host has a character that no host has; give {FORMS}"));
        }
        port
    };
    let Some(port) = port else { return Ok(None) };
    let digits = !port.is_empty() && port.bytes().all(|it| it.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(number) if digits && number > 0 => Ok(Some(number)),
        _ => Err(format!("the port must be a number from 1 to 65535; give {FORMS}")),
    }
}

/// `text` fit to be shown.
pub(super) fn without_password(text: &str) -> String {
    match text.rsplit_once('@') {
        Some((before, host)) => {
            // What stands before "://" in a password is no scheme.
            let scheme = before.split_once("://").map(|(scheme, _)| scheme);
            let scheme = scheme.filter(|it| it.bytes().all(|it| it.is_ascii_alphanumeric()));
            let scheme = scheme.map_or(String::new(), |it| format!("{it}://"));
            format!("{scheme}(hidden)@{host}")
        }
        None => text.to_owned(),
    }
}
