//! One request through consulrs's client, one whole answer back.
//!
//! rustify splits this into an endpoint (what to ask), a middleware (what goes
//! along with everything) and a client (how it travels). The middleware of
//! consulrs escapes the path a second time and panics on odd tokens, and its
//! client reads answers of any size and drops their headers; these are ours.

use std::{error::Error, io, sync::Arc, time::Duration};

use async_trait::async_trait;
use http02::{HeaderValue, Request, Response, header::AUTHORIZATION};
use rustify::{
    client::Client,
    clients::reqwest::Client as HttpClient,
    endpoint::{Endpoint, MiddleWare},
    enums::{RequestMethod, RequestType, ResponseType},
    errors::ClientError,
};
use tokio::time::{Instant, timeout};

use super::{
    RegistryError,
    secrets::{Answer, Secrets},
    token::Known,
};

/// How much of a refusal is read. What Consul has to say is far shorter.
const REFUSAL_BYTES: usize = 4 << 10;
/// How long the body of a refusal is read. Its status and its headers decide by
/// themselves; our choice for what is only told.
const REFUSAL_PATIENCE: Duration = Duration::from_millis(500);
/// The longest URI that the `http` crate holds.
const LONGEST_URI: usize = u16::MAX as usize - 1;

/// What to ask.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) method: RequestMethod,
    /// Without a slash before it and not escaped.
    pub(super) path: String,
    /// Escaped.
    pub(super) query: String,
    pub(super) body: Vec<u8>,
}

/// What goes along with every request.
#[derive(Clone)]
pub(super) struct Credentials {
    pub(super) token: Option<HeaderValue>,
    pub(super) authorization: Option<HeaderValue>,
    /// What `authorization` was made of.
    pub(super) auth: Option<Arc<str>>,
    /// The tokens of other requests.
    pub(super) known: Known,
}

/// Asks and waits up to `patience`, from connecting to the answer's last byte. A
/// good answer may have `limit` bytes; of a refusal only the beginning is read, and
/// only for 500 ms beyond its head.
/// Dropping the future closes the connection.
pub(super) async fn exchange(
    http: &HttpClient,
    credentials: &Credentials,
    call: Call,
    patience: Duration,
    limit: usize,
) -> Result<Answer, RegistryError> {
    // rustify would log a failure of this at ERROR, with the whole path. Escaping
    // makes three bytes of one at the most.
    if http.base.len() + 3 * call.path.len() + call.query.len() + 2 > LONGEST_URI {
        return Err(RegistryError::Unsendable { reason: "it does not fit into a URL".to_owned() });
    }
    let courier = Courier { http, patience, limit };
    let answered = call.with_middleware(credentials).exec(&courier).await;
    let mut response = match answered {
        Ok(result) => result.response,
        Err(error) => return Err(RegistryError::Unsendable { reason: error.to_string() }),
    };
    match response.extensions_mut().remove::<RegistryError>() {
        Some(error) => Err(error),
        None => {
            let (head, body) = response.into_parts();
            let whole = head.extensions.get::<Cut>().is_none();
            Ok(Answer::new(head.status.as_u16(), head.headers, body, whole, credentials.secrets()))
        }
    }
}

/// Marks a response whose body did not come to its end.
#[derive(Clone, Copy)]
struct Cut;

/// rustify's client over consulrs's HTTP client, for one request.
struct Courier<'a> {
    http: &'a HttpClient,
    patience: Duration,
    limit: usize,
}

// === impl Call ===

impl Call {
    pub(super) fn get(path: impl Into<String>, query: String) -> Self {
        Self { method: RequestMethod::GET, path: path.into(), query, body: Vec::new() }
    }

    pub(super) fn post(path: impl Into<String>, query: String, body: Vec<u8>) -> Self {
        Self { method: RequestMethod::POST, path: path.into(), query, body }
    }

    pub(super) fn put(path: impl Into<String>, query: String, body: Vec<u8>) -> Self {
        Self { method: RequestMethod::PUT, path: path.into(), query, body }
    }
}

