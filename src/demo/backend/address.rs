//! Under which host and name an instance is registered.

use std::net::{IpAddr, SocketAddr};

use tokio::net::UdpSocket;
use url::Url;

/// Somewhere beyond the default route: TEST-NET-1 (RFC 5737), which belongs to
/// nobody. Nothing is sent there.
const BEYOND: &str = "192.0.2.1:9";

/// The host to register: `given`, or the address listened on, or, where that is
/// no address but all of them, the one that the kernel uses towards `consul`
/// (a URL). A Consul agent on this very machine says nothing about how
/// others reach it; then the one towards the default route.
pub(super) async fn advertised(
    given: Option<&str>,
    listening: SocketAddr,
    consul: &str,
) -> std::io::Result<String> {
    if let Some(host) = given {
        return Ok(host.to_owned());
    }
    if !listening.ip().is_unspecified() {
        return Ok(listening.ip().to_string());
    }
    let consul = Url::parse(consul).map_err(std::io::Error::other)?;
    let (host, port) =
        (consul.host_str().unwrap_or_default(), consul.port_or_known_default().unwrap_or_default());
    let towards_consul = source(listening, &format!("{host}:{port}")).await;
    if let Ok(ip) = &towards_consul
        && !ip.is_loopback()
    {
        return Ok(ip.to_string());
    }
    match source(listening, BEYOND).await {
        Ok(ip) => Ok(ip.to_string()),
        Err(_) => towards_consul.map(|ip| ip.to_string()),
    }
}

/// Connecting a UDP socket chooses a route and sends nothing.
async fn source(listening: SocketAddr, peer: &str) -> std::io::Result<IpAddr> {
    let mut refused = std::io::Error::other("the name has no address");
    for peer in tokio::net::lookup_host(peer).await? {
        // `[::]` takes IPv4 callers as well, `0.0.0.0` takes no others.
        if listening.is_ipv4() && peer.is_ipv6() {
            continue;
        }
        let any = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).await?;
        match socket.connect(peer).await {
            Ok(()) => return Ok(socket.local_addr()?.ip()),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// `counter-web1-4000`: stable over restarts on one host and port.
pub(super) fn default_name(service: &str, port: u16) -> String {
    let uname = rustix::system::uname();
    let node = uname.nodename().to_string_lossy();
    let host: String =
        node.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).collect();
    format!("{service}-{host}-{port}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_address_listened_on_is_advertised_unless_another_is_given() {
        let listening = "127.0.0.1:4000".parse().unwrap();
        assert_eq!(advertised(None, listening, "http://127.0.0.1:8500").await.unwrap(), "127.0.0.1");
        assert_eq!(advertised(Some("web1"), listening, "http://127.0.0.1:8500").await.unwrap(), "web1");
    }

    #[tokio::test]
    async fn listening_on_all_addresses_some_real_one_is_advertised() {
        let listening = "0.0.0.0:4000".parse().unwrap();
        let host = advertised(None, listening, "http://127.0.0.1:8500").await.unwrap();
        assert!(!host.parse::<IpAddr>().unwrap().is_unspecified(), "{host}");
    }
}
