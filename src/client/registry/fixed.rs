//! Instances that are said, not found.

use std::{collections::BTreeMap, fmt, sync::Arc};

use tokio::{sync::watch, time::timeout};

use super::{Asking, Listing, Question, Registry};
use crate::instance::Instance;

/// A registry of fixed lists, one for each service, which can be replaced while
/// they are in use.
///
/// Cheap to clone; clones are the same lists. One goes to the builder, another
/// one stays with whoever replaces them:
///
/// ```
/// # use tonic_failover::{Instance, client::{ServiceOptions, Services, registry::StaticList}};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let list = StaticList::new();
/// list.set("counter", [Instance::new("counter-1", "10.0.0.7", 50051, "rack-1")]);
/// let services = Services::builder(list.clone()).service(ServiceOptions::new("counter")).build()?;
/// let counter = services.grpc_client("counter")?;
/// list.set("counter", [Instance::new("counter-2", "10.0.0.8", 50051, "rack-1")]);
/// # Ok(()) }
/// ```
///
/// New calls leave an instance that is on the new list no longer as soon as one that
/// is on it is ready; running ones finish. A list that has not been set is empty. An empty list is treated as
/// every registry's: the old instances stay the last resort while they answer.
///
/// One registry is one datacenter, and is called what its first instance says. Those of another go into a list
/// of their own, as a [fallback](crate::client::ServicesBuilder::fallback): then they are used when this one has
/// none, and [`CallOptions::datacenter`](crate::client::CallOptions::datacenter) finds them.
#[derive(Clone)]
pub struct StaticList(watch::Sender<Lists>);

struct Lists {
    /// Grows with each change; that of a list never set is 1.
    version: u64,
    of: BTreeMap<Arc<str>, Listing>,
}

// === impl StaticList ===

impl StaticList {
    /// All lists are empty.
    pub fn new() -> Self {
        Self(watch::Sender::new(Lists { version: 1, of: BTreeMap::new() }))
    }

    /// Sets or replaces the list of a service.
    pub fn set(&self, service: &str, instances: impl IntoIterator<Item = Instance>) {
        let listing = Listing::new(instances);
        self.0.send_modify(|lists| {
            lists.version += 1;
            lists.of.insert(service.into(), listing.version(lists.version));
        });
    }
}

impl Lists {
    fn listing(&self, service: &str) -> Listing {
        self.of.get(service).cloned().unwrap_or_else(|| Listing::new([]).version(1))
    }
}

impl Default for StaticList {
    fn default() -> Self {
        Self::new()
    }
}

impl Registry for StaticList {
    fn ask(&self, question: Question) -> Asking {
        let mut lists = self.0.subscribe();
        let Question { service, seen, wait, .. } = question;
        Box::pin(async move {
            if seen.is_some() {
                let other = |lists: &Lists| lists.listing(&service).answer.index != seen;
                // The end of the wait is no failure; the list lives as long as its registry.
                let _ = timeout(wait, lists.wait_for(other)).await;
            }
            Ok(lists.borrow().listing(&service))
        })
    }
}

impl fmt::Debug for StaticList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StaticList").field("services", &self.0.borrow().of.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const WAIT: Duration = Duration::from_secs(60);

    fn instance(port: u16) -> Instance {
        Instance::new(port.to_string(), "127.0.0.1", port, "here")
    }

    fn ask(list: &StaticList, seen: Option<u64>) -> Asking {
        list.ask(Question { service: "counter".into(), seen, wait: WAIT, begins: false })
    }

    fn ports(listing: &Listing) -> Vec<&str> {
        listing.instances().iter().map(|it| &*it.name).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_seen_is_waited_beyond_and_other_services_are_no_news() {
        let list = StaticList::new();
        let unset = ask(&list, None).await.unwrap();
        assert!(unset.instances().is_empty());
        list.set("counter", [instance(1), instance(2), instance(1)]);
        let first = ask(&list, unset.answer.index).await.unwrap();
        assert_eq!(ports(&first), ["1", "2"], "one entry an address");
        let mut next = ask(&list, first.answer.index);
        list.set("other", [instance(9)]);
        assert!(timeout(WAIT / 2, &mut next).await.is_err());
        list.set("counter", []);
        let second = next.await.unwrap();
        assert!(second.instances().is_empty() && second.answer.index > first.answer.index);
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_wait_the_same_is_answered_again() {
        let list = StaticList::new();
        list.set("counter", [instance(1)]);
        let first = ask(&list, None).await.unwrap();
        let start = tokio::time::Instant::now();
        assert_eq!(ask(&list, first.answer.index).await.unwrap(), first);
        assert_eq!(start.elapsed(), WAIT);
    }
}
