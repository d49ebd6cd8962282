//! What machine a run was measured on.

use std::ffi::CString;
use std::fs::read_to_string;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use super::model::Host;
use crate::cpu::{usable_cpus, CpuPlan};

/// Describes this machine; what cannot be found out stays empty.
pub fn describe_host(data_dir: &Path, plan: &CpuPlan) -> Host {
    let mut placement = plan.brokers.clone();
    placement.push(vec![plan.client]);
    Host {
        name: line("/proc/sys/kernel/hostname"),
        cpu: field("/proc/cpuinfo", "model name"),
        cpus: usable_cpus().len() as u64,
        kernel: line("/proc/sys/kernel/osrelease"),
        memory_bytes: field("/proc/meminfo", "MemTotal")
            .split_whitespace()
            .next()
            .and_then(|kib| kib.parse::<u64>().ok())
            .unwrap_or(0)
            * 1024,
        file_system: file_system(data_dir),
        data_dir: data_dir.display().to_string(),
        commit: commit(),
        started_at: utc_now(),
        placement,
        optimised: !cfg!(debug_assertions),
    }
}

fn line(path: &str) -> String {
    read_to_string(path).unwrap_or_default().trim().to_string()
}

fn field(path: &str, name: &str) -> String {
    let text = read_to_string(path).unwrap_or_default();
    let value = text
        .lines()
        .find(|line| line.starts_with(name))
        .and_then(|line| line.split_once(':'));
    value.map_or_else(String::new, |(_, value)| value.trim().to_string())
}

/// The present moment as `2025-01-31T12:00:00Z`.
pub fn utc_now() -> String {
    let format =
        time::macros::format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");
    time::OffsetDateTime::now_utc()
        .format(format)
        .unwrap_or_default()
}

/// The checked-out commit, with `+` when files were changed; empty outside a checkout.
pub fn commit() -> String {
    let git = |args: &[&str]| -> Option<String> {
        let output = Command::new("git")
            .args(args)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let Some(head) = git(&["rev-parse", "--short=10", "HEAD"]) else {
        return String::new();
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]);
    match changed.is_some_and(|list| !list.is_empty()) {
        true => format!("{head}+"),
        false => head,
    }
}

fn file_system(dir: &Path) -> String {
    let Ok(path) = CString::new(dir.as_os_str().as_bytes()) else {
        return String::new();
    };
    // SAFETY: an all-zero `statfs` is a valid value, the path ends with a zero, and the call only
    // writes into the buffer.
    let found = unsafe {
        let mut found: libc::statfs = std::mem::zeroed();
        (libc::statfs(path.as_ptr(), &mut found) == 0).then_some(found.f_type)
    };
    match found {
        Some(0xEF53) => "ext4".into(),
        Some(0x5846_5342) => "xfs".into(),
        Some(0x9123_683E) => "btrfs".into(),
        Some(0x0102_1994) => "tmpfs".into(),
        Some(0x794C_7630) => "overlay".into(),
        Some(other) => format!("{other:#x}"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_name() {
        let host = describe_host(Path::new("/"), &crate::cpu::plan_cpus(&[0], 1, 1));
        assert!(!host.kernel.is_empty() && !host.cpu.is_empty());
        assert!(host.memory_bytes > 1 << 20);
        assert_eq!(host.started_at.len(), 20);
        assert_eq!(host.placement, [[0], [0]]);
    }
}
