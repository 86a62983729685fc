//! What happens to a service, as a typed stream.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::sync::broadcast;
use tokio_stream::{
    Stream,
    wrappers::{BroadcastStream, errors::BroadcastStreamRecvError},
};

use crate::{FencingToken, Instance, consul::Denied, instance::Shown};

/// Something that happened to one service. Its `Display` is one plain sentence.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FailoverEvent {
    /// The preferred instance changed.
    Rebound {
        /// The service.
        service: Arc<str>,
        /// The one before; `None` at the first binding and after a gap.
        from: Option<Arc<Instance>>,
        /// The one now.
        to: Arc<Instance>,
        /// Why.
        cause: RebindCause,
        /// From the moment the loss was noticed (at the first binding: from the
        /// start) to the publication of the new binding.
        took: Duration,
    },
    /// Another instance is the primary: the first call has been served by it. Only where calls go to it alone
    /// ([`primary_only`](super::ServiceOptions::primary_only)).
    PrimaryChanged {
        /// The service.
        service: Arc<str>,
        /// The one before; `None` at first.
        from: Option<Arc<Instance>>,
        /// The one now.
        to: Arc<Instance>,
        /// Of its term, where that is known.
        token: Option<FencingToken>,
    },
    /// An instance failed and is left alone for a while.
    Ejected {
        /// The service.
        service: Arc<str>,
        /// The instance.
        instance: Arc<Instance>,
        /// What went wrong.
        cause: String,
        /// When it is tried next, by a probe.
        retry_in: Duration,
    },
    /// An ejected instance has answered a probe.
    Readmitted {
        /// The service.
        service: Arc<str>,
        /// The instance.
        instance: Arc<Instance>,
    },
    /// An instance has left the registry, and streams on it are ended in a while:
    /// time to open them anew. Only where [`drain_after`](super::ServiceOptions::drain_after) is set.
    Draining {
        /// The service.
        service: Arc<str>,
        /// The instance.
        instance: Arc<Instance>,
        /// When they end, unless it is listed again by then.
        ends_in: Duration,
    },
    /// An instance says that it is not serving: it gets no new calls while another does.
    NotServing {
        /// The service.
        service: Arc<str>,
        /// The instance.
        instance: Arc<Instance>,
    },
    /// It says that it is serving again.
    ServingAgain {
        /// The service.
        service: Arc<str>,
        /// The instance.
        instance: Arc<Instance>,
    },
    /// Calls went over to a less preferred datacenter.
    FellBack {
        /// The service.
        service: Arc<str>,
        /// The datacenter before.
        from: String,
        /// The datacenter now.
        to: String,
    },
    /// Calls returned to a more preferred datacenter.
    FailedBack {
        /// The service.
        service: Arc<str>,
        /// The datacenter before.
        from: String,
        /// The datacenter now.
        to: String,
    },
    /// No instance is usable.
    Unusable {
        /// The service.
        service: Arc<str>,
        /// Why.
        reason: String,
    },
    /// The registry does not answer; what it said last stays in use.
    RegistryLost {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
        /// What went wrong.
        error: String,
    },
    /// The registry answers, and is cut off from its leader: what it says may be
    /// old, and stays in use.
    RegistryBehind {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
        /// How long the server that answered had not heard from the leader.
        last_contact: Duration,
    },
    /// The registry answers again, is not cut off, and has been like that for 3 s: one
    /// loss is told once. Ends what [`RegistryLost`](Self::RegistryLost) or
    /// [`RegistryBehind`](Self::RegistryBehind) began; in between, one may turn into the
    /// other silently. For one datacenter these and this come in turns.
    RegistryBack {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
        /// From the beginning of the trouble until this was certain.
        after: Duration,
    },
    /// The registry lists no instance any more. Those that it listed last stay in use, and
    /// after [`demote_after`](super::ConsulServiceBuilder::demote_after) behind every other
    /// datacenter's.
    ListEmpty {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
    },
    /// It lists some again.
    ListFilled {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
        /// How long the list was empty.
        after: Duration,
    },
    /// The registry answers blocking queries at once and without news; it is asked once a
    /// second instead.
    NotBlocking {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
    },
    /// A query to it has waited again, or it is in other trouble, which is told.
    BlockingAgain {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
    },
    /// The registry hides from the token what it is asked for. A list that comes
    /// empty for that reason says nothing: what was known before stays in use.
    AccessDenied {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
        /// What the token may not read.
        denied: Denied,
    },
    /// The registry hides nothing any more, as far as that is known.
    AccessGranted {
        /// The service.
        service: Arc<str>,
        /// The datacenter asked about.
        datacenter: String,
    },
    /// Events were lost because they were not read in time; what follows is current.
    Missed {
        /// How many.
        count: u64,
    },
}

