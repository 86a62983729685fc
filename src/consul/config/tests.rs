use std::{collections::HashMap, ffi::OsString, os::unix::ffi::OsStringExt};

use proptest::prelude::*;

use super::*;
use crate::consul::ConsulClient;

fn vars(set: &[(&str, &str)]) -> Result<ConsulConfig, ConfigError> {
    let set: HashMap<_, _> = set.iter().map(|(name, value)| (*name, OsString::from(value))).collect();
    ConsulConfig::from_vars(|name| set.get(name).cloned())
}

fn url(address: &str) -> String {
    ConsulConfig::new(address).unwrap().address.url()
}

/// The error of a configuration that is read well and cannot be used.
fn unusable(config: ConsulConfig) -> ConfigError {
    ConsulClient::new(config).unwrap_err()
}

#[test]
fn addresses_with_and_without_scheme_are_understood() {
    assert_eq!(url("127.0.0.1:8500"), "http://127.0.0.1:8500");
    assert_eq!(url("localhost:8500"), "http://localhost:8500");
    assert_eq!(url("[::1]:8500"), "http://[::1]:8500");
    assert_eq!(url("http://consul_1.example:80/"), "http://consul_1.example:80");
    assert_eq!(url("HTTPS://consul.example"), "https://consul.example");
    assert_eq!(url("https://[2001:db8::1]"), "https://[2001:db8::1]");
}

#[test]
fn addresses_that_cannot_be_used_are_refused_with_what_would_be_right() {
    for (bad, word) in [
        ("", "host is missing"),
        ("127.0.0.1", "port is missing"),
        (":8500", "host is missing"),
        ("http://", "host is missing"),
        ("::1", "brackets"),
        ("::1:8500", "brackets"),
        ("[::1", "not closed"),
        ("[::1]8500", "no port"),
        ("[fe80::1%eth0]:8500", "no IPv6"),
        ("a:b:1", "brackets"),
        ("localhost:", "port must be"),
        ("localhost:0", "port must be"),
        ("localhost:65536", "port must be"),
        ("localhost:+80", "port must be"),
        ("localhost:http", "port must be"),
        ("999.1.1.1:8500", "host cannot be read"),
        ("local host:8500", "character"),
        (" localhost:8500", "character"),
        ("localhost:8500\n", "port must be"),
        ("exämple:8500", "character"),
        ("unix:///run/consul.sock", "Unix sockets"),
        ("ftp://localhost:8500", "http://"),
        ("data:x", "port must be"),
        ("mailto:a@b", "CONSUL_HTTP_AUTH"),
        ("http://localhost:8500/consul", "path prefix"),
        ("localhost:8500/v1", "path prefix"),
        ("http://localhost:8500?dc=x", "nothing may follow"),
        ("http://localhost:8500#x", "nothing may follow"),
        ("http:\\\\localhost:8500", "nothing may follow"),
    ] {
        let error = ConsulConfig::new(bad).unwrap_err();
        assert!(error.problem.contains(word), "{bad:?}: {error}");
        assert_eq!(error.setting, "address");
    }
}

#[test]
fn a_password_in_the_address_is_refused_and_not_shown() {
    let error = vars(&[("CONSUL_HTTP_ADDR", "http://me:geheim@localhost:8500")]).unwrap_err();
    assert_eq!(error.value.as_deref(), Some("http://(hidden)@localhost:8500"));
    assert!(!format!("{error} {error:?}").contains("geheim"), "{error}");
}

#[test]
fn an_empty_environment_means_the_local_agent() {
    for config in [vars(&[]), vars(&[("CONSUL_HTTP_ADDR", ""), ("CONSUL_HTTP_TOKEN", "")])] {
        let config = config.unwrap();
        assert_eq!(config.address.url(), "http://127.0.0.1:8500");
        assert!(config.token.is_none() && config.tls_verify);
    }
}

