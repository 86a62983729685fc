//! What the server says of the call: `grpc-status`, in the headers or in the
//! trailers, missing or malformed, and what stands in its place.

use tonic::{Code, Status};
use tonic_failover::{
    NotPrimary, PrimaryLost,
    client::{CallError, CallErrorKind, Policy, ServiceOptions},
};

use crate::{
    scripted::{Act, Ask, End, Scripted},
    stage::{GET, INCREMENT, SOON, Stage, is_ours, options},
};

/// A server that does `act` at first, and answers from then on.
async fn once(act: Act) -> (Scripted, Stage) {
    let script = move |ask: &Ask| if ask.number == 1 { act.clone() } else { Act::Answer };
    let server = Scripted::start(script).await;
    let stage = Stage::of(server.port).await;
    (server, stage)
}

/// An answer: it reaches the caller, and only UNAVAILABLE is resent, where that is safe.
async fn is_an_answer(act: Act, code: Code, words: &str) {
    let what = format!("{act:?}");
    let check = |status: &Status| {
        assert_eq!(status.code(), code, "{what}: {status:?}");
        assert!(status.message().contains(words), "{what}: {status:?}");
        assert!(CallError::of(status).is_none(), "{what}: an answer, and no error of ours");
    };
    let (server, stage) = once(act.clone()).await;
    check(&stage.call(INCREMENT).await.unwrap_err());
    assert_eq!(server.asks().len(), 1, "{what}: not resent");

    let (server, stage) = once(act).await;
    match stage.call(GET).await {
        Ok(attempts) => assert_eq!((code, attempts), (Code::Unavailable, 2), "{what}"),
        Err(status) => {
            assert_ne!(code, Code::Unavailable, "{what}: resent where it is safe");
            check(&status);
            assert_eq!(server.asks().len(), 1, "{what}: the application's own answer");
        }
    }
    assert_eq!(server.connections(), 1, "{what}");
}

#[tokio::test]
async fn a_status_in_the_headers_is_the_answer() {
    for code in 1..=16 {
        let act = Act::Status(code, "as%20told", vec![]);
        is_an_answer(act, Code::from_i32(code), "as told").await;
    }
}

#[tokio::test]
async fn a_status_in_the_trailers_is_the_answer() {
    for code in 1..=16 {
        for messages in [0, 1] {
            let act = Act::Begin(messages, End::Status(code));
            is_an_answer(act, Code::from_i32(code), "as told").await;
        }
    }
}

#[tokio::test]
async fn a_malformed_status_is_the_answer_unknown() {
    for text in ["", "no number", "17", "99", "-1", "014"] {
        is_an_answer(Act::StatusText(text), Code::Unknown, "").await;
        is_an_answer(Act::Begin(0, End::StatusText(text)), Code::Unknown, "").await;
    }
}

/// The stream ends well, with trailers or without, and nothing says how the call did.
#[tokio::test]
async fn a_missing_status_is_a_response_that_was_cut() {
    for end in [End::NoTrailers, End::NoStatus] {
        for messages in [0, 1] {
            let act = Act::Begin(messages, end.clone());
            let what = format!("{act:?}");
            let (server, stage) = once(act.clone()).await;
            stage.fails_once(&what, INCREMENT, CallErrorKind::ResponseCut).await;
            assert_eq!(server.asks().len(), 1, "{what}: not resent");

            let (_server, stage) = once(act.clone()).await;
            let mut stream = stage.watch().await.unwrap();
            for _ in 0..messages {
                stream.message().await.unwrap().expect("a message");
            }
            is_ours(&what, &stream.message().await.unwrap_err(), &CallErrorKind::ResponseCut, 1);

            let (server, stage) = once(act).await;
            assert_eq!(stage.call(GET).await.unwrap(), 2, "{what}: a safe one is resent");
            assert_eq!(server.connections(), 1, "{what}");
        }
    }
}

/// From a proxy with nothing behind it: with a page for people, and without.
#[tokio::test]
async fn an_http_status_without_a_grpc_status_is_an_answer_with_grpcs_code_for_it() {
    let codes = [
        (400, Code::Internal),
        (401, Code::Unauthenticated),
        (403, Code::PermissionDenied),
        (404, Code::Unimplemented),
        (429, Code::Unavailable),
        (500, Code::Unknown),
        (502, Code::Unavailable),
        (503, Code::Unavailable),
        (504, Code::Unavailable),
    ];
    for (http, code) in codes {
        let words = format!("HTTP status {http}");
        is_an_answer(Act::Http(http), code, &words).await;
        is_an_answer(Act::Page(http, "text/html"), code, &words).await;
        is_an_answer(Act::Page(http, "application/grpc"), code, &words).await;
    }
}

#[tokio::test]
async fn a_page_in_place_of_a_message_is_the_answer_unknown() {
    is_an_answer(Act::Page(200, "text/html"), Code::Unknown, "content type \"text/html\"").await;
}

