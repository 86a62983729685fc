//! The HTTP client that the settings make.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

use http02::HeaderValue;
use reqwest::{Certificate, Identity, header::AUTHORIZATION, redirect::Policy};

use super::{ConfigError, ConsulConfig, Given};

/// A token is a few dozen bytes; a file of more than this holds something else.
const LONGEST_TOKEN: u64 = 8 << 10;

/// How many connections are kept for later. Our choice: enough for most of the
/// questions that one change of a node wakes.
const MOST_IDLE: usize = 32;

/// How long an idle one is kept: below what proxies before an agent usually keep one
/// for, so that few are used just as they are being closed.
pub(in crate::consul) const KEPT_FOR: Duration = Duration::from_secs(30);

/// A client with the settings' time-outs and TLS. It uses no proxy: one that is
/// named in the environment for other ends must not come between a program and
/// the agent on its own host. It follows no redirect: the token would go along.
pub(in crate::consul) fn http_client(config: &ConsulConfig) -> Result<reqwest::Client, ConfigError> {
    for (setting, limit) in
        [("connect_timeout", config.connect_timeout), ("request_timeout", config.request_timeout)]
    {
        if limit.is_zero() {
            return Err(ConfigError::new(setting, format!("{limit:?}"), "it must be more than nothing"));
        }
    }
    if config.max_answer_bytes == 0 {
        return Err(ConfigError::new("max_answer_bytes", "0", "it must be at least 1"));
    }
    let mut builder = reqwest::Client::builder()
        .use_rustls_tls()
        .no_proxy()
        .redirect(Policy::none())
        .referer(false)
        .connect_timeout(config.connect_timeout)
        .tcp_keepalive(Duration::from_secs(30))
        .pool_idle_timeout(KEPT_FOR)
        // They count among the connections that an agent takes from one address.
        .pool_max_idle_per_host(MOST_IDLE)
        // A request on HTTP/2 that gets no answer would keep its dead connection in
        // use for the next one; on HTTP/1 giving up closes it.
        .http1_only()
        .user_agent(concat!("tonic-failover/", env!("CARGO_PKG_VERSION")));
    let trusted = trusted(config)?;
    if !trusted.is_empty() {
        builder = builder.tls_built_in_root_certs(false);
    }
    for certificate in trusted {
        builder = builder.add_root_certificate(certificate);
    }
    if let (Some(cert), Some(key)) = (&config.client_cert, &config.client_key) {
        builder = builder.identity(identity(cert, key)?);
    }
    if !config.tls_verify {
        tracing::warn!(
            address = config.address.url(),
            "the certificate of Consul is not verified: anybody may answer in its place"
        );
        builder = builder.danger_accept_invalid_certs(true);
    }
    builder.build().map_err(|source| match &config.client_cert {
        Some(cert) => ConfigError::new(
            cert.setting,
            cert.value.display().to_string(),
            "the certificate and its key cannot be used together",
        )
        .because(source),
        None => ConfigError::secret("TLS", "the settings cannot be used").because(source),
    })
}

/// The token as a header, from the file if there is one.
pub(in crate::consul) fn token(config: &ConsulConfig) -> Result<Option<HeaderValue>, ConfigError> {
    if let Some(file) = &config.token_file {
        return token_in(file).map(Some);
    }
    let Some(given) = &config.token else { return Ok(None) };
    let problem = if given.value.trim() != given.value {
        Err("begins or ends with white space or a line break")
    } else if given.value.is_empty() {
        Err("is empty; leave it out where there is none")
    } else {
        header(&given.value)
    };
    problem.map(Some).map_err(|problem| {
        ConfigError::secret(given.setting, format!("the token {problem} (its value is not shown)"))
    })
}

/// The token that a file holds now.
pub(in crate::consul) fn token_in(file: &Given<PathBuf>) -> Result<HeaderValue, ConfigError> {
    let mut content = Vec::new();
    fs::File::open(&file.value)
        .and_then(|it| it.take(LONGEST_TOKEN + 1).read_to_end(&mut content))
        .map_err(|source| unreadable(file, source))?;
    token_of(file, content)
}

