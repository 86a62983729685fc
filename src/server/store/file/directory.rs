//! The system calls: each whole or not at all, as others see it.

use std::{
    fs::{self, File, OpenOptions},
    hash::{BuildHasher, RandomState},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

#[cfg(test)]
use std::sync::Arc;

use super::{
    error::{FileError, InvalidFileStore, NoFile, Replaced},
    names::{self, Listing},
};

/// The directory of one lease.
///
/// A file that others look for is written under a name of its own first, and linked or
/// renamed when it is finished. All are in one directory, so the kernel puts links, renames and
/// listings in one order.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    durable: bool,
    /// Which directory was at the path at first, whatever is there later.
    first: Option<Identity>,
    #[cfg(test)]
    stage: Option<Arc<dyn Stage>>,
}

/// How often a directory is tried out whose files are cleared away meanwhile. Our choice: each time takes the
/// beginning of another term.
const TRIES: u32 = 10;

/// What tells a directory from any other that comes to have its name: device and inode.
type Identity = (u64, u64);

/// Stands before each system call of a process under test: to hold it, or to let it die.
#[cfg(test)]
pub(super) trait Stage: std::fmt::Debug + Send + Sync {
    /// An error: the process has died.
    fn enter(&self, call: &'static str) -> io::Result<()>;
}

/// A finished file that nobody looks for yet. Removed when dropped.
pub(super) struct Unfinished<'a> {
    directory: &'a Directory,
    name: Option<String>,
}

// === impl Directory ===

impl Directory {
    pub(super) fn new(path: PathBuf, durable: bool) -> Self {
        Self {
            first: identity(&path).ok().flatten(),
            path,
            durable,
            #[cfg(test)]
            stage: None,
        }
    }

    #[cfg(test)]
    pub(super) fn staged(path: PathBuf, stage: Arc<dyn Stage>) -> Self {
        Self { first: identity(&path).ok().flatten(), path, durable: false, stage: Some(stage) }
    }

