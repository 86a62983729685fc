//! One verified connection to one instance, as the call path and the worker
//! share it: what the one learns, the other sees without waiting.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use http::Request;
use parking_lot::Mutex;
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::{
    body::Body,
    transport::{Channel, channel::ResponseFuture},
};
use tower::Service;

use super::{
    report::{LossCause, Report},
    signal::Signal,
};
use crate::Instance;

/// A connection that has answered, ready for calls until it is known not to be.
pub(crate) struct Endpoint {
    instance: Arc<Instance>,
    channel: Channel,
    /// A clone of it that waits for the next call.
    spare: Mutex<Option<Channel>>,
    link: Arc<Link>,
}

/// A request that waits for room on a connection, and what it is sent with. Boxed, because nearly
/// always there is room.
pub(crate) type Waits = (Channel, Request<Body>);

/// The life of one connection. Made before the connection is, so that the
/// socket itself can say when it ends.
pub(crate) struct Link {
    serial: u64,
    /// False once no new call should be given to it.
    usable: AtomicBool,
    /// True from the moment a caller found it silent until a probe has judged it.
    suspect: AtomicBool,
    /// Said when nothing more is expected of it: calls still waiting on it end.
    abandoned: Signal,
    /// Said when the instance answers, but on another connection: safe calls
    /// still waiting on this one go there, the others and streams stay.
    left: Signal,
    /// Said when streams still coming are to end: the instance left long ago.
    drained: Signal,
    /// Failures in a row, as outcome.rs judges them.
    failures: AtomicU32,
    /// Attempts out and responses not ended, where they are counted.
    in_flight: AtomicU32,
    /// True once a call on it has been answered well.
    served: AtomicBool,
    /// How often it has answered anything.
    heard: AtomicU64,
    /// When a call that had chosen it last heard of it, in milliseconds since `born`.
    used: AtomicU64,
    born: Instant,
    lost_at: Mutex<Option<Instant>>,
    reports: mpsc::UnboundedSender<Report>,
}

/// What had been heard of an instance at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Words(u64);

impl Link {
    /// A link that reports to `reports`. Each kind of report is sent at most
    /// once until the worker has dealt with it, which bounds the channel.
    pub(crate) fn new(serial: u64, reports: mpsc::UnboundedSender<Report>) -> Arc<Self> {
        Arc::new(Self {
            serial,
            usable: AtomicBool::new(true),
            suspect: AtomicBool::new(false),
            abandoned: Signal::default(),
            left: Signal::default(),
            drained: Signal::default(),
            failures: AtomicU32::new(0),
            in_flight: AtomicU32::new(0),
            served: AtomicBool::new(false),
            heard: AtomicU64::new(0),
            used: AtomicU64::new(0),
            born: Instant::now(),
            lost_at: Mutex::new(None),
            reports,
        })
    }

    #[inline]
    pub(crate) fn is_usable(&self) -> bool {
        self.usable.load(Ordering::Acquire)
    }

    /// Takes the connection out of use and tells the worker, the first time.
    pub(crate) fn lose(&self, cause: LossCause) {
        if self.usable.swap(false, Ordering::AcqRel) {
            *self.lost_at.lock() = Some(Instant::now());
            // The worker has ended where nobody listens: then nothing is left to do.
            let _ = self.reports.send(Report::Lost { serial: self.serial, cause });
        }
    }

    /// Takes it out of use without telling anybody: the worker's own decision.
    /// Calls in flight finish.
    pub(crate) fn retire(&self) {
        self.usable.store(false, Ordering::Release);
    }

    /// Ends the calls still waiting on it.
    pub(crate) fn abandon(&self) {
        self.retire();
        self.abandoned.say();
        self.left.say();
    }

    /// Moves to another connection those of its calls that can.
    pub(crate) fn leave(&self) {
        self.retire();
        self.left.say();
    }

    /// Cancelled when calls that may be repeated should be, elsewhere.
    pub(crate) fn left(&self) -> &CancellationToken {
        self.left.token()
    }

    pub(crate) fn abandoned(&self) -> &CancellationToken {
        self.abandoned.token()
    }

    /// Ends the streams that are still coming.
    pub(crate) fn drain(&self) {
        self.drained.say();
    }

    pub(crate) fn drained(&self) -> &Signal {
        &self.drained
    }

    /// The probe was answered.
    pub(crate) fn acquit(&self) {
        self.heard();
        self.rest_suspicion();
    }

    /// Lets it be suspected anew.
    pub(crate) fn rest_suspicion(&self) {
        self.suspect.store(false, Ordering::Release);
    }

