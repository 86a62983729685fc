//! A response as an attempt brings it: begun, or whole.
//!
//! A unary answer to a safe call is taken in whole before any of it reaches the
//! caller. Its frames come together nearly always, and are passed on as they are;
//! but where the connection dies between them, the call can still be sent again.
//! Every other response is handed over as soon as it has begun, and is then
//! never repeated.

use std::collections::VecDeque;

use http::{HeaderMap, Response};
use http_body_util::BodyExt;
use tonic::{Status, body::Body};

use super::{details, frames::Frames, outcome};

/// What came of an attempt that was answered.
pub(crate) enum Answer {
    /// The headers are here; the body goes on.
    Begun(Response<Body>),
    /// All of it is here.
    Whole(Response<Frames>),
}

/// A response of no gRPC server becomes one that says so in its headers: what a
/// proxy writes for people is not read as a message.
pub(crate) fn as_grpc(mut response: Response<Body>) -> Response<Body> {
    let Some(status) = outcome::status_of_no_server(&response) else { return response };
    if let Err(error) = status.add_header(response.headers_mut()) {
        tracing::debug!(%error, "no header could be made of a status");
    }
    response.map(|_| Body::empty())
}

/// Whether these say how the call ended.
pub(crate) fn tell(headers: &HeaderMap) -> bool {
    headers.contains_key(Status::GRPC_STATUS)
}

impl Answer {
    /// Takes the response in, up to `limit` bytes; what is longer goes on as it
    /// has begun.
    ///
    /// # Errors
    /// The body's own, and [`NoEnd`] where it stops without a status.
    pub(crate) async fn whole(
        response: Response<Body>,
        limit: usize,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let (head, mut body) = response.into_parts();
        let (mut kept, mut trailers) = (VecDeque::new(), None);
        let mut size = 0;
        while let Some(frame) = body.frame().await {
            match frame?.into_data() {
                Ok(data) => {
                    size += data.len();
                    kept.push_back(data);
                    if size > limit {
                        let body = Body::new(Frames::before(kept, body));
                        return Ok(Self::Begun(Response::from_parts(head, body)));
                    }
                }
                Err(frame) => {
                    trailers = frame.into_trailers().ok();
                    trailers.as_mut().map(details::drop_malformed);
                }
            }
        }
        let response = Response::from_parts(head, Frames::ending(kept, trailers));
        if !response.body().trailers().is_some_and(tell) && !tell(response.headers()) {
            return Err(NoEnd.into());
        }
        Ok(Self::Whole(response))
    }

    /// The call's status, as far as it is known.
    pub(crate) fn status(&self) -> Option<Status> {
        match self {
            Self::Begun(response) => Status::from_header_map(response.headers()),
            Self::Whole(response) => {
                let trailers = response.body().trailers();
                trailers
                    .and_then(Status::from_header_map)
                    .or_else(|| Status::from_header_map(response.headers()))
            }
        }
    }
}

/// The response stopped without saying how the call ended.
#[derive(Debug, thiserror::Error)]
#[error("the response ended without a status")]
pub(crate) struct NoEnd;

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body::Frame;
    use http_body_util::StreamBody;
    use tonic::Code;

    use super::*;

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
        let answer =
            Answer::whole(response(vec![data("one"), data("two"), trailers("0")]), 100).await.unwrap();
        assert_eq!(answer.status().map(|s| s.code()), Some(Code::Ok));
        let Answer::Whole(response) = answer else { panic!("whole") };
        let collected = response.into_body().collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(collected.to_bytes(), "onetwo");
    }

    #[tokio::test]
    async fn one_that_stops_in_the_middle_is_an_error() {
        let cut = Answer::whole(response(vec![data("one"), Err(Status::unknown("cut"))]), 100).await;
        assert_eq!(cut.err().expect("cut").to_string(), Status::unknown("cut").to_string());
        let silent = Answer::whole(response(vec![data("one")]), 100).await;
        assert!(silent.err().expect("no end").is::<NoEnd>());
        let trailers = HeaderMap::from_iter([("x-mine".parse().unwrap(), "1".parse().unwrap())]);
        let mute = response(vec![data("one"), Ok(Frame::trailers(trailers))]);
        assert!(Answer::whole(mute, 100).await.err().expect("no status").is::<NoEnd>());
    }

    #[tokio::test]
    async fn a_long_one_goes_on_as_it_has_begun() {
        let frames = vec![data("12345"), data("67890"), data("abc"), trailers("0")];
        let answer = Answer::whole(response(frames), 7).await.unwrap();
        assert!(answer.status().is_none());
        let Answer::Begun(response) = answer else { panic!("begun") };
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "1234567890abc");
    }

    #[tokio::test]
    async fn a_status_in_the_headers_is_the_end() {
        let mut response = response(vec![]);
        response.headers_mut().insert("grpc-status", "5".parse().unwrap());
        let answer = Answer::whole(response, 100).await.unwrap();
        assert_eq!(answer.status().map(|s| s.code()), Some(Code::NotFound));
    }
}
