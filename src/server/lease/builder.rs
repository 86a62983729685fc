//! What a lease is campaigned for with: every setting is checked before anything starts.

use std::{fmt, io, net::IpAddr, sync::Arc, time::Duration};

use tokio::sync::watch;

use super::{Lease, timing::Timing};
use crate::{
    InstanceId,
    not_primary::is_sound,
    role::{FencingToken, Primary},
    server::{
        life::Life,
        probe::{Probe, ProbeError},
        store::LeaseStore,
    },
};

/// An instance's name is as long as this at the most: as a name in DNS (RFC 1035, 2.3.4).
pub(super) const LONGEST_NAME: usize = 255;

/// Builds a [`Lease`].
#[derive(Clone)]
pub struct LeaseBuilder {
    pub(super) store: Arc<dyn LeaseStore>,
    pub(super) instance: String,
    pub(super) address: InstanceId,
    pub(super) timing: Timing,
    pub(super) drain: Duration,
    pub(super) life: Option<Life>,
}

/// Why a campaign cannot begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CampaignError {
    /// A setting is impossible, by itself or beside the others.
    #[error("lease: {setting} = {value} is not usable: {expected}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// What was given.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// The probe cannot run.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// There is no thread to run on.
    #[error("the lease's thread could not be started")]
    Thread {
        /// What the system says.
        source: io::Error,
    },
}

/// Whether an instance may be called so.
pub(super) fn is_name(name: &str) -> bool {
    (1..=LONGEST_NAME).contains(&name.len()) && !name.contains(char::is_control)
}

impl CampaignError {
    pub(super) fn setting(
        setting: &'static str,
        value: impl fmt::Debug,
        expected: impl Into<String>,
    ) -> Self {
        Self::Setting { setting, value: format!("{value:?}"), expected: expected.into() }
    }
}

impl LeaseBuilder {
    pub(super) fn new(store: impl LeaseStore, instance: String, address: InstanceId) -> Self {
        Self {
            store: Arc::new(store),
            instance,
            address,
            timing: Timing::default(),
            drain: Duration::from_secs(5),
            life: None,
        }
    }

    /// A standby takes over when it has seen no renewal for so long. To be the same for all instances of
    /// one lease; where it is not, a standby waits by the primary's, which is kept in the store, and logs a
    /// warning. 100 ms to 5 min.
    /// Default: 2 s, so that a crash is taken over within 3 s.
    pub fn length(mut self, length: Duration) -> Self {
        self.timing.length = length;
        self
    }

    /// Between two renewals, and between a standby's reads. Twice this, and the margin, must be less
    /// than the length, so that one renewal may fail. Default: 400 ms.
    pub fn renewal(mut self, renewal: Duration) -> Self {
        self.timing.renewal = renewal;
        self
    }

    /// A holder stops so much before a standby may take over. It covers what clocks of two machines
    /// run apart within the length, and the time between looking at the clock and acting. Default:
    /// 300 ms.
    pub fn margin(mut self, margin: Duration) -> Self {
        self.timing.margin = margin;
        self
    }

    /// The lease is held, and campaigned for, only while `probe` finds that this instance serves. In
    /// place of an [`alive_while`](Self::alive_while) before. Default: always, which
    /// leaves a primary that hangs in its role.
    pub fn alive(mut self, probe: &Probe) -> Self {
        self.life = Some(Life::Probe(probe.clone()));
        self
    }

    /// As [`alive`](Self::alive), by the application's own judgement. Where its sender is gone, the
    /// instance is not known to serve. Default: always.
    pub fn alive_while(mut self, alive: watch::Receiver<bool>) -> Self {
        self.life = Some(Life::Told(alive));
        self
    }

    /// How long a [hand-over](Lease::hand_over) waits for what is in flight. Up to an hour. Default: 5 s.
    pub fn drain(mut self, drain: Duration) -> Self {
        self.drain = drain;
        self
    }

    /// Begins to campaign, on a thread of its own, and returns at once: no runtime is needed. Whether
    /// the store can be reached is for the [role](Lease::role) to show.
    ///
    /// # Errors
    /// A setting is impossible, or there is no thread to run on.
    pub fn campaign(self) -> Result<Lease, CampaignError> {
        self.timing.check()?;
        let name = &self.instance;
        if !is_name(name) {
            return Err(CampaignError::setting(
                "instance",
                name,
                "a name of 1 to 255 bytes without control characters, like counter-a",
            ));
        }
        let unspecified = self.address.host().parse().is_ok_and(|ip: IpAddr| ip.is_unspecified());
        // Nobody could be sent to it.
        if unspecified || !is_sound(&Primary::new(name, self.address.clone(), FencingToken::new(1))) {
            let expected = "the host by which others reach it and the port that the listener has got, like 10.0.0.7:50051";
            return Err(CampaignError::setting("address", self.address.authority(), expected));
        }
        if self.drain > Duration::from_secs(3600) {
            return Err(CampaignError::setting("drain", self.drain, "an hour at the most"));
        }
        Lease::start(self)
    }
}

impl fmt::Debug for LeaseBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseBuilder")
            .field("instance", &self.instance)
            .field("address", &self.address)
            .field("timing", &self.timing)
            .finish_non_exhaustive()
    }
}
