//! The journal: what had reached this process, readable after its death.
//!
//! One line before a request is handled, one after it has been answered:
//! ```text
//! received Increment 7f3a-12
//! answered Increment 7f3a-12
//! ```
//! A line is handed to the kernel before the request goes on, so the death of
//! the process (not of the machine) loses none.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use tonic::Status;

/// The first word of the line written before a request is handled.
pub(crate) const RECEIVED: &str = "received";
/// The first word of the line written after it has been answered.
pub(crate) const ANSWERED: &str = "answered";

/// How long after the handler's end an answer counts as given. The handler
/// cannot see the answer leave: a process killed before that must not claim to
/// have answered. Our choice: long beside the way from handler to socket.
const LEAVING: Duration = Duration::from_millis(5);

/// Cheap to clone; all clones write to one file, or to none.
#[derive(Clone, Default)]
pub(super) struct Journal {
    file: Option<Arc<Mutex<File>>>,
    leaving: TaskTracker,
}

/// A request that was received. Dropped without [`answered`](Self::answered),
/// as when the caller has gone, it stays without an answer in the journal.
pub(super) struct Entry {
    journal: Journal,
    line: String,
}

// === impl Journal ===

impl Journal {
    /// Appends to `path`, which is made where it is missing.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file: Some(Arc::new(Mutex::new(file))), leaving: TaskTracker::new() })
    }

    /// Writes that a request came. A request that cannot be written is refused.
    pub(super) fn received(&self, method: &str, id: &str) -> Result<Entry, Status> {
        let line = format!("{method} {}", one_word(id));
        self.write(RECEIVED, &line)
            .map_err(|error| Status::internal(format!("the journal cannot be written: {error}")))?;
        Ok(Entry { journal: self.clone(), line })
    }

    /// Waits until the last answer is written.
    pub(super) async fn close(&self) {
        self.leaving.close();
        self.leaving.wait().await;
    }

    fn write(&self, word: &str, line: &str) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        // One call, so that two processes appending to one file do not mix their lines.
        file.lock().write_all(format!("{word} {line}\n").as_bytes())
    }
}

// === impl Entry ===

impl Entry {
    /// Writes that the request was answered, once the answer has left.
    pub(super) fn answered(self) {
        if self.journal.file.is_none() {
            return;
        }
        let journal = self.journal.clone();
        journal.leaving.spawn(async move {
            tokio::time::sleep(LEAVING).await;
            if let Err(error) = self.journal.write(ANSWERED, &self.line) {
                tracing::warn!(%error, "the journal cannot be written");
            }
        });
    }
}

/// The client chooses the id: blanks and line ends in it must not forge lines.
fn one_word(id: &str) -> String {
    if id.is_empty() {
        return "-".to_owned();
    }
    id.chars()
        .map(
            |c| {
                if c.is_ascii_graphic() && c != '%' {
                    c.to_string()
                } else {
                    format!("%{:02X}", u32::from(c))
                }
            },
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_is_written_when_it_comes_and_when_it_was_answered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journal = Journal::open(&path).unwrap();
        let read = || std::fs::read_to_string(&path).unwrap();

        let first = journal.received("Get", "1").unwrap();
        assert_eq!(read(), "received Get 1\n");
        let second = journal.received("Add", "a key\nanswered Add x").unwrap();
        first.answered();
        drop(second);
        journal.close().await;
        assert_eq!(read(), "received Get 1\nreceived Add a%20key%0Aanswered%20Add%20x\nanswered Get 1\n");
    }

    #[tokio::test]
    async fn without_a_file_nothing_is_written_and_nothing_fails() {
        let journal = Journal::default();
        journal.received("Get", "").unwrap().answered();
        journal.close().await;
    }
}
