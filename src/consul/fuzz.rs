//! What must hold for any answer and any configuration: run on chance by the tests
//! here, and by the fuzz targets in `fuzz/`; both begin with the seeds in `tests/seeds`.

use std::{collections::HashSet, error::Error, ffi::OsString, os::unix::ffi::OsStringExt, sync::LazyLock};

use http02::{HeaderMap, HeaderName, HeaderValue};
use rustify::endpoint::Endpoint;
use url::{Url, form_urlencoded};

use super::{
    BlockingIndex, ConfigError, ConsulConfig, HealthAnswer, HealthQuery, Objection, RegistryError,
    ServiceName, ServiceRegistration, TxnAnswer, access, agents, config,
    instances::Wanted,
    kv,
    listed::datacenters,
    refusal::refusal,
    secrets::Answer,
    token::Known,
    transport::{Call, Credentials},
    txn,
};

/// What no message may show.
const SECRET: &str = "geheim";

/// The headers that are read, by the first byte of a line.
const HEADERS: [&str; 5] = [
    "x-consul-index",
    "x-consul-knownleader",
    "x-consul-lastcontact",
    "x-consul-results-filtered-by-acls",
    "retry-after",
];

/// Longer than any message may be: what of an answer is shown has 300 characters at most.
const LONG: usize = 400;

/// As it is made for every configuration; making one takes 40 ms.
static HTTP: LazyLock<reqwest::Client> = LazyLock::new(|| {
    config::http_client(&agent("localhost:8500").expect("the address is good"))
        .expect("the settings are good")
});

/// Reads `data` as an answer: a byte for the question, two for the status, five
/// lines for headers, and the body. It is read as an answer to each question.
///
/// # Panics
/// Where what was read is not as it must be.
pub fn answer(data: &[u8]) {
    let Some((&[how, high, low], mut body)) = data.split_first_chunk::<3>() else { return };
    let mut headers = HeaderMap::new();
    for name in HEADERS {
        let Some(end) = body.iter().position(|it| *it == b'\n') else { break };
        if let Ok(value) = HeaderValue::from_bytes(&body[..end]) {
            headers.insert(HeaderName::from_static(name), value);
        }
        body = &body[end + 1..];
    }
    let status = u16::from_be_bytes([high, low]) % 1000;
    let answer = Answer::new(status, headers, body.to_vec(), how & 8 == 0, credentials("").secrets());
    let meta = [("version".to_owned(), "1".to_owned())];
    let from_afar = how & 2 != 0;
    let meta = if how & 4 != 0 { &meta[..] } else { &[] };
    let wanted = Wanted { warning: how & 1 != 0, from_afar, meta };
    match HealthAnswer::read(&answer, wanted) {
        Ok(read) => {
            holds_together(&read, wanted, u64::from(high));
            let list = serde_json::from_slice::<Vec<serde_json::Value>>(body).expect("it was read as one");
            // Else it would count as empty.
            assert!(list.is_empty() || list.iter().any(|it| it["Service"].is_object()), "{list:?}");
        }
        Err(error) => is_told(&error),
    }
    if let Err(error) = access::read(&answer) {
        is_told(&error);
    }
    if let Err(error) = datacenters(&answer) {
        is_told(&error);
    }
    if let Err(error) = kv::read(&answer) {
        is_told(&error);
    }
    match txn::read(&answer) {
        Ok(TxnAnswer::Refused(errors)) => errors.iter().for_each(|it| match &it.what {
            Objection::Other(what) => is_told(&RegistryError::Unsendable { reason: what.clone() }),
            Objection::Stale | Objection::Missing | Objection::Denied => {}
        }),
        Ok(TxnAnswer::Done(_)) => assert_eq!(answer.status(), 200),
        Err(error) => is_told(&error),
    }
    let error = refusal(&answer, Some("dc2"));
    is_told(&error);
    assert!(error.retry_after().is_none() || matches!(error, RegistryError::RateLimited { .. }));
    // What an agent answers by itself says as much of it, whatever was asked about.
    let [near, far] = [false, true].map(|from_afar| agents::fault(&error, from_afar) == agents::Fault::Agent);
    assert!(near || !far, "{error}");
}

