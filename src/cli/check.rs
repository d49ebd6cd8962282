//! `check`: can this host run the broker?

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use shard_executor::topology::CoreRequest;

use super::exit::{output_error, CommandError, Exit};
use crate::preflight::{self, PreflightInput};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    # Everything a broker with one core needs\n  \
    felix-uring check\n\n  \
    # As it will be run: four cores, and the disk the logs will be on\n  \
    felix-uring check --cores 4 --data-dir /var/lib/felix\n\n  \
    # Only what is wrong, for a script\n  \
    felix-uring check --json | jq '.checks[] | select(.status != \"ok\")'\n\n\
    A failed check gives exit status 6; `serve` makes the same checks and refuses to start. A\n\
    warning stops nothing.")]
pub struct CheckArgs {
    /// Cores to check for: a number, or a list of cpus such as 0-3,6
    #[arg(long, default_value = "1", value_name = "LIST|N")]
    cores: String,
    /// Submission entries of each ring
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32_768))]
    queue_depth: u32,
    /// Directory the logs will be in
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Looks at the host and prints every check.
pub fn run(args: &CheckArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let cores: CoreRequest = args
        .cores
        .parse()
        .map_err(|error| CommandError::usage(format!("--cores {:?}: {error}", args.cores)))?;
    let input = PreflightInput::new(args.data_dir.clone(), cores, args.queue_depth as usize);
    // `serve` raises them too, so what it could raise by itself is not missing.
    preflight::raise_soft_limits();
    let report = preflight::run(&input);
    let text = if args.json {
        report.to_json() + "\n"
    } else {
        report.to_text()
    };
    write!(out, "{text}").map_err(output_error)?;
    Ok(if report.ok {
        Exit::Done
    } else {
        Exit::HostUnfit
    })
}
