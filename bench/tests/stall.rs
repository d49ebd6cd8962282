//! A broker that is frozen for a second must show in the latencies of a fixed schedule.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn stat_fields(pid: u32) -> Vec<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    behind_name.split_whitespace().map(str::to_string).collect()
}

/// A process whose parent is `parent` and whose command line has these words.
fn child_of(parent: u32, words: &str) -> Option<u32> {
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if stat_fields(pid).get(1) == Some(&parent.to_string()) && line.contains(words) {
            return Some(pid);
        }
    }
    None
}

fn cpu_ticks(pid: u32) -> u64 {
    let fields = stat_fields(pid);
    let of = |at: usize| fields.get(at).and_then(|f| f.parse::<u64>().ok());
    of(11).unwrap_or(0) + of(12).unwrap_or(0)
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: kill has no memory effects; the pid is that of a live grandchild of this test.
    let sent = unsafe { libc::kill(pid as i32, signal) };
    assert_eq!(sent, 0, "signal {signal} to {pid}");
}

fn start(json: &Path) -> Child {
    let line = "forward --direct --no-probe --rounds 1 --rate 1000 --batch 1 --payload-bytes 100 \
                --warmup 500ms --duration 6s --in-flight 1024 --json";
    Command::new(env!("CARGO_BIN_EXE_felix-bench"))
        .args(line.split_whitespace())
        .arg(json)
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary starts")
}

fn owner_of(parent: u32) -> u32 {
    let give_up = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(pid) = child_of(parent, "broker --node-id node-2") {
            return pid;
        }
        assert!(Instant::now() < give_up, "the owner does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A thousand publishes a second cost CPU at a rate that neither an idle broker nor one that is zeroing
/// its first segments keeps up for a second.
fn wait_for_load(owner: u32) {
    let give_up = Instant::now() + Duration::from_secs(60);
    let (mut last, mut busy) = (cpu_ticks(owner), 0);
    while busy < 3 {
        assert!(Instant::now() < give_up, "the load does not begin");
        std::thread::sleep(Duration::from_millis(500));
        let now = cpu_ticks(owner);
        busy = if now - last >= 4 { busy + 1 } else { 0 };
        last = now;
    }
}

#[test]
fn a_frozen_second_is_not_hidden() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("run.json");
    let mut run = start(&json);
    let owner = owner_of(run.id());
    wait_for_load(owner);
    signal(owner, libc::SIGSTOP);
    std::thread::sleep(Duration::from_secs(1));
    signal(owner, libc::SIGCONT);
    let status = run.wait().unwrap();
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert!(status.success(), "{report:#}");
    let result = &report["result"];
    let us = |name: &str| result["latency_us"][name].as_f64().unwrap();
    // One in six fell due while nobody answered, late by 0 to 1 s.
    assert!(us("p90") > 200_000.0, "{result:#}");
    assert!(us("p99") > 750_000.0, "{result:#}");
    assert!((950_000.0..3_000_000.0).contains(&us("max")), "{result:#}");
    assert!(us("p50") < 200_000.0, "{result:#}");
    assert_eq!(result["offered_per_s"].as_f64(), Some(1000.0));
    assert_eq!(report["verify"]["missing"].as_u64(), Some(0));
}
