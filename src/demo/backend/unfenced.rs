//! For tests: a counter without the fence, to show what it is for.

use std::{fs, io, path::PathBuf, sync::Arc, time::Duration};

use tokio::{sync::Mutex, time::sleep};
use tonic::Status;

use super::shared::Count;

/// How long is between reading and writing: whenever a process is struck, it is there.
const BETWEEN: Duration = Duration::from_millis(10);

/// A plain file, read and written by whoever has been let in: as a program does that asks for
/// its role and then believes it. Cheap to clone.
#[derive(Clone)]
pub(super) struct Unfenced {
    /// One at a time, within this process.
    file: Arc<Mutex<PathBuf>>,
}

// === impl Unfenced ===

impl Unfenced {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file: Arc::new(Mutex::new(file)) }
    }

    /// A write that has begun is done, though its caller may be gone when the process wakes up:
    /// in 10 ms it is over, which nobody waits for at the process's end.
    pub(super) async fn update(
        &self,
        change: impl FnOnce(&mut Count) -> Result<u64, Status> + Send + 'static,
    ) -> Result<u64, Status> {
        let written = tokio::spawn(self.clone().write(change));
        written.await.unwrap_or_else(|error| Err(failed(&error)))
    }

    async fn write(
        self,
        change: impl FnOnce(&mut Count) -> Result<u64, Status> + Send + 'static,
    ) -> Result<u64, Status> {
        let file = self.file.lock().await;
        let mut count = match fs::read(&*file) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| failed(&error))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Count::default(),
            Err(error) => return Err(failed(&error)),
        };
        let value = change(&mut count)?;
        sleep(BETWEEN).await;
        // Whole or not at all: what is missing here is the fence alone.
        let beside = file.with_extension(std::process::id().to_string());
        let text = serde_json::to_vec(&count).map_err(|error| failed(&error))?;
        fs::write(&beside, text)
            .and_then(|()| fs::rename(&beside, &*file))
            .map_err(|error| failed(&error))?;
        Ok(value)
    }
}

fn failed(error: &dyn std::error::Error) -> Status {
    Status::internal(error.to_string())
}
