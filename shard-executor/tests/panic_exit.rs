//! A panic on a core, in its main task or another, ends the whole process with one report.

use std::process::{Command, Output};

use shard_executor::panic_exit::PANIC_EXIT_CODE;
use shard_executor::rt::{self, spawn_core, CoreSpec};

const CASE: &str = "SHARD_EXECUTOR_PANIC_CASE";

/// Not a test of its own: the body of the child processes, a no-op without the variable.
#[test]
fn child_body() {
    let Ok(case) = std::env::var(CASE) else {
        return;
    };
    shard_executor::install_panic_exit();
    let healthy = spawn_core(CoreSpec::new(0), || async { rt::sleep(LONG).await });
    let failing = spawn_core(CoreSpec::new(1), move || async move {
        match case.as_str() {
            "main" => panic!("broken in main"),
            "task" => {
                rt::spawn_local(async { panic!("broken in a {}", "task") }).detach();
                rt::sleep(LONG).await;
            }
            other => unreachable!("no case {other}"),
        }
    });
    for core in [healthy, failing] {
        core.expect("starts").join().expect("joins");
    }
}

const LONG: std::time::Duration = std::time::Duration::from_secs(30);

fn run(case: &str) -> Output {
    Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "child_body", "--nocapture"])
        .env(CASE, case)
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("child runs")
}

#[test]
fn a_panic_names_core_and_place_and_ends_the_process() {
    for (case, message) in [("main", "broken in main"), ("task", "broken in a task")] {
        let start = std::time::Instant::now();
        let output = run(case);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(PANIC_EXIT_CODE),
            "{case}: {text}"
        );
        assert!(
            text.contains("fatal: panic on core 1 (thread core1-"),
            "{case}: {text}"
        );
        assert!(
            text.contains(message) && text.contains("panic_exit.rs:"),
            "{case}: {text}"
        );
        assert_eq!(text.matches("fatal:").count(), 1, "{case}: {text}");
        assert!(
            start.elapsed() < LONG,
            "{case}: the healthy core must not be waited for"
        );
    }
}
