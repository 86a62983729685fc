//! Whether this instance serves, for whoever is to act only while it does.

use std::io;

use tokio::sync::watch;

use super::{
    probe::{Probe, ProbeError},
    pulse::Pulse,
};

/// Who says it.
#[derive(Clone)]
pub(super) enum Life {
    Probe(Probe),
    Told(watch::Receiver<bool>),
}

/// What is said, and what has to be kept so that it goes on being said.
pub(super) type Watched = (watch::Receiver<bool>, Option<Probe>);

/// Begins to listen, where anybody says it; and gives a thread to act on, the probe's where
/// there is one.
pub(super) fn start<E: From<ProbeError>>(
    life: Option<Life>,
    no_thread: impl FnOnce(io::Error) -> E,
) -> Result<(Option<Watched>, Pulse), E> {
    let told = match life {
        Some(Life::Probe(probe)) => {
            let (alive, pulse) = probe.start()?;
            return Ok((Some((alive, Some(probe))), pulse));
        }
        Some(Life::Told(alive)) => Some((alive, None)),
        None => None,
    };
    Ok((told, Pulse::start().map_err(no_thread)?))
}
