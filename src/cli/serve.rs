//! `felix-uring serve`: run one broker, or only judge or print its configuration.

use std::io::Write;

use crate::config::{self, Config, ServeArgs};
use crate::driver::{self, ServeError};

use super::exit::{output_error, CommandError, Exit};

/// Runs a broker until a signal stops it, unless only a check or a print was asked for.
pub fn run(args: &ServeArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let environment = Config::process_environment();
    if args.print_config {
        let config = Config::resolve(args, &environment).map_err(CommandError::usage)?;
        out.write_all(config.print().as_bytes())
            .map_err(output_error)?;
        return Ok(Exit::Done);
    }
    let now_s = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let loaded = config::load(args, &environment, now_s).map_err(CommandError::usage)?;
    if args.check_config {
        for warning in &loaded.warnings {
            writeln!(out, "warning: {warning}").map_err(output_error)?;
        }
        writeln!(out, "the configuration is good").map_err(output_error)?;
        return Ok(Exit::Done);
    }
    let summary = driver::serve(loaded).map_err(|error| {
        let exit = match &error {
            ServeError::HostUnfit(_) => Exit::HostUnfit,
            ServeError::Damaged(_) => Exit::Damaged,
            ServeError::CatalogTooOld(_) => Exit::Usage,
            ServeError::Start(_) | ServeError::Unfinished(_) => Exit::Failed,
        };
        CommandError::new(exit, error)
    })?;
    tracing::info!(served_s = summary.served_for.as_secs(), "stopped in order");
    Ok(Exit::Done)
}
