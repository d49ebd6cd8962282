//! Real refusals: child processes with lowered limits or a system call filter.

use std::process::Command;

use serde_json::Value;
use shard_executor::memlock::required_bytes;
use shard_executor::rt::{spawn_core, CoreSpec, StartError};
use shard_executor::topology::CoreRequest;

use super::*;

const CASE: &str = "FELIX_PREFLIGHT_TEST_CASE";
const MARK: &str = "preflight-report: ";
const NOBODY: libc::uid_t = 65_534;

/// Not a test of its own: what the child processes run; returns at once without the variable.
#[test]
fn child_body() {
    let Ok(case) = std::env::var(CASE) else {
        return;
    };
    let one_core = PreflightInput::new(None, CoreRequest::Count(1), 128);
    match case.as_str() {
        "small-memlock" => set_memlock(64 << 10),
        "half-memlock" => {
            set_memlock(required_bytes(2, one_core.io_memory_bytes, 128) / 2);
            become_nobody();
        }
        "filter" => refuse_rings(),
        other => panic!("no case {other}"),
    }
    raise_soft_limits();
    let two_cores = PreflightInput {
        cores: CoreRequest::Count(2),
        ..one_core.clone()
    };
    let input = if case == "half-memlock" {
        two_cores
    } else {
        one_core
    };
    println!("\n{MARK}{}", run(&input).to_json());
    if case == "small-memlock" {
        let refused = spawn_core(CoreSpec::new(0), || async {}).err();
        assert!(
            matches!(refused, Some(StartError::LockedMemory { .. })),
            "{refused:?}"
        );
    }
}

fn set_memlock(bytes: u64) {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: bytes,
    };
    // SAFETY: `limit` is live for the call.
    assert_eq!(
        unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) },
        0
    );
}

/// Root is not charged for locked memory; its absence shows what users see.
fn become_nobody() {
    // SAFETY: no memory is passed. Fails for other users, who are nobody enough already.
    unsafe { libc::setuid(NOBODY) };
}

/// What the default profiles of containers do: `io_uring_setup` answers "not permitted".
fn refuse_rings() {
    let instruction = |code: u32, jump_false: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: jump_false,
        k,
    };
    let mut program = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        instruction(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            1,
            libc::SYS_io_uring_setup as u32,
        ),
        instruction(
            libc::BPF_RET,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
        instruction(libc::BPF_RET, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: plain flags; and `filter` with its program is live for the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter),
            0
        );
    }
}

/// Runs a case and returns the named check of its report.
fn check_in_child(case: &str, name: &str) -> Value {
    let test = "preflight::tests_process::child_body";
    let output = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", test, "--nocapture"])
        .env(CASE, case)
        .output()
        .expect("the child runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case}: {text}{errors}");
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(MARK))
        .expect("a report");
    let report: Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(report["ok"], false, "{report}");
    let checks = report["checks"].as_array().expect("checks");
    let failed: Vec<&Value> = checks.iter().filter(|c| c["status"] == "fail").collect();
    assert_eq!(failed.len(), 1, "only the spoilt thing fails: {failed:?}");
    assert_eq!(failed[0]["name"], name);
    failed[0].clone()
}

fn cause(check: &Value) -> &str {
    check["cause"].as_str().expect("text")
}

#[test]
fn a_real_limit_of_64_kib_is_refused_by_check_and_executor() {
    let check = check_in_child("small-memlock", "locked-memory");
    assert_eq!(check["current"], "64 KiB");
    assert!(cause(&check).contains("512 KiB"));
}

#[test]
fn a_real_limit_for_half_the_executors_is_refused() {
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < 2) {
        eprintln!("SKIPPED: needs two CPUs");
        return;
    }
    let check = check_in_child("half-memlock", "locked-memory");
    assert!(cause(&check).contains("enough for 1 of 2"), "{check}");
}

#[test]
fn a_real_filter_is_told_from_the_system_switch() {
    let check = check_in_child("filter", "io_uring");
    assert!(cause(&check).contains("seccomp"), "{check}");
    assert!(
        cause(&check).contains("the system switch is not the reason"),
        "{check}"
    );
    let current = check["current"].as_str().expect("text");
    assert_eq!(current, "io_uring_setup refused: not permitted (EPERM)");
}