/// The token that `file` holds, where its first bytes are `content`.
pub(in crate::consul) fn token_of(
    file: &Given<PathBuf>,
    content: Vec<u8>,
) -> Result<HeaderValue, ConfigError> {
    if content.len() as u64 > LONGEST_TOKEN {
        return Err(bad_file(file, "the file is too long; it must hold a token and nothing else"));
    }
    let text = String::from_utf8(content).map_err(|_| bad_file(file, "it must hold text in UTF-8"))?;
    let text = text.trim();
    if text.is_empty() {
        return Err(bad_file(file, "the file is empty; it must hold a token"));
    }
    header(text).map_err(|problem| bad_file(file, &format!("the token {problem}")))
}

/// The header of HTTP's basic authentication.
pub(in crate::consul) fn authorization(
    config: &ConsulConfig,
    client: &reqwest::Client,
) -> Result<Option<HeaderValue>, ConfigError> {
    let Some(auth) = &config.auth else { return Ok(None) };
    let (user, password) = match auth.value.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (auth.value.as_str(), None),
    };
    if user.is_empty() {
        return Err(ConfigError::secret(auth.setting, "it must be user:password (its value is not shown)"));
    }
    let request = client.get(config.address.url()).basic_auth(user, password).build();
    let header = request.ok().and_then(|it| it.headers().get(AUTHORIZATION).cloned());
    header.map(Some).ok_or_else(|| ConfigError::secret(auth.setting, "it cannot be put into a header"))
}

fn header(text: &str) -> Result<HeaderValue, &'static str> {
    let mut value = HeaderValue::from_bytes(text.as_bytes())
        .map_err(|_| "holds a line break or another control character")?;
    value.set_sensitive(true);
    Ok(value)
}

fn trusted(config: &ConsulConfig) -> Result<Vec<Certificate>, ConfigError> {
    let mut trusted = Vec::new();
    if let Some(file) = &config.ca_cert {
        trusted.extend(certificates(file.setting, &file.value)?);
    }
    if let Some(folder) = &config.ca_path {
        let unreadable =
            |source: std::io::Error| bad_file(folder, "it must be a folder that can be read").because(source);
        let mut files = Vec::new();
        for entry in fs::read_dir(&folder.value).map_err(unreadable)? {
            let file = entry.map_err(unreadable)?.path();
            if file.is_file() {
                files.push(file);
            }
        }
        files.sort();
        if files.is_empty() {
            return Err(bad_file(folder, "the folder holds no file; it must hold certificates in PEM"));
        }
        for file in files {
            trusted.extend(certificates(folder.setting, &file)?);
        }
    }
    Ok(trusted)
}

fn certificates(setting: &'static str, file: &Path) -> Result<Vec<Certificate>, ConfigError> {
    let given = Given { setting, value: file.to_owned() };
    let no_pem = || bad_file(&given, "it must be a file of certificates in PEM");
    let found = Certificate::from_pem_bundle(&read(&given)?).map_err(|source| no_pem().because(source))?;
    if found.is_empty() { Err(no_pem()) } else { Ok(found) }
}

fn identity(cert: &Given<PathBuf>, key: &Given<PathBuf>) -> Result<Identity, ConfigError> {
    let mut pem = read(cert)?;
    pem.push(b'\n');
    pem.extend(read(key)?);
    Identity::from_pem(&pem).map_err(|source| {
        bad_file(cert, "it must be a certificate in PEM, and its key one in PEM too (PKCS#8, RSA or EC)")
            .because(source)
    })
}

fn read(file: &Given<PathBuf>) -> Result<Vec<u8>, ConfigError> {
    fs::read(&file.value).map_err(|source| unreadable(file, source))
}

fn unreadable(file: &Given<PathBuf>, source: std::io::Error) -> ConfigError {
    bad_file(file, "it must be a file that can be read").because(source)
}

fn bad_file(file: &Given<PathBuf>, problem: &str) -> ConfigError {
    ConfigError::new(file.setting, file.value.display().to_string(), problem)
}
