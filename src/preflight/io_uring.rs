//! The kernel's version, and whether it lets this process have a ring.

use std::fmt;

use super::facts::{HostFacts, RingFailure};
use super::{Check, Remedy, Status};

/// Below this the executor cannot even ask which operations the kernel has.
pub const MINIMUM_KERNEL: KernelVersion = KernelVersion { major: 5, minor: 8 };

/// The oldest long-term series we would choose today: rings are not charged as locked memory, and
/// files tell their direct I/O alignment.
pub const RECOMMENDED_KERNEL: KernelVersion = KernelVersion { major: 6, minor: 1 };

/// Major and minor version of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion {
    /// As in 6.
    pub major: u32,
    /// As in .1.
    pub minor: u32,
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl KernelVersion {
    /// Reads the front of a release string like `6.1.0-18-amd64`.
    pub fn parse(release: &str) -> Option<Self> {
        let mut parts = release.trim().splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?;
        let digits = minor
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(minor.len());
        Some(Self {
            major,
            minor: minor[..digits].parse().ok()?,
        })
    }
}

pub(super) fn check_kernel(facts: &dyn HostFacts) -> Check {
    let release = facts.kernel_release();
    let needed = format!("{MINIMUM_KERNEL} or newer, {RECOMMENDED_KERNEL} or newer recommended");
    let check = Check::ok("kernel", release.trim(), needed);
    let remedy = || {
        Remedy::new(
            "install a newer kernel of your distribution and reboot",
            "nothing in a unit can help",
            "a container uses the kernel of its host: move it to a newer host",
        )
    };
    match KernelVersion::parse(&release) {
        None => check.bad(
            Status::Warn,
            "the version cannot be read; going by what the kernel can do instead",
            Remedy::default(),
        ),
        Some(version) if version < MINIMUM_KERNEL => check.bad(
            Status::Fail,
            "the kernel is too old: its io_uring lacks operations the executor needs",
            remedy(),
        ),
        Some(version) if version < RECOMMENDED_KERNEL => check.bad(
            Status::Warn,
            "old kernels charge rings as locked memory and may show idle rings as I/O wait",
            remedy(),
        ),
        Some(_) => check,
    }
}

pub(super) fn check_io_uring(facts: &dyn HostFacts) -> Check {
    let needed = "a ring can be made";
    match facts.probe_ring() {
        Ok(()) => Check::ok("io_uring", "available", needed),
        Err(failure) => {
            let (cause, remedy) = explain(facts, failure);
            let current = format!(
                "{} refused: {}",
                failure.call,
                describe_errno(failure.errno)
            );
            Check::ok("io_uring", current, needed).bad(Status::Fail, cause, remedy)
        }
    }
}

/// Finds out which of the mechanisms that can refuse a ring did it.
fn explain(facts: &dyn HostFacts, failure: RingFailure) -> (String, Remedy) {
    match failure.errno {
        libc::ENOSYS => not_implemented(facts),
        libc::EPERM | libc::EACCES => not_permitted(facts),
        libc::ENOMEM => (
            "the kernel would not lock memory for a ring: the limit is used up, by this process \
             or by others of the same user"
                .into(),
            super::memory::remedy("unlimited"),
        ),
        libc::EMFILE | libc::ENFILE => (
            "no file descriptor was left for the ring".into(),
            super::limits::open_files_remedy(65_536),
        ),
        libc::EINVAL => (
            format!(
                "the kernel knows io_uring but not this use of {}",
                failure.call
            ),
            Remedy::new(
                "run a newer kernel",
                "nothing in a unit can help",
                "use a newer host",
            ),
        ),
        _ => (
            format!(
                "{} failed in a way this check has no name for",
                failure.call
            ),
            Remedy::new("look at the kernel log (dmesg)", "", ""),
        ),
    }
}

