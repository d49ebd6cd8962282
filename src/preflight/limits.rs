//! CPUs and file descriptors.

use shard_executor::topology::{place, Placement};

use super::facts::{HostFacts, Limit, Resource};
use super::{system, Check, PreflightInput, Remedy, Status};

/// Rings, sockets, event descriptors, segments and a margin for one core.
const OPEN_FILES_PER_CORE: u64 = 64;
/// Admin connections, log files, catalog, libraries.
const OPEN_FILES_BASE: u64 = 256;
/// Below this, many shards or admin clients may run into the limit later.
const OPEN_FILES_COMFORTABLE: u64 = 4_096;

pub(super) fn check_cores(
    facts: &dyn HostFacts,
    input: &PreflightInput,
) -> (Check, Option<Placement>) {
    let needed = format!("--cores {}", input.cores);
    let known = facts
        .topology()
        .and_then(|t| facts.allowed_cpus().map(|allowed| (t, allowed)));
    let (topology, allowed) = match known {
        Ok(known) => known,
        Err(error) => {
            let remedy = Remedy::new(
                "mount /sys, or start without pinning by leaving --cores out",
                "do not hide /sys (InaccessiblePaths=)",
                "mount /sys read-only into the container",
            );
            let check = Check::ok("cores", "unknown", needed);
            return (
                check.bad(
                    Status::Fail,
                    format!("the CPUs cannot be read: {error}"),
                    remedy,
                ),
                None,
            );
        }
    };
    let current = format!(
        "{} CPUs online, {} allowed",
        topology.cpus().len(),
        allowed.len()
    );
    let placement = match place(&input.cores, &topology, &allowed) {
        Ok(placement) => placement,
        Err(error) => {
            let remedy = Remedy::new(
                "choose other --cores, or widen the set with taskset",
                "AllowedCPUs= or CPUAffinity=",
                "--cpuset-cpus",
            );
            let check = Check::ok("cores", current, needed);
            return (check.bad(Status::Fail, error.to_string(), remedy), None);
        }
    };
    // The chosen CPUs are what the tuning script wants to know.
    let current = format!(
        "{current}; data cores on CPU {}, control threads on CPU {}",
        list(&placement.data),
        list(&placement.control)
    );
    let check = Check::ok("cores", current, needed);
    if placement.warnings.is_empty() {
        return (check, Some(placement));
    }
    let remedy = Remedy::new(
        "ask for fewer --cores, or list them",
        "AllowedCPUs= with more CPUs",
        "--cpuset-cpus with more CPUs",
    );
    let cause = placement.warnings.join("; ");
    (check.bad(Status::Warn, cause, remedy), Some(placement))
}

fn list(cpus: &[usize]) -> String {
    let text: Vec<String> = cpus.iter().map(ToString::to_string).collect();
    text.join(",")
}

pub(super) fn check_open_files(facts: &dyn HostFacts, executors: usize) -> Check {
    let needed = OPEN_FILES_BASE + OPEN_FILES_PER_CORE * executors as u64;
    let limit = facts.limit(Resource::OpenFiles);
    let Some(soft) = limit.soft else {
        return Check::ok("open-files", "unlimited", needed.to_string());
    };
    let check = Check::ok("open-files", soft.to_string(), needed.to_string());
    if soft < needed {
        return check.bad(
            Status::Fail,
            "the limit on open files (RLIMIT_NOFILE) is too low for this many cores",
            open_files_remedy(OPEN_FILES_COMFORTABLE.max(needed)),
        );
    }
    if soft < OPEN_FILES_COMFORTABLE {
        return check.bad(
            Status::Warn,
            "the limit on open files (RLIMIT_NOFILE) is low; many shards may reach it",
            open_files_remedy(OPEN_FILES_COMFORTABLE),
        );
    }
    check
}

pub(super) fn open_files_remedy(count: u64) -> Remedy {
    Remedy::new(
        format!("ulimit -n {count}"),
        format!("LimitNOFILE={count}"),
        format!("--ulimit nofile={count}:{count}"),
    )
}

/// Raises this process's soft limits on locked memory and open files to the hard ones. Call it
/// before the checks, in `check` as in `serve`, so that both see the same. A limit that cannot be
/// raised stays; the checks then say what that means.
pub fn raise_soft_limits() {
    for resource in [Resource::LockedMemory, Resource::OpenFiles] {
        let Limit { soft, hard } = system::limit(resource);
        if soft != hard {
            system::set_soft_limit(resource, hard);
        }
    }
}
