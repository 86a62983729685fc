//! Free loopback ports for one agent.

use std::{
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
};

/// The ports of one agent, all on 127.0.0.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// HTTP API.
    pub http: u16,
    /// Gossip within the datacenter, TCP and UDP.
    pub serf_lan: u16,
    /// Gossip between datacenters, TCP and UDP.
    pub serf_wan: u16,
    /// The servers' own protocol.
    pub server: u16,
}

// === impl Ports ===

impl Ports {
    /// Four ports that are free now. Nobody holds them, so another process may
    /// take one before it is used; [`Builder::start`](super::Builder::start)
    /// tries again then.
    ///
    /// # Errors
    /// Where the system has none to give.
    pub fn free() -> io::Result<Self> {
        Self::free_for(1).map(|all| all[0])
    }

    /// The same for so many agents, no two of which share a port.
    pub(super) fn free_for(agents: usize) -> io::Result<Vec<Self>> {
        // All are held until all are chosen, so that they differ.
        let held: Vec<_> = (0..4 * agents).map(|_| both()).collect::<io::Result<_>>()?;
        let port = |held: &(TcpListener, UdpSocket)| held.0.local_addr().map(|addr| addr.port());
        let ports: Vec<_> = held.iter().map(port).collect::<io::Result<_>>()?;
        let of_one = |it: &[u16]| Self { http: it[0], serf_lan: it[1], serf_wan: it[2], server: it[3] };
        Ok(ports.chunks_exact(4).map(of_one).collect())
    }
}

/// A port that is free in TCP and in UDP.
fn both() -> io::Result<(TcpListener, UdpSocket)> {
    let mut tries = 0;
    loop {
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        match UdpSocket::bind(tcp.local_addr()?) {
            Ok(udp) => return Ok((tcp, udp)),
            Err(error) if tries == 20 => return Err(error),
            Err(_) => tries += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_agents_of_a_cluster_share_a_port() {
        let all = Ports::free_for(20).unwrap();
        assert_eq!(all.len(), 20);
        let mut ports: Vec<_> =
            all.iter().flat_map(|it| [it.http, it.serf_lan, it.serf_wan, it.server]).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 80);
    }
}
