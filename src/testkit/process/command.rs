//! The command line of an agent.

use std::{path::Path, process::Stdio, time::Duration};

use tokio::process::{Child, Command};

use super::super::registry::Registry;
use super::{Builder, Ports, StartError, builder::Role, logged};

const META: &str = "testkit-nonce";

pub(super) async fn spawn(
    setup: &Builder,
    ports: Ports,
    nonce: &str,
    folder: &Path,
) -> Result<Child, StartError> {
    let failed = |source| StartError::Spawn { bin: setup.bin.clone(), source };
    let mut command =
        logged(&setup.bin, folder).map_err(|source| StartError::Prepare { what: "log", source })?;
    command
        .arg("agent")
        .arg(format!("-datacenter={}", setup.datacenter))
        .arg(format!("-node={}", setup.node_name()))
        .arg(format!("-node-meta={META}:{nonce}"))
        .args(["-bind=127.0.0.1", "-client=127.0.0.1", "-dns-port=-1", "-grpc-port=-1"])
        .arg(format!("-http-port={}", ports.http))
        .arg(format!("-serf-lan-port={}", ports.serf_lan))
        .arg("-disable-host-node-id")
        .arg("-hcl=disable_update_check = true");
    if has_grpc_tls(&version(&setup.bin).await.map_err(failed)?) {
        command.arg("-grpc-tls-port=-1");
    }
    if !matches!(setup.role, Role::Client { .. }) {
        command
            .arg(format!("-serf-wan-port={}", ports.serf_wan))
            .arg(format!("-server-port={}", ports.server));
    }
    match &setup.role {
        Role::Memory => command.arg("-dev"),
        Role::Server { expect, .. } => command
            .args(["-server", "-hcl=performance { raft_multiplier = 1 }"])
            .arg(format!("-bootstrap-expect={expect}")),
        Role::Client { .. } => &mut command,
    };
    if let Some(dir) = setup.data_dir() {
        command.arg("-data-dir").arg(dir);
    }
    if !setup.retry_join.is_empty() {
        command.arg("-retry-interval=1s");
        command.args(setup.retry_join.iter().map(|port| format!("-retry-join=127.0.0.1:{port}")));
    }
    if let Some(peer) = &setup.joined {
        // Its default of 30 s is what an unlucky start would wait.
        command.arg(format!("-retry-join-wan=127.0.0.1:{}", peer.serf_wan)).arg("-retry-interval-wan=1s");
    }
    command.args(setup.hcl.iter().map(|text| format!("-hcl={text}")));
    command.spawn().map_err(failed)
}

/// What `consul version` says, for example `Consul v1.8.7`.
async fn version(bin: &Path) -> std::io::Result<String> {
    let said = Command::new(bin).arg("version").stdin(Stdio::null()).kill_on_drop(true).output().await?;
    Ok(String::from_utf8_lossy(&said.stdout).into_owned())
}

/// From 1.14 on a `-dev` agent opens a second gRPC port, which must be switched
/// off lest two agents want the same one; before, the option is unknown.
/// <https://developer.hashicorp.com/consul/docs/release-notes/consul/v1_14_x>
fn has_grpc_tls(version: &str) -> bool {
    let numbers = version.split_once('v').map_or("", |(_, rest)| rest);
    let mut numbers = numbers.split(|it: char| !it.is_ascii_digit()).map_while(|it| it.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(1), Some(14))
}

/// A name that no other agent on this machine has now: that of its folder.
pub(super) fn nonce(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.chars().filter(char::is_ascii_alphanumeric).collect()
}

/// Whether the agent that answers is the one started, not one that was faster
/// at its port, and has entered itself into the catalog: until then its indexes
/// move without anybody's doing. With ACLs in force nobody says; then it is
/// taken to be.
pub(super) async fn is_settled(registry: &Registry, setup: &Builder, nonce: &str) -> bool {
    let ask = async |path: &str| registry.get_within(path, Duration::from_secs(1)).await;
    let entered = match &setup.role {
        Role::Client { .. } => format!("/v1/catalog/node/{}", setup.node_name()),
        _ => "/v1/health/service/consul?passing".to_owned(),
    };
    match ask("/v1/agent/self").await {
        Ok(answer) if answer.status.is_success() => {
            let entered = ask(&entered).await.map(|it| it.json()).unwrap_or_default();
            let is_own = |entry: &serde_json::Value| entry["Node"]["Meta"][META] == nonce;
            let checked =
                |entry: &serde_json::Value| entry["Checks"].as_array().is_some_and(|it| !it.is_empty());
            answer.json()["Meta"][META] == nonce
                && match entered.as_array() {
                    Some(servers) => servers.iter().any(|it| is_own(it) && checked(it)),
                    None => is_own(&entered),
                }
        }
        Ok(answer) => answer.status.is_client_error(),
        Err(_) => false,
    }
}

/// Whether the log tells of a port that somebody else has.
pub(super) fn port_taken(log: &str) -> bool {
    log.contains("address already in use")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_grpc_port_is_known_from_1_14_on() {
        assert!(!has_grpc_tls("Consul v1.8.7\nProtocol 2 spoken by default"));
        assert!(!has_grpc_tls("Consul v1.13.9"));
        assert!(has_grpc_tls("Consul v1.14.0-rc1"));
        assert!(has_grpc_tls("Consul v1.21.3\nRevision abc"));
        assert!(has_grpc_tls("Consul v2.0.0"));
        assert!(!has_grpc_tls("something else"));
    }
}
