//! The token that goes along with each request, and the file it comes from.

use std::{collections::VecDeque, error::Error, path::PathBuf, sync::Arc, time::Duration};

use http02::HeaderValue;
use parking_lot::Mutex;
use tokio::{task::spawn_blocking, time::timeout};

use super::{
    ConfigError, ConsulConfig,
    config::{self, Given},
};

/// How long a request waits for the file. Our choice: a file that takes longer
/// lies on something that hangs, and the token at hand is better than none.
const FILE_PATIENCE: Duration = Duration::from_secs(1);

/// How many tokens are remembered, to be hidden where an answer repeats them. Our
/// choice: a request that is answered after so many exchanges still hides its own.
const REMEMBERED: usize = 16;

/// The token as it is now. A file is read before each request: tokens have one
/// length, and two may be written in one tick of the file's clock, so its size
/// and time tell less than its few bytes do.
pub(super) struct Token {
    file: Option<Arc<Given<PathBuf>>>,
    known: Known,
    held: Arc<Mutex<Held>>,
}

/// The tokens that were held lately, this one among them: an answer may repeat what
/// went along with an earlier request.
#[derive(Clone, Default)]
pub(super) struct Known(Arc<Mutex<VecDeque<HeaderValue>>>);

struct Held {
    value: Option<HeaderValue>,
    /// Somebody reads the file now; the others do not wait for it.
    reading: bool,
    /// The file cannot be used, and that has been said.
    unusable: bool,
}

/// The right to read the file; given back also when the reader is cancelled.
struct Reading(Arc<Mutex<Held>>);

// === impl Token ===

impl Token {
    /// # Errors
    /// Where the token, or at this first time its file, cannot be used.
    pub(super) fn new(config: &ConsulConfig) -> Result<Self, ConfigError> {
        let value = config::token(config)?;
        let known = Known::default();
        known.add(value.as_ref());
        Ok(Self {
            file: config.token_file.clone().map(Arc::new),
            known,
            held: Arc::new(Mutex::new(Held { value, reading: false, unusable: false })),
        })
    }

    /// The token for a request that is about to be sent.
    pub(super) async fn now(&self) -> Option<HeaderValue> {
        if let Some(file) = &self.file
            && let Some(reading) = Reading::begin(&self.held)
        {
            let path = Arc::clone(file);
            let read = spawn_blocking(move || reading.read(&path));
            // What a hanging file says later counts from then on.
            if let Ok(Ok(read)) = timeout(FILE_PATIENCE, read).await {
                self.tell(file, read);
            }
        }
        let token = self.held.lock().value.clone();
        // Before it is sent.
        self.known.add(token.as_ref());
        token
    }

    /// The tokens that were held lately.
    pub(super) fn known(&self) -> Known {
        self.known.clone()
    }

    /// One line in the log for each thing that happens to the file.
    fn tell(&self, file: &Given<PathBuf>, read: Result<bool, ConfigError>) {
        let unusable = read.is_err();
        let was_unusable = std::mem::replace(&mut self.held.lock().unusable, unusable);
        let file = file.value.display();
        match read {
            Err(error) if !was_unusable => {
                let error: &dyn Error = &error;
                tracing::warn!(%file, error, "the token's file cannot be used; the token read before stays");
            }
            Ok(true) => tracing::info!(%file, "the token's file holds another token"),
            Ok(false) if was_unusable => tracing::info!(%file, "the token's file can be used again"),
            _ => {}
        }
    }
}

// === impl Known ===

impl Known {
    fn add(&self, token: Option<&HeaderValue>) {
        let Some(token) = token else { return };
        let mut known = self.0.lock();
        if !known.contains(token) {
            known.truncate(REMEMBERED - 1);
            known.push_front(token.clone());
        }
    }

    pub(super) fn all(&self) -> Vec<HeaderValue> {
        self.0.lock().iter().cloned().collect()
    }
}

// === impl Reading ===

impl Reading {
    fn begin(held: &Arc<Mutex<Held>>) -> Option<Self> {
        let busy = std::mem::replace(&mut held.lock().reading, true);
        (!busy).then(|| Self(Arc::clone(held)))
    }

    /// True where the file holds another token than before.
    fn read(self, file: &Given<PathBuf>) -> Result<bool, ConfigError> {
        // A pipe is read once, at the start: it may block, and holds nothing the
        // second time.
        if std::fs::metadata(&file.value).is_ok_and(|it| !it.is_file() && !it.is_dir()) {
            return Ok(false);
        }
        let value = Some(config::token_in(file)?);
        let mut held = self.0.lock();
        let other = held.value != value;
        held.value = value;
        Ok(other)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.lock().reading = false;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn token(file: &std::path::Path) -> Token {
        Token::new(&ConsulConfig::new("localhost:8500").unwrap().token_file(file)).unwrap()
    }

    async fn text(token: &Token) -> String {
        token.now().await.unwrap().to_str().unwrap().to_owned()
    }

    #[tokio::test]
    async fn the_file_is_read_again_and_what_cannot_be_used_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        fs::write(&file, "one\n").unwrap();
        let token = token(&file);
        assert_eq!(text(&token).await, "one");
        // As long as before and within the same moment.
        fs::write(&file, "two\n").unwrap();
        assert_eq!(text(&token).await, "two");
        let long = "x".repeat(1 << 20);
        for bad in ["", " \n", "a\nb", "\u{1}", &long] {
            fs::write(&file, bad).unwrap();
            assert_eq!(text(&token).await, "two");
            assert!(token.held.lock().unusable);
        }
        fs::remove_file(&file).unwrap();
        assert_eq!(text(&token).await, "two");
        fs::create_dir(&file).unwrap();
        assert_eq!(text(&token).await, "two");
        fs::remove_dir(&file).unwrap();
        fs::write(&file, "three").unwrap();
        assert_eq!(text(&token).await, "three");
        assert!(!token.held.lock().unusable);
    }

    #[tokio::test]
    async fn one_reads_and_the_others_do_not_wait() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        fs::write(&file, "one").unwrap();
        let token = token(&file);
        fs::write(&file, "two").unwrap();
        let reading = Reading::begin(&token.held).unwrap();
        assert_eq!(text(&token).await, "one");
        drop(reading);
        assert_eq!(text(&token).await, "two");
    }

    #[tokio::test]
    async fn a_request_given_up_while_the_file_is_read_holds_up_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        fs::write(&file, "one").unwrap();
        let token = token(&file);
        for _ in 0..20 {
            let _ = futures_util::poll!(std::pin::pin!(token.now()));
        }
        fs::write(&file, "two").unwrap();
        while text(&token).await != "two" {
            tokio::task::yield_now().await;
        }
    }
}