    /// Tries out what a lease needs.
    pub(super) fn try_out(&self) -> Result<(), InvalidFileStore> {
        let path = || self.path.clone();
        match fs::metadata(&self.path) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => {
                let source = io::Error::from(io::ErrorKind::NotADirectory);
                return Err(InvalidFileStore::NotADirectory { path: path(), source });
            }
            Err(source) => return Err(InvalidFileStore::NotADirectory { path: path(), source }),
        }
        let mut tries = TRIES;
        loop {
            match self.write_and_link() {
                Err(error) if error.kind() == io::ErrorKind::NotFound && tries > 1 => tries -= 1,
                tried => {
                    return tried
                        .map_err(|error| InvalidFileStore::Unusable { path: path(), source: error.into() });
                }
            }
        }
    }

    /// Not found is what whoever has just begun a term has cleared away meanwhile.
    fn write_and_link(&self) -> Result<(), FileError> {
        // Numbered like a term's before any, so that it is cleared away if this process dies here.
        let file = self.passing(0, b"")?;
        let linked = self.unused_name(0);
        file.link(&linked)?;
        match self.remove(&linked) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the file called `name` is.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.path.clone() } else { self.path.join(name) }
    }

    fn call<T>(
        &self,
        doing: &'static str,
        name: &str,
        call: impl FnOnce(&Path) -> io::Result<T>,
    ) -> Result<T, FileError> {
        let path = self.place(name);
        let done = self.enter(doing).and_then(|()| call(&path));
        done.map_err(|source| FileError::new(doing, path, source))
    }

    #[cfg(not(test))]
    fn enter(&self, _: &'static str) -> io::Result<()> {
        Ok(())
    }

    #[cfg(test)]
    fn enter(&self, call: &'static str) -> io::Result<()> {
        self.stage.as_ref().map_or(Ok(()), |stage| stage.enter(call))
    }

    /// What is wrong where another directory has come to the path: one that has not the term of `token`,
    /// which was seen in the first.
    pub(super) fn replaced(&self, token: u64) -> Result<(), FileError> {
        let now = self.call("find", "", identity)?;
        if now == self.first {
            return Ok(());
        }
        Err(FileError::new("go on in", self.path.clone(), io::Error::other(Replaced { token })))
    }

    /// The names that were there when this was called are in it, unless they have been removed
    /// meanwhile.
    pub(super) fn list(&self) -> Result<Listing, FileError> {
        self.call("list", "", |path| {
            let names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().into_string()));
            let names = names.collect::<io::Result<Vec<_>>>()?;
            Ok(Listing::of(names.into_iter().flatten()))
        })
    }

    /// The first `most` bytes of a file, or `None` where it is not there. What is no file is not
    /// opened: a FIFO would hold the thread until somebody writes into it.
    pub(super) fn read(&self, name: &str, most: usize) -> Result<Option<Vec<u8>>, FileError> {
        let read = self.call("read", name, |path| {
            let kind = fs::metadata(path)?.file_type();
            if !kind.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, NoFile::of(kind)));
            }
            let mut content = Vec::new();
            File::open(path)?.take(most as u64).read_to_end(&mut content)?;
            Ok(content)
        });
        match read {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A directory that is away must not look like a lease that nobody holds.
                self.call("find", "", |path| fs::metadata(path).map(drop))?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn unused_name(&self, token: u64) -> String {
        names::unfinished(token, RandomState::new().hash_one(token))
    }

    /// Writes a file for the term of `token`. It outlasts a failing machine, where the directory
    /// is to.
    pub(super) fn lasting(&self, token: u64, content: &[u8]) -> Result<Unfinished<'_>, FileError> {
        self.write(token, content, self.durable)
    }

    /// Writes a file for the term of `token` that need not outlast this machine.
    pub(super) fn passing(&self, token: u64, content: &[u8]) -> Result<Unfinished<'_>, FileError> {
        self.write(token, content, false)
    }

    fn write(&self, token: u64, content: &[u8], lasts: bool) -> Result<Unfinished<'_>, FileError> {
        let name = self.unused_name(token);
        let mut file =
            self.call("make", &name, |path| OpenOptions::new().write(true).create_new(true).open(path))?;
        let unfinished = Unfinished { directory: self, name: Some(name.clone()) };
        // A death in between leaves half of it.
        let (begin, end) = content.split_at(content.len() / 2);
        self.call("write", &name, |_| file.write_all(begin))?;
        self.call("write", &name, |_| file.write_all(end))?;
        if lasts {
            self.call("sync", &name, |_| file.sync_all())?;
        }
        Ok(unfinished)
    }

    /// Makes `to` another name of the file; false where `to` is there already.
    pub(super) fn link(&self, name: &str, to: &str) -> Result<bool, FileError> {
        let linked = self.call("link", to, |to| fs::hard_link(self.place(name), to));
        match linked {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes the names outlast a failing machine.
    pub(super) fn sync(&self) -> Result<(), FileError> {
        if self.durable {
            // With a dot it is opened as a directory or not at all.
            self.call("sync", "", |path| File::open(path.join("."))?.sync_all())?;
        }
        Ok(())
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), FileError> {
        self.call("remove", name, |path| fs::remove_file(path))
    }
}

/// `None`: this system does not say.
#[cfg(unix)]
fn identity(path: &Path) -> io::Result<Option<Identity>> {
    use std::os::unix::fs::MetadataExt;
    let it = fs::metadata(path)?;
    Ok(Some((it.dev(), it.ino())))
}

#[cfg(not(unix))]
fn identity(path: &Path) -> io::Result<Option<Identity>> {
    fs::metadata(path).map(|_| None)
}

// === impl Unfinished ===

impl Unfinished<'_> {
    /// Gives it another name, `to`; false where that is taken.
    pub(super) fn link(&self, to: &str) -> Result<bool, FileError> {
        let name = self.name.as_deref().unwrap_or_default();
        self.directory.link(name, to)
    }

    /// Puts it in the place of `to`.
    pub(super) fn rename(mut self, to: &str) -> Result<(), FileError> {
        let name = self.name.clone().unwrap_or_default();
        self.directory.call("rename", to, |to| fs::rename(self.directory.place(&name), to))?;
        self.name = None;
        Ok(())
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // What stays is cleared away by the next term's holder.
            let _ = self.directory.remove(name);
        }
    }
}
