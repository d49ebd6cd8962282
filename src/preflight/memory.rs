//! Lockable memory: enough for all executors, not just for the first.

use shard_executor::memlock::{required_bytes, EXECUTOR_MINIMUM_BYTES};

use super::facts::{HostFacts, Resource};
use super::{Check, PreflightInput, Remedy, Status};

pub(super) fn check_locked_memory(
    facts: &dyn HostFacts,
    input: &PreflightInput,
    executors: usize,
) -> Check {
    let required = |count| required_bytes(count, input.io_memory_bytes, input.queue_depth);
    let free = facts.may_lock_freely();
    // With CAP_IPC_LOCK nothing is charged, but the executor looks at the limit all the same.
    let needed_bytes = if free {
        EXECUTOR_MINIMUM_BYTES
    } else {
        required(executors)
    };
    let limit = facts.limit(Resource::LockedMemory);
    let needed = if free {
        format!("{} (not charged: CAP_IPC_LOCK)", kib(needed_bytes))
    } else {
        format!(
            "{} for {executors} executors with {} of I/O memory and queue depth {}",
            kib(needed_bytes),
            kib(input.io_memory_bytes as u64),
            input.queue_depth
        )
    };
    let Some(soft_bytes) = limit.soft else {
        return Check::ok("locked-memory", "unlimited", needed);
    };
    let check = Check::ok("locked-memory", kib(soft_bytes), needed);
    if soft_bytes >= needed_bytes {
        return check;
    }
    let cause = if soft_bytes < EXECUTOR_MINIMUM_BYTES {
        format!(
            "the limit on locked memory (RLIMIT_MEMLOCK) is below {}, without which no executor \
             starts, not even for root",
            kib(EXECUTOR_MINIMUM_BYTES)
        )
    } else {
        let fitting = (0..executors)
            .rev()
            .find(|&count| required(count) <= soft_bytes);
        format!(
            "the limit on locked memory (RLIMIT_MEMLOCK) is enough for {} of {executors} \
             executors; it is charged per user, so other processes of the user count too",
            fitting.unwrap_or(0)
        )
    };
    check.bad(Status::Fail, cause, remedy(&needed_bytes.to_string()))
}

/// How to raise the limit to `bytes` (a number, or `unlimited`).
pub(super) fn remedy(bytes: &str) -> Remedy {
    let number: Option<u64> = bytes.parse().ok();
    let shell_kib = number.map_or_else(|| bytes.to_owned(), |n| n.div_ceil(1024).to_string());
    let unit = number.map_or("infinity".to_owned(), |n| n.to_string());
    let docker = number.map_or("-1".to_owned(), |n| n.to_string());
    Remedy::new(
        format!(
            "ulimit -l {shell_kib} (KiB; the hard limit is raised in /etc/security/limits.conf), \
             or fewer --cores or a smaller --queue-depth"
        ),
        format!("LimitMEMLOCK={unit}"),
        format!("--ulimit memlock={docker}:{docker}, or --cap-add IPC_LOCK"),
    )
}

fn kib(bytes: u64) -> String {
    format!("{} KiB", bytes / 1024)
}