#[test]
fn asking_for_tls_wins_over_the_address() {
    for address in ["localhost:8501", "http://localhost:8501"] {
        let config = vars(&[("CONSUL_HTTP_ADDR", address), ("CONSUL_HTTP_SSL", "true")]).unwrap();
        assert_eq!(config.address.url(), "https://localhost:8501");
    }
    let config = vars(&[("CONSUL_HTTP_ADDR", "https://a"), ("CONSUL_HTTP_SSL", "0")]).unwrap();
    assert_eq!(config.address.url(), "https://a");
}

#[test]
fn switches_that_are_neither_true_nor_false_are_refused() {
    for name in ["CONSUL_HTTP_SSL", "CONSUL_HTTP_SSL_VERIFY"] {
        let error = vars(&[(name, "yes")]).unwrap_err();
        assert_eq!(error.to_string(), format!("{name} is \"yes\": it must be true or false"));
    }
    assert!(!vars(&[("CONSUL_HTTP_SSL_VERIFY", "F")]).unwrap().tls_verify);
}

#[test]
fn another_name_for_the_certificate_is_refused_where_there_is_one() {
    assert!(vars(&[("CONSUL_TLS_SERVER_NAME", "x")]).is_ok());
    let error = vars(&[("CONSUL_TLS_SERVER_NAME", "x"), ("CONSUL_HTTP_SSL", "1")]).unwrap_err();
    assert_eq!(error.setting, "CONSUL_TLS_SERVER_NAME");
}

#[test]
fn text_that_is_none_is_refused_and_a_token_is_not_shown() {
    let bytes = |name: &'static str| {
        ConsulConfig::from_vars(move |asked| {
            (asked == name).then(|| OsString::from_vec(b"sec\xffret".to_vec()))
        })
        .unwrap_err()
    };
    assert!(bytes("CONSUL_NAMESPACE").to_string().contains("CONSUL_NAMESPACE"));
    let error = bytes("CONSUL_HTTP_TOKEN");
    assert_eq!((error.setting.as_str(), error.value), ("CONSUL_HTTP_TOKEN", None));
}

#[test]
fn tokens_that_cannot_be_sent_are_refused_and_not_shown() {
    for bad in ["geheim\n", "ge\nheim", " geheim", "ge\u{7f}heim", "ge\rheim"] {
        let error = unusable(vars(&[("CONSUL_HTTP_TOKEN", bad)]).unwrap());
        assert_eq!(error.setting, "CONSUL_HTTP_TOKEN");
        assert!(!format!("{error} {error:?}").contains("heim"), "{error}");
    }
    let odd = ConsulConfig::new("localhost:8500").unwrap().token("schlüssel mit raum");
    ConsulClient::new(odd).unwrap();
}

#[test]
fn the_tokens_file_goes_before_the_token_and_is_trimmed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    let file_text = file.to_str().unwrap();
    let config = || vars(&[("CONSUL_HTTP_TOKEN_FILE", file_text), ("CONSUL_HTTP_TOKEN", "other")]).unwrap();
    let error = unusable(config());
    assert_eq!((&*error.setting, error.value.as_deref()), ("CONSUL_HTTP_TOKEN_FILE", Some(file_text)));
    assert!(std::error::Error::source(&error).is_some());
    std::fs::write(&file, " \n").unwrap();
    assert!(unusable(config()).problem.contains("empty"));
    std::fs::write(&file, "from-the-file\n").unwrap();
    assert_eq!(http::token(&config()).unwrap().unwrap(), "from-the-file");
}

