//! The connections that the server takes, and a way to let it take none, for tests.

use std::io;

use futures_util::{Stream, StreamExt, stream};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{Signal, SignalKind, signal},
};
use tonic::transport::server::TcpIncoming;

/// SIGUSR1 blocks, SIGUSR2 lets go on.
struct Signals {
    block: Signal,
    go_on: Signal,
}

/// What comes to `listener`.
pub(super) fn incoming(
    listener: TcpListener,
    blockable: bool,
) -> io::Result<impl Stream<Item = io::Result<TcpStream>>> {
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let signals = match blockable {
        true => Some(Signals {
            block: signal(SignalKind::user_defined1())?,
            go_on: signal(SignalKind::user_defined2())?,
        }),
        false => None,
    };
    Ok(stream::unfold((incoming, signals), |(mut incoming, mut signals)| async move {
        let next = match &mut signals {
            None => incoming.next().await,
            Some(signals) => signals.next(&mut incoming).await,
        };
        Some((next?, (incoming, signals)))
    }))
}

// === impl Signals ===

impl Signals {
    async fn next(&mut self, incoming: &mut TcpIncoming) -> Option<io::Result<TcpStream>> {
        loop {
            tokio::select! {
                biased;
                _ = self.block.recv() => {}
                next = incoming.next() => return next,
            }
            self.go_on.recv().await;
        }
    }
}
