//! What the result of one attempt proves: pure, and the only place that decides it.
//!
//! The status code of an error made on our side of the wire proves nothing: the
//! same fault comes as CANCELLED, UNKNOWN, INTERNAL or UNAVAILABLE, depending on
//! timing and on tonic's features. What the chain of `source()` holds does:
//!
//! | found in the chain, before response headers | proves | evidence |
//! |---|---|---|
//! | `tonic::ConnectError` | never sent | made by the connector, before there is a request on a connection |
//! | `hyper::Error::is_canceled` | never sent | hyper makes it only for a request still in its queue |
//! | remote GOAWAY in `h2::Error` | refused | h2 gives it only to streams above the peer's last stream id (RFC 9113, 6.8) |
//! | remote RST_STREAM REFUSED_STREAM | refused | RFC 9113, 8.7: not processed |
//! | a reset that is neither the peer's nor h2's own | may have run, and fails for its request's sake | hyper resets a stream whose request's body fails, and no other that is waited for |
//! | anything else | may have run | - |
//!
//! After the headers nothing proves that the call has not run, not even a refusal.
//! `docs/judging.md` has every row with its measurement, what the caller sees, and
//! the test that makes it happen on real sockets.

use std::error::Error;

use tonic::{Code, Status};

use super::{answer::NoEnd, report::LossCause};

/// What is proven about a request that got no response headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// It never left: it may be sent elsewhere, any number of times.
    NeverSent,
    /// The server has not processed it: it may be sent again, once (gRFC A6).
    Refused,
    /// It may have run.
    MayHaveRun,
}

/// A failed attempt: what it proves, and what became of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) proof: Proof,
    /// Why the connection takes no more calls; `None` where only the one stream failed.
    pub(crate) lost: Option<LossCause>,
    /// The transport's own time limit (the `grpc-timeout` header) ended it.
    pub(crate) timed_out: bool,
    /// The request's own body failed, and the transport reset the stream for it.
    pub(crate) own: bool,
}

impl Verdict {
    const fn new(proof: Proof, lost: Option<LossCause>) -> Self {
        Self { proof, lost, timed_out: false, own: false }
    }

    /// It has not run, because the connection takes no more calls.
    pub(crate) fn is_of_a_spent_connection(self) -> bool {
        self.proof != Proof::MayHaveRun && self.lost.is_some()
    }
}

/// Judges the error of an attempt that got no response headers.
pub(crate) fn judge(error: &(dyn Error + 'static)) -> Verdict {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<tonic::ConnectError>() {
            // Our connections connect once, before they are used: a later
            // attempt to connect means that the first connection has ended.
            return Verdict::new(Proof::NeverSent, Some(LossCause::Closed));
        }
        if error.is::<NoEnd>() {
            // One stream's fault.
            return Verdict::new(Proof::MayHaveRun, None);
        }
        if error.is::<tonic::TimeoutExpired>() {
            return Verdict { timed_out: true, ..Verdict::new(Proof::MayHaveRun, None) };
        }
        if let Some(hyper) = error.downcast_ref::<hyper::Error>() {
            if hyper.is_canceled() {
                return Verdict::new(Proof::NeverSent, Some(LossCause::GoingAway));
            }
            if hyper.is_timeout() {
                return Verdict::new(Proof::MayHaveRun, Some(LossCause::Closed));
            }
        }
        if let Some(h2) = error.downcast_ref::<h2::Error>() {
            return judge_h2(h2);
        }
        next = error.source();
    }
    Verdict::new(Proof::MayHaveRun, Some(LossCause::Closed))
}

fn judge_h2(error: &h2::Error) -> Verdict {
    if error.is_remote() && error.is_go_away() {
        return Verdict::new(Proof::Refused, Some(LossCause::GoingAway));
    }
    if error.is_reset() {
        let refused = error.is_remote() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
        let verdict = Verdict::new(if refused { Proof::Refused } else { Proof::MayHaveRun }, None);
        // Neither the peer's nor h2's: hyper's, which resets a stream whose request it cannot read to its end.
        return Verdict { own: !error.is_remote() && !error.is_library(), ..verdict };
    }
    Verdict::new(Proof::MayHaveRun, Some(LossCause::Closed))
}

