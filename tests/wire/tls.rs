//! TLS to the instances, and where one side expects another thing than it gets.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio::{net::TcpListener, task::JoinSet};
use tonic::transport::{
    Certificate, ClientTlsConfig, Identity, Server, ServerTlsConfig, server::TcpIncoming,
};
use tonic_failover::client::CallErrorKind;

use crate::{
    common::{DEADLINE, hostile, options, scripted::Scripted, until},
    stage::{Stage, get, kind, timed},
};

/// A certificate authority and a server's identity by it.
struct Authority {
    ca: Certificate,
    identity: Identity,
}

fn authority(name: &str, host: &str) -> Authority {
    let ca_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new([]).unwrap();
    // Each has a name of its own: rustls looks for the issuer by it.
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = params.self_signed(&ca_key).unwrap();
    let key = KeyPair::generate().unwrap();
    let issuer = Issuer::new(params, ca_key);
    let leaf = CertificateParams::new([host.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    Authority {
        ca: Certificate::from_pem(ca.pem()),
        identity: Identity::from_pem(leaf.pem(), key.serialize_pem()),
    }
}

/// A server with a health service and nothing else: a call that gets
/// UNIMPLEMENTED from it has reached it.
struct TlsServer {
    port: u16,
    _tasks: JoinSet<()>,
}

async fn serve(identity: Identity) -> TlsServer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder()
        .tls_config(ServerTlsConfig::new().identity(identity))
        .unwrap()
        .add_service(health)
        .serve_with_incoming(TcpIncoming::from(listener));
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { server.await.unwrap() });
    TlsServer { port, _tasks: tasks }
}

fn trusting(authority: &Authority) -> ClientTlsConfig {
    ClientTlsConfig::new().ca_certificate(authority.ca.clone())
}

/// Calls reach `good` at once; `bad` is tried and never published.
async fn only_the_good_one(what: &str, tls: Option<ClientTlsConfig>, good: u16, bad: u16, words: &str) {
    let options = || match &tls {
        Some(tls) => options().tls(tls.clone()),
        None => options(),
    };
    for _ in 0..2 {
        let Some(stage) = Stage::with(options(), &[("good", good), ("bad", bad)]).await else { return };
        stage.client.ready().await.unwrap();
        until(&stage.client, "the bad one was tried", |c| c.status().datacenters[0].ejected == 1).await;
        assert_eq!(stage.bound(), "good", "{what}");
        assert_eq!(stage.client.binding().generation(), 1, "{what}");
        for _ in 0..10 {
            let (result, took) = timed(get(stage.channel(), DEADLINE)).await;
            if let Err(status) = result {
                assert_eq!(status.code(), tonic::Code::Unimplemented, "{what}: {status:?}");
            }
            assert!(took < Duration::from_millis(900), "{what}: {took:?}");
        }
    }
    let options = options().fail_fast_after(Duration::from_millis(1500));
    let Some(stage) = Stage::with(options, &[("bad", bad)]).await else { return };
    let (result, took) = timed(get(stage.channel(), DEADLINE)).await;
    let status = result.unwrap_err();
    assert!(matches!(kind(&status), CallErrorKind::NothingUsable { .. }), "{what}: {status:?}");
    assert!(status.message().contains(words), "{what}: {}", status.message());
    assert!(took < DEADLINE, "{what}: {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_certificate_is_of_another_authority_is_never_published() {
    let (ours, other) = (authority("ours", "127.0.0.1"), authority("other", "127.0.0.1"));
    let tls = trusting(&ours);
    let (good, bad) = (serve(ours.identity).await, serve(other.identity).await);
    only_the_good_one("wrong CA", Some(tls), good.port, bad.port, "UnknownIssuer").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_certificate_names_another_host_is_never_published() {
    let ours = authority("ours", "127.0.0.1");
    let tls = trusting(&ours);
    let good = serve(ours.identity).await;
    let elsewhere = authority("elsewhere", "elsewhere.example");
    // Both are trusted: the name alone is wrong.
    let both = tls.ca_certificate(elsewhere.ca.clone());
    let bad = serve(elsewhere.identity).await;
    only_the_good_one("wrong name", Some(both), good.port, bad.port, "certificate").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plaintext_server_where_tls_is_expected_is_never_published() {
    let ours = authority("ours", "127.0.0.1");
    let tls = trusting(&ours);
    let (good, bad) = (serve(ours.identity).await, Scripted::good().await);
    only_the_good_one("no TLS", Some(tls), good.port, bad.port, "InvalidContentType").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tls_server_where_plaintext_is_expected_is_never_published() {
    let (good, bad) = (Scripted::good().await, serve(authority("ours", "127.0.0.1").identity).await);
    only_the_good_one("unexpected TLS", None, good.port, bad.port, "no gRPC answer").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_never_answers_the_tls_handshake_is_never_published() {
    let ours = authority("ours", "127.0.0.1");
    let tls = trusting(&ours);
    let (good, bad) = (serve(ours.identity).await, hostile::silent().await);
    only_the_good_one("silent", Some(tls), good.port, bad.port, "no answer within 1s").await;
}
