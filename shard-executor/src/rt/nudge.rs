//! Ending a sleep that began before the executor had run any task.
//!
//! The fault is the one of [`super::wake_guard`], at the one moment that module cannot cover: a thread
//! that loses its CPU for a time slice before its very first task goes to sleep with nothing to wake it,
//! and no waker exists yet. A signal does: the wait in the kernel ends as interrupted, glommio takes that
//! as an empty wake-up, and looks at its tasks again.
//!
//! Duty: send a signal that does nothing to the threads whose name begins with a core's (glommio adds a
//! number). Other cores may be among them; to a core that runs, the signal costs one interrupted wait.

use std::sync::OnceLock;

/// Ignored unless somebody asks for it, and nobody else here does: it announces urgent TCP data.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Linux keeps so much of a thread's name.
const COMM_BYTES: usize = 15;

extern "C" fn nothing(_: libc::c_int) {}

/// Interrupts whatever the threads whose names begin with `name` wait for in the kernel; how many there were. Threads
/// that do not wait are not disturbed beyond an empty signal handler.
pub(super) fn nudge(name: &str) -> usize {
    if !handler_is_set() {
        return 0;
    }
    let wanted = &name.as_bytes()[..name.len().min(COMM_BYTES)];
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return 0;
    };
    threads
        .flatten()
        .filter(|thread| {
            std::fs::read(thread.path().join("comm")).is_ok_and(|comm| comm.starts_with(wanted))
        })
        .filter_map(|thread| thread.file_name().to_str()?.parse().ok())
        .filter(|thread: &libc::pid_t| interrupt(*thread))
        .count()
}

/// Installs the empty handler once. An ignored signal interrupts nothing, and one with `SA_RESTART`
/// would have the wait begin again. A handler that somebody else installed is left alone.
fn handler_is_set() -> bool {
    static SET: OnceLock<bool> = OnceLock::new();
    *SET.get_or_init(|| {
        // SAFETY: both structures are plain data that outlives the calls, and the handler does nothing,
        // which is allowed in a signal handler.
        unsafe {
            let mut current: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(SIGNAL, std::ptr::null(), &mut current) != 0 {
                return false;
            }
            if current.sa_sigaction != libc::SIG_DFL {
                return false;
            }
            let mut ours: libc::sigaction = std::mem::zeroed();
            ours.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
            libc::sigemptyset(&mut ours.sa_mask);
            libc::sigaction(SIGNAL, &ours, std::ptr::null_mut()) == 0
        }
    })
}

fn interrupt(thread: libc::pid_t) -> bool {
    // SAFETY: a signal to a thread of this process; one that has ended meanwhile gives an error.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn a_wait_in_the_kernel_ends() {
        let (ended, on_end) = channel();
        let name = "nudged-sleeper-of-a-test";
        let sleeper = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                // SAFETY: a poll of no descriptors, for ever.
                let result = unsafe { libc::poll(std::ptr::null_mut(), 0, -1) };
                let error = std::io::Error::last_os_error().raw_os_error();
                ended.send((result, error)).unwrap();
            })
            .unwrap();
        // The first nudges may come before the thread waits.
        let outcome = loop {
            assert!(nudge(name) <= 1);
            if let Ok(outcome) = on_end.recv_timeout(Duration::from_millis(20)) {
                break outcome;
            }
        };
        assert_eq!(outcome, (-1, Some(libc::EINTR)));
        sleeper.join().unwrap();
        assert_eq!(nudge("a name that no thread has"), 0);
    }
}
