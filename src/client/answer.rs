//! A response as an attempt brings it: begun, or whole.
//!
//! A unary answer to a safe call is taken in whole before any of it reaches the
//! caller. Its frames come together nearly always, and are passed on as they are;
//! but where the connection dies between them, the call can still be sent again.
//! Every other response is handed over as soon as it has begun, and is then
//! never repeated.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::{HeaderMap, Response, StatusCode};
use http_body::Body as HttpBody;
use tonic::{Code, Status, body::Body};

use super::{
    details,
    frames::{Frames, Kept},
    headers::{Said, said},
    outcome,
};

/// What came of an attempt that was answered.
pub(crate) enum Answer {
    /// The headers are here, with or without the call's status; the body goes on.
    Begun { response: Response<Body>, has_status: bool },
    /// All of it is here.
    Whole { response: Response<Frames>, code: Option<Code> },
}

/// A response whose headers are here, and whether they tell its status.
///
/// One of no gRPC server becomes one that says so in its headers: what a proxy writes for people is
/// not read as a message. Details that tonic could not decode go.
#[inline]
pub(crate) fn begun(response: Response<Body>) -> (Response<Body>, bool) {
    let Said { status, content_type, details } = said(response.headers());
    let is_grpc = content_type.is_none_or(outcome::is_grpc);
    if response.status() == StatusCode::OK && is_grpc && !details {
        let has_status = status.is_some();
        return (response, has_status);
    }
    unusual(response)
}

#[cold]
fn unusual(mut response: Response<Body>) -> (Response<Body>, bool) {
    details::drop_malformed(response.headers_mut());
    let response = as_grpc(response);
    let has_status = tell(response.headers());
    (response, has_status)
}

fn as_grpc(mut response: Response<Body>) -> Response<Body> {
    let Some(status) = outcome::status_of_no_server(&response) else { return response };
    if let Err(error) = status.add_header(response.headers_mut()) {
        tracing::debug!(%error, "no header could be made of a status");
    }
    response.map(|_| Body::empty())
}

/// Whether these say how the call ended.
#[inline]
pub(crate) fn tell(headers: &HeaderMap) -> bool {
    headers.contains_key(Status::GRPC_STATUS)
}

/// A response that is being taken in, up to a limit; what is longer goes on as
/// it has begun.
pub(crate) struct Intake {
    /// Gone once it has been taken in.
    response: Option<Response<Body>>,
    kept: Kept,
    trailers: Option<HeaderMap>,
    /// The headers told how the call ended.
    has_status: bool,
    /// The trailers did.
    code: Option<Code>,
    size: usize,
    limit: usize,
}

// === impl Answer ===

fn status_in(headers: &HeaderMap) -> Option<Status> {
    if tell(headers) { Status::from_header_map(headers) } else { None }
}

impl Answer {
    /// The call's code, as far as it is known.
    ///
    /// Said apart from [`status`](Self::status), which copies the trailers: two
    /// allocations that a call that went well is spared.
    #[inline]
    pub(crate) fn code(&self) -> Option<Code> {
        match self {
            Self::Begun { has_status: false, .. } => None,
            Self::Whole { code: Some(code), .. } => Some(*code),
            Self::Begun { .. } | Self::Whole { .. } => self.status().map(|status| status.code()),
        }
    }

    /// The call's status, as far as it is known.
    pub(crate) fn status(&self) -> Option<Status> {
        match self {
            Self::Begun { response, .. } => status_in(response.headers()),
            Self::Whole { response, .. } => {
                let trailers = response.body().trailers();
                trailers.and_then(status_in).or_else(|| status_in(response.headers()))
            }
        }
    }
}

// === impl Intake ===

impl Intake {
    #[inline]
    pub(crate) fn new(response: Response<Body>, has_status: bool, limit: usize) -> Self {
        Self {
            response: Some(response),
            kept: Kept::default(),
            trailers: None,
            has_status,
            code: None,
            size: 0,
            limit,
        }
    }