#[test]
fn user_and_password_become_basic_authentication() {
    let config = vars(&[("CONSUL_HTTP_AUTH", "Aladdin:open sesame")]).unwrap();
    let header = authorization(&config, &http_client(&config).unwrap()).unwrap().unwrap();
    // The example of RFC 7617, section 2.
    assert_eq!(header, "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
    assert!(header.is_sensitive());
    let error = unusable(vars(&[("CONSUL_HTTP_AUTH", ":geheim")]).unwrap());
    assert!(!error.to_string().contains("geheim"), "{error}");
}

#[test]
fn files_that_are_no_certificates_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let rubbish = folder.path().join("rubbish.pem");
    std::fs::write(&rubbish, "rubbish").unwrap();
    let (rubbish, folder) = (rubbish.to_str().unwrap(), folder.path().to_str().unwrap());
    let missing = "/nonexistent/ca.pem";
    for (name, value, told) in [
        ("CONSUL_CACERT", missing, missing),
        ("CONSUL_CACERT", rubbish, rubbish),
        ("CONSUL_CAPATH", missing, missing),
        ("CONSUL_CAPATH", folder, rubbish),
    ] {
        let error = unusable(vars(&[(name, value)]).unwrap());
        assert_eq!((&*error.setting, error.value.as_deref()), (name, Some(told)), "{error}");
    }
    let pair = [("CONSUL_CLIENT_CERT", rubbish), ("CONSUL_CLIENT_KEY", rubbish)];
    assert_eq!(unusable(vars(&pair).unwrap()).setting, "CONSUL_CLIENT_CERT");
    for half in pair {
        let error = vars(&[half]).unwrap_err();
        assert_eq!(error.setting, half.0);
        assert!(error.problem.contains("must be set as well"));
    }
}

#[test]
fn certificates_and_keys_in_pem_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let write = |name: &str, text: String| {
        let file = folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        file
    };
    let cert = write("cert.pem", made.cert.pem());
    let key = write("key.pem", made.signing_key.serialize_pem());
    let other = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let other_key = write("other.pem", other.signing_key.serialize_pem());
    let config = || ConsulConfig::new("https://localhost:8501").unwrap();
    ConsulClient::new(config().ca_cert(&cert).client_cert(&cert, &key)).unwrap();
    assert_eq!(unusable(config().client_cert(&cert, &cert)).setting, "client_cert");
    // rustls 0.21 does not hold the key against the certificate; the agent will.
    let _ = ConsulClient::new(config().client_cert(&cert, &other_key));
    // A folder with a key in it is no folder of certificates.
    assert_eq!(unusable(config().ca_path(folder.path())).setting, "ca_path");
}

#[test]
fn limits_of_nothing_are_refused() {
    let config = || ConsulConfig::new("localhost:8500").unwrap();
    assert_eq!(unusable(config().connect_timeout(Duration::ZERO)).setting, "connect_timeout");
    assert_eq!(unusable(config().request_timeout(Duration::ZERO)).setting, "request_timeout");
    assert_eq!(unusable(config().max_answer_bytes(0)).setting, "max_answer_bytes");
}

#[test]
fn debug_shows_no_secret() {
    let config = ConsulConfig::new("localhost:8500").unwrap().token("geheim").basic_auth("me:geheim");
    let shown = format!("{config:?} {:?}", ConsulClient::new(config.clone()).unwrap());
    assert!(!shown.contains("geheim"), "{shown}");
}

proptest! {
    #[test]
    fn any_address_makes_a_usable_url_or_an_error(text in ".{0,40}|[a-z0-9:/\\[\\]@.?#-]{0,24}") {
        if let Ok(config) = ConsulConfig::new(&text) {
            let url = url::Url::parse(&config.address.url()).unwrap();
            prop_assert!(url.has_host() && url.path() == "/" && url.username().is_empty());
        }
    }

    #[test]
    fn any_token_can_be_sent_or_is_refused(token in ".{0,40}") {
        let _ = http::token(&ConsulConfig::new("localhost:8500").unwrap().token(token));
    }
}

#[test]
fn no_part_of_a_password_in_an_odd_address_is_shown() {
    let odd =
        [&b"http://user:geheim\xff@host:8500"[..], b"user:geheim://x@host:8500", b"user:ge@heim@host:8500"];
    for address in odd {
        let value = OsString::from_vec(address.to_vec());
        let error = ConsulConfig::from_vars(|name| (name == "CONSUL_HTTP_ADDR").then(|| value.clone()));
        let error = error.unwrap_err();
        assert_eq!(error.setting, "CONSUL_HTTP_ADDR");
        assert!(!format!("{error} {error:?}").contains("heim"), "{error}");
    }
}
