//! The file every executor reads before it opens any other.
//!
//! glommio decides once a thread and device whether to poll for completions, by a small read from
//! the first file it opens there. On an empty or merely reserved file that read succeeds for the
//! wrong reason, and the executor then spins at full load with writes some ten times slower. A
//! fully written file gives the right answer.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use glommio::io::DmaFile;

/// Name of the warm-up file in a data directory.
pub const WARM_UP_FILE_NAME: &str = ".executor-warm-up";

/// Its size: one block of every usual file system.
pub const WARM_UP_FILE_BYTES: usize = 4096;

/// Makes sure the warm-up file exists in `dir`, written and on disk, and returns its path.
/// Blocking; call it from a control thread before the cores start.
pub fn prepare_warm_up_file(dir: &Path) -> io::Result<PathBuf> {
    let path = dir.join(WARM_UP_FILE_NAME);
    if std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() == WARM_UP_FILE_BYTES as u64) {
        return Ok(path);
    }
    let mut file = std::fs::File::create(&path)?;
    file.write_all(&[0x5a; WARM_UP_FILE_BYTES])?;
    // Without this the blocks may not be allocated yet when the probe reads them.
    file.sync_all()?;
    Ok(path)
}

/// Opens the warm-up file for reading (which runs the probe) and closes it again.
pub(super) async fn warm_up(path: &Path) -> io::Result<()> {
    // glommio unwraps a `statfs` of the path; find out here that it is missing.
    std::fs::metadata(path)?;
    let file = DmaFile::open(path).await.map_err(io::Error::from)?;
    file.close().await.map_err(io::Error::from)
}