impl Call {
    /// The same once more, where asking twice changes nothing. One that waits beyond an
    /// index is not: the agent that cut it off may have come back with lower ones.
    pub(super) fn repeatable(&self) -> Option<Self> {
        let waits = self.query.split('&').any(|it| it.starts_with("index="));
        (matches!(self.method, RequestMethod::GET) && !waits).then(|| self.clone())
    }
}

impl Endpoint for Call {
    /// The body is read elsewhere.
    type Response = ();
    const REQUEST_BODY_TYPE: RequestType = RequestType::JSON;
    const RESPONSE_BODY_TYPE: ResponseType = ResponseType::JSON;

    fn path(&self) -> String {
        self.path.clone()
    }

    fn method(&self) -> RequestMethod {
        self.method.clone()
    }

    fn query(&self) -> Result<Option<String>, ClientError> {
        Ok(Some(self.query.clone()).filter(|it| !it.is_empty()))
    }

    fn body(&self) -> Result<Option<Vec<u8>>, ClientError> {
        Ok(Some(self.body.clone()))
    }
}

// === impl Credentials ===

impl Credentials {
    /// What whoever is sent these may repeat. To be asked for when he has answered:
    /// he may have been sent another token meanwhile, and mistake one request for
    /// another.
    pub(super) fn secrets(&self) -> Secrets {
        let as_text = |it: &HeaderValue| String::from_utf8_lossy(it.as_bytes()).into_owned();
        let mut secrets: Vec<_> = self.known.all().iter().chain(&self.token).map(as_text).collect();
        let authorization = self.authorization.as_ref().map(as_text);
        secrets.extend(authorization.iter().filter_map(|it| Some(it.split_once(' ')?.1.to_owned())));
        if let Some(auth) = &self.auth {
            secrets.extend(auth.split_once(':').map(|(_, password)| password.to_owned()));
            secrets.push(auth.to_string());
        }
        Secrets::of(secrets)
    }
}

impl MiddleWare for Credentials {
    fn request<E: Endpoint>(&self, _: &E, request: &mut Request<Vec<u8>>) -> Result<(), ClientError> {
        let headers = request.headers_mut();
        if let Some(token) = &self.token {
            headers.insert("x-consul-token", token.clone());
        }
        if let Some(authorization) = &self.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        Ok(())
    }

    fn response<E: Endpoint>(&self, _: &E, _: &mut Response<Vec<u8>>) -> Result<(), ClientError> {
        Ok(())
    }
}

// === impl Courier ===

#[async_trait]
impl Client for Courier<'_> {
    fn base(&self) -> &str {
        &self.http.base
    }

    async fn send(&self, request: Request<Vec<u8>>) -> Result<Response<Vec<u8>>, ClientError> {
        self.execute(request).await
    }

    /// Never an error: rustify logs each one three times at ERROR, on every
    /// attempt. A failure travels in the response's extensions instead.
    async fn execute(&self, request: Request<Vec<u8>>) -> Result<Response<Vec<u8>>, ClientError> {
        let outcome = self.fetch(request).await;
        Ok(outcome.unwrap_or_else(|error| {
            let mut response = Response::new(Vec::new());
            response.extensions_mut().insert(error);
            response
        }))
    }
}

impl Courier<'_> {
    async fn fetch(&self, request: Request<Vec<u8>>) -> Result<Response<Vec<u8>>, RegistryError> {
        let request = reqwest::Request::try_from(request)
            .map_err(|error| RegistryError::Unsendable { reason: error.without_url().to_string() })?;
        let timed_out = |_| RegistryError::TimedOut { after: self.patience };
        let started = Instant::now();
        let sent = timeout(self.patience, self.http.http.execute(request));
        let mut incoming = sent.await.map_err(timed_out)?.map_err(unanswered)?;
        let mut body = Vec::new();
        let whole = if incoming.status().is_success() {
            let left = self.patience.saturating_sub(started.elapsed());
            timeout(left, self.read(&mut incoming, &mut body)).await.map_err(timed_out)??;
            true
        } else {
            let read = timeout(REFUSAL_PATIENCE, beginning(&mut incoming, &mut body)).await;
            read.unwrap_or(false)
        };
        let mut response = Response::new(body);
        *response.status_mut() = incoming.status();
        *response.headers_mut() = std::mem::take(incoming.headers_mut());
        if !whole {
            response.extensions_mut().insert(Cut);
        }
        Ok(response)
    }

    /// All of a good answer.
    async fn read(&self, incoming: &mut reqwest::Response, body: &mut Vec<u8>) -> Result<(), RegistryError> {
        let too_large = || RegistryError::TooLarge { limit: self.limit };
        if incoming.content_length().is_some_and(|it| it > self.limit as u64) {
            return Err(too_large());
        }
        while let Some(chunk) = incoming.chunk().await.map_err(lost)? {
            if body.len() + chunk.len() > self.limit {
                return Err(too_large());
            }
            body.extend_from_slice(&chunk);
        }
        Ok(())
    }
}

