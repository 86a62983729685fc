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
//! | anything else | may have run | - |

use std::error::Error;

use tonic::{Code, Status};

use super::{
    answer::NoEnd,
    headers::{GRPC_STATUS, find},
    report::LossCause,
};

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
}

impl Verdict {
    const fn new(proof: Proof, lost: Option<LossCause>) -> Self {
        Self { proof, lost, timed_out: false }
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
            return Verdict { proof: Proof::MayHaveRun, lost: None, timed_out: true };
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
        return Verdict::new(if refused { Proof::Refused } else { Proof::MayHaveRun }, None);
    }
    Verdict::new(Proof::MayHaveRun, Some(LossCause::Closed))
}

/// The status that a response's headers already tell, if they do: `grpc-status`
/// in a response without a body, or an HTTP status in its place, from a proxy
/// that has no server behind it (the table is gRPC's "HTTP to gRPC Status Code Mapping").
pub(crate) fn status_in_headers<B>(response: &http::Response<B>) -> Option<Status> {
    if find(response.headers(), &GRPC_STATUS).is_some()
        && let Some(status) = Status::from_header_map(response.headers())
    {
        return Some(status);
    }
    let code = match response.status().as_u16() {
        200 => return None,
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502..=504 => Code::Unavailable,
        _ => Code::Unknown,
    };
    Some(Status::new(code, format!("HTTP status {} without a gRPC status", response.status())))
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

    #[test]
    fn a_proxy_without_a_server_behind_it_counts_as_unavailable() {
        let answer = |status: u16| {
            let response = http::Response::builder().status(status).body(()).unwrap();
            status_in_headers(&response).map(|s| s.code())
        };
        assert_eq!(answer(503), Some(Code::Unavailable));
        assert_eq!(answer(404), Some(Code::Unimplemented));
        assert_eq!(answer(200), None, "the status comes in the trailers");
    }

    #[test]
    fn only_unavailable_counts_against_an_instance() {
        for code in (0..17).map(Code::from_i32) {
            assert_eq!(counts_against(code), code == Code::Unavailable, "{code:?}");
        }
    }
}
