//! Exit statuses: one enum for every command, documented in `--help` and the operations guide.

use std::fmt;
use std::process::ExitCode;

use crate::preflight::EXIT_CODE_HOST_UNFIT;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Done,
    /// It was tried and did not work.
    Failed,
    /// The command line, the environment or a configuration file is wrong.
    Usage,
    /// Nobody answered.
    Unreachable,
    /// Somebody answered no: credentials or permissions.
    Refused,
    /// Data on disk, or a frame given to us, is not what was written.
    Damaged,
    /// This host lacks something a broker needs; see `check`.
    HostUnfit,
}

/// What the statuses mean, for `--help`.
pub const EXIT_HELP: &str = "Exit status:\n  \
    0  done\n  \
    1  failed: it was tried and did not work\n  \
    2  usage or configuration: nothing was started\n  \
    3  unreachable: nobody answered\n  \
    4  refused: credentials or permissions\n  \
    5  damaged data\n  \
    6  this host cannot run a broker (see `check`)";

impl Exit {
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Unreachable => 3,
            Self::Refused => 4,
            Self::Damaged => 5,
            Self::HostUnfit => EXIT_CODE_HOST_UNFIT,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

/// A command that did not end well: its status and the one message for standard error.
#[derive(Debug)]
pub struct CommandError {
    pub exit: Exit,
    pub message: String,
}

impl CommandError {
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Self {
            exit,
            message: message.to_string(),
        }
    }

    pub fn failed(message: impl fmt::Display) -> Self {
        Self::new(Exit::Failed, message)
    }

    pub fn usage(message: impl fmt::Display) -> Self {
        Self::new(Exit::Usage, message)
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Standard output that is gone (a closed pipe) ends a command quietly, as it does for `cat`.
pub fn output_error(error: std::io::Error) -> CommandError {
    match error.kind() {
        std::io::ErrorKind::BrokenPipe => CommandError::new(Exit::Done, ""),
        _ => CommandError::failed(format!("standard output: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lists_every_status() {
        for exit in [
            Exit::Done,
            Exit::Failed,
            Exit::Usage,
            Exit::Unreachable,
            Exit::Refused,
            Exit::Damaged,
            Exit::HostUnfit,
        ] {
            assert!(
                EXIT_HELP.contains(&format!("  {}  ", exit.code())),
                "{exit:?}"
            );
        }
    }
}