/// The beginning of a refusal. True where that is all of it.
async fn beginning(incoming: &mut reqwest::Response, body: &mut Vec<u8>) -> bool {
    while body.len() < REFUSAL_BYTES {
        match incoming.chunk().await {
            Ok(Some(chunk)) => body.extend_from_slice(&chunk[..chunk.len().min(REFUSAL_BYTES - body.len())]),
            Ok(None) => return true,
            // The status is what counts in a refusal.
            Err(_) => return false,
        }
    }
    false
}

/// Nothing was answered. A connection that Consul does not want is closed at once,
/// which comes as a reset or as its end, as chance will have it; and the end comes as
/// one of three, by whether the request had been sent, had not been, or was just then.
fn unanswered(error: reqwest::Error) -> RegistryError {
    let mut cause = error.source();
    while let Some(it) = cause {
        let io = it.downcast_ref::<io::Error>().map(io::Error::kind);
        let reset = matches!(io, Some(io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe));
        let ended = it
            .downcast_ref::<hyper014::Error>()
            .is_some_and(|it| it.is_incomplete_message() || it.is_closed() || it.is_canceled());
        if reset || ended {
            return RegistryError::Reset { source: Arc::new(error.without_url()) };
        }
        // Somebody answered, and not in HTTP: TLS, or another program on that port.
        if it.downcast_ref::<hyper014::Error>().is_some_and(hyper014::Error::is_parse) {
            return RegistryError::not_understood(error.without_url());
        }
        cause = it.source();
    }
    lost(error)
}

fn lost(error: reqwest::Error) -> RegistryError {
    let connecting = error.is_connect();
    // The asker knows the address; the query in the URL says nothing about the trouble.
    let source: Arc<dyn Error + Send + Sync> = Arc::new(error.without_url());
    if connecting { RegistryError::Unreachable { source } } else { RegistryError::Interrupted { source } }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::consul::{HealthQuery, ServiceName};

    fn uri(path: String, query: String) -> http02::Uri {
        let credentials =
            Credentials { token: None, authorization: None, auth: None, known: Known::default() };
        let endpoint = Call::get(path, query);
        let request = endpoint.with_middleware(&credentials).request("http://127.0.0.1:8500").unwrap();
        request.uri().clone()
    }

    proptest! {
        #[test]
        fn every_name_that_is_taken_arrives_as_it_was(name in "\\PC{1,20}|[a-c%/?#\\\\ .+&é]{1,12}") {
            if let Ok(name) = ServiceName::new(name) {
                let uri = uri(HealthQuery::of(name.clone()).path(), "passing".to_owned());
                // Once more through the reader that reqwest uses.
                let url = url::Url::parse(&uri.to_string()).unwrap();
                let escaped = url.path().strip_prefix("/v1/health/service/").unwrap();
                let pairs = url::form_urlencoded::parse(escaped.replace('+', "%2B").replace('&', "%26").replace('=', "%3D").as_bytes())
                    .into_owned()
                    .collect::<Vec<_>>();
                prop_assert_eq!(&*pairs[0].0, name.as_str());
            }
        }

        #[test]
        fn every_filter_arrives_as_it_was(filter in "\\PC{1,40}") {
            let query = HealthQuery::new("counter").unwrap().filter(&*filter);
            let uri = uri(query.path(), query.query(None, None));
            let url = url::Url::parse(&uri.to_string()).unwrap();
            let arrived = url.query_pairs().find(|(key, _)| key == "filter").unwrap().1.into_owned();
            prop_assert_eq!(arrived, filter);
        }
    }
}
