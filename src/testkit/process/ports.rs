//! Loopback ports for one agent.

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
};

use super::super::port::Port;

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

/// An agent's ports, which nobody else is given in TCP until this is dropped. UDP has
/// no such way; there is hardly anyone who takes a port of it for long.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) ports: Ports,
    _held: [Port; 4],
}

// === impl Ports ===

impl Ports {
    /// Four ports that are free now. Nobody holds them, so another process may
    /// take one before it is used; [`Builder::start`](super::Builder::start)
    /// tries again then, where it has chosen them itself. From then on the agent holds them.
    ///
    /// # Errors
    /// Where the system has none to give.
    pub fn free() -> io::Result<Self> {
        Held::free().map(|held| held.ports)
    }

    fn numbers(self) -> [u16; 4] {
        [self.http, self.serf_lan, self.serf_wan, self.server]
    }
}

// === impl Held ===

impl Held {
    pub(super) fn free() -> io::Result<Self> {
        let held = [both()?, both()?, both()?, both()?];
        let [http, serf_lan, serf_wan, server] = held.each_ref().map(Port::number);
        Ok(Self { ports: Ports { http, serf_lan, serf_wan, server }, _held: held })
    }

    /// Fails where somebody listens on one.
    pub(super) fn these(ports: Ports) -> io::Result<Self> {
        let [http, serf_lan, serf_wan, server] =
            ports.numbers().map(|port| Port::hold((Ipv4Addr::LOCALHOST, port)));
        Ok(Self { ports, _held: [http?, serf_lan?, serf_wan?, server?] })
    }
}

/// A port that is free in TCP and in UDP.
fn both() -> io::Result<Port> {
    let mut tries = 0;
    loop {
        let port = Port::free()?;
        match UdpSocket::bind(port.addr()) {
            Ok(_) => return Ok(port),
            Err(error) if tries == 20 => return Err(error),
            Err(_) => tries += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_two_agents_share_a_port_while_both_hold_theirs() {
        let all: Vec<_> = (0..20).map(|_| Held::free().unwrap()).collect();
        let mut ports: Vec<_> = all.iter().flat_map(|it| it.ports.numbers()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 80);
    }
}