/// The status of a response that is no gRPC server's: an HTTP status other than
/// 200, or another content, from a proxy that has no server behind it. `None`
/// where it is gRPC, or where a `grpc-status` tells anyway.
///
/// The codes are those of gRPC's "HTTP to gRPC Status Code Mapping"; all that it
/// does not name are UNKNOWN. A missing content type is forgiven, as tonic does.
pub(crate) fn status_of_no_server<B>(response: &http::Response<B>) -> Option<Status> {
    let headers = response.headers();
    let content = headers.get(http::header::CONTENT_TYPE);
    let foreign = content.filter(|content| !is_grpc(content));
    let http = response.status();
    if (http == http::StatusCode::OK && foreign.is_none()) || headers.contains_key(Status::GRPC_STATUS) {
        return None;
    }
    let code = match http.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502..=504 => Code::Unavailable,
        _ => Code::Unknown,
    };
    let foreign = foreign.map(|content| format!(", content type {content:?}")).unwrap_or_default();
    Some(Status::new(code, format!("HTTP status {http} without a gRPC status{foreign}")))
}

/// Whether this content type is gRPC's.
pub(crate) fn is_grpc(content: &http::HeaderValue) -> bool {
    content.as_bytes().starts_with(b"application/grpc")
}

/// Whether a status that came over the wire counts against the instance.
///
/// Only UNAVAILABLE does: every other code is the application's own answer.
pub(crate) fn counts_against(code: Code) -> bool {
    code == Code::Unavailable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_refused_stream_was_not_processed_and_costs_no_connection() {
        // h2 marks an error built from a bare reason as neither remote nor local.
        let local = h2::Error::from(h2::Reason::REFUSED_STREAM);
        assert_eq!(judge(&local).proof, Proof::MayHaveRun, "only the peer's word proves it");
    }

    #[test]
    fn an_unknown_error_may_have_run_and_the_connection_is_not_trusted() {
        let verdict = judge(&std::io::Error::other("anything"));
        assert_eq!(verdict, Verdict::new(Proof::MayHaveRun, Some(LossCause::Closed)));
    }

    /// The whole of gRPC's table, and what it does not name.
    #[test]
    fn a_response_that_is_no_grpc_has_the_code_of_its_http_status() {
        let answer = |status: u16, header: (&'static str, &'static str)| {
            let response = http::Response::builder().status(status).header(header.0, header.1);
            status_of_no_server(&response.body(()).unwrap()).map(|s| s.code())
        };
        let codes = [
            (400, Code::Internal),
            (401, Code::Unauthenticated),
            (403, Code::PermissionDenied),
            (404, Code::Unimplemented),
            (429, Code::Unavailable),
            (502, Code::Unavailable),
            (503, Code::Unavailable),
            (504, Code::Unavailable),
            (204, Code::Unknown),
            (302, Code::Unknown),
            (500, Code::Unknown),
        ];
        for (status, code) in codes {
            for content in ["text/html", "application/grpc"] {
                assert_eq!(answer(status, ("content-type", content)), Some(code), "{status} {content}");
            }
            assert_eq!(answer(status, ("grpc-status", "5")), None, "{status}: gRPC's word goes first");
        }
        assert_eq!(answer(200, ("content-type", "text/html")), Some(Code::Unknown));
        for content in ["application/grpc", "application/grpc+proto"] {
            assert_eq!(answer(200, ("content-type", content)), None, "its status comes in the trailers");
        }
        assert_eq!(answer(200, ("x-mine", "kept")), None, "forgiven");
    }

    #[test]
    fn only_unavailable_counts_against_an_instance() {
        for code in (0..17).map(Code::from_i32) {
            assert_eq!(counts_against(code), code == Code::Unavailable, "{code:?}");
        }
    }
}
