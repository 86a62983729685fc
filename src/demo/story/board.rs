//! What the callers write on and the acts read: the books, and a bell.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use super::tally::Tally;

/// Cheap to clone; all clones are one board.
#[derive(Clone)]
pub(crate) struct Board {
    tally: Arc<Mutex<Tally>>,
    changed: watch::Sender<()>,
}

/// Something that the story waited for did not come.
#[derive(Debug, thiserror::Error)]
#[error("waited {} for this in vain: {what}", crate::demo::text::duration(*waited))]
pub(crate) struct Stuck {
    what: String,
    waited: Duration,
}

impl Board {
    pub(crate) fn new() -> Self {
        Self { tally: Arc::default(), changed: watch::Sender::new(()) }
    }

    /// Reads the books.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&Tally) -> T) -> T {
        look(&self.tally.lock())
    }

    /// Writes into the books and rings the bell.
    pub(crate) fn write<T>(&self, act: impl FnOnce(&mut Tally) -> T) -> T {
        let done = act(&mut self.tally.lock());
        self.changed.send_replace(());
        done
    }

    /// Waits, `bound` at most, until `look` finds something in the books.
    pub(crate) async fn until<T>(
        &self,
        what: impl Into<String>,
        bound: Duration,
        mut look: impl FnMut(&Tally) -> Option<T>,
    ) -> Result<T, Stuck> {
        let mut changed = self.changed.subscribe();
        let watch = async {
            loop {
                if let Some(found) = self.read(&mut look) {
                    return found;
                }
                // The sender is `self`: it cannot have gone.
                let _ = changed.changed().await;
            }
        };
        timeout(bound, watch).await.map_err(|_| Stuck { what: what.into(), waited: bound })
    }

    /// Waits until every call that has begun by now has ended.
    pub(crate) async fn settled(&self, bound: Duration) -> Result<(), Stuck> {
        let now = Instant::now();
        let what = "the end of every call that was under way";
        self.until(what, bound, |tally| tally.settled(now).then_some(())).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_when_the_books_say_so_or_with_what_was_waited_for() {
        let board = Board::new();
        let writer = board.clone();
        let written = tokio::spawn(async move { writer.write(|tally| tally.open("act")) });
        board.until("an act", Duration::from_secs(1), |tally| tally.acts().first().map(drop)).await.unwrap();
        written.await.unwrap();
        let stuck =
            board.until("a second act", Duration::from_secs(3), |tally| tally.acts().get(1).map(drop));
        let words = stuck.await.unwrap_err().to_string();
        assert_eq!(words, "waited 3.00 s for this in vain: a second act");
    }
}
