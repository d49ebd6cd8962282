//! `cluster up` and the launcher with real brokers.
#![cfg(feature = "runtime")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use felix_uring::cluster::{BrokerProgram, Cluster, ClusterSpec, NodeExit};
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_felix-uring");

/// Where O_DIRECT works: the system's temporary directory may be in memory.
fn disk_dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A running `cluster up`; killed when a test fails.
struct Up {
    child: Child,
    report: Value,
}

impl Up {
    fn start(dir: &Path, nodes: &str) -> Self {
        let mut child = Command::new(BINARY)
            .args(["cluster", "up", "--json", "--nodes", nodes, "--dir"])
            .arg(dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let report = serde_json::from_str(&line).unwrap_or(Value::Null);
        let mut up = Self { child, report };
        if up.report.is_null() {
            panic!("no report: {line:?} {}", up.finish().1);
        }
        up
    }

    fn broker_pids(&self) -> Vec<u32> {
        let nodes = self.report["nodes"].as_array().unwrap();
        nodes
            .iter()
            .map(|n| u32::try_from(n["pid"].as_u64().unwrap()).unwrap())
            .collect()
    }

    fn signal(&self, signal: i32) {
        send(self.child.id(), signal);
    }

    /// Waits for the end; gives exit status and standard error.
    fn finish(&mut self) -> (Option<i32>, String) {
        let mut stderr = String::new();
        if let Some(mut pipe) = self.child.stderr.take() {
            pipe.read_to_string(&mut stderr).unwrap();
        }
        (self.child.wait().unwrap().code(), stderr)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send(pid: u32, signal: i32) {
    // SAFETY: kill has no memory effects; the pid is a process this test started.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

fn is_running(pid: u32) -> bool {
    // A zombie has ended; whoever inherited it just has not asked yet.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .trim_start()
            .starts_with('Z')
    })
}

fn until_gone(pids: &[u32]) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while pids.iter().any(|pid| is_running(*pid)) {
        assert!(Instant::now() < deadline, "brokers still run: {pids:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn up_reports_ready_brokers_and_stops_in_order() {
    let dir = disk_dir();
    let mut up = Up::start(dir.path(), "2");
    for key in [
        "dir",
        "ca",
        "token",
        "tenant",
        "namespace",
        "stream",
        "cache",
        "signing_key",
    ] {
        assert!(up.report[key].is_string(), "{key}");
    }
    assert_eq!(up.report["nodes"].as_array().unwrap().len(), 2);
    let pids = up.broker_pids();
    for node in up.report["nodes"].as_array().unwrap() {
        let admin = node["admin"].as_str().unwrap();
        let out = Command::new(BINARY)
            .args(["status", admin, "--json"])
            .output()
            .unwrap();
        let status: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(status["state"], "ready");
        assert_eq!(status["node_id"], node["node_id"]);
        assert_eq!(status["pid"], node["pid"]);
        assert_eq!(status["cores"][0]["phase"], "serving");
    }
    up.signal(libc::SIGTERM);
    let (code, stderr) = up.finish();
    assert_eq!(code, Some(0), "{stderr}");
    until_gone(&pids);
}

#[test]
fn brokers_die_with_a_killed_parent() {
    let dir = disk_dir();
    let mut up = Up::start(dir.path(), "2");
    let pids = up.broker_pids();
    assert!(pids.iter().all(|pid| is_running(*pid)));
    up.signal(libc::SIGKILL);
    up.finish();
    until_gone(&pids);
}

#[test]
fn a_broker_that_dies_ends_up_with_status_1_and_its_name() {
    let dir = disk_dir();
    let mut up = Up::start(dir.path(), "2");
    let pids = up.broker_pids();
    send(pids[1], libc::SIGKILL);
    let (code, stderr) = up.finish();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("node-2 ended with signal 9"), "{stderr}");
    until_gone(&pids);
}

#[test]
fn nodes_are_killed_frozen_and_restarted_one_by_one() {
    let dir = disk_dir();
    let spec = ClusterSpec::new(dir.path(), 2, BrokerProgram::serve_of(BINARY));
    let mut cluster = Cluster::start(&spec).unwrap();
    let first_pid = cluster.node(0).pid().unwrap();
    assert!(cluster
        .node(1)
        .metrics()
        .unwrap()
        .contains("\nfelix_ready 1\n"));

    cluster.node_mut(0).kill().unwrap();
    assert_eq!(cluster.node(0).pid(), None);
    cluster.node(0).status().unwrap_err();
    cluster.node_mut(0).restart().unwrap();
    assert_ne!(cluster.node(0).pid().unwrap(), first_pid);

    cluster.node_mut(1).sigstop().unwrap();
    cluster.node_mut(1).sigcont().unwrap();
    cluster.node_mut(1).wait_ready().unwrap();

    cluster.node_mut(1).restart().unwrap();
    // Stopped while frozen: it is woken to stop in order.
    cluster.node_mut(1).sigstop().unwrap();
    let exits = cluster.stop().unwrap();
    assert!(exits.iter().all(NodeExit::is_clean), "{exits:?}");
}

#[test]
fn a_wrong_flag_for_the_broker_is_shown_with_its_words() {
    let dir = disk_dir();
    let out = Command::new(BINARY)
        .args(["cluster", "up", "--json", "--dir"])
        .arg(dir.path())
        .args(["--", "--queue-depth", "7"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("node-1 ended with exit status 2"),
        "{stderr}"
    );
    assert!(stderr.contains("queue-depth"), "{stderr}");
    assert!(out.stdout.is_empty());
}
