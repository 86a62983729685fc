//! Services whose calls go to the primary alone.
//!
//! ```text
//! registry's tags --> worker --+                          +--> each call: the connection to go on
//!                              +--> Claims --watch<Sight>-+
//! refusals, answers --> calls -+                          +--> worker: binding, status, events
//! ```
//!
//! Calls and worker change the claims directly, under a lock that is held for a few comparisons: a call
//! that was refused must not wait for the worker to know where to go next. Calls on a known primary only
//! read the watch; those of other services do not know that any of this exists.

mod claims;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, SemaphorePermit, mpsc, watch},
    time::Instant,
};
use tower::util::rng::{HasherRng, Rng};

pub(crate) use self::claims::{Attempt, Leader, Rivals};
use self::claims::{Claims, Token};
use super::{options::ServiceOptions, report::Report};
use crate::{Instance, InstanceId, NotPrimary, Primary};

/// What is known of one service's primary. Its calls and its worker share it.
pub(crate) struct Lookout {
    claims: Mutex<Claims>,
    sight: watch::Sender<Sight>,
    /// Whoever has it may try an instance that is not known to be the primary; the others wait.
    turn: Semaphore,
    rng: Mutex<HasherRng>,
    reports: mpsc::UnboundedSender<Report>,
    /// The worker has been told of news, and has not looked yet.
    told: AtomicBool,
}

/// Where calls go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sight {
    /// The connection to the primary.
    pub(crate) open: Option<u64>,
    /// Who is, or claims to be.
    pub(crate) leader: Option<InstanceId>,
    token: Token,
}

/// The right to try: until this is dropped.
pub(crate) type Turn<'a> = SemaphorePermit<'a>;

// === impl Lookout ===

impl Lookout {
    pub(crate) fn new(reports: mpsc::UnboundedSender<Report>) -> Arc<Self> {
        Arc::new(Self {
            claims: Mutex::new(Claims::default()),
            sight: watch::Sender::new(Sight::default()),
            turn: Semaphore::new(1),
            rng: Mutex::new(HasherRng::new()),
            reports,
            told: AtomicBool::new(false),
        })
    }

    /// The connection that all calls may go on.
    pub(crate) fn open(&self) -> Option<u64> {
        self.sight.borrow().open
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Sight> {
        self.sight.subscribe()
    }

    /// Waits for its turn. Cancel safe; in the order of asking.
    pub(crate) async fn turn(&self) -> Turn<'_> {
        self.turn.acquire().await.expect("never closed")
    }

    /// Which of the candidates to try now, which marks it; or from when on one may be.
    pub(crate) fn next(&self, candidates: &[&InstanceId], now: Instant) -> Result<usize, Option<Instant>> {
        let random = self.rng.lock().next_f64();
        let mut claims = self.claims.lock();
        let place = claims.next(candidates, now)?;
        claims.trying(candidates[place], random, now);
        Ok(place)
    }

    pub(crate) fn refused(&self, attempt: Attempt<'_>, refusal: NotPrimary) {
        self.change(|claims| claims.refused(attempt, refusal.primary));
    }

    pub(crate) fn answered(&self, attempt: Attempt<'_>) {
        self.change(|claims| claims.answered(attempt, Instant::now()));
    }

    pub(crate) fn not_refused(&self, attempt: Attempt<'_>) {
        self.change(|claims| claims.not_refused(attempt));
    }

    fn change(&self, change: impl FnOnce(&mut Claims)) {
        if self.apply(change) && !self.told.swap(true, Ordering::AcqRel) {
            // The worker has ended where nobody listens.
            let _ = self.reports.send(Report::Primary);
        }
    }

    /// Returns whether there is news for the worker.
    fn apply(&self, change: impl FnOnce(&mut Claims)) -> bool {
        let mut claims = self.claims.lock();
        let sought = claims.sought().cloned();
        change(&mut claims);
        let leader = claims.leader();
        let sight = Sight {
            open: leader.as_ref().and_then(|it| it.open),
            token: leader.as_ref().and_then(|it| it.token),
            leader: leader.map(|it| it.instance.id.clone()),
        };
        // Under the lock, so that an older sight does not come after a newer one.
        let moved = self.sight.send_if_modified(|seen| {
            let moved = *seen != sight;
            *seen = sight;
            moved
        });
        moved || claims.sought() != sought.as_ref()
    }

    // === for the worker ===

    /// The registry lists these, and what it claims counts where that is said.
    pub(crate) fn listed(&self, known: impl Iterator<Item = (Arc<Instance>, bool)>) {
        // What is asked of it afterwards has all the news.
        self.told.store(false, Ordering::Release);
        self.apply(|claims| claims.listed(known));
    }

    pub(crate) fn leader(&self) -> Option<Leader> {
        self.claims.lock().leader()
    }

    /// Two that cannot both be what the registry says of them, if they share a lease.
    pub(crate) fn rivals(&self) -> Option<Rivals> {
        self.claims.lock().rivals()
    }

    /// Whom an instance has named, and no registry lists.
    pub(crate) fn sought(&self) -> Option<Primary> {
        self.claims.lock().sought().cloned()
    }
}

impl ServiceOptions {
    /// Sends calls to the primary alone: for services of which one instance at a time does the work, and
    /// the others refuse it ([`server::FenceLayer`](crate::server::FenceLayer), or any server that answers
    /// with [`NotPrimary`]).
    ///
    /// The primary is found by the registry (the tag `primary` or the metadata `role` = `primary`, with
    /// the term's `token`), by what instances say that refuse a call, and by trying: of two words the
    /// greater token's is believed, and an instance's own refusal more than either. Only instances that the
    /// registry lists are ever called: one that is merely named makes it be asked afresh. All instances of the
    /// datacenter in use are kept connected; an instance of another one is called where one of these names it.
    ///
    /// A call that is refused has not run. Whatever its method, it waits for a primary until its deadline and
    /// is sent there; its caller sees nothing of it. While no primary is known, one call at a time tries the
    /// instances in turn, and the others wait for what it finds. Each is tried at first after 5 to 10 ms again, after
    /// 200 ms of searching at most once in 50 to 100 ms. An instance
    /// that was ejected is connected again after 500 ms at most, for it may be the one by now. Where none
    /// is found in time, the call fails with DEADLINE_EXCEEDED and
    /// [`CallErrorKind::NoPrimary`](super::CallErrorKind::NoPrimary). A request is kept until it is answered,
    /// one that is streamed while it is sent, up to [`replay_limit`](Self::replay_limit), which is 4 MiB then; one
    /// that was refused beyond that is not sent again, and its caller sees the refusal.
    ///
    /// Such calls are not hedged, for there is one instance to send them to. One that says where it is to go
    /// ([`CallOptions`](super::CallOptions)) goes there, whoever is primary. Nobody is ejected for refusing,
    /// nor the primary for answering UNAVAILABLE. Default: no.
    pub fn primary_only(mut self) -> Self {
        self.primary_only = true;
        self
    }
}
