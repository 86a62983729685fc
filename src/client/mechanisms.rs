//! Switches for tests: a fault test proves something only where it fails without
//! the mechanism that it is about.

#[cfg(any(test, feature = "testkit"))]
use std::sync::Arc;

#[cfg(any(test, feature = "testkit"))]
use super::registry::{Asking, Question, Registry, RegistryError};

/// A mechanism that a test may switch off with
/// [`ConsulServiceBuilder::without`](super::ConsulServiceBuilder::without).
#[cfg(any(test, feature = "testkit"))]
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// The last known instances stay when the registry fails.
    KeepOnError,
    /// The last known instances stay when the list is empty.
    KeepOnEmpty,
    /// A list that stays empty puts its old instances behind other datacenters.
    Demotion,
    /// An index that falls, or a query that ends without news, is forgotten.
    IndexReset,
    /// An instance that failed is left alone for a while.
    Ejection,
    /// A registry that asks for it is left alone.
    Quiet,
    /// Questions are spaced, and those that bring no news the more.
    Spacing,
    /// What a registry says that is cut off from its leader counts as old.
    Behind,
    /// Long polls are counted, and beyond so many services take turns.
    Seats,
    /// Long polls make room for reads where connections are turned away.
    GivenUpSeats,
    /// No datacenter holds all places for reads.
    Lanes,
    /// Another agent is asked where one fails, or is cut off from its leader.
    NextAgent,
    /// A datacenter that is missing from a list stays until lists have gone on missing it.
    Confirmation,
}

/// What a resolver leaves out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Without {
    pub(crate) keep_on_error: bool,
    pub(crate) keep_on_empty: bool,
    pub(crate) index_reset: bool,
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) quiet: bool,
    pub(crate) spacing: bool,
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) behind: bool,
    pub(crate) seats: bool,
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) given_up_seats: bool,
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) confirmation: bool,
}

/// A registry whose hints are not heard.
#[cfg(any(test, feature = "testkit"))]
struct Deaf {
    registry: Arc<dyn Registry>,
    without: Without,
}

/// `registry`, without those of its hints that a test has switched off.
#[cfg(any(test, feature = "testkit"))]
pub(crate) fn deaf(registry: Arc<dyn Registry>, without: Without) -> Arc<dyn Registry> {
    let deaf = without.quiet || without.behind || without.given_up_seats;
    if deaf { Arc::new(Deaf { registry, without }) } else { registry }
}

#[cfg(any(test, feature = "testkit"))]
impl Registry for Deaf {
    fn ask(&self, question: Question) -> Asking {
        let (asking, without) = (self.registry.ask(question), self.without);
        Box::pin(async move {
            match asking.await {
                Err(RegistryError::RateLimited { .. }) if without.quiet => {
                    Err(RegistryError::RateLimited { retry_after: None })
                }
                // As if it had not been turned away, but lost.
                Err(RegistryError::Reset { source }) if without.given_up_seats => {
                    Err(RegistryError::Interrupted { source })
                }
                Ok(mut listing) if without.behind => {
                    listing.answer.known_leader = None;
                    listing.answer.last_contact = None;
                    Ok(listing)
                }
                other => other,
            }
        })
    }
}

/// What a fleet leaves out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FleetWithout {
    /// What answers badly is ejected although nothing good is left.
    pub(crate) last_resort: bool,
    /// What is ejected is taken out of use.
    pub(crate) removal: bool,
}

/// What makes a call keep its promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallMechanism {
    /// It ends at its deadline.
    Deadline,
    /// A response that stops without a status is cut, and did not end well.
    Ending,
    /// What may have run is resent only where it is safe.
    Safety,
    /// Only what is proven to have never left counts as that.
    Proof,
    /// What may have run, and is safe, is resent.
    Replay,
    /// A call is sent only so often.
    Cap,
    /// What may have run is resent within the budget.
    Budget,
    /// What was refused is resent unpaid only once.
    RefusedOnce,
    /// What never ran is resent, whether it is safe or not.
    Unseen,
}

/// What calls leave out. Nothing, where there are no tests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallWithout {
    #[cfg(test)]
    pub(crate) off: Option<CallMechanism>,
}

impl CallWithout {
    #[cfg(test)]
    #[inline]
    pub(crate) fn lacks(self, mechanism: CallMechanism) -> bool {
        self.off == Some(mechanism)
    }

    #[cfg(not(test))]
    #[inline]
    pub(crate) fn lacks(self, _: CallMechanism) -> bool {
        false
    }
}
