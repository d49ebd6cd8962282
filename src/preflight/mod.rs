//! Can this host run the broker? Asked before anything is opened.
//!
//! Duty: check what the broker needs from the kernel, the process limits and the data directory,
//! and say for everything missing what it is now, what it must be, why, and how to change it from a
//! shell, in a service unit and for a container. It changes nothing except, in
//! [`raise_soft_limits`], the process's own soft limits.
//!
//! The decisions are pure functions of [`HostFacts`], so every cause is tested with made-up hosts;
//! [`SystemFacts`] reads the real one.
//!
//! Invariants: a failed check means that the broker would not start or would lose data, and `serve`
//! refuses; a warning never stops it. `check` and `serve` run the same checks and print the same.

mod data_dir;
mod facts;
mod io_uring;
mod limits;
mod memory;
mod render;
mod system;
mod tuning;

#[cfg(test)]
mod tests_hosts;
#[cfg(test)]
mod tests_process;

use std::path::PathBuf;

use serde::Serialize;
use shard_executor::memlock::DEFAULT_IO_MEMORY_BYTES;
use shard_executor::topology::CoreRequest;

pub use data_dir::{DirectIoFailure, DirectoryFacts};
pub use facts::{HostFacts, Limit, Resource, RingFailure};
pub use io_uring::{KernelVersion, MINIMUM_KERNEL, RECOMMENDED_KERNEL};
pub use limits::raise_soft_limits;
pub use system::SystemFacts;

/// Exit status of `check` and `serve` on a host that cannot run the broker. Apart from 1 so that a
/// supervisor can tell "fix the host" from "it broke".
pub const EXIT_CODE_HOST_UNFIT: u8 = 6;

/// What the broker is going to ask of the host.
#[derive(Clone, Debug)]
pub struct PreflightInput {
    /// Where the logs are to live; `None` skips that check.
    pub data_dir: Option<PathBuf>,
    /// `--cores`.
    pub cores: CoreRequest,
    /// `--queue-depth`: submission entries of each ring.
    pub queue_depth: usize,
    /// Memory each executor registers for file I/O.
    pub io_memory_bytes: usize,
    /// Socket buffer the UDP sockets ask for, each way.
    pub udp_buffer_bytes: u64,
}

impl PreflightInput {
    /// Input with the broker's defaults for what is not given.
    pub fn new(data_dir: Option<PathBuf>, cores: CoreRequest, queue_depth: usize) -> Self {
        Self {
            data_dir,
            cores,
            queue_depth,
            io_memory_bytes: DEFAULT_IO_MEMORY_BYTES,
            udp_buffer_bytes: 4 << 20,
        }
    }
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As needed.
    Ok,
    /// It runs, slower or less safely than it could.
    Warn,
    /// It cannot run.
    Fail,
}

/// How to put it right, by the place where the broker runs. Empty where there is nothing to do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Remedy {
    /// On a shell of the host.
    pub shell: String,
    /// In a systemd unit.
    pub unit: String,
    /// For a container.
    pub container: String,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name, for scripts.
    pub name: &'static str,
    /// How it ended.
    pub status: Status,
    /// What the host has.
    pub current: String,
    /// What the broker needs.
    pub needed: String,
    /// Why it is not as needed; empty when it is.
    pub cause: String,
    /// How to change it; empty when there is no need.
    pub remedy: Remedy,
}

impl Check {
    fn ok(name: &'static str, current: impl Into<String>, needed: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            current: current.into(),
            needed: needed.into(),
            cause: String::new(),
            remedy: Remedy::default(),
        }
    }

    fn bad(self, status: Status, cause: impl Into<String>, remedy: Remedy) -> Self {
        Self {
            status,
            cause: cause.into(),
            remedy,
            ..self
        }
    }
}

impl Remedy {
    fn new(
        shell: impl Into<String>,
        unit: impl Into<String>,
        container: impl Into<String>,
    ) -> Self {
        Self {
            shell: shell.into(),
            unit: unit.into(),
            container: container.into(),
        }
    }
}

/// Everything that was looked at, in a fixed order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PreflightReport {
    /// Whether the broker can run here.
    pub ok: bool,
    /// The checks.
    pub checks: Vec<Check>,
}

impl PreflightReport {
    /// The checks that ended with `status`.
    pub fn with_status(&self, status: Status) -> impl Iterator<Item = &Check> {
        self.checks
            .iter()
            .filter(move |check| check.status == status)
    }

    /// Logs every warning once, with its remedy for a shell; for `serve`.
    pub fn log_warnings(&self) {
        for check in self.with_status(Status::Warn) {
            tracing::warn!(
                check = check.name,
                current = %check.current,
                needed = %check.needed,
                remedy = %check.remedy.shell,
                "{}",
                check.cause
            );
        }
    }
}

/// Looks at the real host.
pub fn run(input: &PreflightInput) -> PreflightReport {
    run_with(&SystemFacts, input)
}

/// Looks at a given host. Costs a few system calls and one 4 KiB write in the data directory.
pub fn run_with(facts: &dyn HostFacts, input: &PreflightInput) -> PreflightReport {
    let (cores_check, placed) = limits::check_cores(facts, input);
    let executors = placed
        .as_ref()
        .map_or_else(|| requested(&input.cores), |p| p.data.len());
    let mut checks = vec![
        io_uring::check_kernel(facts),
        io_uring::check_io_uring(facts),
        cores_check,
        memory::check_locked_memory(facts, input, executors),
        limits::check_open_files(facts, executors),
    ];
    if let Some(dir) = &input.data_dir {
        checks.push(data_dir::check_data_dir(facts, dir));
    }
    checks.push(tuning::check_udp_buffers(facts, input));
    checks.push(tuning::check_governor(facts, placed.as_ref()));
    checks.push(tuning::check_huge_pages(facts));
    let ok = checks.iter().all(|check| check.status != Status::Fail);
    PreflightReport { ok, checks }
}

fn requested(cores: &CoreRequest) -> usize {
    match cores {
        CoreRequest::Count(count) => *count,
        CoreRequest::List(cpus) => cpus.len(),
    }
}