    /// An answer came, whatever it said. Counted, because to read the clock is dear beside the rest.
    #[inline]
    pub(crate) fn heard(&self) {
        // Two at once may count as one: whoever listens looks for another number, not for how many.
        self.heard.store(self.heard.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// What has been heard up to now, to be [looked back to](Self::heard_since).
    #[inline]
    pub(crate) fn words(&self) -> Words {
        Words(self.heard.load(Ordering::Relaxed))
    }

    /// Whether anything has been heard since then.
    pub(crate) fn heard_since(&self, words: Words) -> bool {
        self.words() != words
    }

    /// A call that wanted this very one has heard of it.
    pub(crate) fn used(&self) {
        let elapsed = self.born.elapsed().as_millis();
        self.used.store(u64::try_from(elapsed).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Whether that was so at or after `since`.
    pub(crate) fn used_since(&self, since: Instant) -> bool {
        self.born + Duration::from_millis(self.used.load(Ordering::Relaxed)) >= since
    }

    /// An answer that was no failure.
    #[inline]
    pub(crate) fn succeeded(&self) {
        self.heard();
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
        if !self.served.load(Ordering::Relaxed) {
            self.served.store(true, Ordering::Relaxed);
        }
    }

    /// Whether any call on it has been answered well.
    pub(crate) fn has_served(&self) -> bool {
        self.served.load(Ordering::Relaxed)
    }

    /// An answer that counts against the instance. At `limit` in a row the
    /// worker is told, who decides whether there is anything better.
    pub(crate) fn failed(&self, limit: u32) {
        self.heard();
        self.timed_out(limit);
    }

    /// The same for an attempt that was not answered in its time.
    pub(crate) fn timed_out(&self, limit: u32) {
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 == limit {
            let _ = self.reports.send(Report::Failing { serial: self.serial });
        }
    }

    /// Whether the last `limit` answers and more were failures.
    pub(crate) fn is_failing(&self, limit: u32) -> bool {
        self.failures.load(Ordering::Relaxed) >= limit
    }

    /// One more attempt, or one fewer.
    #[inline]
    pub(crate) fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// How many attempts are out on it, where they are counted.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// When it was found lost.
    pub(crate) fn lost_at(&self) -> Option<Instant> {
        *self.lost_at.lock()
    }
}

impl Endpoint {
    pub(crate) fn new(instance: Arc<Instance>, channel: Channel, link: Arc<Link>) -> Self {
        Self { instance, channel, spare: Mutex::new(None), link }
    }

    /// The same connection, as the registry describes its instance now.
    pub(crate) fn described(&self, instance: Arc<Instance>) -> Self {
        Self::new(instance, self.channel.clone(), self.link.clone())
    }

    #[inline]
    pub(crate) fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    #[inline]
    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Sends a request at once, where there is room on the connection; else gives it back with a channel
    /// that is to be polled for it.
    ///
    /// A channel that was not polled itself panics, so that one is not called as it is but a clone of it.
    /// The clone is kept for the next call, which spares that two allocations and the counting of clones.
    #[inline]
    pub(crate) fn try_send(&self, request: Request<Body>) -> Result<ResponseFuture, Box<Waits>> {
        let mut spare = self.spare.try_lock();
        let kept = spare.as_mut().and_then(|spare| spare.take());
        let mut channel = kept.unwrap_or_else(|| self.channel.clone());
        match channel.poll_ready(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(())) => {
                let sent = channel.call(request);
                if let Some(spare) = &mut spare {
                    **spare = Some(channel);
                }
                Ok(sent)
            }
            // Where it has failed it says so again.
            _ => Err(Box::new((channel, request))),
        }
    }

    /// Keeps a clone that has been called: one that is ready and was not would hold a place on the
    /// connection.
    pub(crate) fn keep(&self, channel: Channel) {
        *self.spare.lock() = Some(channel);
    }

    #[inline]
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    #[inline]
    pub(crate) fn is_usable(&self) -> bool {
        self.link.is_usable()
    }

    /// A caller has waited longer than it should without a word. Also where it
    /// takes no new calls: those it still has must not wait for a dead instance.
    pub(crate) fn suspect(self: &Arc<Self>) {
        let link = &self.link;
        if !link.abandoned.is_said() && !link.suspect.swap(true, Ordering::AcqRel) {
            let _ = link.reports.send(Report::Suspect { endpoint: Arc::clone(self) });
        }
    }

    #[inline]
    pub(crate) fn serial(&self) -> u64 {
        self.link.serial
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("instance", &self.instance.name)
            .field("serial", &self.link.serial)
            .field("usable", &self.is_usable())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_failures_in_a_row_are_told() {
        let (reporter, mut reports) = mpsc::unbounded_channel();
        let link = Link::new(1, reporter);
        for _ in 0..3 {
            link.failed(3);
            link.timed_out(3);
            assert!(!link.is_failing(3));
            link.succeeded();
        }
        assert!(reports.try_recv().is_err(), "never three in a row");
        link.failed(3);
        link.timed_out(3);
        link.failed(3);
        assert!(link.is_failing(3));
        assert!(matches!(reports.try_recv(), Ok(Report::Failing { serial: 1 })));
        link.failed(3);
        assert!(reports.try_recv().is_err(), "told once");
    }
}
