//! One look at an instance, as TCP and GRPC checks take it.

use std::error::Error;

use tokio::{net::TcpStream, time::timeout};
use tonic::transport::Endpoint;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use super::super::definition::Probe;

/// Connects, and says how that went.
pub(crate) async fn tcp(probe: &Probe) -> Result<String, String> {
    let target = &probe.target;
    match timeout(probe.timeout, TcpStream::connect(target.as_str())).await {
        Ok(Ok(_)) => Ok(format!("TCP connect {target}: Success")),
        Ok(Err(error)) => Err(format!("dial tcp {target}: {error}")),
        Err(_) => Err(format!("dial tcp {target}: i/o timeout")),
    }
}

/// Asks `host:port` or `host:port/service` for its health.
pub(crate) async fn grpc(probe: &Probe) -> Result<String, String> {
    let target = &probe.target;
    let (authority, service) = target.split_once('/').unwrap_or((target, ""));
    let ask = async {
        let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(|it| told(&it))?;
        let channel = endpoint.connect().await.map_err(|it| told(&it))?;
        let request = HealthCheckRequest { service: service.to_owned() };
        let answer = HealthClient::new(channel).check(request).await;
        let status =
            answer.map_err(|it| format!("rpc error: code = {:?} desc = {}", it.code(), it.message()))?;
        match status.into_inner().status() {
            ServingStatus::Serving => Ok(format!("gRPC check {target}: success")),
            _ => Err("gRPC application didn't report service healthy".to_owned()),
        }
    };
    match timeout(probe.timeout, ask).await {
        Ok(result) => result,
        Err(_) => Err("rpc error: code = DeadlineExceeded desc = context deadline exceeded".to_owned()),
    }
}

/// An error with everything under it.
fn told(error: &dyn Error) -> String {
    let mut text = format!("rpc error: code = Unavailable desc = {error}");
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
