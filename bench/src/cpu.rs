//! CPU time of threads and processes, and where the processes of a run are placed.

use std::path::Path;

fn usage(who: libc::c_int) -> (f64, f64, u64) {
    // SAFETY: an all-zero `rusage` is a valid value, and the call only writes into it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(who, &mut usage);
        usage
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    let rss = u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024;
    (seconds(usage.ru_utime), seconds(usage.ru_stime), rss)
}

/// CPU seconds the calling thread has used.
pub fn thread_cpu_seconds() -> f64 {
    let (user, system, _) = usage(libc::RUSAGE_THREAD);
    user + system
}

/// What a thread asks of the scheduler when it has to share its CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuShare {
    /// Like everybody else.
    #[default]
    Usual,
    /// Runs only while nothing else wants to: what is measured beside it must not wait for it.
    GivesWay,
    /// Runs in slices so short that it is let in as soon as it wakes: its answers must not wait for a tick of the
    /// scheduler. It gets no more of the CPU than others.
    ComesSoon,
}

impl CpuShare {
    /// Takes effect for the calling thread.
    pub fn apply(self) -> std::io::Result<()> {
        match self {
            Self::Usual => Ok(()),
            Self::GivesWay => give_way(),
            Self::ComesSoon => run_in_short_slices(),
        }
    }
}

/// The shortest slice Linux takes. Kernels before 6.12 take none and ignore it.
const SHORTEST_SLICE_NS: u64 = 100_000;

fn run_in_short_slices() -> std::io::Result<()> {
    // SAFETY: an all-zero `sched_attr` is a valid value.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    attr.size = std::mem::size_of::<libc::sched_attr>() as u32;
    attr.sched_policy = libc::SCHED_OTHER as u32;
    attr.sched_runtime = SHORTEST_SLICE_NS;
    // SAFETY: the call reads as many bytes as the structure says it has; it lives until the call returns.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &attr, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn give_way() -> std::io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads the structure, which lives until it returns.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &param) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// CPU seconds another process has used, by the scheduler's own account; `None` when it has gone.
pub fn process_cpu_seconds_of(pid: u32) -> Option<f64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let ns: u64 = tasks
        .flatten()
        .filter_map(|task| run_time_ns(&task.path().join("schedstat")))
        .sum();
    Some(ns as f64 / 1e9)
}

fn run_time_ns(schedstat: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(schedstat).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Resident bytes of a process; `None` when it has gone.
pub fn resident_bytes_of(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// Where the processes of a run go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuPlan {
    /// By broker, the CPUs of its cores. Broker 0 is the one that forwards.
    pub brokers: Vec<Vec<usize>>,
    /// The load generator's.
    pub client: usize,
    /// How many different CPUs that makes.
    pub distinct: usize,
}

/// Places brokers and the load generator on CPUs, best first. When there are too few, the forwarding
/// broker keeps a CPU of its own and the load generator shares one with an owner: the two lighter ends
/// of the path together cost about what the middle costs.
pub fn plan_cpus(cpus: &[usize], brokers: usize, cores_per_broker: usize) -> CpuPlan {
    let cpus = if cpus.is_empty() { &[0][..] } else { cpus };
    let count = cpus.len();
    let mut next = 0;
    let mut take = || {
        next += 1;
        cpus[(next - 1) % count]
    };
    let owners: Vec<Vec<usize>> = (1..brokers.max(1))
        .map(|_| (0..cores_per_broker).map(|_| take()).collect())
        .collect();
    let needed = brokers * cores_per_broker + 1;
    let (client, first): (usize, Vec<usize>) = if needed <= count {
        (take(), (0..cores_per_broker).map(|_| take()).collect())
    } else {
        // From the far end, so as not to meet the owners as long as possible.
        let first = (0..cores_per_broker)
            .map(|i| cpus[count - 1 - i % count])
            .collect();
        (cpus[0], first)
    };
    let mut all: Vec<Vec<usize>> = vec![first];
    all.extend(owners);
    let mut distinct: Vec<usize> = all.iter().flatten().copied().chain([client]).collect();
    distinct.sort_unstable();
    distinct.dedup();
    CpuPlan {
        brokers: all,
        client,
        distinct: distinct.len(),
    }
}

/// The CPUs this process may use, in the order in which a broker would take them.
pub fn usable_cpus() -> Vec<usize> {
    use shard_executor::topology::{allowed_cpus, place, CoreRequest, Topology};
    let allowed = allowed_cpus().unwrap_or_default();
    let ordered = Topology::read_host().ok().and_then(|topology| {
        place(&CoreRequest::Count(allowed.len()), &topology, &allowed)
            .ok()
            .map(|placement| placement.data)
    });
    ordered.unwrap_or(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_cpus_give_the_forwarder_its_own() {
        let plan = plan_cpus(&[1, 0], 2, 1);
        assert_eq!(plan.brokers, [[0], [1]]);
        assert_eq!((plan.client, plan.distinct), (1, 2));
    }

    #[test]
    fn enough_cpus_are_all_different() {
        let plan = plan_cpus(&[4, 5, 6, 7, 8, 9], 2, 2);
        assert_eq!(plan.distinct, 5);
        assert_eq!(plan_cpus(&[3], 3, 2).distinct, 1);
        assert_eq!(plan_cpus(&[], 1, 1).client, 0);
    }

    #[test]
    fn a_thread_is_scheduled_as_it_asked_for_and_others_are_not() {
        // SAFETY: the call takes no pointers.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        for (share, expected) in [
            (CpuShare::Usual, libc::SCHED_OTHER),
            (CpuShare::GivesWay, libc::SCHED_IDLE),
            (CpuShare::ComesSoon, libc::SCHED_OTHER),
        ] {
            let of_thread = std::thread::spawn(move || share.apply().map(|()| policy()));
            assert_eq!(of_thread.join().unwrap().unwrap(), expected, "{share:?}");
            assert_eq!(policy(), libc::SCHED_OTHER);
        }
    }

    #[test]
    fn cpu_time_grows() {
        let before = thread_cpu_seconds();
        let mut n = 0u64;
        while thread_cpu_seconds() - before < 0.02 {
            n = std::hint::black_box(n + 1);
        }
        let own = process_cpu_seconds_of(std::process::id()).unwrap();
        assert!(own > 0.01, "{own}");
        assert_eq!(process_cpu_seconds_of(u32::MAX), None);
        assert!(resident_bytes_of(std::process::id()).unwrap() > 1 << 20);
        assert_eq!(resident_bytes_of(u32::MAX), None);
    }
}
