//! Where to look when the own datacenter has no usable instance.

use std::{fmt, sync::Arc};

use super::{
    registry::{ConsulQuery, Guarded, Registry},
    service::ConsulService,
    worker::Others,
};
use crate::consul::{ConsulClient, HealthQuery};

/// The other datacenters, in the order of preference. The own one is skipped.
///
/// They are asked only when the own datacenter has no usable instance, each on
/// its own, so that a dead one costs the others nothing. The first with a
/// usable instance, one that has answered, wins. Calls return once the own
/// datacenter has been usable for a while
/// ([`failback_after`](super::ConsulServiceBuilder::failback_after)).
#[derive(Clone, Debug, Default)]
pub struct Fallback(Kind);

#[derive(Clone, Default)]
enum Kind {
    #[default]
    None,
    /// Through the own agent, in the order of its round-trip times.
    Nearest,
    /// Through the own agent, in this order.
    Datacenters(Vec<String>),
    /// Through other agents, in this order.
    Services(Vec<ConsulService>),
    /// In other registries, in this order.
    Registries(Vec<(String, Arc<dyn Registry>)>),
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

    /// Other registries than Consul, by name, in this order: for example a
    /// [`StaticList`](super::registry::StaticList), for when Consul cannot be
    /// reached from the start.
    pub fn registries<S: Into<String>>(registries: impl IntoIterator<Item = (S, Arc<dyn Registry>)>) -> Self {
        let guarded =
            |(name, registry): (S, _)| (name.into(), Arc::new(Guarded(registry)) as Arc<dyn Registry>);
        Self(Kind::Registries(registries.into_iter().map(guarded).collect()))
    }

    /// The registries of the others, for a service found by `query` through `client`.
    pub(super) fn others(&self, client: &ConsulClient, query: &HealthQuery) -> Others {
        let through_agent = |wanted| Others::Agent { client: client.clone(), query: query.clone(), wanted };
        match &self.0 {
            Kind::None => Others::None,
            Kind::Nearest => through_agent(None),
            Kind::Datacenters(names) => through_agent(Some(names.clone())),
            Kind::Services(services) => {
                let registry = |other: &ConsulService| {
                    let (client, query) = (other.consul_client().clone(), query.clone());
                    (other.name().to_owned(), Arc::new(ConsulQuery::new(client, query)) as Arc<dyn Registry>)
                };
                // The own one is skipped: it is asked already.
                let others = services.iter().filter(|it| it.consul_client().address() != client.address());
                Others::Registries(others.map(registry).collect())
            }
            Kind::Registries(registries) => Others::Registries(registries.clone()),
        }
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Nearest => f.write_str("Nearest"),
            Self::Datacenters(names) => f.debug_tuple("Datacenters").field(names).finish(),
            Self::Services(services) => f.debug_tuple("Services").field(services).finish(),
            Self::Registries(registries) => {
                let names: Vec<_> = registries.iter().map(|(name, _)| name).collect();
                f.debug_tuple("Registries").field(&names).finish()
            }
        }
    }
}