/// Why the preferred instance changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RebindCause {
    /// The first usable instance was found, at the start or after a gap.
    Found,
    /// The connection to the one before was lost.
    ConnectionLost,
    /// The one before takes no more calls on its connection (it drains).
    GoingAway,
    /// The one before fell silent and did not answer a probe.
    Unresponsive,
    /// The one before answered UNAVAILABLE, or not in time, too often.
    Failing,
    /// The one before says that it is not serving.
    NotServing,
    /// The one before is no longer registered as healthy.
    LeftRegistry,
    /// The one before may still be called, and another is better: its checks pass, or it says that it is
    /// serving, where the one before only warns, or has not said so yet.
    Outranked,
    /// A more preferred datacenter is usable again.
    FailedBack,
    /// Another instance is the primary.
    PrimaryMoved,
}

// === impl FailoverEvent ===

impl FailoverEvent {
    /// Whether something went wrong: those are warnings in the log. What ends a trouble
    /// is none, and a new binding is no more than how it was dealt with.
    pub(crate) fn is_trouble(&self) -> bool {
        match self {
            Self::Rebound { .. }
            | Self::PrimaryChanged { .. }
            | Self::Readmitted { .. }
            | Self::ServingAgain { .. }
            | Self::FailedBack { .. }
            | Self::RegistryBack { .. }
            | Self::ListFilled { .. }
            | Self::BlockingAgain { .. }
            | Self::AccessGranted { .. } => false,
            Self::Ejected { .. }
            | Self::Draining { .. }
            | Self::NotServing { .. }
            | Self::FellBack { .. }
            | Self::Unusable { .. }
            | Self::RegistryLost { .. }
            | Self::RegistryBehind { .. }
            | Self::ListEmpty { .. }
            | Self::NotBlocking { .. }
            | Self::AccessDenied { .. }
            | Self::Missed { .. } => true,
        }
    }
}

impl fmt::Display for RebindCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Found => "found",
            Self::ConnectionLost => "connection lost",
            Self::GoingAway => "server is going away",
            Self::Unresponsive => "fell silent",
            Self::Failing => "answered UNAVAILABLE, or not in time, too often",
            Self::NotServing => "says that it is not serving",
            Self::LeftRegistry => "left the registry",
            Self::Outranked => "another is better",
            Self::FailedBack => "preferred datacenter is back",
            Self::PrimaryMoved => "another is the primary",
        })
    }
}

impl fmt::Display for FailoverEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rebound { from: None, to, took, .. } => {
                write!(f, "bound to {to} in {:.1} ms", took.as_secs_f64() * 1e3)
            }
            Self::Rebound { from: Some(from), to, cause, took, .. } => {
                write!(f, "rebound from {from} to {to} ({cause}) in {:.1} ms", took.as_secs_f64() * 1e3)
            }
            Self::PrimaryChanged { from, to, token, .. } => {
                write!(f, "{to} is the primary")?;
                if let Some(token) = token {
                    write!(f, " of term {token}")?;
                }
                from.as_ref().map_or(Ok(()), |from| write!(f, ", after {from}"))
            }
            Self::Ejected { instance, cause, retry_in, .. } => {
                write!(f, "ejected {instance} ({cause}), next try in {:.1} s", retry_in.as_secs_f64())
            }
            Self::Readmitted { instance, .. } => write!(f, "{instance} answers again"),
            Self::Draining { instance, ends_in, .. } => {
                write!(f, "{instance} has left; its streams end in {:.1} s", ends_in.as_secs_f64())
            }
            Self::NotServing { instance, .. } => write!(f, "{instance} says that it is not serving"),
            Self::ServingAgain { instance, .. } => write!(f, "{instance} says that it is serving again"),
            Self::FellBack { from, to, .. } => write!(f, "fell back from {} to {}", Shown(from), Shown(to)),
            Self::FailedBack { from, to, .. } => {
                write!(f, "failed back from {} to {}", Shown(from), Shown(to))
            }
            Self::Unusable { reason, .. } => write!(f, "nothing usable: {reason}"),
            Self::RegistryLost { datacenter, error, .. } => {
                write!(
                    f,
                    "the registry of {} does not answer ({error}); the last known instances stay",
                    Shown(datacenter)
                )
            }
            Self::RegistryBehind { datacenter, last_contact, .. } => write!(
                f,
                "the registry of {} has been cut off from its leader for {:.1} s; what it says stays in use",
                Shown(datacenter),
                last_contact.as_secs_f64()
            ),
            Self::RegistryBack { datacenter, after, .. } => {
                write!(
                    f,
                    "the registry of {} answers again after {:.1} s",
                    Shown(datacenter),
                    after.as_secs_f64()
                )
            }
            Self::ListEmpty { datacenter, .. } => {
                write!(
                    f,
                    "the registry of {} lists no instance any more; the last known ones stay",
                    Shown(datacenter)
                )
            }
            Self::ListFilled { datacenter, after, .. } => write!(
                f,
                "the registry of {} lists instances again after {:.1} s",
                Shown(datacenter),
                after.as_secs_f64()
            ),
            Self::NotBlocking { datacenter, .. } => {
                write!(
                    f,
                    "the registry of {} answers at once instead of when there is news",
                    Shown(datacenter)
                )
            }
            Self::BlockingAgain { datacenter, .. } => {
                write!(f, "the registry of {} does no longer answer at once", Shown(datacenter))
            }
            Self::AccessDenied { datacenter, denied, .. } => {
                write!(f, "the registry of {} hides something: {denied}", Shown(datacenter))
            }
            Self::AccessGranted { datacenter, .. } => {
                write!(f, "the registry of {} hides nothing from the token any more", Shown(datacenter))
            }
            Self::Missed { count } => write!(f, "{count} events were missed"),
        }
    }
}

