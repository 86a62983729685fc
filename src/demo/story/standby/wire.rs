//! The way to Consul, which can be cut: nothing passes, nobody is told.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

/// Forwards to one address. Ends when dropped.
pub(super) struct Wire {
    address: SocketAddr,
    whole: watch::Sender<bool>,
    _tasks: JoinSet<()>,
}

// === impl Wire ===

impl Wire {
    pub(super) async fn to(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let whole = watch::Sender::new(true);
        let state = whole.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((client, _)) = listener.accept() => {
                        connections.spawn(forward(client, target, state.subscribe()));
                    }
                    Some(_) = connections.join_next() => {}
                }
            }
        });
        Ok(Self { address, whole, _tasks: tasks })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From now on nothing passes, in neither direction.
    pub(super) fn cut(&self) {
        self.whole.send_replace(false);
    }

    /// New connections pass again; those that were cut are closed.
    pub(super) fn mend(&self) {
        self.whole.send_replace(true);
    }
}

async fn forward(mut client: TcpStream, target: SocketAddr, mut whole: watch::Receiver<bool>) {
    if *whole.borrow_and_update() {
        let Ok(mut server) = TcpStream::connect(target).await else { return };
        tokio::select! {
            _ = copy_bidirectional(&mut client, &mut server) => return,
            _ = whole.wait_for(|whole| !whole) => {}
        }
        // Held, as a network would that loses what it is given.
        let _ = whole.wait_for(|whole| *whole).await;
        return;
    }
    let _ = whole.wait_for(|whole| *whole).await;
}
