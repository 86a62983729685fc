//! For now: the few requests to Consul that a backend makes.

use std::time::Duration;

use serde_json::Value;

#[derive(Debug, thiserror::Error)]
pub(super) enum SeamError {
    #[error("Consul has forgotten this instance")]
    Forgotten,
    #[error("{0}")]
    Other(String),
}

#[derive(Clone)]
pub struct Agent {
    http: reqwest::Client,
    base: String,
}

impl Agent {
    pub fn new(url: &str) -> Self {
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build().unwrap();
        Self { http, base: url.trim_end_matches('/').to_owned() }
    }

    pub(super) fn authority(&self) -> String {
        self.base.trim_start_matches("http://").to_owned()
    }

    async fn send(&self, method: reqwest::Method, path: &str, body: Value) -> Result<Value, SeamError> {
        let request = self.http.request(method, format!("{}{path}", self.base)).body(body.to_string());
        let answer = request.send().await.map_err(|error| SeamError::Other(error.to_string()))?;
        let status = answer.status();
        let text = answer.text().await.map_err(|error| SeamError::Other(error.to_string()))?;
        match status.as_u16() {
            200 => Ok(serde_json::from_str(&text).unwrap_or_default()),
            404 => Err(SeamError::Forgotten),
            500 if text.contains("does not have associated TTL") || text.contains("Unknown check") => {
                Err(SeamError::Forgotten)
            }
            _ => Err(SeamError::Other(format!("{status}: {text}"))),
        }
    }

    pub(super) async fn datacenter(&self) -> Result<String, SeamError> {
        let me = self.send(reqwest::Method::GET, "/v1/agent/self", Value::Null).await?;
        Ok(me["Config"]["Datacenter"].as_str().unwrap_or_default().to_owned())
    }

    pub(super) async fn register(&self, body: Value) -> Result<(), SeamError> {
        self.send(reqwest::Method::PUT, "/v1/agent/service/register", body).await.map(drop)
    }

    pub(super) async fn deregister(&self, id: &str) -> Result<(), SeamError> {
        self.send(reqwest::Method::PUT, &format!("/v1/agent/service/deregister/{id}"), Value::Null)
            .await
            .map(drop)
    }

    pub(super) async fn pass_check(&self, id: &str) -> Result<(), SeamError> {
        self.send(reqwest::Method::PUT, &format!("/v1/agent/check/pass/service:{id}"), Value::Null)
            .await
            .map(drop)
    }
}
