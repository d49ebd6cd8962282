//! The real host.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use shard_executor::topology::{self, Topology};

use super::data_dir::{DirectIoFailure, DirectoryFacts};
use super::facts::{HostFacts, Limit, Resource, RingFailure};

mod direct_io;

/// Reads this host and process.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemFacts;

impl HostFacts for SystemFacts {
    fn kernel_release(&self) -> String {
        // SAFETY: all-zero bytes are a valid `utsname`, and it is live for the call.
        let mut name: libc::utsname = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        if unsafe { libc::uname(&raw mut name) } != 0 {
            return String::new();
        }
        // SAFETY: the kernel ends the field with a zero byte.
        unsafe { CStr::from_ptr(name.release.as_ptr()) }
            .to_string_lossy()
            .into_owned()
    }

    fn sysctl(&self, name: &str) -> Option<String> {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        Some(fs::read_to_string(path).ok()?.trim().to_owned())
    }

    fn probe_ring(&self) -> Result<(), RingFailure> {
        probe_ring()
    }

    fn limit(&self, resource: Resource) -> Limit {
        limit(resource)
    }

    fn may_lock_freely(&self) -> bool {
        const CAP_IPC_LOCK: u32 = 14;
        let Some(effective) = status_field("CapEff") else {
            return false;
        };
        u64::from_str_radix(&effective, 16).is_ok_and(|bits| bits & (1 << CAP_IPC_LOCK) != 0)
    }

    fn has_seccomp_filter(&self) -> bool {
        status_field("Seccomp").is_some_and(|mode| mode == "2")
    }

    fn container(&self) -> Option<String> {
        let marks = [("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")];
        if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
            return Some("Kubernetes".into());
        }
        if let Some((_, kind)) = marks.iter().find(|(path, _)| Path::new(path).exists()) {
            return Some((*kind).into());
        }
        let named = fs::read_to_string("/run/systemd/container").ok()?;
        Some(named.trim().to_owned()).filter(|kind| !kind.is_empty())
    }

    fn topology(&self) -> Result<Topology, String> {
        Topology::read_host().map_err(|error| error.to_string())
    }

    fn allowed_cpus(&self) -> Result<Vec<usize>, String> {
        topology::allowed_cpus().map_err(|error| error.to_string())
    }

    fn governor(&self, cpu: usize) -> Option<String> {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor");
        Some(fs::read_to_string(path).ok()?.trim().to_owned())
    }

    fn huge_pages(&self) -> Option<String> {
        let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }

    fn probe_directory(&self, dir: &Path) -> Result<DirectoryFacts, DirectIoFailure> {
        let place = locate(dir);
        match direct_io::try_in(&place.tried) {
            Ok(()) => Ok(place),
            Err((step, errno)) => Err(DirectIoFailure { place, step, errno }),
        }
    }
}

