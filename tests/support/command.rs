//! Single runs of the program, with limits and filters set in the child.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::brokers::BROKER;

/// What a run came to.
#[derive(Debug)]
pub struct Ran {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
}

impl Ran {
    /// The exit status, which must not be a signal.
    pub fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| panic!("ended by a signal: {self:?}"))
    }

    /// Both outputs.
    pub fn text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

/// The program with these arguments, and without any setting of the caller's environment.
pub fn felix<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(BROKER);
    command.args(args).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"FELIX_") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs to the end; a program that has not ended in time is killed and fails the test.
pub fn run(command: &mut Command, limit: Duration) -> Ran {
    let started = Instant::now();
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // Read beside the wait: a full pipe would stop the child.
    let stdout = reader(child.stdout.take());
    let stderr = reader(child.stderr.take());
    let status = wait(&mut child, limit);
    let took = started.elapsed();
    let (stdout, stderr) = (
        stdout.join().expect("a reader"),
        stderr.join().expect("a reader"),
    );
    match status {
        Some(status) => Ran {
            status,
            stdout,
            stderr,
            took,
        },
        None => panic!("still running after {limit:?}:\n{stdout}{stderr}"),
    }
}

fn reader(from: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(mut from) = from {
            // What cannot be read is missed by the assertions on the text.
            let _ = from.read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).into_owned()
    })
}

fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return Some(status);
        }
        if Instant::now() >= deadline {
            child.kill().expect("a child of ours");
            child.wait().expect("a child of ours");
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