/// Reads `data` as settings: lines `VARIABLE=value`, each line also as an address, a
/// token, a user's password, a datacenter, a filter and names to ask for or to
/// register, and all of it as the file of a token.
///
/// # Panics
/// Where what was read is not as it must be, or a secret shows.
pub fn configuration(data: &[u8]) {
    // More than this is no setting. What is none of ours must not look like a secret.
    if data.len() > 4096 || data.windows(SECRET.len()).any(|it| it == SECRET.as_bytes()) {
        return;
    }
    let secret = |name: &str| matches!(name, "CONSUL_HTTP_TOKEN" | "CONSUL_HTTP_AUTH");
    let read = ConsulConfig::from_vars(|name| {
        let mut lines = data.split(|it| *it == b'\n');
        let found = lines.find_map(|it| it.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        let before = if secret(name) { format!("{SECRET}:") } else { String::new() };
        Some(OsString::from_vec([before.as_bytes(), found].concat()))
    });
    shows_nothing(&read);
    for content in [data.to_vec(), [SECRET.as_bytes(), data].concat()] {
        let file = config::Given { setting: "token_file", value: "token".into() };
        is_hidden(config::token_of(&file, content));
    }
    for line in String::from_utf8_lossy(data).lines() {
        shows_nothing(&agent(line));
        for address in [format!("http://me:{SECRET}{line}@localhost:8500"), format!("{line}{SECRET}@{line}")]
        {
            let error = agent(&address).expect_err("a password does not belong there");
            shows_nothing(&Err(error));
        }
        let config = agent(line).unwrap_or_else(|_| agent("localhost:8500").expect("the address is good"));
        let more = config.clone().more_agents([line]);
        shows_nothing(&more);
        let secret = format!("{SECRET}{line}");
        let config = config.token(&*secret).basic_auth(format!("me:{secret}")).namespace(line);
        is_hidden(config::token(&config).map(|it| it.expect("one was given")));
        is_hidden(config::authorization(&config, &HTTP).map(|it| it.expect("one was given")));
        shows_nothing(&Ok(config.clone()));
        let credentials = credentials(line);
        let repeated = format!("{config:?} {secret:?} {secret} {:?}", credentials.authorization);
        assert!(!credentials.secrets().hidden(&repeated).contains(SECRET), "{repeated}");
        arrives(&config, line, &credentials);
    }
}

fn agent(address: &str) -> Result<ConsulConfig, ConfigError> {
    ConsulConfig::new(address)
}

/// Those of a client whose token is the secret and `more`, as far as a header takes it.
fn credentials(more: &str) -> Credentials {
    let token = format!("{SECRET}{more}");
    let auth = format!("me:{token}");
    let authorization = HTTP.get("http://localhost").basic_auth("me", Some(&token)).build().ok();
    Credentials {
        authorization: authorization.and_then(|it| it.headers().get("authorization").cloned()),
        token: HeaderValue::from_str(&token).ok(),
        auth: Some(auth.into()),
        known: Known::default(),
    }
}

/// A good answer, for whoever goes by it.
fn holds_together(answer: &HealthAnswer, wanted: Wanted<'_>, before: u64) {
    let mut ids = HashSet::new();
    for instance in &answer.snapshot.instances {
        let uri = format!("http://{}/", instance.id).parse::<http02::Uri>();
        let port = uri.as_ref().ok().and_then(http02::Uri::port_u16);
        assert!(port.is_some_and(|it| it != 0), "{instance:?}");
        assert!((1..=65_535).contains(&instance.weight), "{instance:?}");
        assert!(wanted.warning || !instance.warning, "{instance:?}");
        let has = |(key, value): &(String, String)| instance.meta.get(key) == Some(value);
        assert!(wanted.meta.iter().all(has), "{instance:?}");
        let tags: HashSet<_> = instance.tags.iter().collect();
        assert!(tags.len() == instance.tags.len() && !tags.contains(&String::new()), "{instance:?}");
        assert!(ids.insert(&instance.id), "twice: {instance:?}");
    }
    for entry in &answer.skipped {
        let line = entry.to_string();
        // Each character may need an escape of ten.
        assert!(line.len() < 3 * 10 * LONG && !line.contains('\n'), "{line}");
        assert!(!line.contains(SECRET), "{line}");
    }
    assert_eq!(answer.denied.is_some(), answer.filtered_by_acl);
    let mut index = BlockingIndex::from(before);
    index.answered(answer.index);
    assert_ne!((index.get(), answer.index), (Some(0), Some(0)));
    for agent in [0, agents::MOST_AGENTS - 1] {
        if let Some(marked) = answer.index.and_then(|it| agents::marked(agent, it)) {
            assert_eq!(agents::unmarked(agent, marked.into()).get(), answer.index);
        }
    }
}

/// An error and what lies behind it: each fits a line and shows no secret.
fn is_told(error: &RegistryError) {
    let mut error: Option<&dyn Error> = Some(error);
    while let Some(it) = error {
        let line = it.to_string();
        assert!(line.chars().count() < LONG && !line.contains(char::is_control), "{line}");
        assert!(!line.contains(SECRET), "{line}");
        error = it.source();
    }
}

/// What is asked about `line` comes out of the request as it was.
fn arrives(config: &ConsulConfig, line: &str, credentials: &Credentials) {
    let Ok(name) = ServiceName::new(line) else { return };
    let query = HealthQuery::of(name).datacenter(line).tag(line).meta(line, line).filter(line).near(line);
    let call = Call::get(query.path(), query.query(config.namespace.as_deref(), None));
    let base = config.address.url();
    let request = call.with_middleware(credentials).request(&base).expect("it makes a request");
    let request = reqwest::Request::try_from(request).expect("it can be sent");
    let (url, base) = (request.url(), Url::parse(&base).expect("an address is a URL"));
    assert_eq!(url.origin(), base.origin());
    // Read by Consul with escapes resolved once, in the path without a meaning of `+`.
    let path = url.path().strip_prefix("/v1/health/service/").expect("the path stays");
    let path = path.replace('+', "%2B").replace('&', "%26").replace('=', "%3D");
    let path: Vec<_> = form_urlencoded::parse(path.as_bytes()).into_owned().collect();
    assert_eq!(path, [(line.to_owned(), String::new())]);
    let pairs: Vec<_> = url.query_pairs().collect();
    let pairs: Vec<_> = pairs.iter().map(|(key, value)| (&**key, &**value)).collect();
    let keys = [("dc", line), ("ns", line), ("near", line), ("filter", line), ("tag", line)];
    assert_eq!(pairs, [&[("passing", "")], &keys[..], &[("stale", "")]].concat());
    let registration = ServiceRegistration::new(line, line, line, 1).expect("the name is good");
    let registration = serde_json::to_value(registration.tag(line).meta(line, line)).expect("it is JSON");
    assert_eq!((&registration["Name"], &registration["Meta"][line]), (&line.into(), &line.into()));
}

fn is_hidden(header: Result<HeaderValue, ConfigError>) {
    match header {
        Ok(header) => assert!(header.is_sensitive(), "it would show in logs"),
        Err(error) => shows_nothing(&Err(error)),
    }
}

fn shows_nothing(config: &Result<ConsulConfig, ConfigError>) {
    let shown = match config {
        Ok(config) => {
            let url = Url::parse(config.address.url().as_str());
            assert!(url.is_ok_and(|it| it.has_host() && it.path() == "/" && it.username().is_empty()));
            format!("{config:?}")
        }
        Err(error) => format!("{error} {error:?}"),
    };
    assert!(!shown.contains(SECRET), "{shown}");
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;

    use super::*;

    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/seeds").join(target);
        let files = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
        let seeds: Vec<_> = files.map(|it| fs::read(it).unwrap()).collect();
        assert!(!seeds.is_empty(), "no seeds for {target}");
        seeds
    }

    #[test]
    fn every_seed_of_the_fuzz_targets_is_read_or_refused() {
        seeds("answer").iter().for_each(|seed| answer(seed));
        seeds("configuration").iter().for_each(|seed| configuration(seed));
    }

    proptest! {
        #[test]
        fn a_seed_changed_anywhere_is_read_or_refused(
            which in any::<prop::sample::Index>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            end in any::<prop::sample::Index>(),
        ) {
            for target in ["answer", "configuration"] {
                let seeds = seeds(target);
                let mut data = seeds[which.index(seeds.len())].clone();
                for (place, byte) in &changes {
                    let place = place.index(data.len());
                    data[place] = *byte;
                }
                let run = if target == "answer" { answer } else { configuration };
                run(&data);
                data.truncate(end.index(data.len() + 1));
                run(&data);
            }
        }
    }
}
