//! How many reads are under way at once, and how those that queue are kept apart: a
//! datacenter that stands still holds places of its own alone.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use super::RegistryError;

/// How many reads that do not wait are under way at once; more queue. Our choice:
/// an agent answers one within a few milliseconds, so a thousand take a second.
const READS_AT_ONCE: usize = 16;
/// How many of them may ask about other datacenters than the agent's own, which has the
/// rest to itself. Our choice.
const FROM_AFAR: usize = 12;
/// How many may ask about any one of those: while it answers, and while it does not.
/// Our choice.
const OF_ONE: usize = 8;
const OF_A_SILENT_ONE: usize = 1;

/// The places for reads.
pub(super) struct Lanes {
    all: Arc<Places>,
    from_afar: Arc<Places>,
    others: Mutex<HashMap<String, Arc<Lane>>>,
    /// How long one queues behind reads of which none is answered.
    patience: Duration,
}

/// Places, and when one of them was last given back by a read that was answered.
struct Places {
    semaphore: Arc<Semaphore>,
    answered_at: Mutex<Option<Instant>>,
}

/// The places of one datacenter.
struct Lane {
    places: Places,
    /// How many there are at present.
    open: Mutex<usize>,
}

/// The place of one read, until it is dropped.
pub(super) struct Place {
    all: Arc<Places>,
    _all: OwnedSemaphorePermit,
    _from_afar: Option<OwnedSemaphorePermit>,
    lane: Option<(Arc<Lane>, OwnedSemaphorePermit)>,
}

// === impl Lanes ===

impl Lanes {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            all: Arc::new(Places::new(READS_AT_ONCE)),
            from_afar: Arc::new(Places::new(FROM_AFAR)),
            others: Mutex::default(),
            patience,
        }
    }

    /// Waits until there is room for one more read about a `datacenter` that is not known
    /// to be the agent's own, or about its own. It waits as long as reads are answered that
    /// it waits behind; where none is for the time of a request it gives up.
    pub(super) async fn enter(&self, datacenter: Option<&str>) -> Result<Place, RegistryError> {
        let (mut lane, mut from_afar) = (None, None);
        if let Some(name) = datacenter {
            let own = self.lane(name);
            let permit = own.places.queue(self.patience).await?;
            lane = Some((own, permit));
            from_afar = Some(self.from_afar.queue(self.patience).await?);
        }
        let all = self.all.queue(self.patience).await?;
        Ok(Place { all: Arc::clone(&self.all), _all: all, _from_afar: from_afar, lane })
    }

    fn lane(&self, name: &str) -> Arc<Lane> {
        let mut others = self.others.lock();
        if let Some(lane) = others.get(name) {
            return Arc::clone(lane);
        }
        // Names come from the caller, so those that nobody asks about are forgotten.
        others.retain(|_, lane| Arc::strong_count(lane) > 1);
        let lane = Arc::new(Lane { places: Places::new(OF_ONE), open: Mutex::new(OF_ONE) });
        others.insert(name.to_owned(), Arc::clone(&lane));
        lane
    }
}

// === impl Places ===

impl Places {
    fn new(places: usize) -> Self {
        Self { semaphore: Arc::new(Semaphore::new(places)), answered_at: Mutex::default() }
    }

    async fn queue(&self, patience: Duration) -> Result<OwnedSemaphorePermit, RegistryError> {
        let mut permit = std::pin::pin!(Arc::clone(&self.semaphore).acquire_owned());
        let mut until = Instant::now() + patience;
        loop {
            if let Ok(permit) = timeout_at(until, &mut permit).await {
                return Ok(permit.expect("the semaphore is never closed"));
            }
            let answered_at = *self.answered_at.lock();
            match answered_at.map(|at| at + patience) {
                Some(later) if later > until => until = later,
                _ => return Err(RegistryError::Unasked { after: patience }),
            }
        }
    }
}

// === impl Place ===

