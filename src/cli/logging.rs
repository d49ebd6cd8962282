//! Where the program's own messages go: standard error, as text or JSON, filtered.

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

use super::exit::CommandError;

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// Flags every command takes.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// What to log: a level, or levels by module
    #[arg(
        long = "log",
        env = "FELIX_LOG",
        global = true,
        default_value = "info",
        value_name = "FILTER",
        help_heading = "Logging"
    )]
    pub filter: String,
    /// How to write log lines, on standard error
    #[arg(
        long,
        env = "FELIX_LOG_FORMAT",
        global = true,
        value_enum,
        default_value_t = LogFormat::Text,
        value_name = "FORMAT",
        help_heading = "Logging"
    )]
    pub log_format: LogFormat,
}

impl LogArgs {
    /// Installs the subscriber; a second call in one process changes nothing.
    pub fn install(&self) -> Result<(), CommandError> {
        let filter = EnvFilter::builder().parse(&self.filter).map_err(|error| {
            CommandError::usage(format!(
                "--log {:?} is not a filter: {error}; write a level (error, warn, info, debug, trace) or module=level pairs separated by commas",
                self.filter
            ))
        })?;
        let builder = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr);
        // An error only says that a subscriber is installed already, by the program we run in.
        let _ = match self.log_format {
            LogFormat::Text => builder.with_ansi(false).try_init(),
            LogFormat::Json => builder.json().try_init(),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_is_a_usage_error_with_a_remedy() {
        let args = LogArgs {
            filter: "felix_uring=loud".into(),
            log_format: LogFormat::Text,
        };
        let error = args.install().unwrap_err();
        assert_eq!(error.exit, super::super::exit::Exit::Usage);
        assert!(error.message.contains("module=level"), "{error}");
    }
}
