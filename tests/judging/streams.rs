//! RST_STREAM: one stream's end, and not the connection's.

use h2::Reason;
use tonic::{Code, Status};
use tonic_failover::client::CallErrorKind;

use crate::{
    scripted::{Act, Ask, End, Scripted},
    stage::{GET, INCREMENT, Stage, bare, is_ours, request, send, verdict},
    table::outcome::{Proof, Verdict},
};

const OTHERS: [Reason; 12] = [
    Reason::NO_ERROR,
    Reason::PROTOCOL_ERROR,
    Reason::INTERNAL_ERROR,
    Reason::FLOW_CONTROL_ERROR,
    Reason::STREAM_CLOSED,
    Reason::FRAME_SIZE_ERROR,
    Reason::CANCEL,
    Reason::COMPRESSION_ERROR,
    Reason::CONNECT_ERROR,
    Reason::ENHANCE_YOUR_CALM,
    Reason::INADEQUATE_SECURITY,
    Reason::HTTP_1_1_REQUIRED,
];

#[tokio::test]
async fn a_refused_stream_was_not_processed_and_is_resent_once() {
    let server = Scripted::start(|_| Act::Reset(Reason::REFUSED_STREAM)).await;
    let error = send(bare(server.port).await, request(server.port, INCREMENT)).await.unwrap_err();
    let expected = Verdict { proof: Proof::Refused, lost: None, timed_out: false, own: false };
    assert_eq!(verdict("REFUSED_STREAM", error), expected);

    let once = |ask: &Ask| match ask.number {
        1 => Act::Reset(Reason::REFUSED_STREAM),
        _ => Act::Answer,
    };
    let server = Scripted::start(once).await;
    let stage = Stage::of(server.port).await;
    assert_eq!(stage.call(INCREMENT).await.unwrap(), 2);
    assert_eq!(server.connections(), 1);

    let server = Scripted::start(|_| Act::Reset(Reason::REFUSED_STREAM)).await;
    let stage = Stage::of(server.port).await;
    let status = stage.call(INCREMENT).await.unwrap_err();
    is_ours("for ever", &status, &CallErrorKind::Refused, 2);
}

#[tokio::test]
async fn a_stream_reset_for_any_other_reason_may_have_run() {
    for reason in OTHERS {
        let what = format!("RST_STREAM {reason:?}");
        let once = move |ask: &Ask| match ask.number {
            1 => Act::Reset(reason),
            _ => Act::Answer,
        };
        let server = Scripted::start(once).await;
        let error = send(bare(server.port).await, request(server.port, INCREMENT)).await.unwrap_err();
        let expected = Verdict { proof: Proof::MayHaveRun, lost: None, timed_out: false, own: false };
        assert_eq!(verdict(&what, error), expected, "{what}");

        let server = Scripted::start(once).await;
        let stage = Stage::of(server.port).await;
        stage.fails_once(&what, INCREMENT, CallErrorKind::StreamReset).await;
        assert_eq!(server.asks().len(), 1, "{what}: not resent");

        let server = Scripted::start(once).await;
        let stage = Stage::of(server.port).await;
        assert_eq!(stage.call(GET).await.unwrap(), 2, "{what}: a safe one is resent");
        assert_eq!(server.connections(), 1, "{what}");
    }
}

/// hyper takes NO_ERROR and CANCEL there for a good end of the body.
#[tokio::test]
async fn a_stream_reset_in_the_response_cuts_it_whatever_the_reason() {
    for reason in [Reason::REFUSED_STREAM, Reason::INTERNAL_ERROR, Reason::CANCEL, Reason::NO_ERROR] {
        for messages in [0, 1] {
            let what = format!("RST_STREAM {reason:?} after headers and {messages} messages");
            let server = Scripted::start(move |_| Act::Begin(messages, End::Reset(reason))).await;
            let stage = Stage::of(server.port).await;
            stage.fails_once(&what, INCREMENT, CallErrorKind::ResponseCut).await;
            let mut stream = stage.watch().await.unwrap();
            for _ in 0..messages {
                stream.message().await.unwrap().expect("a message");
            }
            let status = stream.message().await.unwrap_err();
            is_ours(&what, &status, &CallErrorKind::ResponseCut, 1);
            assert_eq!(server.asks().len(), 2, "{what}: never resent");

            let once = move |ask: &Ask| match ask.number {
                1 => Act::Begin(messages, End::Reset(reason)),
                _ => Act::Answer,
            };
            let server = Scripted::start(once).await;
            let stage = Stage::of(server.port).await;
            assert_eq!(stage.call(GET).await.unwrap(), 2, "{what}: nobody has seen a part of it");
            let previous = server.asks()[1].header("grpc-previous-rpc-attempts").map(str::to_owned);
            assert_eq!(previous.as_deref(), Some("1"), "{what}: resent as one that may have run");
        }
    }
}

/// Which is why no verdict looks at it. That the code is what it is also shows
/// that the feature is on in one of the packages that run this, and off in the other.
#[tokio::test]
async fn tonics_own_code_for_a_refused_stream_depends_on_its_server_feature() {
    let server = Scripted::start(|_| Act::Reset(Reason::REFUSED_STREAM)).await;
    let error = send(bare(server.port).await, request(server.port, INCREMENT)).await.unwrap_err();
    let code = if env!("CARGO_PKG_NAME") == "tonic-failover" { Code::Unavailable } else { Code::Unknown };
    assert_eq!(Status::from_error(Box::new(error)).code(), code);
}
