//! Where a run keeps its data while it runs.
//!
//! Invariants: only a directory that allows direct I/O is used for logs; what was made here is removed at
//! the end unless it is to be kept, and what a killed run left behind is removed by the next.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use felix_uring::cli::{CommandError, Exit};
use felix_uring::preflight::{self, PreflightInput, Status};
use shard_executor::topology::CoreRequest;

const PREFIX: &str = "felix-bench-";

/// A directory of this run; removed when dropped, unless kept.
#[derive(Debug)]
pub struct WorkDir {
    path: PathBuf,
    keep: bool,
}

impl WorkDir {
    /// Under `chosen`, or else under the first usual place that can hold logs. Refuses a host that cannot
    /// run brokers, with what is missing and the remedy.
    pub fn for_logs(
        chosen: Option<&Path>,
        cores: usize,
        queue_depth: usize,
    ) -> Result<Self, CommandError> {
        preflight::raise_soft_limits();
        let candidates = match chosen {
            Some(dir) => vec![dir.to_path_buf()],
            None => usual_places(),
        };
        let mut last = None;
        for base in candidates {
            if std::fs::create_dir_all(&base).is_err() {
                continue;
            }
            let mut input =
                PreflightInput::new(Some(base.clone()), CoreRequest::Count(cores), queue_depth);
            input.cores =
                CoreRequest::Count(cores.clamp(1, crate::cpu::usable_cpus().len().max(1)));
            let report = preflight::run(&input);
            if report.ok {
                return Self::make(&base).map_err(CommandError::failed);
            }
            let only_here = report
                .with_status(Status::Fail)
                .all(|check| check.name == "data-directory");
            last = report.failure_message();
            if !only_here {
                break;
            }
        }
        let why = last.unwrap_or_else(|| {
            "no directory can be made for the logs; name one with --data-dir".to_string()
        });
        Err(CommandError::new(Exit::HostUnfit, why))
    }

    /// For certificates, addresses and output: anywhere.
    pub fn anywhere() -> Result<Self> {
        let base = std::env::temp_dir();
        Self::make(&base).map_err(|error| anyhow::anyhow!(error))
    }

    fn make(base: &Path) -> Result<Self, String> {
        remove_leftovers(base);
        let path = base.join(format!(
            "{PREFIX}{}-{:08x}",
            std::process::id(),
            random_u64() as u32
        ));
        std::fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self { path, keep: false })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the directory when the run is over.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Free bytes of its file system.
    pub fn free_bytes(&self) -> Result<u64> {
        use std::os::unix::ffi::OsStrExt;
        let path = std::ffi::CString::new(self.path.as_os_str().as_bytes())?;
        // SAFETY: an all-zero `statvfs` is a valid value, the path ends with a zero, and the call only
        // writes into the buffer.
        let found = unsafe {
            let mut found: libc::statvfs = std::mem::zeroed();
            (libc::statvfs(path.as_ptr(), &mut found) == 0).then_some(found)
        };
        let found = found.context("the file system does not tell its free space")?;
        Ok(found.f_bavail * found.f_frsize)
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if !self.keep {
            // The next run tries again.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Beside the build, then the directory for temporary files, then here.
fn usual_places() -> Vec<PathBuf> {
    let beside = std::env::current_exe()
        .ok()
        .and_then(|exe| exe.parent().map(|dir| dir.join("bench-data")));
    beside
        .into_iter()
        .chain([
            std::env::temp_dir(),
            PathBuf::from("/var/tmp"),
            PathBuf::from("."),
        ])
        .collect()
}

/// Removes directories of processes that have ended.
fn remove_leftovers(base: &Path) {
    for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|rest| rest.split('-').next())
            .and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// A number nobody can guess, for runs and directories.
pub fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library seeds its hashers from the system's randomness.
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_with_its_run_and_leftovers_with_the_next() {
        let base = tempfile::tempdir().unwrap();
        let left = base.path().join(format!("{PREFIX}4294967295-00000000"));
        let other = base.path().join("somebody-elses");
        std::fs::create_dir(&left).unwrap();
        std::fs::create_dir(&other).unwrap();
        let dir = WorkDir::make(base.path()).unwrap();
        let path = dir.path().to_path_buf();
        assert!(path.is_dir() && dir.free_bytes().unwrap() > 0);
        assert!(!left.exists() && other.exists());
        drop(dir);
        assert!(!path.exists());
        let mut kept = WorkDir::make(base.path()).unwrap();
        kept.keep();
        let path = kept.path().to_path_buf();
        drop(kept);
        assert!(path.exists());
        assert_ne!(random_u64(), random_u64());
    }
}
