//! Plain HTTP to one agent, real or embedded.

use std::{fmt, time::Duration};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};

use super::{
    answer::{Answer, RequestError},
    registration::Registration,
};

/// How long a request may take that does not block on purpose. Our choice:
/// longer than the 7 s a leaderless Consul needs to say so.
const PATIENCE: Duration = Duration::from_secs(10);

/// Speaks to the agent at one address. Every request has its own connection, so
/// that an agent's death between two of them is not felt by the second.
#[derive(Clone)]
pub struct Registry {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
    token: Option<String>,
}

/// Speaks to the agent at `url`, for example `http://127.0.0.1:8500`.
pub fn registry(url: impl Into<String>) -> Registry {
    Registry::new(url)
}

// === impl Registry ===

impl Registry {
    /// Speaks to the agent at `url`, for example `http://127.0.0.1:8500`.
    /// Connects to nothing yet.
    pub fn new(url: impl Into<String>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(PATIENCE));
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Self { client, url: url.into().trim_end_matches('/').to_owned(), token: None }
    }

    /// Sends this ACL token with every request. Default: none.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// The agent's address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// `GET`s `path` (with its query, for example `/v1/status/leader`) and gives
    /// the answer whatever its status. Waits 10 s at most.
    ///
    /// # Errors
    /// Where no whole answer comes.
    pub async fn get(&self, path: &str) -> Result<Answer, RequestError> {
        self.send(Method::GET, path, Bytes::new(), PATIENCE).await
    }

    /// As [`get`](Self::get), waiting up to `patience`: for blocking queries.
    ///
    /// # Errors
    /// Where no whole answer comes.
    pub async fn get_within(&self, path: &str, patience: Duration) -> Result<Answer, RequestError> {
        self.send(Method::GET, path, Bytes::new(), patience).await
    }

    /// `PUT`s `body` to `path` and gives the answer whatever its status. Waits
    /// 10 s at most.
    ///
    /// # Errors
    /// Where no whole answer comes.
    pub async fn put(&self, path: &str, body: impl Into<Bytes>) -> Result<Answer, RequestError> {
        self.send(Method::PUT, path, body.into(), PATIENCE).await
    }

    /// `POST`s `body` to `path` and gives the answer whatever its status. Waits
    /// 10 s at most.
    ///
    /// # Errors
    /// Where no whole answer comes.
    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Result<Answer, RequestError> {
        self.send(Method::POST, path, body.into(), PATIENCE).await
    }

    /// `DELETE`s `path` and gives the answer whatever its status. Waits 10 s at
    /// most.
    ///
    /// # Errors
    /// Where no whole answer comes.
    pub async fn delete(&self, path: &str) -> Result<Answer, RequestError> {
        self.send(Method::DELETE, path, Bytes::new(), PATIENCE).await
    }

    /// Registers a service, or changes its registration.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn register(&self, registration: &Registration) -> Result<(), RequestError> {
        self.done("/v1/agent/service/register", registration.to_json().to_string()).await
    }

    /// Takes a service out, by its id. An unknown one is no error.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn deregister(&self, service_id: &str) -> Result<(), RequestError> {
        self.done(&format!("/v1/agent/service/deregister/{}", escaped(service_id)), "").await
    }

    /// Says that a service with one TTL check passes.
    ///
    /// # Errors
    /// Where the agent does not answer, or knows no such TTL check.
    pub async fn pass(&self, service_id: &str) -> Result<(), RequestError> {
        self.done(&format!("/v1/agent/check/pass/service:{}", escaped(service_id)), "").await
    }

    /// Says that a service with one TTL check is in a doubtful state.
    ///
    /// # Errors
    /// As [`pass`](Self::pass).
    pub async fn warn(&self, service_id: &str) -> Result<(), RequestError> {
        self.done(&format!("/v1/agent/check/warn/service:{}", escaped(service_id)), "").await
    }

    /// Says that a service with one TTL check is critical.
    ///
    /// # Errors
    /// As [`pass`](Self::pass).
    pub async fn fail(&self, service_id: &str) -> Result<(), RequestError> {
        self.done(&format!("/v1/agent/check/fail/service:{}", escaped(service_id)), "").await
    }

    /// Switches a service's maintenance on or off.
    ///
    /// # Errors
    /// Where the agent does not answer, or knows no such service.
    pub async fn maintenance(&self, service_id: &str, on: bool) -> Result<(), RequestError> {
        self.done(&format!("/v1/agent/service/maintenance/{}?enable={on}", escaped(service_id)), "").await
    }

    /// The ids of a service's passing instances, in the agent's order.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn passing(&self, service: &str) -> Result<Vec<String>, RequestError> {
        let path = format!("/v1/health/service/{}?passing", escaped(service));
        let answer = self.accepted(&path, self.get(&path).await?)?;
        let entries = answer.json();
        let ids = entries.as_array().into_iter().flatten().map(|entry| entry["Service"]["ID"].as_str());
        Ok(ids.flatten().map(str::to_owned).collect())
    }

    /// Writes a key.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn kv_put(&self, key: &str, value: impl Into<Bytes>) -> Result<(), RequestError> {
        self.done(&format!("/v1/kv/{}", escaped(key)), value).await
    }

    /// What a key holds; `None` where there is none.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn kv_get(&self, key: &str) -> Result<Option<Bytes>, RequestError> {
        let path = format!("/v1/kv/{}?raw", escaped(key));
        let answer = self.get(&path).await?;
        if answer.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        Ok(Some(self.accepted(&path, answer)?.body))
    }

    /// All keys that begin with `prefix`.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn kv_keys(&self, prefix: &str) -> Result<Vec<String>, RequestError> {
        let path = format!("/v1/kv/{}?keys", escaped(prefix));
        let answer = self.get(&path).await?;
        if answer.status == StatusCode::NOT_FOUND {
            return Ok(Vec::new());
        }
        let keys = self.accepted(&path, answer)?.json();
        Ok(keys.as_array().into_iter().flatten().filter_map(|it| it.as_str().map(str::to_owned)).collect())
    }

    /// Deletes a key. One that is not there is no error.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn kv_delete(&self, key: &str) -> Result<(), RequestError> {
        let path = format!("/v1/kv/{}", escaped(key));
        self.accepted(&path, self.delete(&path).await?).map(drop)
    }

    /// Deletes all keys that begin with `prefix`.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn kv_delete_below(&self, prefix: &str) -> Result<(), RequestError> {
        let path = format!("/v1/kv/{}?recurse", escaped(prefix));
        self.accepted(&path, self.delete(&path).await?).map(drop)
    }

    /// The datacenter's whole state, as `consul snapshot save` has it. The embedded
    /// agent knows no snapshots.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn save_snapshot(&self) -> Result<Bytes, RequestError> {
        let path = "/v1/snapshot";
        Ok(self.accepted(path, self.get(path).await?)?.body)
    }

    /// Puts the datacenter back to a saved state: every index falls.
    ///
    /// # Errors
    /// Where the agent does not answer, or refuses.
    pub async fn restore_snapshot(&self, snapshot: Bytes) -> Result<(), RequestError> {
        self.done("/v1/snapshot", snapshot).await
    }

    async fn done(&self, path: &str, body: impl Into<Bytes>) -> Result<(), RequestError> {
        self.accepted(path, self.put(path, body).await?).map(drop)
    }

    fn accepted(&self, path: &str, answer: Answer) -> Result<Answer, RequestError> {
        if answer.status.is_success() {
            return Ok(answer);
        }
        let url = format!("{}{path}", self.url);
        Err(RequestError::Refused { url, status: answer.status, body: answer.text() })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        patience: Duration,
    ) -> Result<Answer, RequestError> {
        let url = format!("{}{path}", self.url);
        let mut request = Request::builder().method(method).uri(&url);
        if let Some(token) = &self.token {
            request = request.header("x-consul-token", token);
        }
        let request = match request.body(Full::new(body)) {
            Ok(request) => request,
            Err(source) => return Err(RequestError::Address { url, source }),
        };
        let exchange = async {
            let (head, body) = self.client.request(request).await?.into_parts();
            let body = body.collect().await?.to_bytes();
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Answer {
                status: head.status,
                headers: head.headers,
                body,
            })
        };
        match tokio::time::timeout(patience, exchange).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(source)) => Err(RequestError::Unreachable { url, source }),
            Err(_) => Err(RequestError::TimedOut { url, waited: patience }),
        }
    }
}

/// Without the token.
impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("url", &self.url).finish_non_exhaustive()
    }
}

/// A name as it stands in a path (RFC 3986, 3.3); slashes stay.
fn escaped(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    };
    name.bytes().map(escape).collect()
}