    /// Is not to be polled again once it is ready.
    ///
    /// # Errors
    /// The body's own, and [`NoEnd`] where it stops without a status.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Answer, Box<dyn std::error::Error + Send + Sync>>> {
        let response = self.response.as_mut().expect("polled until it is ready");
        while let Some(frame) = ready!(Pin::new(response.body_mut()).poll_frame(cx)) {
            match frame?.into_data() {
                Ok(data) => {
                    self.size += data.len();
                    self.kept.push(data);
                    if self.size > self.limit {
                        return Poll::Ready(Ok(self.too_long()));
                    }
                }
                Err(frame) => {
                    self.trailers = frame.into_trailers().ok();
                    if let Some(trailers) = &mut self.trailers {
                        let said = said(trailers);
                        self.code = said.status.map(|it| Code::from_bytes(it.as_bytes()));
                        if said.details {
                            details::drop_malformed(trailers);
                        }
                    }
                }
            }
        }
        let (kept, trailers) = (std::mem::take(&mut self.kept), self.trailers.take());
        let code = self.code;
        if !self.has_status && code.is_none() {
            return Poll::Ready(Err(NoEnd.into()));
        }
        let response = self.finish().map(|_| Frames::ending(kept, trailers));
        Poll::Ready(Ok(Answer::Whole { response, code }))
    }

    #[cold]
    fn too_long(&mut self) -> Answer {
        let kept = std::mem::take(&mut self.kept);
        let response = self.finish().map(|body| Body::new(Frames::before(kept, body)));
        Answer::Begun { response, has_status: self.has_status }
    }

    #[inline]
    fn finish(&mut self) -> Response<Body> {
        self.response.take().expect("polled until it is ready")
    }
}

/// The response stopped without saying how the call ended.
#[derive(Debug, thiserror::Error)]
#[error("the response ended without a status")]
pub(crate) struct NoEnd;

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use bytes::Bytes;
    use http_body::Frame;
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    async fn whole(
        response: Response<Body>,
        limit: usize,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        let (response, has_status) = begun(response);
        let mut intake = Intake::new(response, has_status, limit);
        poll_fn(|cx| intake.poll(cx)).await
    }

    fn response(frames: Vec<Result<Frame<Bytes>, Status>>) -> Response<Body> {
        Response::new(Body::new(StreamBody::new(tokio_stream::iter(frames))))
    }

    fn data(text: &'static str) -> Result<Frame<Bytes>, Status> {
        Ok(Frame::data(Bytes::from_static(text.as_bytes())))
    }

    fn trailers(code: &'static str) -> Result<Frame<Bytes>, Status> {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", code.parse().unwrap());
        Ok(Frame::trailers(trailers))
    }

    #[tokio::test]
    async fn a_whole_answer_is_passed_on_as_it_came() {
        let answer = whole(response(vec![data("one"), data("two"), trailers("0")]), 100).await.unwrap();
        assert_eq!(answer.status().map(|s| s.code()), Some(Code::Ok));
        let Answer::Whole { response, .. } = answer else { panic!("whole") };
        let collected = response.into_body().collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(collected.to_bytes(), "onetwo");
    }

    #[tokio::test]
    async fn one_that_stops_in_the_middle_is_an_error() {
        let cut = whole(response(vec![data("one"), Err(Status::unknown("cut"))]), 100).await;
        assert_eq!(cut.err().expect("cut").to_string(), Status::unknown("cut").to_string());
        let silent = whole(response(vec![data("one")]), 100).await;
        assert!(silent.err().expect("no end").is::<NoEnd>());
        let trailers = HeaderMap::from_iter([("x-mine".parse().unwrap(), "1".parse().unwrap())]);
        let mute = response(vec![data("one"), Ok(Frame::trailers(trailers))]);
        assert!(whole(mute, 100).await.err().expect("no status").is::<NoEnd>());
    }

    #[tokio::test]
    async fn a_long_one_goes_on_as_it_has_begun() {
        let frames = vec![data("12345"), data("67890"), data("abc"), trailers("0")];
        let answer = whole(response(frames), 7).await.unwrap();
        assert!(answer.status().is_none());
        let Answer::Begun { response, .. } = answer else { panic!("begun") };
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "1234567890abc");
    }

    #[tokio::test]
    async fn the_code_is_that_of_the_status() {
        for code in ["0", "5", "14", "nonsense"] {
            let answer = whole(response(vec![data("one"), trailers(code)]), 100).await.unwrap();
            assert_eq!(answer.code(), answer.status().map(|s| s.code()), "{code}");
        }
    }

    #[tokio::test]
    async fn a_status_in_the_headers_is_the_end() {
        let mut response = response(vec![]);
        response.headers_mut().insert("grpc-status", "5".parse().unwrap());
        let answer = whole(response, 100).await.unwrap();
        assert_eq!(answer.status().map(|s| s.code()), Some(Code::NotFound));
    }
}
