//! Whether the path of the data directory still leads to the directory that was opened.
//!
//! Files that were unlinked or moved away can be written to for as long as they are open: without this look a
//! broker whose directory is gone would acknowledge records no start will ever find.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the path is looked at. Both are held open by the storage, so that looking needs no disk.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

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
