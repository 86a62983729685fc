//! What goes out, and what goes along with it.

use std::{io, process::Command, sync::Arc};

use parking_lot::Mutex;
use serde_json::json;
use tonic_failover::{
    consul::{BlockingIndex, RegistryError},
    testkit::{ConsulProcess, Port},
};

use super::{
    scripted::{Reply, Scripted, answer},
    *,
};

/// Set in the child of the test below.
const UNDER_PROXY: &str = "TONIC_FAILOVER_TEST_UNDER_PROXY";

#[tokio::test]
async fn token_user_and_namespace_go_along_and_the_query_is_as_asked() {
    let server = Scripted::always(answer("200 OK", "X-Consul-Index: 9\r\n", "[]")).await;
    let config = ConsulConfig::new(&server.url()).unwrap();
    let config = config.token("geheim").basic_auth("Aladdin:open sesame").namespace("team a");
    let client = ConsulClient::new(config).unwrap();
    let asked = query("counter").tag("v1").tag("v2").include_warning(true);
    client.watch_instances(&asked, BlockingIndex::from(9), Duration::from_secs(30)).await.unwrap();
    let head = server.requests().remove(0);
    let line = "GET /v1/health/service/counter?ns=team+a&tag=v1&tag=v2&stale&index=9&wait=30000ms HTTP/1.1";
    assert_eq!(head.lines().next(), Some(line));
    for header in [
        "x-consul-token: geheim",
        "authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==",
        "user-agent: tonic-failover/",
    ] {
        assert_eq!(head.matches(header).count(), 1, "{head}");
    }
}

#[tokio::test]
async fn an_agent_may_listen_on_ipv6() {
    let Ok(listener) = tokio::net::TcpListener::bind("[::1]:0").await else {
        eprintln!("SKIPPED: no IPv6 on this machine");
        return;
    };
    let server = Scripted::on(listener, answer("200 OK", "", "[]"));
    for address in [server.url(), server.url().replace("http://", "")] {
        client(&address).healthy_instances(&query("counter")).await.unwrap();
    }
}

#[tokio::test]
async fn a_query_too_long_for_a_url_is_refused_unsent() {
    let server = Scripted::always(answer("200 OK", "", "[]")).await;
    let client = client(&server.url());
    let error = client.healthy_instances(&query("counter").filter("x".repeat(70_000))).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unsendable { .. }), "{error:?}");
    for name in ["", "a\nb", "..", "a/"] {
        let error = client.deregister(name).await.unwrap_err();
        assert!(matches!(error, RegistryError::Unsendable { .. }), "{error:?}");
        assert!(client.pass_check(name).await.is_err());
    }
    assert_eq!(server.requests().len(), 0);
    client.healthy_instances(&query("counter").filter("x".repeat(60_000))).await.unwrap();
}

#[tokio::test]
async fn a_proxy_named_in_the_environment_is_not_used() {
    // The environment cannot be changed beside other tests, so this one runs itself
    // again with another.
    if let Ok(url) = std::env::var(UNDER_PROXY) {
        client(&url).healthy_instances(&query("counter")).await.unwrap();
        return;
    }
    let server = Scripted::always(answer("200 OK", "", "[]")).await;
    let proxy = Scripted::always(answer("502 Proxy", "", "")).await;
    let (url, proxy_url) = (server.url(), proxy.url());
    let output = tokio::task::spawn_blocking(move || {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "requests::a_proxy_named_in_the_environment_is_not_used"]);
        for name in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
            child.env(name, &proxy_url);
        }
        child.env_remove("NO_PROXY").env_remove("no_proxy").env(UNDER_PROXY, url).output().unwrap()
    })
    .await
    .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!((server.requests().len(), proxy.requests().len()), (1, 0));
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn requests_leave_no_line_in_the_log_whether_they_succeed_or_fail() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    for reply in [
        answer("200 OK", "", "[]"),
        answer("500 Oops", "", "No cluster leader"),
        answer("403 No", "", "ACL not found"),
        answer("200 OK", "", "rubbish"),
        Reply::Send(Vec::new()),
    ] {
        let server = Scripted::always(reply).await;
        let _ = client(&server.url()).healthy_instances(&query("counter")).await;
        let _ = client(&server.url()).pass_check("service:a").await;
        assert_eq!(server.requests().len(), 2);
    }
    let _ = client("localhost:1").healthy_instances(&query("counter")).await;
    let text = String::from_utf8(log.0.lock().clone()).unwrap();
    assert_eq!(text, "");
}

#[tokio::test]
async fn a_consul_that_speaks_tls_is_asked_with_certificates_of_both_sides() {
    let Some(bin) = consul() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_key = rcgen::KeyPair::generate().unwrap();
    std::fs::write(file("ca.pem"), ca.self_signed(&ca_key).unwrap().pem()).unwrap();
    let ca = rcgen::Issuer::new(ca, ca_key);
    for name in ["agent", "client"] {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let key = rcgen::KeyPair::generate().unwrap();
        let cert = rcgen::CertificateParams::new(names).unwrap().signed_by(&key, &ca).unwrap();
        std::fs::write(file(&format!("{name}.pem")), cert.pem()).unwrap();
        std::fs::write(file(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }
    let held = Port::free().unwrap();
    let port = held.number();
    let hcl = format!(
        "ports {{ https = {port} }} verify_incoming_https = true\n\
         ca_file = {:?} cert_file = {:?} key_file = {:?}",
        file("ca.pem"),
        file("agent.pem"),
        file("agent.key")
    );
    let agent = ConsulProcess::builder(bin).hcl(hcl).start().await.unwrap();
    register(agent.registry(), json!({"ID": "a"})).await;
    let (ca, cert, key) = (file("ca.pem"), file("client.pem"), file("client.key"));
    let ask = async |config: ConsulConfig| {
        ConsulClient::new(config).unwrap().healthy_instances(&query("counter")).await
    };
    for host in ["localhost", "127.0.0.1"] {
        let at = || ConsulConfig::new(&format!("https://{host}:{port}")).unwrap();
        let answer = ask(at().ca_cert(&ca).client_cert(&cert, &key)).await.unwrap();
        assert_eq!(answer.snapshot.instances[0].name, "a");
        let untrusted = ask(at().client_cert(&cert, &key)).await.unwrap_err();
        assert!(matches!(untrusted, RegistryError::Unreachable { .. }), "{untrusted:?}");
        ask(at().tls_verify(false).client_cert(&cert, &key)).await.unwrap();
        ask(at().ca_cert(&ca)).await.unwrap_err();
    }
}
