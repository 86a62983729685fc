//! A directory is tried out while others begin terms in it.

use std::{
    fs, io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use super::super::{
    directory::{Directory, Stage},
    error::InvalidFileStore,
};

/// Clears the directory away under whoever is about to link a file, the first time.
#[derive(Debug)]
struct Clears {
    path: PathBuf,
    left: AtomicUsize,
}

impl Stage for Clears {
    fn enter(&self, call: &'static str) -> io::Result<()> {
        if call == "link" && self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
            for file in fs::read_dir(&self.path)? {
                fs::remove_file(file?.path())?;
            }
        }
        Ok(())
    }
}

#[test]
fn a_directory_whose_files_are_cleared_away_by_a_new_term_is_tried_out_again() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().to_owned();
    let tried = |times| {
        let stage = Arc::new(Clears { path: path.clone(), left: AtomicUsize::new(times) });
        Directory::staged(path.clone(), stage).try_out()
    };
    assert!(tried(1).is_ok());
    let error = tried(usize::MAX).unwrap_err();
    assert!(matches!(&error, InvalidFileStore::Unusable { path: named, .. } if *named == path), "{error}");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}
