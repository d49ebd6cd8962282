//! What a check may ask about a host.

use std::path::Path;

use shard_executor::topology::Topology;

use super::data_dir::{DirectIoFailure, DirectoryFacts};

/// A limit of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// RLIMIT_MEMLOCK, bytes.
    LockedMemory,
    /// RLIMIT_NOFILE, descriptors.
    OpenFiles,
}

/// Soft and hard limit; `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What counts now.
    pub soft: Option<u64>,
    /// How far the process may raise it by itself.
    pub hard: Option<u64>,
}

/// Which call of a ring probe failed, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFailure {
    /// The system call.
    pub call: &'static str,
    /// Its error number.
    pub errno: i32,
}

/// A host, real or made up.
pub trait HostFacts {
    /// `uname -r`.
    fn kernel_release(&self) -> String;
    /// The value of a sysctl, by its dotted name; `None` when the kernel has no such setting.
    fn sysctl(&self, name: &str) -> Option<String>;
    /// Makes a small ring, probes it, enters it and closes it.
    fn probe_ring(&self) -> Result<(), RingFailure>;
    /// A limit of this process.
    fn limit(&self, resource: Resource) -> Limit;
    /// Whether locked memory is not charged to this process (CAP_IPC_LOCK).
    fn may_lock_freely(&self) -> bool;
    /// Whether a system call filter is attached to this process.
    fn has_seccomp_filter(&self) -> bool;
    /// The kind of container this process runs in, if it can tell.
    fn container(&self) -> Option<String>;
    /// The online CPUs.
    fn topology(&self) -> Result<Topology, String>;
    /// The CPUs this process may use.
    fn allowed_cpus(&self) -> Result<Vec<usize>, String>;
    /// Frequency governor of a CPU; `None` when not exposed.
    fn governor(&self, cpu: usize) -> Option<String>;
    /// The chosen mode of transparent huge pages; `None` when not exposed.
    fn huge_pages(&self) -> Option<String>;
    /// Where the directory (or the nearest parent that exists) is, and whether direct I/O works.
    fn probe_directory(&self, dir: &Path) -> Result<DirectoryFacts, DirectIoFailure>;
}
