//! One question to DNS, of one or of many look-ups, and what the answers mean.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use futures_util::{StreamExt, TryStreamExt, future::try_join, stream};
use hickory_resolver::{
    TokioResolver,
    net::{DnsError, NetError},
    proto::{
        op::ResponseCode,
        rr::{Name, RData, RecordType, rdata::SRV},
    },
};

use super::{Kind, Settings};
use crate::{
    client::registry::{Listing, RegistryError},
    instance::Instance,
};

/// How many targets are asked about at once. Ours: few enough for one small server.
const AT_ONCE: usize = 8;

pub(super) struct Lookups {
    resolver: TokioResolver,
    settings: Settings,
}

/// What was found under one name, and for how long it holds.
struct Found<T> {
    records: Vec<T>,
    /// Whether the name exists.
    exists: bool,
    ttl: Option<Duration>,
}

// === impl Lookups ===

impl Lookups {
    pub(super) fn new(resolver: TokioResolver, settings: Settings) -> Self {
        Self { resolver, settings }
    }

    /// All instances under the name.
    pub(super) async fn list(&self, name: &str) -> Result<Listing, RegistryError> {
        let unusable = |reason: String| RegistryError::Unsendable { reason };
        let name = Name::from_utf8(name).map_err(|error| unusable(format!("{name:?}: {error}")))?;
        let Found { mut records, exists, ttl } = match self.settings.kind {
            Kind::Hosts(port) => {
                let found = self.addresses(&name).await?;
                found.map(|ip| self.instance(format!("{ip}"), ip, port))
            }
            Kind::Srv => self.targets(&name).await?,
        };
        if !exists && records.is_empty() {
            return Err(RegistryError::NotFound);
        }
        // Servers rotate their answers; the same set in another order is no news.
        records.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(Listing::new(records).again_in(self.settings.bounded(ttl)))
    }

    async fn targets(&self, name: &Name) -> Result<Found<Instance>, RegistryError> {
        let found = self.look_up(name, RecordType::SRV, |data| match data {
            // "." says that the service is decidedly not there (RFC 2782).
            RData::SRV(srv) if !srv.target.is_root() && srv.port > 0 => Some(srv.clone()),
            _ => None,
        });
        let Found { records, mut exists, mut ttl } = found.await?;
        let lowest = records.iter().map(|srv| srv.priority).min().unwrap_or_default();
        let mut targets: BTreeMap<Name, Vec<SRV>> = BTreeMap::new();
        for srv in records {
            targets.entry(srv.target.clone()).or_default().push(srv);
        }
        let addresses = stream::iter(targets)
            .map(async |(target, srvs)| {
                Ok::<_, RegistryError>((self.addresses(&target).await?, target, srvs))
            })
            .buffer_unordered(AT_ONCE);
        let addresses: Vec<_> = addresses.try_collect().await?;
        let mut instances = Vec::new();
        for (found, target, srvs) in addresses {
            exists &= found.exists;
            ttl = shorter(ttl, found.ttl);
            let label = target.to_utf8().trim_end_matches('.').to_owned();
            for (srv, ip) in srvs.iter().flat_map(|srv| found.records.iter().map(move |ip| (srv, *ip))) {
                let mut instance = self.instance(label.clone(), ip, srv.port);
                instance.weight = u32::from(srv.weight).max(1);
                instance.warning = srv.priority > lowest;
                instances.push(instance);
            }
        }
        // Of one address twice the better is kept, which is the first.
        instances.sort_by_key(|it| it.warning);
        Ok(Found { records: instances, exists, ttl })
    }

    async fn addresses(&self, name: &Name) -> Result<Found<IpAddr>, RegistryError> {
        let v4 = self.look_up(name, RecordType::A, |data| match data {
            RData::A(ip) => somewhere(ip.0.into()),
            _ => None,
        });
        if self.settings.ipv4_only {
            return v4.await;
        }
        let v6 = self.look_up(name, RecordType::AAAA, |data| match data {
            RData::AAAA(ip) => somewhere(ip.0.into()),
            _ => None,
        });
        let (mut found, v6) = try_join(v4, v6).await?;
        // While one kind is there, how long the other one is not bears on nothing.
        found.ttl = match (found.records.is_empty(), v6.records.is_empty()) {
            (true, false) => v6.ttl,
            (false, true) => found.ttl,
            _ => shorter(found.ttl, v6.ttl),
        };
        found.exists |= v6.exists;
        found.records.extend(v6.records);
        Ok(found)
    }

    async fn look_up<T>(
        &self,
        name: &Name,
        kind: RecordType,
        pick: impl Fn(&RData) -> Option<T>,
    ) -> Result<Found<T>, RegistryError> {
        match self.resolver.lookup(name.clone(), kind).await {
            Ok(lookup) => {
                let answers = lookup.answers();
                Ok(Found {
                    records: answers.iter().filter_map(|record| pick(&record.data)).collect(),
                    exists: true,
                    ttl: answers.iter().map(|record| seconds(record.ttl)).min(),
                })
            }
            Err(NetError::Dns(DnsError::NoRecordsFound(none)))
                if matches!(none.response_code, ResponseCode::NoError | ResponseCode::NXDomain) =>
            {
                Ok(Found {
                    records: Vec::new(),
                    exists: none.response_code == ResponseCode::NoError,
                    ttl: none.negative_ttl.map(seconds),
                })
            }
            Err(NetError::Timeout) => Err(RegistryError::TimedOut { after: self.settings.timeout }),
            Err(error) => Err(RegistryError::other(error)),
        }
    }

    fn instance(&self, name: String, ip: IpAddr, port: u16) -> Instance {
        Instance::new(name, &ip.to_string(), port, &*self.settings.datacenter)
    }
}

// === impl Found ===

impl<T> Found<T> {
    fn map<U>(self, each: impl Fn(T) -> U) -> Found<U> {
        let Self { records, exists, ttl } = self;
        Found { records: records.into_iter().map(each).collect(), exists, ttl }
    }
}

// === impl Settings ===

impl Settings {
    /// When to ask again, for records of this TTL.
    fn bounded(&self, ttl: Option<Duration>) -> Duration {
        ttl.unwrap_or_default().clamp(self.floor, self.ceiling)
    }
}

/// `ip`, unless it is 0.0.0.0 or `::`: servers that block a name say so, and whoever connects to it
/// reaches his own host.
fn somewhere(ip: IpAddr) -> Option<IpAddr> {
    (!ip.is_unspecified()).then_some(ip)
}

fn seconds(ttl: u32) -> Duration {
    Duration::from_secs(ttl.into())
}

fn shorter(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    [a, b].into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::super::Dns;

    #[test]
    fn the_time_to_the_next_question_stays_within_its_bounds() {
        let settings = Dns::srv().settings;
        let cases = [(None, 1), (Some(0), 1), (Some(30), 30), (Some(86_400), 60)];
        for (ttl, expected) in cases {
            assert_eq!(settings.bounded(ttl.map(super::seconds)).as_secs(), expected, "{ttl:?}");
        }
    }
}
