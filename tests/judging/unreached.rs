//! No connection comes about: no call leaves, and its caller is told why.

use std::time::Duration;

use tonic::transport::{ClientTlsConfig, Endpoint};
use tonic_failover::client::{CallError, CallErrorKind, ServiceOptions};

use crate::{
    hostile,
    stage::{INCREMENT, Stage, bare, endpoint, options, proof},
    table::outcome::Proof,
};

/// The instance is never published; a call waits for it until the fail-fast bound.
async fn is_never_called(what: &str, options: ServiceOptions, port: u16, words: &str) {
    let stage = Stage::set(options.fail_fast_after(Duration::from_millis(800)), &[port]);
    let status = stage.call(INCREMENT).await.unwrap_err();
    let error = CallError::of(&status).unwrap_or_else(|| panic!("{what}: {status:?}"));
    let CallErrorKind::NothingUsable { reason } = error.kind() else { panic!("{what}: {error:?}") };
    assert!(reason.contains(words), "{what}: {reason}");
    assert_eq!((error.attempts(), error.may_have_run()), (0, false), "{what}");
    assert_eq!(status.code(), tonic::Code::Unavailable, "{what}");
    assert!(stage.client.binding().is_empty(), "{what}");
}

#[tokio::test]
async fn a_refused_connection_proves_that_nothing_was_sent() {
    let nobody = hostile::refused();
    let port = nobody.port;
    assert_eq!(proof("refused", endpoint(port).connect_lazy(), port).await, Proof::NeverSent);
    is_never_called("refused", options(), port, "Connection refused").await;
}

#[tokio::test]
async fn a_connection_that_does_not_come_about_in_time_proves_that_nothing_was_sent() {
    let (limit, hole) = (Duration::from_millis(200), hostile::black_hole().await);
    let lazy = endpoint(hole.port).connect_timeout(limit).connect_lazy();
    assert_eq!(proof("black hole", lazy, hole.port).await, Proof::NeverSent);
    is_never_called("black hole", options().connect_timeout(limit), hole.port, "no answer within").await;
}

/// The peer answers the handshake with what is no TLS.
#[tokio::test]
async fn a_failed_tls_handshake_proves_that_nothing_was_sent() {
    let plain = hostile::http1().await;
    let https = Endpoint::from_shared(format!("https://127.0.0.1:{}", plain.port)).unwrap();
    let lazy = https.tls_config(ClientTlsConfig::new()).unwrap().connect_lazy();
    assert_eq!(proof("no TLS", lazy, plain.port).await, Proof::NeverSent);
    is_never_called("no TLS", options().tls(ClientTlsConfig::new()), plain.port, "corrupt message").await;
}

/// What is reported is a matter of luck; none of it is a proof that is not one.
#[tokio::test]
async fn a_peer_that_speaks_no_http2_is_never_called() {
    for (what, peer) in
        [("HTTP/1", hostile::http1().await), ("closes before SETTINGS", hostile::closing().await)]
    {
        for _ in 0..10 {
            let proof = proof(what, bare(peer.port).await, peer.port).await;
            assert!(matches!(proof, Proof::NeverSent | Proof::MayHaveRun), "{what}: {proof:?}");
        }
        is_never_called(what, options(), peer.port, "no gRPC answer").await;
    }
}

#[tokio::test]
async fn a_peer_that_accepts_and_says_nothing_is_never_called() {
    let (limit, silent) = (Duration::from_millis(200), hostile::silent().await);
    is_never_called("silent", options().connect_timeout(limit), silent.port, "no answer within").await;
}