impl Place {
    /// The read was answered, well or badly.
    pub(super) fn answered(&self) {
        let now = Some(Instant::now());
        *self.all.answered_at.lock() = now;
        if let Some((lane, _)) = &self.lane {
            *lane.places.answered_at.lock() = now;
            let mut open = lane.open.lock();
            lane.places.semaphore.add_permits(OF_ONE - *open);
            *open = OF_ONE;
        }
    }

    /// The read was not answered in time: its datacenter loses the place, unless it is the
    /// last.
    pub(super) fn unanswered(mut self) {
        if let Some((lane, permit)) = self.lane.take() {
            let mut open = lane.open.lock();
            if *open > OF_A_SILENT_ONE {
                *open -= 1;
                permit.forget();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, future::join_all};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn at_once(lanes: &Lanes, datacenter: Option<&str>) -> Option<Place> {
        // Not held to the share of a task that goes on for long.
        let entered = tokio::task::unconstrained(lanes.enter(datacenter)).now_or_never();
        entered.map(|it| it.expect("nobody has waited"))
    }

    fn all_at_once(lanes: &Lanes, datacenter: Option<&str>) -> Vec<Place> {
        std::iter::from_fn(|| at_once(lanes, datacenter)).take(100).collect()
    }

    #[tokio::test]
    async fn no_datacenter_holds_all_places_and_the_own_one_always_has_some() {
        let lanes = Lanes::new(PATIENCE);
        let two = all_at_once(&lanes, Some("dc2"));
        let three = all_at_once(&lanes, Some("dc3"));
        assert_eq!((two.len(), three.len()), (OF_ONE, FROM_AFAR - OF_ONE));
        assert_eq!(all_at_once(&lanes, None).len(), READS_AT_ONCE - FROM_AFAR);
        drop(two);
        assert_eq!(all_at_once(&lanes, None).len(), READS_AT_ONCE - three.len());
    }

    #[tokio::test]
    async fn a_datacenter_that_is_silent_is_left_one_place_until_it_answers() {
        let lanes = Lanes::new(PATIENCE);
        for _ in 0..2 {
            all_at_once(&lanes, Some("dc2")).into_iter().for_each(Place::unanswered);
            let mut left = all_at_once(&lanes, Some("dc2"));
            assert_eq!(left.len(), OF_A_SILENT_ONE);
            assert_eq!(all_at_once(&lanes, Some("dc3")).len(), OF_ONE, "the others are not held back");
            let last = left.pop().expect("there is one");
            last.answered();
            drop(last);
            assert_eq!(all_at_once(&lanes, Some("dc2")).len(), OF_ONE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_queues_gives_up_only_behind_reads_of_which_none_is_answered() {
        let lanes = Lanes::new(PATIENCE);
        let mut held = all_at_once(&lanes, None);
        let begun = Instant::now();
        let slow = async {
            for _ in 0..3 {
                tokio::time::sleep(PATIENCE - Duration::from_millis(1)).await;
                held.pop().expect("there are many").answered();
            }
        };
        let queue = join_all((0..4).map(|_| async {
            let entered = lanes.enter(None).await;
            let waited = begun.elapsed();
            // Held on to, and never answered.
            entered.map(std::mem::forget).map_err(|error| (error, waited))
        }));
        let (entered, ()) = tokio::join!(queue, slow);
        assert!(entered[..3].iter().all(Result::is_ok), "{entered:?}");
        let (error, waited) = entered[3].as_ref().unwrap_err();
        assert!(matches!(error, RegistryError::Unasked { .. }), "{error}");
        assert_eq!(*waited, 4 * PATIENCE - Duration::from_millis(3));
    }

    #[tokio::test]
    async fn names_that_nobody_asks_about_are_forgotten() {
        let lanes = Lanes::new(PATIENCE);
        let held = at_once(&lanes, Some("dc2"));
        for other in 0..1000 {
            assert!(at_once(&lanes, Some(&format!("other-{other}"))).is_some());
        }
        assert!(lanes.others.lock().len() <= 3);
        drop(held);
    }
}