/// How many events are kept for a reader that is behind.
const CAPACITY: usize = 256;

pub(crate) type EventSender = broadcast::Sender<FailoverEvent>;

pub(crate) fn channel() -> EventSender {
    broadcast::Sender::new(CAPACITY)
}

/// A stream of [`FailoverEvent`]s from now on. It ends when the service is shut
/// down. A reader that falls more than 256 events behind gets [`FailoverEvent::Missed`].
#[derive(Debug)]
pub struct EventStream(BroadcastStream<FailoverEvent>);

impl EventStream {
    pub(crate) fn new(receiver: broadcast::Receiver<FailoverEvent>) -> Self {
        Self(BroadcastStream::new(receiver))
    }
}

impl Stream for EventStream {
    type Item = FailoverEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<FailoverEvent>> {
        Pin::new(&mut self.0).poll_next(cx).map(|item| {
            item.map(|event| match event {
                Ok(event) => event,
                Err(BroadcastStreamRecvError::Lagged(count)) => FailoverEvent::Missed { count },
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_a_trouble_is_a_warning_and_its_end_is_none() {
        let (service, datacenter): (Arc<str>, _) = ("counter".into(), || "dc1".to_owned());
        let (from, to) = ("dc1".to_owned(), "dc2".to_owned());
        let after = Duration::from_secs(1);
        let at = |service: &Arc<str>| service.clone();
        let pairs = [
            (
                FailoverEvent::RegistryLost {
                    service: at(&service),
                    datacenter: datacenter(),
                    error: String::new(),
                },
                FailoverEvent::RegistryBack { service: at(&service), datacenter: datacenter(), after },
            ),
            (
                FailoverEvent::RegistryBehind {
                    service: at(&service),
                    datacenter: datacenter(),
                    last_contact: after,
                },
                FailoverEvent::RegistryBack { service: at(&service), datacenter: datacenter(), after },
            ),
            (
                FailoverEvent::ListEmpty { service: at(&service), datacenter: datacenter() },
                FailoverEvent::ListFilled { service: at(&service), datacenter: datacenter(), after },
            ),
            (
                FailoverEvent::NotBlocking { service: at(&service), datacenter: datacenter() },
                FailoverEvent::BlockingAgain { service: at(&service), datacenter: datacenter() },
            ),
            (
                FailoverEvent::AccessDenied {
                    service: at(&service),
                    datacenter: datacenter(),
                    denied: Denied::Part,
                },
                FailoverEvent::AccessGranted { service: at(&service), datacenter: datacenter() },
            ),
            (
                FailoverEvent::FellBack { service: at(&service), from: from.clone(), to: to.clone() },
                FailoverEvent::FailedBack { service: at(&service), from: to, to: from },
            ),
        ];
        for (begin, end) in pairs {
            assert!(begin.is_trouble(), "{begin}");
            assert!(!end.is_trouble(), "{end}");
        }
    }
}