/// A field of this thread's status: filters and capabilities belong to threads.
fn status_field(name: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/thread-self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

/// Size in bytes of `struct io_uring_params`.
const RING_PARAMS_BYTES: usize = 120;

/// The three calls an executor makes, each of which a filter can refuse by itself.
fn probe_ring() -> Result<(), RingFailure> {
    const REGISTER_PROBE: libc::c_long = 8;
    const ENTRIES: libc::c_long = 8;
    let failure = |call| RingFailure {
        call,
        errno: io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
    };
    let mut params = [0_u64; RING_PARAMS_BYTES / 8];
    // SAFETY: `params` is live, zeroed and of the size the kernel writes.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, params.as_mut_ptr()) };
    if fd < 0 {
        return Err(failure("io_uring_setup"));
    }
    // SAFETY: the kernel just returned this descriptor to us.
    let ring = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // A header of 16 bytes and no room for operations is the smallest probe there is.
    let mut probe = [0_u64; 2];
    // SAFETY: `probe` is live and holds the header of a probe for 0 operations.
    let registered = unsafe {
        let (call, fd) = (libc::SYS_io_uring_register, ring.as_raw_fd());
        libc::syscall(call, fd, REGISTER_PROBE, probe.as_mut_ptr(), 0_u32)
    };
    if registered < 0 {
        return Err(failure("io_uring_register"));
    }
    // SAFETY: submits nothing and waits for nothing; no memory is passed.
    let entered = unsafe {
        let (call, fd) = (libc::SYS_io_uring_enter, ring.as_raw_fd());
        libc::syscall(
            call,
            fd,
            0_u32,
            0_u32,
            0_u32,
            std::ptr::null::<u8>(),
            0_usize,
        )
    };
    if entered < 0 {
        return Err(failure("io_uring_enter"));
    }
    Ok(())
}

fn raw(resource: Resource) -> libc::__rlimit_resource_t {
    match resource {
        Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
        Resource::OpenFiles => libc::RLIMIT_NOFILE,
    }
}

fn read_limit(resource: Resource) -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is live for the call.
    match unsafe { libc::getrlimit(raw(resource), &raw mut limit) } {
        0 => Ok(limit),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn limit(resource: Resource) -> Limit {
    let bounded = |value| (value != libc::RLIM_INFINITY).then_some(value);
    match read_limit(resource) {
        Ok(limit) => Limit {
            soft: bounded(limit.rlim_cur),
            hard: bounded(limit.rlim_max),
        },
        // Cannot happen for a known resource; claiming nothing leaves the refusal to the kernel.
        Err(_) => Limit {
            soft: None,
            hard: None,
        },
    }
}

pub(super) fn set_soft_limit(resource: Resource, soft: Option<u64>) {
    let Ok(mut limit) = read_limit(resource) else {
        return;
    };
    limit.rlim_cur = soft.unwrap_or(libc::RLIM_INFINITY);
    // SAFETY: `limit` is live for the call.
    if unsafe { libc::setrlimit(raw(resource), &raw const limit) } != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(?resource, %error, "the soft limit stays as it is");
    }
}

/// The nearest existing directory on the way to `dir`, and the mount it is on.
fn locate(dir: &Path) -> DirectoryFacts {
    let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let existing = absolute
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"));
    let real = existing
        .canonicalize()
        .unwrap_or_else(|_| existing.to_owned());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let (mount, file_system) = mount_of(&mounts, &real);
    let tried = if existing == absolute {
        dir.to_owned()
    } else {
        existing.to_owned()
    };
    DirectoryFacts {
        tried,
        mount,
        file_system,
    }
}

/// Finds the mount of `path` in the text of `/proc/self/mountinfo`: the longest mount point above
/// it, the last of equals (it hides the others).
fn mount_of(mountinfo: &str, path: &Path) -> (String, String) {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        let point = unescape(front.split(' ').nth(4)?);
        path.starts_with(&point)
            .then(|| (point, back.split(' ').next().unwrap_or("").to_owned()))
    });
    let depth = |point: &PathBuf| point.components().count();
    mounts.max_by_key(|(point, _)| depth(point)).map_or_else(
        || ("an unknown mount".into(), "an unknown file system".into()),
        |(point, kind)| (point.display().to_string(), kind),
    )
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &str) -> PathBuf {
    let replaced = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ]
    .iter()
    .fold(field.to_owned(), |text, (code, plain)| {
        text.replace(code, plain)
    });
    PathBuf::from(replaced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_and_last_mount_counts() {
        let info = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                    30 22 0:5 / /data\\040dir rw,nosuid shared:1 - xfs /dev/vdb rw\n\
                    31 22 0:6 / /data rw - tmpfs tmpfs rw\n\
                    32 22 0:7 / /data rw - btrfs /dev/vdc rw\n";
        let find = |path: &str| mount_of(info, Path::new(path));
        assert_eq!(find("/data dir/x"), ("/data dir".into(), "xfs".into()));
        assert_eq!(find("/data/x/y"), ("/data".into(), "btrfs".into()));
        assert_eq!(find("/database"), ("/".into(), "ext4".into()));
        assert_eq!(
            mount_of("garbage", Path::new("/x")).1,
            "an unknown file system"
        );
    }

    #[test]
    fn a_missing_directory_is_tried_at_its_parent_and_leaves_nothing() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
        let wanted = dir.path().join("a/b");
        let place = SystemFacts
            .probe_directory(&wanted)
            .expect("the build directory is on a disk");
        assert_eq!(place.tried, dir.path());
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 0);
    }

    #[test]
    fn a_file_is_not_a_data_directory() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let failure = SystemFacts
            .probe_directory(file.path())
            .expect_err("refused");
        assert_eq!(failure.errno, libc::ENOTDIR);
    }

    #[test]
    fn this_host_gives_answers() {
        assert!(!SystemFacts.kernel_release().is_empty());
        assert!(SystemFacts.sysctl("kernel.osrelease").is_some());
        assert_eq!(SystemFacts.sysctl("kernel.no_such_setting"), None);
        assert!(SystemFacts.limit(Resource::OpenFiles).soft.is_some());
        assert!(!SystemFacts.allowed_cpus().expect("mask").is_empty());
        assert!(!SystemFacts.topology().expect("topology").cpus().is_empty());
    }
}
