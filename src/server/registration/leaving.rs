//! Leaving in order.

use std::{pin::Pin, time::Duration};

use tokio::{
    sync::{Mutex, watch},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{RegistrationStatus, keeper::FAREWELL};

/// What is to be done first.
pub(super) type Before = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How long what is to be done first may take: what cannot reach its store must not keep
/// the process from ending. Our choice, as for Consul.
const BEFORE: Duration = FAREWELL;

/// The steps, each taken once, however many wait for them.
pub(super) struct Leaving {
    /// Not yet done. Held across awaits: who comes second waits for the first.
    pub(super) before: Mutex<Option<Before>>,
    /// Tells the keeper.
    pub(super) stop: CancellationToken,
    pub(super) settle: Duration,
    pub(super) drain: Duration,
    pub(super) serving: watch::Sender<bool>,
    /// Streams are to end, and the server.
    pub(super) stopping: CancellationToken,
}

/// The server had not ended when its time was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("some calls had not ended {after:?} after the server was told to stop")]
#[non_exhaustive]
pub struct NotDrained {
    /// How long they had.
    pub after: Duration,
}

// === impl Leaving ===

impl Leaving {
    /// Takes the steps up to the one where the server is to stop. Dropped and called again,
    /// it goes on where it was.
    pub(super) async fn leave(&self, status: &mut watch::Receiver<RegistrationStatus>) {
        // The order of the steps is kept by this, for all who call.
        let mut before = self.before.lock().await;
        if self.stopping.is_cancelled() {
            return;
        }
        if let Some(first) = before.as_mut() {
            if timeout(BEFORE, first).await.is_err() {
                warn!("what is to be done before leaving had not ended after {BEFORE:?}");
            }
            *before = None;
        }
        self.stop.cancel();
        if is_out(status).await && !self.settle.is_zero() {
            info!("out of the registry: waiting {:?} for callers to move", self.settle);
            sleep(self.settle).await;
        }
        self.serving.send_replace(false);
        self.stopping.cancel();
    }

    /// Waits for `server`, when it has been told to stop for as long as calls may take to end.
    pub(super) async fn drained<T>(&self, server: impl Future<Output = T>) -> Result<T, NotDrained> {
        let late = async {
            self.stopping.cancelled().await;
            sleep(self.drain).await;
        };
        tokio::select! {
            biased;
            done = server => Ok(done),
            () = late => Err(NotDrained { after: self.drain }),
        }
    }
}

/// Waits for the keeper's end, and says whether callers will hear that the instance has gone.
async fn is_out(status: &mut watch::Receiver<RegistrationStatus>) -> bool {
    // It keeps its own time; a machine that is busy gets a little more.
    let ended = timeout(FAREWELL * 2, status.wait_for(RegistrationStatus::has_ended)).await;
    matches!(ended, Ok(Ok(status)) if matches!(*status, RegistrationStatus::Left { instead: None }))
}
