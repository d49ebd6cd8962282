//! Signals: two ask for a stop; those that would end a daemon by default and mean nothing here are set aside.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use libc::{SIGALRM, SIGHUP, SIGUSR1, SIGUSR2};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::serve::{start_error, ServeError};

/// Their default is to end the process, without a stop in order.
const SET_ASIDE: [i32; 4] = [SIGHUP, SIGUSR1, SIGUSR2, SIGALRM];

/// Signals that ask for a stop, counted.
pub(super) struct Signals {
    count: Arc<AtomicUsize>,
}

impl Signals {
    /// To be called before any other thread is started: threads inherit what is set aside.
    pub(super) fn install() -> Result<Self, ServeError> {
        set_aside().map_err(|error| start_error("cannot set signals aside", &error))?;
        let count = Arc::new(AtomicUsize::new(0));
        for signal in [SIGTERM, SIGINT] {
            let counted = Arc::clone(&count);
            // SAFETY: the handler adds to an atomic, which is async-signal-safe.
            let installed = unsafe {
                signal_hook::low_level::register(signal, move || {
                    counted.fetch_add(1, Ordering::Relaxed);
                })
            };
            installed.map_err(|error| start_error("cannot handle stop signals", &error))?;
        }
        Ok(Self { count })
    }

    pub(super) fn received(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Takes what was set aside, and says so where somebody may have meant something by it.
    pub(super) fn discard_set_aside(&self) {
        while let Some(signal) = take_pending() {
            if signal == SIGHUP {
                tracing::info!(
                    "SIGHUP is ignored: the catalog, token keys and certificates are read again by themselves; \
                     for other settings stop the broker with SIGTERM and start it again"
                );
            }
        }
    }
}

fn set_aside_mask() -> libc::sigset_t {
    // SAFETY: all zeros is a valid value of this plain struct; the calls get a pointer to a live one.
    unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut mask);
        for signal in SET_ASIDE {
            libc::sigaddset(&mut mask, signal);
        }
        mask
    }
}

/// Blocked rather than handled: no core is ever interrupted by them.
fn set_aside() -> std::io::Result<()> {
    let mask = set_aside_mask();
    // SAFETY: the mask is live for the call, and the old one is not asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &mask, std::ptr::null_mut()) } {
        0 => Ok(()),
        errno => Err(std::io::Error::from_raw_os_error(errno)),
    }
}

fn take_pending() -> Option<i32> {
    let mask = set_aside_mask();
    let at_once = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: mask and time are live for the call, and details of the signal are not asked for.
    let signal = unsafe { libc::sigtimedwait(&mask, std::ptr::null_mut(), &at_once) };
    (signal > 0).then_some(signal)
}
