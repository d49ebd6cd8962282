//! Flags that commands have in common, and what is done about them.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::place::WorkDir;
use crate::report::write_json;
use felix_uring::cli::CommandError;

/// Where the data of a run lies and its report goes.
#[derive(Debug, Clone, Default, Args)]
pub struct OutputArgs {
    /// Directory for the brokers' data, on a file system with direct I/O
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Write the report to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl OutputArgs {
    /// A directory for the data of brokers with `cores` cores.
    pub fn work_dir(&self, cores: usize) -> Result<WorkDir, CommandError> {
        WorkDir::for_logs(self.data_dir.as_deref(), cores, 128)
    }

    /// Writes the report if a file was named for it.
    pub fn save(&self, report: &impl Serialize) -> anyhow::Result<()> {
        match &self.json {
            Some(path) => write_json(path, report),
            None => Ok(()),
        }
    }
}

/// What the brokers of a run are told beside.
#[derive(Debug, Clone, Default, Args)]
pub struct ServeArgs {
    /// More flags for every broker started, after "--"
    #[arg(last = true, value_name = "SERVE FLAGS")]
    pub serve_flags: Vec<String>,
}
