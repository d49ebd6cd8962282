//! One child process: started so that it dies with this process, signalled, waited for, and its
//! log read when it dies early.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{channel, Sender};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How often a child is looked at while we wait for it.
const WAIT_STEP: Duration = Duration::from_millis(5);

/// What to start.
#[derive(Debug, Clone, Default)]
pub struct ChildSpec {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub env: Vec<(String, String)>,
    /// Standard output and standard error go here, appended.
    pub log: PathBuf,
}

/// A started child; killed when dropped.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl ChildProcess {
    /// Starts the child in a process group of its own, so that Ctrl-C in a terminal reaches only
    /// its parent, which then stops it in order.
    pub fn start(spec: &ChildSpec) -> std::io::Result<Self> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&spec.log)?;
        let mut command = Command::new(&spec.program);
        command
            .args(&spec.args)
            .envs(spec.env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        // What the caller's own shell says about some other broker is not meant for this one.
        for (name, _) in std::env::vars_os() {
            let ours = name.as_encoded_bytes().starts_with(b"FELIX_");
            let given = spec.env.iter().any(|(k, _)| name == **k);
            if ours && !given && !name.as_encoded_bytes().starts_with(b"FELIX_LOG") {
                command.env_remove(name);
            }
        }
        let parent = std::process::id();
        // SAFETY: the closure runs in the child between fork and exec and only makes two system
        // calls, both async-signal-safe; it allocates nothing.
        unsafe {
            command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                // The parent may have died before the line above took effect.
                if libc::getppid() as u32 != parent {
                    return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
        Ok(Self {
            child: spawn_from_lasting_thread(command)?,
            log: spec.log.clone(),
            ended: None,
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal unless the child is known to have ended.
    pub fn signal(&mut self, signal: i32) -> std::io::Result<()> {
        if self.poll_exit()?.is_some() {
            return Ok(());
        }
        let pid = i32::try_from(self.child.id()).map_err(std::io::Error::other)?;
        // SAFETY: kill has no memory effects; the pid is our unreaped child's, so it cannot have
        // been given to another process.
        match unsafe { libc::kill(pid, signal) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// The exit status if the child has ended.
    pub fn poll_exit(&mut self) -> std::io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    /// Waits until the child ends, `deadline` passes or `hurry` says to wait no longer.
    pub fn wait_until(
        &mut self,
        deadline: Instant,
        hurry: &dyn Fn() -> bool,
    ) -> std::io::Result<Option<ExitStatus>> {
        loop {
            let status = self.poll_exit()?;
            if status.is_some() || Instant::now() >= deadline || hurry() {
                return Ok(status);
            }
            std::thread::sleep(WAIT_STEP);
        }
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) -> std::io::Result<ExitStatus> {
        self.signal(libc::SIGKILL)?;
        let status = match self.ended {
            Some(status) => status,
            None => self.child.wait()?,
        };
        self.ended = Some(status);
        Ok(status)
    }

    /// The last lines of the child's output.
    pub fn log_tail(&self) -> String {
        tail(&self.log, 4 << 10)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if !matches!(self.poll_exit(), Ok(Some(_))) {
            // Nobody is left to tell; the kernel kills it at our end in any case.
            let _ = self.kill();
        }
    }
}

/// `exit status 3` or `signal 9`, for messages.
pub fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown end".to_string(),
    }
}

/// The last `bytes` of a file from the start of a line; empty when it cannot be read.
pub fn tail(path: &Path, bytes: u64) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
        let mut text = Vec::new();
        file.take(bytes).read_to_end(&mut text)?;
        if length > bytes {
            let line_end = text.iter().position(|b| *b == b'\n').map_or(0, |i| i + 1);
            text.drain(..line_end);
        }
        Ok(text)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

type Job = (Command, Sender<std::io::Result<Child>>);

/// Spawns on a thread that lives as long as the process. The death signal of a child is tied to
/// the thread that forked it, and the caller's thread may end long before the cluster does.
fn spawn_from_lasting_thread(command: Command) -> std::io::Result<Child> {
    static SPAWNER: OnceLock<std::sync::Mutex<Sender<Job>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, inbox) = channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in inbox {
                // The caller waits for the answer, so it cannot have gone.
                let _ = answer.send(command.spawn());
            }
        });
        std::sync::Mutex::new(jobs)
    });
    let gone = || std::io::Error::other("the thread that starts processes has ended");
    let (answer, result) = channel();
    spawner
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .send((command, answer))
        .map_err(|_| gone())?;
    result.recv().map_err(|_| gone())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(dir: &Path, script: &str) -> ChildSpec {
        ChildSpec {
            program: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            env: vec![("GREETING".into(), "hello".into())],
            log: dir.join("child.log"),
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn output_and_exit_status_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut child =
            ChildProcess::start(&shell(dir.path(), "echo $GREETING; echo oops >&2; exit 3"))
                .unwrap();
        let status = child.wait_until(soon(), &|| false).unwrap().unwrap();
        assert_eq!(describe_exit(status), "exit status 3");
        assert_eq!(child.log_tail(), "hello\noops\n");
        // Signalling the dead is not an error.
        child.signal(libc::SIGTERM).unwrap();
    }

    #[test]
    fn a_child_outlives_the_thread_that_started_it() {
        let dir = tempfile::tempdir().unwrap();
        let spec = shell(dir.path(), "sleep 0.2; echo alive");
        let mut child = std::thread::spawn(move || ChildProcess::start(&spec).unwrap())
            .join()
            .unwrap();
        let status = child.wait_until(soon(), &|| false).unwrap().unwrap();
        assert_eq!(describe_exit(status), "exit status 0");
        assert_eq!(child.log_tail(), "alive\n");
    }

    #[test]
    fn dropping_kills() {
        let dir = tempfile::tempdir().unwrap();
        let child = ChildProcess::start(&shell(dir.path(), "exec sleep 600")).unwrap();
        let proc_dir = PathBuf::from(format!("/proc/{}", child.pid()));
        assert!(proc_dir.exists());
        drop(child);
        assert!(!proc_dir.exists());
    }

    #[test]
    fn a_deaf_child_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = ChildProcess::start(&shell(
            dir.path(),
            "trap '' TERM; echo up; while :; do sleep 0.1; done",
        ))
        .unwrap();
        let up = soon();
        while child.log_tail().is_empty() && Instant::now() < up {
            std::thread::sleep(WAIT_STEP);
        }
        child.signal(libc::SIGTERM).unwrap();
        let early = child
            .wait_until(Instant::now() + Duration::from_millis(100), &|| false)
            .unwrap();
        assert_eq!(early, None);
        assert_eq!(describe_exit(child.kill().unwrap()), "signal 9");
    }

    #[test]
    fn a_tail_starts_at_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "first line\nsecond\nthird\n").unwrap();
        assert_eq!(tail(&path, 9), "third\n");
        assert_eq!(tail(&path, 1000), "first line\nsecond\nthird\n");
        assert_eq!(tail(&dir.path().join("none"), 10), "");
    }
}
