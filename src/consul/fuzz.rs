//! What must hold for any answer and any configuration: run on chance by the tests
//! here, and by the fuzz targets in `fuzz/`; both begin with the seeds in `tests/seeds`.

use std::ffi::OsString;

use http02::{HeaderMap, HeaderName, HeaderValue};

use super::{
    BlockingIndex, ConsulConfig, HealthQuery, RegistryError, ServiceName, config, instances,
    refusal::refusal, transport::Answer,
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

/// Reads `data` as an answer: a byte for the question, two for the status, five
/// lines for headers, and the body.
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
    let meta = [("version".to_owned(), "1".to_owned())];
    let wanted = instances::Wanted {
        warning: how & 1 != 0,
        from_afar: how & 2 != 0,
        meta: if how & 4 != 0 { &meta } else { &[] },
    };
    if let Ok((snapshot, _)) = instances::read(body, wanted) {
        for instance in &snapshot.instances {
            let uri = format!("http://{}/", instance.id).parse::<http02::Uri>();
            let port = uri.as_ref().ok().and_then(http02::Uri::port_u16);
            assert!(port.is_some_and(|it| it != 0), "{instance:?}");
            assert!((1..=65_535).contains(&instance.weight), "{instance:?}");
            assert!(wanted.warning || !instance.warning, "{instance:?}");
        }
    }
    let mut index = BlockingIndex::from(u64::from(high));
    let status = u16::from_be_bytes([high, low]) % 1000;
    let answer = Answer { status, headers, body: body.to_vec() };
    index.answered(answer.number(HEADERS[0]));
    assert_ne!(index.get(), Some(0));
    let _ = HEADERS.map(|name| answer.flag(name));
    let error = refusal(&answer, Some("dc2"), str::to_owned);
    let line = error.to_string();
    assert!(line.chars().count() < 400 && !line.contains('\n'), "{line}");
    assert!(error.retry_after().is_none() || matches!(error, RegistryError::RateLimited { .. }));
}

/// Reads `data` as text: lines `VARIABLE=value`, and on others an address, a token
/// and names to ask for.
///
/// # Panics
/// Where what was read is not as it must be, or a secret shows.
pub fn configuration(data: &[u8]) {
    let text = String::from_utf8_lossy(data).replace(SECRET, "");
    let secret = |name: &str| matches!(name, "CONSUL_HTTP_TOKEN" | "CONSUL_HTTP_AUTH");
    let read = ConsulConfig::from_vars(|name| {
        let found = text.lines().filter_map(|it| it.split_once('=')).find(|it| it.0 == name)?.1;
        Some(OsString::from(if secret(name) { format!("{SECRET}:{found}") } else { found.to_owned() }))
    });
    shows_nothing(&read);
    for line in text.lines() {
        let config = ConsulConfig::new(line);
        shows_nothing(&config);
        let token = format!("{SECRET}{line}");
        let config = config.or_else(|_| ConsulConfig::new("localhost")).map(|it| it.token(token));
        if let Ok(config) = config {
            let header = config::token(&config);
            shows_nothing(&header.map(|_| config));
        }
        if let Ok(name) = ServiceName::new(line) {
            let query = HealthQuery::of(name).tag(line).meta(line, line).filter(line).near(line);
            let path = query.path();
            assert!(path.starts_with("v1/health/service/") && path.len() > 18, "{path}");
            let asked = query.query(Some(line), None);
            assert!(asked.is_ascii() && !asked.contains([' ', '\n', '#']), "{asked}");
        }
    }
}

fn shows_nothing(config: &Result<ConsulConfig, super::ConfigError>) {
    let shown = match config {
        Ok(config) => {
            let url = url::Url::parse(config.address.url().as_str());
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
