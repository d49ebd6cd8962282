//! The data directory: who may look into it, and whether its path still leads to the one that was opened.
//!
//! Files that were unlinked or moved away can be written to for as long as they are open: without this look a
//! broker whose directory is gone would acknowledge records no start will ever find.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the path is looked at. Both are held open by the storage, so that looking needs no disk.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Makes the directory where there is none. Records are anybody's who can read the files, and their modes are
/// the umask's: the directory keeps others out.
pub(super) fn create(dir: &Path) -> io::Result<()> {
    // Those above it may be shared with others.
    if let Some(parent) = dir.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        // A link to a directory is as good as one.
        Err(_) if dir.is_dir() => Ok(()),
        made => made,
    }
}

/// A warning about a directory that lets others in. Its mode is the operator's, and stays.
pub(super) fn open_to_others(dir: &Path) -> Option<String> {
    let mode = std::fs::metadata(dir).ok()?.mode() & 0o777;
    // To list it or to pass through it: the names of the files are known.
    (mode & 0o005 != 0).then(|| {
        format!(
            "the data directory {} has mode {mode:o}: its records can be read by every user of this host; \
             chmod 700 it",
            dir.display()
        )
    })
}

/// Device and inode.
type FileId = (u64, u64);

fn id_of(path: &Path) -> io::Result<FileId> {
    std::fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

/// The data directory as it was when it was opened.
#[derive(Debug)]
pub(super) struct DataDirWatch {
    /// The directory, and the file whose lock keeps other brokers out of it.
    opened: [(PathBuf, FileId); 2],
    due: Instant,
}

impl DataDirWatch {
    /// Remembers what `dir`, which this process has locked, is now.
    pub(super) fn new(dir: &Path, now: Instant) -> io::Result<Self> {
        let lock = dir.join("lock");
        Ok(Self {
            opened: [
                (dir.to_path_buf(), id_of(dir)?),
                (lock.clone(), id_of(&lock)?),
            ],
            due: now + POLL_INTERVAL,
        })
    }

    /// Looks when a second has passed; says why when what was opened is not there any more.
    pub(super) fn poll(&mut self, now: Instant) -> Option<String> {
        if now < self.due {
            return None;
        }
        self.due = now + POLL_INTERVAL;
        self.opened.iter().find_map(|(path, id)| lost(path, *id))
    }
}

fn lost(path: &Path, opened: FileId) -> Option<String> {
    use io::ErrorKind::{NotADirectory, NotFound};
    let path_text = path.display();
    match id_of(path) {
        Ok(found) if found == opened => None,
        Ok(_) => Some(format!("{path_text} is not the one this broker opened")),
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => {
            Some(format!("{path_text} has been removed or renamed"))
        }
        // It says nothing about what is there; a device that fails is noticed by the writes.
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_opened_is_told_from_what_took_its_place() {
        let parent = tempfile::tempdir().expect("a directory");
        let dir = parent.path().join("data");
        let make = || {
            std::fs::create_dir(&dir).expect("made");
            std::fs::write(dir.join("lock"), "1").expect("written");
        };
        make();
        let mut now = Instant::now();
        let mut watch = DataDirWatch::new(&dir, now).expect("there");
        let mut look = move || {
            assert_eq!(watch.poll(now), None, "before a second has passed");
            now += POLL_INTERVAL;
            watch.poll(now)
        };
        assert_eq!(look(), None);
        let away = parent.path().join("away");
        std::fs::rename(&dir, &away).expect("renamed");
        let said = look().expect("gone");
        assert!(said.contains("data has been removed or renamed"), "{said}");
        make();
        assert!(look().expect("another").contains("data is not the one"));
        std::fs::remove_dir_all(&dir).expect("removed");
        std::fs::rename(&away, &dir).expect("renamed");
        assert_eq!(look(), None);
        std::fs::rename(dir.join("lock"), dir.join("kept")).expect("renamed");
        assert!(look().expect("no lock").contains("lock has been removed"));
    }
}
