//! A port that stays ours while its server is dead.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use tokio::net::{TcpListener, TcpSocket};

/// A port for a server that is to be killed and started again, here or in a process of
/// its own: nobody else is given it, whether the server is there or not, until this is dropped.
/// A connection to it is refused while nobody listens.
///
/// A port that was merely free a moment ago is soon another's: the system gives it to the next
/// that asks for any, and to outgoing connections, which may last for minutes. This one is bound
/// and not listened on. By the rules of `SO_REUSEADDR` on Linux (`man 7 socket`) a server
/// that sets this option may bind it too; tokio's, the standard library's, Go's and Python's
/// `asyncio` servers do. So whoever names the port may listen on it, one at a time: it is kept from those
/// who ask for any.
///
/// ```
/// use tonic_failover::testkit::Port;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// let port = Port::free()?;
/// let server = tokio::net::TcpListener::bind(port.addr()).await?;
/// drop(server); // ... killed, its port still ours ...
/// let server = tokio::net::TcpListener::bind(port.addr()).await?;
/// # drop(server); Ok(()) }
/// ```
#[derive(Debug)]
pub struct Port {
    addr: SocketAddr,
    _held: TcpSocket,
}

// === impl Port ===

impl Port {
    /// A free port of 127.0.0.1.
    ///
    /// # Errors
    /// Where the system has none to give.
    pub fn free() -> io::Result<Self> {
        Self::hold((Ipv4Addr::LOCALHOST, 0))
    }

    /// This port of an address of this host; 0 is one that is free. Several may hold the same.
    ///
    /// # Errors
    /// Where somebody listens on it, or the address is not this host's.
    pub fn hold(addr: impl Into<SocketAddr>) -> io::Result<Self> {
        let held = bound(addr.into())?;
        Ok(Self { addr: held.local_addr()?, _held: held })
    }

    /// The address with the port.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The port.
    pub fn number(&self) -> u16 {
        self.addr.port()
    }

    /// Listens on it.
    ///
    /// # Errors
    /// Where somebody does already.
    ///
    /// # Panics
    /// Outside a tokio runtime with its I/O driver.
    pub fn listen(&self) -> io::Result<TcpListener> {
        bound(self.addr)?.listen(1024)
    }
}

fn bound(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, io::ErrorKind};

    use tokio::net::TcpStream;

    use super::*;

    /// Where the system's range is the default one, a port that is not held is met by about
    /// one of 14,000 that are asked for at a time.
    const HELD: usize = 400;
    const ASKED: usize = 700;

    #[tokio::test]
    async fn nobody_who_asks_for_any_port_is_given_one_that_is_held() {
        let held: Vec<_> = (0..HELD).map(|_| Port::free().unwrap()).collect();
        let numbers: HashSet<_> = held.iter().map(Port::number).collect();
        assert_eq!(numbers.len(), HELD, "each its own");
        // For a listener, with and without the option.
        let listeners: Vec<_> = (0..ASKED / 2)
            .map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port())
            .chain((0..ASKED / 2).map(|_| {
                let socket = TcpSocket::new_v4().unwrap();
                socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
                socket.local_addr().unwrap().port()
            }))
            .collect();
        assert!(listeners.iter().all(|port| !numbers.contains(port)));
        // For a connection.
        let server = Port::free().unwrap();
        let listener = server.listen().unwrap();
        let mut connections = Vec::new();
        for _ in 0..ASKED {
            let stream = TcpStream::connect(server.addr()).await.unwrap();
            assert!(!numbers.contains(&stream.local_addr().unwrap().port()));
            connections.push((stream, listener.accept().await.unwrap()));
            if connections.len() == 100 {
                connections.clear();
            }
        }
    }

    #[tokio::test]
    async fn its_server_comes_and_goes_and_connections_are_refused_meanwhile() {
        let port = Port::free().unwrap();
        for _ in 0..3 {
            let refused = TcpStream::connect(port.addr()).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
            // Left open at the server's end when it dies, as in a crash.
            let server = tokio::net::TcpListener::bind(port.addr()).await.unwrap();
            let client = TcpStream::connect(port.addr()).await.unwrap();
            let taken = server.accept().await.unwrap();
            assert_eq!(port.listen().unwrap_err().kind(), ErrorKind::AddrInUse);
            assert_eq!(Port::hold(port.addr()).unwrap_err().kind(), ErrorKind::AddrInUse);
            drop((server, taken, client));
        }
        assert_eq!(Port::hold(port.addr()).unwrap().addr(), port.addr());
    }
}
