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
        // All are held until all are chosen, so that they differ.
        let [http, lan, wan, server] = [both()?, both()?, both()?, both()?];
        let port = |held: &(TcpListener, UdpSocket)| held.0.local_addr().map(|addr| addr.port());
        Ok(Self { http: port(&http)?, serf_lan: port(&lan)?, serf_wan: port(&wan)?, server: port(&server)? })
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
