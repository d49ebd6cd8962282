//! Why a core did not start, or ended badly.

use std::io;
use std::path::PathBuf;

use glommio::{BuilderErrorKind, GlommioError};

use crate::panic_exit::message;

/// The core did not start. Nothing of it is left running.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings cannot work.
    #[error("core {core}: {cause}")]
    Invalid {
        /// The core.
        core: usize,
        /// What is wrong.
        cause: String,
    },
    /// The limit on lockable memory is below what an executor needs at all.
    #[error(
        "core {core}: the limit on lockable memory (RLIMIT_MEMLOCK) is {current_bytes} bytes and \
         at least {needed_bytes} are needed; raise it with `ulimit -l`, LimitMEMLOCK= in a unit, \
         or --ulimit memlock=-1 for a container"
    )]
    LockedMemory {
        /// The core.
        core: usize,
        /// The present limit.
        current_bytes: u64,
        /// The least that works.
        needed_bytes: u64,
    },
    /// The wanted CPU is not there or not allowed.
    #[error("core {core}: CPU {cpu} does not exist or is not online")]
    NoSuchCpu {
        /// The core.
        core: usize,
        /// The CPU it should run on.
        cpu: usize,
    },
    /// The warm-up file could not be read with direct I/O.
    #[error("core {core}: cannot read {} with direct I/O: {source}", path.display())]
    WarmUp {
        /// The core.
        core: usize,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The thread or its rings could not be made.
    #[error("core {core}: the executor cannot start: {cause}")]
    Executor {
        /// The core.
        core: usize,
        /// What the system or the executor said.
        cause: String,
    },
    /// The executor did not get ready in time.
    #[error("core {core}: the executor was not ready after {seconds} s")]
    TimedOut {
        /// The core.
        core: usize,
        /// How long was waited.
        seconds: u64,
    },
}

/// The core ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// Something on the core panicked (seen only when
    /// [`install_panic_exit`](crate::install_panic_exit) is not in use).
    #[error("core {core} panicked: {message}")]
    Panicked {
        /// The core.
        core: usize,
        /// The panic's text.
        message: String,
    },
    /// The executor failed.
    #[error("core {core}: the executor failed: {cause}")]
    Executor {
        /// The core.
        core: usize,
        /// What it said.
        cause: String,
    },
}

impl StartError {
    pub(super) fn from_glommio(core: usize, error: GlommioError<()>) -> Self {
        match error {
            GlommioError::BuilderError(BuilderErrorKind::NonExistentCpus { cpu }) => {
                Self::NoSuchCpu { core, cpu }
            }
            GlommioError::BuilderError(BuilderErrorKind::ThreadPanic(payload)) => Self::Executor {
                core,
                cause: message(&*payload).to_owned(),
            },
            other => Self::Executor {
                core,
                cause: other.to_string(),
            },
        }
    }
}

impl CoreError {
    pub(super) fn from_glommio(core: usize, error: GlommioError<()>) -> Self {
        match error {
            GlommioError::BuilderError(BuilderErrorKind::ThreadPanic(payload)) => Self::Panicked {
                core,
                message: message(&*payload).to_owned(),
            },
            other => Self::Executor {
                core,
                cause: other.to_string(),
            },
        }
    }
}
