//! When the lease is read.

use std::time::Duration;

use tokio::time::Instant;

/// So many of one kind may be on their way: one that hangs does not hold up the next.
pub(super) const AT_ONCE: u32 = 3;

/// The reads of one stand.
#[derive(Debug)]
pub(super) struct Reads {
    /// What was sent before is another stand's.
    begun: Instant,
    out: u32,
    next: Instant,
    last_sent: Option<Instant>,
    /// When the read was sent whose answer is the newest.
    newest: Option<Instant>,
}

impl Reads {
    /// From `begun` on, the first at `next`.
    pub(super) fn new(begun: Instant, next: Instant) -> Self {
        Self { begun, out: 0, next, last_sent: None, newest: None }
    }

    /// Whether one is to be sent at `now`; it then counts as sent.
    pub(super) fn send(&mut self, now: Instant, pace: Duration) -> bool {
        let due = self.due().is_some_and(|due| due <= now);
        if due {
            self.out += 1;
            self.last_sent = Some(now);
            self.next = now + pace;
        }
        due
    }

    /// When the next one is to be sent.
    pub(super) fn due(&self) -> Option<Instant> {
        (self.out < AT_ONCE).then_some(self.next)
    }

    /// The next one is to be sent at `at`, if that is later.
    pub(super) fn not_before(&mut self, at: Instant) {
        self.next = self.next.max(at);
    }

    /// The next one is to be sent now, but at least `spacing` after the last.
    pub(super) fn hurry(&mut self, now: Instant, spacing: Duration) {
        let at = self.last_sent.map_or(now, |last| now.max(last + spacing));
        self.next = self.next.min(at);
    }

    /// Whether the answer to one sent at `sent` is news: not another stand's, nor overtaken.
    pub(super) fn answered(&mut self, sent: Instant, well: bool) -> bool {
        if sent < self.begun {
            return false;
        }
        self.out = self.out.saturating_sub(1);
        let is_news = self.newest.is_none_or(|newest| sent >= newest);
        if well && is_news {
            self.newest = Some(sent);
        }
        is_news
    }
}
