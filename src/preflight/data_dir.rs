//! Whether the data directory takes durable direct I/O.

use std::path::{Path, PathBuf};

use super::facts::HostFacts;
use super::{Check, Remedy, Status};

/// Where a directory is and what its file system can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryFacts {
    /// The directory that was tried: the wanted one or its nearest parent that exists.
    pub tried: PathBuf,
    /// Its mount point.
    pub mount: String,
    /// The file system's type.
    pub file_system: String,
}

/// A directory that did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectIoFailure {
    /// Where it is.
    pub place: DirectoryFacts,
    /// What was being done.
    pub step: &'static str,
    /// The error number.
    pub errno: i32,
}

pub(super) fn check_data_dir(facts: &dyn HostFacts, dir: &Path) -> Check {
    let needed = "a local file system with direct I/O, writable";
    match facts.probe_directory(dir) {
        Ok(place) => {
            let check = Check::ok("data-directory", describe(dir, &place), needed);
            match volatile_cause(&place.file_system) {
                None => check,
                Some(cause) => check.bad(Status::Warn, cause, other_directory()),
            }
        }
        Err(failure) => {
            let (cause, remedy) = explain(dir, &failure);
            Check::ok("data-directory", describe(dir, &failure.place), needed).bad(
                Status::Fail,
                cause,
                remedy,
            )
        }
    }
}

fn describe(dir: &Path, place: &DirectoryFacts) -> String {
    let tried = if place.tried == dir {
        String::new()
    } else {
        format!("not there yet, tried {}; ", place.tried.display())
    };
    format!(
        "{}: {tried}{} on {}",
        dir.display(),
        place.file_system,
        place.mount
    )
}

fn volatile_cause(file_system: &str) -> Option<&'static str> {
    match file_system {
        "tmpfs" | "ramfs" => {
            Some("a memory file system: acknowledged records do not survive a restart of the host")
        }
        "overlay" | "aufs" => Some(
            "a container's layered file system: the records go when the container does, and \
             flushes are slow",
        ),
        "nfs" | "nfs4" | "cifs" | "9p" | "virtiofs" | "fuse" => {
            Some("a remote or user-space file system: how durable a flush is depends on its server")
        }
        _ => None,
    }
}

fn explain(dir: &Path, failure: &DirectIoFailure) -> (String, Remedy) {
    let place = &failure.place;
    let step = failure.step;
    let user = |shell: String| {
        Remedy::new(
            shell,
            "StateDirectory=felix-uring, or ReadWritePaths= with the directory",
            "mount a writable volume with -v, owned by the container's user",
        )
    };
    match failure.errno {
        libc::EINVAL | libc::EOPNOTSUPP => (
            format!(
                "the file system {} mounted on {} does not do direct I/O in blocks of 4096 bytes \
                 ({step})",
                place.file_system, place.mount
            ),
            other_directory(),
        ),
        libc::EACCES | libc::EPERM => (
            format!("this user may not {step} in {}", place.tried.display()),
            user(format!(
                "chown the directory to the broker's user: chown USER {}",
                dir.display()
            )),
        ),
        libc::EROFS => (
            format!("the file system mounted on {} is read-only", place.mount),
            user(format!("mount -o remount,rw {}", place.mount)),
        ),
        libc::ENOSPC | libc::EDQUOT => (
            format!("no space is left on {}", place.mount),
            user("free some space, or choose another --data-dir".into()),
        ),
        libc::ENOTDIR => (
            format!("{} is not a directory", place.tried.display()),
            user("choose another --data-dir".into()),
        ),
        libc::EIO => (
            format!("what was written was not read back, or the device failed ({step})"),
            user("look at the kernel log (dmesg) and replace the disk".into()),
        ),
        errno => (
            format!(
                "{step} failed: {}",
                std::io::Error::from_raw_os_error(errno)
            ),
            other_directory(),
        ),
    }
}

fn other_directory() -> Remedy {
    Remedy::new(
        "give a --data-dir on a local disk with ext4 or xfs",
        "StateDirectory=felix-uring on such a disk",
        "mount a volume of such a disk with -v HOST_DIR:DATA_DIR",
    )
}