fn not_implemented(facts: &dyn HostFacts) -> (String, Remedy) {
    let version = KernelVersion::parse(&facts.kernel_release());
    if version.is_some_and(|v| v < MINIMUM_KERNEL) {
        return (
            "this kernel has no usable io_uring".into(),
            Remedy::new(
                "install a newer kernel",
                "nothing in a unit can help",
                "use a newer host",
            ),
        );
    }
    if facts.has_seccomp_filter() || facts.container().is_some() {
        return (
            format!("{} hides io_uring from this process", sandbox(facts)),
            sandbox_remedy(),
        );
    }
    (
        "the kernel was built without io_uring (CONFIG_IO_URING is off)".into(),
        Remedy::new(
            "run a kernel built with CONFIG_IO_URING=y",
            "nothing in a unit can help",
            "use another host",
        ),
    )
}

fn not_permitted(facts: &dyn HostFacts) -> (String, Remedy) {
    let switch = facts.sysctl("kernel.io_uring_disabled");
    match switch.as_deref().map(str::trim) {
        Some("2") => (
            "io_uring is switched off for all processes: kernel.io_uring_disabled is 2, needed is 0"
                .into(),
            switch_remedy(),
        ),
        Some("1") => {
            let group = facts.sysctl("kernel.io_uring_group").unwrap_or_else(|| "-1".into());
            let group = group.trim();
            (
                format!(
                    "kernel.io_uring_disabled is 1: only processes with CAP_SYS_ADMIN or in the \
                     group kernel.io_uring_group (now {group}) may use io_uring"
                ),
                group_remedy(group),
            )
        }
        _ => (
            format!(
                "the system switch is not the reason (kernel.io_uring_disabled is {}): {} blocks \
                 io_uring",
                switch.as_deref().map_or("absent", str::trim),
                sandbox(facts)
            ),
            sandbox_remedy(),
        ),
    }
}

fn sandbox(facts: &dyn HostFacts) -> String {
    match (facts.container(), facts.has_seccomp_filter()) {
        (Some(kind), true) => format!("the system call filter (seccomp) of the {kind} container"),
        (Some(kind), false) => format!("the sandbox of the {kind} container"),
        (None, true) => "a system call filter (seccomp) on this process".into(),
        (None, false) => "a security module (SELinux, AppArmor) or sandbox".into(),
    }
}

fn switch_remedy() -> Remedy {
    Remedy::new(
        "sysctl -w kernel.io_uring_disabled=0 (as root; keep it in /etc/sysctl.d/)",
        "a unit cannot override it: set the sysctl on the host",
        "set it on the container's host; it holds for all its containers",
    )
}

fn group_remedy(group: &str) -> Remedy {
    if group == "-1" {
        return Remedy::new(
            "sysctl -w kernel.io_uring_group=GID of the broker's group, or \
             kernel.io_uring_disabled=0 (as root)",
            "Group= or SupplementaryGroups= with that group",
            "set the sysctl on the host and run with --group-add GID",
        );
    }
    Remedy::new(
        format!("add the broker's user to group {group}, or sysctl -w kernel.io_uring_disabled=0"),
        format!("SupplementaryGroups={group}"),
        format!("run with --group-add {group}"),
    )
}

fn sandbox_remedy() -> Remedy {
    Remedy::new(
        "start the broker outside the sandbox, or look for denials with dmesg or ausearch",
        "SystemCallFilter=@system-service io_uring_setup io_uring_enter io_uring_register",
        "--security-opt seccomp=PROFILE with the three io_uring calls allowed (a default profile \
         blocks them); in Kubernetes a localhostProfile",
    )
}

/// The error as words with its name: numbers alone were read as something else too often.
fn describe_errno(errno: i32) -> String {
    let name = match errno {
        libc::ENOSYS => "not implemented (ENOSYS)",
        libc::EPERM => "not permitted (EPERM)",
        libc::EACCES => "access denied (EACCES)",
        libc::ENOMEM => "no memory (ENOMEM)",
        libc::EMFILE => "too many open files (EMFILE)",
        libc::ENFILE => "too many open files on the host (ENFILE)",
        libc::EINVAL => "invalid argument (EINVAL)",
        _ => return std::io::Error::from_raw_os_error(errno).to_string(),
    };
    name.into()
}
