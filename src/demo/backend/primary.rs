//! Primary or standby: the lease of an instance, and all that goes by it.

use std::{fs, net::SocketAddr};

use tokio::{sync::watch, time::timeout};

use super::{
    Log,
    lease_at::LeaseAt,
    options::Options,
    shared::{Count, SharedCounter},
    unfenced::Unfenced,
};
use crate::{
    InstanceId, Role,
    consul::ConsulConfig,
    demo::{cli::Failure, screen::Tone},
    server::{
        FenceLayer, FencedState, Lease, LeaseBuilder, Probe,
        store::{ConsulLeaseStore, FileLeaseStore, LeaseStore},
    },
};

/// How long calls in flight may take to end before the lease is given up. Our choice: they are
/// short, and what does not end then is refused by the store.
pub(super) const LAST_CALLS: std::time::Duration = std::time::Duration::from_secs(1);

/// An instance's part in who is primary. Cheap to clone.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) lease: Lease,
    pub(super) fence: FenceLayer,
    /// Whether the listener answers.
    pub(super) probe: Probe,
    pub(super) counter: SharedCounter,
}

// === impl Candidate ===

impl Candidate {
    /// Campaigns for the lease at `at`, at once and for ever.
    pub(super) fn start(
        at: &LeaseAt,
        options: &Options,
        name: &str,
        listening: SocketAddr,
        address: InstanceId,
        consul: &ConsulConfig,
    ) -> Result<Self, Failure> {
        let probe = Probe::of(listening);
        let lease = match at {
            LeaseAt::Consul { prefix } => {
                let default = || format!("services/{}", options.service);
                let prefix = prefix.clone().unwrap_or_else(default);
                lease(ConsulLeaseStore::new(consul.clone(), prefix)?, options, name, address)
            }
            LeaseAt::Files(directory) => {
                fs::create_dir_all(directory)
                    .map_err(|error| format!("cannot make {}: {error}", directory.display()))?;
                lease(FileLeaseStore::new(directory)?, options, name, address)
            }
        };
        let lease = lease.alive(&probe).drain(LAST_CALLS).campaign()?;
        let state = FencedState::<Count>::new(&lease, "counter")?;
        let fence = FenceLayer::new(&lease);
        let unfenced = options.unfenced.clone().map(Unfenced::new);
        let counter = SharedCounter::new(state, lease.clone(), unfenced);
        Ok(Self { lease, fence, probe, counter })
    }

    /// Gives the lease up, for good: what is in flight ends before, what comes is refused.
    pub(super) async fn leave(self) {
        self.fence.close();
        if timeout(LAST_CALLS, self.fence.idle()).await.is_err() {
            tracing::warn!(left = self.fence.in_flight(), "calls were in flight when the lease was given up");
        }
        self.lease.shutdown().await;
    }
}

fn lease(store: impl LeaseStore, options: &Options, name: &str, address: InstanceId) -> LeaseBuilder {
    let mut lease = Lease::builder(store, name, address);
    if let Some(length) = options.lease_length {
        lease = lease.length(length);
    }
    if let Some(renewal) = options.lease_renewal {
        lease = lease.renewal(renewal);
    }
    if let Some(margin) = options.lease_margin {
        lease = lease.margin(margin);
    }
    lease
}

/// Says each change of the role, until the lease is no more.
pub(super) async fn tell(mut role: watch::Receiver<Role>, log: Log) {
    let mut held = None;
    loop {
        let now = role.borrow_and_update().clone();
        let token = match now {
            Role::Primary { token, .. } => Some(token),
            _ => None,
        };
        if held != token {
            if let Some(lost) = held {
                log.say(Tone::Notice, &format!("lost primary role, of term {lost}"));
            }
            if let Some(token) = token {
                log.say(Tone::Good, &format!("became PRIMARY, term {token}"));
            }
        }
        if let Role::Standby { primary: Some(primary) } = &now {
            log.say(Tone::Quiet, &format!("standby of {primary}"));
        }
        held = token;
        if role.changed().await.is_err() {
            return;
        }
    }
}