/// UNAVAILABLE, whoever says it; nothing else says anything of the instance.
#[tokio::test]
async fn only_what_says_unavailable_is_held_against_an_instance() {
    let statuses = (1..=16).map(|code| (Act::Status(code, "as told", vec![]), code == 14));
    let pages = [(500, false), (404, false), (503, true)].map(|(http, counts)| (Act::Http(http), counts));
    for (act, counts) in statuses.chain(pages) {
        let what = format!("{act:?}");
        let (says, good) = (Scripted::start(move |_| act.clone()).await, Scripted::good().await);
        let options = blames_at_once().failures_to_eject(2);
        let stage = Stage::ready(options, &[says.port, good.port]).await;
        while says.asks().len() < 2 {
            let _ = stage.call(INCREMENT).await;
        }
        if counts {
            stage.until(&what, |c| c.status().datacenters[0].ejected == 1).await;
        }
        for _ in 0..6 {
            let _ = stage.call(INCREMENT).await;
        }
        assert_eq!(says.asks().len(), if counts { 2 } else { 5 }, "{what}");
        assert_eq!(stage.client.status().datacenters[0].ejected, usize::from(counts), "{what}");
    }
}

/// Calls go to both of two in turn, while nobody is held to have failed.
fn blames_at_once() -> ServiceOptions {
    options().policy(Policy::RoundRobin).failures_to_eject(1).panic_threshold(0).ejection(SOON, SOON)
}

/// The binary details of a status, as they travel.
fn details(status: Status) -> &'static str {
    let mut headers = http::HeaderMap::new();
    status.add_header(&mut headers).unwrap();
    headers["grpc-status-details-bin"].to_str().unwrap().to_owned().leak()
}

/// A standby's refusal: resent once whatever the method, and seen as it came the second time.
#[tokio::test]
async fn who_is_not_the_primary_has_not_run_the_call_and_is_not_to_blame() {
    let details = details(NotPrimary::new(None).into());
    let refusal = Act::Status(14, "NOT_PRIMARY", vec![("grpc-status-details-bin", details)]);
    for path in [INCREMENT, GET] {
        let (server, stage) = once(refusal.clone()).await;
        assert_eq!(stage.call(path).await.unwrap(), 2, "{path}");
        assert_eq!(server.asks().len(), 2, "{path}");
    }
    let always = refusal.clone();
    let server = Scripted::start(move |_| always.clone()).await;
    let stage = Stage::ready(options().failures_to_eject(1).panic_threshold(0), &[server.port]).await;
    for n in 1..=3 {
        let status = stage.call(INCREMENT).await.unwrap_err();
        assert!(NotPrimary::of(&status).is_some() && CallError::of(&status).is_none(), "{status:?}");
        assert_eq!(server.asks().len(), 2 * n, "resent once");
    }
    let (server, other) = (Scripted::start(move |_| refusal.clone()).await, Scripted::good().await);
    let stage = Stage::ready(blames_at_once(), &[server.port, other.port]).await;
    for _ in 0..10 {
        stage.call(INCREMENT).await.unwrap();
    }
    assert!(server.asks().len() >= 5, "it goes on to be asked: {}", server.asks().len());
    assert_eq!(stage.client.status().datacenters[0].ejected, 0);
}

/// The end of a stream at a primary that is deposed: it ran in part, and nobody is to blame.
#[tokio::test]
async fn who_is_the_primary_no_longer_has_begun_the_call_and_is_not_to_blame() {
    let details = details(PrimaryLost::new(None).into());
    let script = move |_: &Ask| Act::Begin(1, End::Details(14, details));
    let (server, other) = (Scripted::start(script).await, Scripted::start(script).await);
    let stage = Stage::ready(blames_at_once(), &[server.port, other.port]).await;
    for n in 1..=4 {
        let mut stream = stage.watch().await.unwrap();
        stream.message().await.unwrap().expect("a message");
        let status = stream.message().await.unwrap_err();
        assert!(PrimaryLost::of(&status).is_some() && CallError::of(&status).is_none(), "{status:?}");
        assert_eq!(server.asks().len() + other.asks().len(), n, "never resent");
    }
    assert_eq!(stage.client.status().datacenters[0].ejected, 0);

    // A handler may say it in place of a single answer.
    let says = move |_: &Ask| Act::Status(14, "PRIMARY_LOST", vec![("grpc-status-details-bin", details)]);
    let (server, other) = (Scripted::start(says).await, Scripted::start(says).await);
    let stage = Stage::ready(blames_at_once(), &[server.port, other.port]).await;
    for n in 1..=4 {
        let status = stage.call(INCREMENT).await.unwrap_err();
        assert!(PrimaryLost::of(&status).is_some() && CallError::of(&status).is_none(), "{status:?}");
        assert_eq!(server.asks().len() + other.asks().len(), n, "not resent");
    }
    assert!(stage.call(GET).await.is_err());
    assert_eq!(stage.client.status().datacenters[0].ejected, 0);
}
