//! Where to look when the own datacenter has no usable instance.

use super::service::ConsulService;

/// The other datacenters, in the order of preference. The own one is skipped.
///
/// They are asked only when the own datacenter has no usable instance, each on
/// its own, so that a dead one costs the others nothing. The first with a
/// usable instance, one that has answered, wins. Calls return once the own
/// datacenter has been usable for a while
/// ([`failback_after`](super::ConsulServiceBuilder::failback_after)).
#[derive(Clone, Debug, Default)]
pub struct Fallback(pub(crate) Kind);

#[derive(Clone, Debug, Default)]
pub(crate) enum Kind {
    #[default]
    None,
    /// Through the own agent, in the order of its round-trip times.
    Nearest,
    /// Through the own agent, in this order.
    Datacenters(Vec<String>),
    /// Through other agents, in this order.
    Services(Vec<ConsulService>),
}

impl Fallback {
    /// No other datacenter: the default.
    pub fn none() -> Self {
        Self(Kind::None)
    }

    /// All datacenters that the agent knows, in the order of their round-trip times.
    pub fn nearest() -> Self {
        Self(Kind::Nearest)
    }

    /// These datacenters, in this order, asked through the own agent.
    pub fn datacenters<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        Self(Kind::Datacenters(names.into_iter().map(Into::into).collect()))
    }

    /// Other `ConsulService`s, each with the datacenter of its own agent, in this
    /// order: works also when the own agent is gone. They are kept alive by
    /// this one, and need not know the service's name themselves.
    pub fn services(services: impl IntoIterator<Item = ConsulService>) -> Self {
        Self(Kind::Services(services.into_iter().collect()))
    }
}
