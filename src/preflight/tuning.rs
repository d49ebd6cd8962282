//! Settings that cost throughput or latency when left alone. Warnings only.

use shard_executor::topology::Placement;

use super::facts::HostFacts;
use super::{Check, PreflightInput, Remedy, Status};

pub(super) fn check_udp_buffers(facts: &dyn HostFacts, input: &PreflightInput) -> Check {
    let wanted = input.udp_buffer_bytes;
    let settings = ["net.core.rmem_max", "net.core.wmem_max"];
    let values = settings.map(|name| {
        (
            name,
            facts
                .sysctl(name)
                .and_then(|value| value.trim().parse::<u64>().ok()),
        )
    });
    let show = |(name, value): &(&str, Option<u64>)| match value {
        Some(value) => format!("{name} {value}"),
        None => format!("{name} not visible"),
    };
    let current = values.iter().map(show).collect::<Vec<_>>().join(", ");
    let check = Check::ok("udp-buffers", current, format!("{wanted} bytes each"));
    if values
        .iter()
        .all(|(_, value)| value.is_none_or(|value| value >= wanted))
    {
        return check;
    }
    let sysctls = format!("net.core.rmem_max={wanted} net.core.wmem_max={wanted}");
    check.bad(
        Status::Warn,
        "the kernel caps UDP socket buffers below what is asked for; bursts are dropped and sent \
         again",
        Remedy::new(
            format!("sysctl -w {sysctls} (tuning/felix-uring.sysctl.conf keeps it)"),
            "a unit cannot set it: use /etc/sysctl.d/",
            "set it on the container's host",
        ),
    )
}

pub(super) fn check_governor(facts: &dyn HostFacts, placed: Option<&Placement>) -> Check {
    let needed = "performance";
    let cpus = placed
        .map(|placement| placement.data.as_slice())
        .unwrap_or_default();
    let known: Vec<(usize, String)> = cpus
        .iter()
        .filter_map(|&cpu| facts.governor(cpu).map(|g| (cpu, g)))
        .collect();
    match known.iter().find(|(_, governor)| governor.trim() != needed) {
        None if known.is_empty() => Check::ok("cpu-governor", "not exposed", needed),
        None => Check::ok("cpu-governor", needed, needed),
        Some((cpu, governor)) => {
            let current = format!("{} (CPU {cpu})", governor.trim());
            Check::ok("cpu-governor", current, needed).bad(
                Status::Warn,
                "the frequency follows the load with a delay; wakes and tails get slower",
                Remedy::new(
                    "cpupower frequency-set -g performance, or tuning/tune.sh --apply",
                    "a unit cannot set it",
                    "set it on the container's host",
                ),
            )
        }
    }
}

pub(super) fn check_huge_pages(facts: &dyn HostFacts) -> Check {
    let needed = "madvise or never";
    match facts.huge_pages() {
        None => Check::ok("huge-pages", "not exposed", needed),
        Some(mode) if mode == "always" => Check::ok("huge-pages", mode, needed).bad(
            Status::Warn,
            "the kernel may stop a core to assemble huge pages for memory that gains nothing",
            Remedy::new(
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or tuning/tune.sh \
                 --apply",
                "a unit cannot set it",
                "set it on the container's host",
            ),
        ),
        Some(mode) => Check::ok("huge-pages", mode, needed),
    }
}
