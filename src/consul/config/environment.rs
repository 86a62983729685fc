//! Consul's environment variables.

use std::{ffi::OsString, path::PathBuf};

use super::{Address, ConfigError, ConsulConfig, Given, address::without_password};

const ADDR: &str = "CONSUL_HTTP_ADDR";
const SSL: &str = "CONSUL_HTTP_SSL";
const TOKEN: &str = "CONSUL_HTTP_TOKEN";
const TOKEN_FILE: &str = "CONSUL_HTTP_TOKEN_FILE";
const AUTH: &str = "CONSUL_HTTP_AUTH";
const CA_CERT: &str = "CONSUL_CACERT";
const CA_PATH: &str = "CONSUL_CAPATH";
const CLIENT_CERT: &str = "CONSUL_CLIENT_CERT";
const CLIENT_KEY: &str = "CONSUL_CLIENT_KEY";
const VERIFY: &str = "CONSUL_HTTP_SSL_VERIFY";
const NAMESPACE: &str = "CONSUL_NAMESPACE";
const SERVER_NAME: &str = "CONSUL_TLS_SERVER_NAME";

/// Reads all of them by `lookup`.
pub(super) fn read(lookup: impl Fn(&str) -> Option<OsString>) -> Result<ConsulConfig, ConfigError> {
    let vars = Vars(lookup);
    let mut address = match vars.text(ADDR)? {
        Some(text) => Address::parse(ADDR, &text)?,
        None => Address::local(),
    };
    // As Consul's own client does: asking for TLS is never undone by the address.
    if vars.flag(SSL)? == Some(true) {
        address = address.with_tls();
    }
    if address.is_https()
        && let Some(name) = vars.text(SERVER_NAME)?
    {
        return Err(ConfigError::new(
            SERVER_NAME,
            name,
            "another name for the certificate is not supported; unset it and use an address that the \
             certificate is made out to",
        ));
    }
    let mut config = ConsulConfig::at(address);
    config.token = vars.secret(TOKEN)?;
    config.auth = vars.secret(AUTH)?;
    config.token_file = vars.path(TOKEN_FILE);
    config.ca_cert = vars.path(CA_CERT);
    config.ca_path = vars.path(CA_PATH);
    config.client_cert = vars.path(CLIENT_CERT);
    config.client_key = vars.path(CLIENT_KEY);
    for (one, other, set) in [
        (CLIENT_CERT, CLIENT_KEY, (&config.client_cert, &config.client_key)),
        (CLIENT_KEY, CLIENT_CERT, (&config.client_key, &config.client_cert)),
    ] {
        if let (Some(given), None) = set {
            let value = given.value.display().to_string();
            return Err(ConfigError::new(one, value, format!("{other} must be set as well")));
        }
    }
    config.tls_verify = vars.flag(VERIFY)?.unwrap_or(true);
    config.namespace = vars.text(NAMESPACE)?;
    Ok(config)
}

struct Vars<L>(L);

// === impl Vars ===

impl<L: Fn(&str) -> Option<OsString>> Vars<L> {
    fn set(&self, name: &str) -> Option<OsString> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn text(&self, name: &str) -> Result<Option<String>, ConfigError> {
        let Some(value) = self.set(name) else { return Ok(None) };
        value.into_string().map(Some).map_err(|raw| {
            // An address may hold a password, although it should not.
            let shown = without_password(&raw.to_string_lossy());
            ConfigError::new(name, shown, "it must be text in UTF-8")
        })
    }

    fn secret(&self, name: &'static str) -> Result<Option<Given<String>>, ConfigError> {
        let Some(value) = self.set(name) else { return Ok(None) };
        let value = value
            .into_string()
            .map_err(|_| ConfigError::secret(name, "it must be text in UTF-8 (its value is not shown)"))?;
        Ok(Some(Given { setting: name, value }))
    }

    fn path(&self, name: &'static str) -> Option<Given<PathBuf>> {
        self.set(name).map(|value| Given { setting: name, value: value.into() })
    }

    /// The words are those of Go's `strconv.ParseBool`, which Consul reads them by.
    fn flag(&self, name: &str) -> Result<Option<bool>, ConfigError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match text.as_str() {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(Some(true)),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(Some(false)),
            _ => Err(ConfigError::new(name, text, "it must be true or false")),
        }
    }
}
