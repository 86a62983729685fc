//! The access log: a line for each request, refused ones too.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use http::{Request, Response};
use tonic::Status;
use tower::{Layer, Service};

use super::Log;
use crate::demo::{screen::Tone, text::duration};

/// What is not the demo's own is a probe's question, and no request.
const OURS: &str = "/counter.v1.";

#[derive(Clone)]
pub(super) struct AccessLog(pub(super) Log);

#[derive(Clone)]
pub(super) struct Logged<S> {
    inner: S,
    log: Log,
}

impl<S> Layer<S> for AccessLog {
    type Service = Logged<S>;

    fn layer(&self, inner: S) -> Logged<S> {
        Logged { inner, log: self.0.clone() }
    }
}

impl<S, B, R> Service<Request<B>> for Logged<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    R: Send + 'static,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let (log, began) = (self.log.clone(), tokio::time::Instant::now());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            if path.starts_with(OURS)
                && let Ok(response) = &answer
            {
                // An answer that has begun carries its status at its end.
                let status = Status::from_header_map(response.headers());
                let status = status.filter(|it| it.code() != tonic::Code::Ok);
                let took = duration(began.elapsed());
                match status {
                    None => log.say(Tone::Quiet, &format!("POST {path} answered in {took}")),
                    Some(status) => {
                        let (code, words) = (status.code(), status.message());
                        log.say(Tone::Notice, &format!("POST {path} {code:?} in {took}: {words}"));
                    }
                }
            }
            answer
        })
    }
}
