//! What goes wrong with a directory, and what it says about the step.

#[cfg(unix)]
use std::os::unix::fs::FileTypeExt;
use std::{fs::FileType, io, path::PathBuf, sync::Arc, time::Duration};

use crate::server::store::StoreError;

/// A system call that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {path:?}")]
pub(super) struct FileError {
    doing: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Why a directory cannot keep a lease.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidFileStore {
    /// It is not there, or is no directory.
    #[error("{path:?} must be a directory that exists: make one for this lease alone")]
    NotADirectory {
        /// What was given.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Files cannot be made in it, or its file system cannot link them.
    #[error(
        "the directory {path:?} cannot keep a lease: it must be writable, on a local file system with hard links"
    )]
    Unusable {
        /// What was given.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A setting is out of its bounds.
    #[error("{setting} is {value:?}; it must be from {least:?} to {most:?}")]
    Setting {
        /// Its name.
        setting: &'static str,
        /// What was given.
        value: Duration,
        /// The least that is taken.
        least: Duration,
        /// The most that is taken.
        most: Duration,
    },
}

/// A step that took longer than it may.
#[derive(Debug, thiserror::Error)]
pub(super) enum Late {
    #[error("{path:?} was not touched: an earlier step on it has not returned for {limit:?}")]
    Waiting { path: PathBuf, limit: Duration },
    #[error("a step on {path:?} has not returned within {limit:?}")]
    Working { path: PathBuf, limit: Duration },
    #[error("a step on {path:?} was given up: its runtime ends")]
    Ended { path: PathBuf },
}

/// What stands in the place of a file.
#[derive(Debug, thiserror::Error)]
#[error("it is {0} and no file: remove it")]
pub(super) struct NoFile(&'static str);

/// A write that was overtaken by a claim.
#[derive(Debug, thiserror::Error)]
#[error("a later term was claimed, and its files do not say yet whether it goes on from this write")]
pub(super) struct Unsettled;

/// Another directory has come to the path, without what was in the first.
#[derive(Debug, thiserror::Error)]
#[error(
    "it is not the directory that was there before, and has not its term {token}: bring that one back (is \
     something not mounted?), or, to begin anew, end all processes first"
)]
pub(super) struct Replaced {
    pub(super) token: u64,
}

// === impl NoFile ===

impl NoFile {
    pub(super) fn of(kind: FileType) -> Self {
        Self(match kind {
            _ if kind.is_dir() => "a directory",
            #[cfg(unix)]
            _ if kind.is_fifo() => "a FIFO",
            #[cfg(unix)]
            _ if kind.is_socket() => "a socket",
            #[cfg(unix)]
            _ if kind.is_char_device() || kind.is_block_device() => "a device",
            _ => "something else",
        })
    }
}

// === impl FileError ===

impl From<FileError> for io::Error {
    fn from(error: FileError) -> Self {
        error.source
    }
}

impl FileError {
    pub(super) fn new(doing: &'static str, path: PathBuf, source: io::Error) -> Self {
        Self { doing, path, source }
    }

    pub(super) fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }

    /// Of a call that leaves nothing behind when it fails, with nothing done before it.
    pub(super) fn undone(self) -> StoreError {
        use io::ErrorKind::{InvalidData, PermissionDenied, ReadOnlyFilesystem};
        match self.kind() {
            PermissionDenied | ReadOnlyFilesystem => {
                StoreError::Refused { reason: format!("{self}: {}", self.source) }
            }
            InvalidData => StoreError::NotUnderstood {
                place: self.path.display().to_string(),
                reason: self.source.to_string(),
            },
            _ => StoreError::Unavailable { source: Arc::new(self) },
        }
    }

    /// Of a call after which what was done before it may stand.
    pub(super) fn perhaps_done(self) -> StoreError {
        StoreError::Unanswered { source: Arc::new(self) }
    }

    /// Of the very call that does it: most reasons prove that it has not.
    pub(super) fn of_the_deed(self) -> StoreError {
        use io::ErrorKind::{NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        match self.kind() {
            NotFound | PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull => self.undone(),
            _ => self.perhaps_done(),
        }
    }
}
