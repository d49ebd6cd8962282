//! The command line as a user meets it: help, usage errors, exit statuses.
#![cfg(feature = "runtime")]

use std::process::{Command, Output};

fn felix(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_felix-uring"))
        .args(args)
        .output()
        .expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn help_is_on_standard_output_with_examples_and_exit_statuses() {
    let out = felix(&["--help"]);
    assert_eq!(out.status.code(), Some(0));
    let help = text(&out.stdout);
    assert!(help.contains("Exit status:"), "{help}");
    assert!(help.contains("6  this host cannot run a broker"), "{help}");
    for command in [
        &["serve"][..],
        &["cluster", "up"],
        &["certs"],
        &["token"],
        &["check"],
        &["status"],
        &["log", "inspect"],
        &["log", "verify"],
        &["log", "dump"],
        &["frame", "decode"],
        &["frame", "encode"],
    ] {
        let mut args = command.to_vec();
        args.push("--help");
        let out = felix(&args);
        assert_eq!(out.status.code(), Some(0), "{args:?}");
        let help = text(&out.stdout);
        assert!(help.contains("Examples:"), "{args:?}: {help}");
    }
}

#[test]
fn a_wrong_command_line_is_status_2_on_standard_error() {
    for args in [
        &["no-such-command"][..],
        &["token"],
        &["token", "--tenant", "t1", "--key-file", "/no/such/file"],
        &[
            "cluster",
            "up",
            "--nodes",
            "1",
            "--replicas",
            "3",
            "--dir",
            "/nonexistent/x",
        ],
        &["status", "not an address"],
        &["--log", "felix=shout", "status", "127.0.0.1:1"],
        &["certs", "--dir", "/nonexistent/x", "--node", "not_dns"],
    ] {
        let out = felix(args);
        assert_eq!(
            out.status.code(),
            Some(2),
            "{args:?}: {}",
            text(&out.stderr)
        );
        assert!(out.stdout.is_empty(), "{args:?}");
        assert!(!out.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn a_broker_that_is_not_there_is_status_3() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    drop(listener);
    let out = felix(&["status", &addr]);
    assert_eq!(out.status.code(), Some(3), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("cannot be reached"));
}

#[test]
fn a_host_that_cannot_run_it_is_status_6() {
    let fine = felix(&["check", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&fine.stdout).unwrap();
    let expected = if report["ok"] == true { 0 } else { 6 };
    assert_eq!(fine.status.code(), Some(expected), "{report}");

    // procfs takes no O_DIRECT files.
    let unfit = felix(&["check", "--data-dir", "/proc/self"]);
    assert_eq!(unfit.status.code(), Some(6), "{}", text(&unfit.stdout));
}
