//! The command line: definitions and commands. [`run`] is the whole program, so that another
//! binary (the load tool) can be a broker by calling it.
//!
//! Commands print results on standard output and everything else on standard error; each ends
//! with a status of [`Exit`].

mod certs;
mod check;
mod cluster;
mod exit;
mod frame;
mod log;
mod logging;
mod serve;
mod status;
mod token;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use exit::{CommandError, Exit, EXIT_HELP};
pub use logging::{LogArgs, LogFormat};

/// A thread-per-core io_uring broker that speaks Felix's broker-to-broker protocol.
#[derive(Debug, Parser)]
#[command(
    name = "felix-uring",
    version,
    propagate_version = true,
    max_term_width = 100,
    after_help = "Examples:\n  \
        # A cluster on this machine, stopped by Ctrl-C\n  \
        felix-uring cluster up --nodes 3 --dir /tmp/felix\n\n  \
        # One broker\n  \
        felix-uring serve --config /etc/felix/broker.toml\n\n  \
        # Is it taking work?\n  \
        felix-uring status 127.0.0.1:9600",
    after_long_help = EXIT_HELP
)]
pub struct Cli {
    #[command(flatten)]
    log: LogArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run one broker
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(crate::config::ServeArgs),
    /// Run a local cluster
    Cluster(cluster::ClusterArgs),
    /// Make development certificates and a token signing key
    Certs(certs::CertsArgs),
    /// Make a signed token for a client
    Token(token::TokenArgs),
    /// Check whether this host can run a broker
    Check(check::CheckArgs),
    /// Show what running brokers say about themselves
    Status(status::StatusArgs),
    /// Read a data directory without a broker
    Log(log::LogArgs),
    /// Decode or encode protocol frames, one a line
    Frame(frame::FrameArgs),
}

const SERVE_EXAMPLES: &str = "Examples:\n  \
    # From a file, with one setting overridden\n  \
    felix-uring serve --config /etc/felix-uring/broker.toml --cores 4\n\n  \
    # Only judge the configuration, certificates and catalog included\n  \
    felix-uring serve --config /etc/felix-uring/broker.toml --check-config\n\n  \
    # The effective configuration, as a file that can be fed back in\n  \
    felix-uring serve --config /etc/felix-uring/broker.toml --print-config";

/// Runs the program with these arguments, the first being its own name.
pub fn run<I, T>(args: I) -> ExitCode
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are errors to clap, with status 0; a closed pipe is nothing to
            // report about either.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(Exit::Usage.code()));
        }
    };
    match dispatch(&cli) {
        Ok(exit) => exit.into(),
        Err(error) => {
            for line in error.message.lines() {
                eprintln!("felix-uring: {line}");
            }
            error.exit.into()
        }
    }
}

fn dispatch(cli: &Cli) -> Result<Exit, CommandError> {
    cli.log.install()?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let exit = match &cli.command {
        Command::Serve(args) => serve::run(args, &mut out),
        Command::Cluster(args) => cluster::run(args, &mut out),
        Command::Token(args) => token::run(args, &mut out),
        Command::Log(args) => log::run(args, &mut out),
        Command::Frame(args) => frame::run(args, std::io::stdin().lock(), &mut out),
        Command::Check(args) => check::run(args, &mut out),
        Command::Certs(args) => certs::run(args, &mut out),
        Command::Status(args) => status::run(args, &mut out),
    }?;
    out.flush().map_err(exit::output_error)?;
    Ok(exit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Every command that does something, with its path.
    fn leaves(command: &clap::Command, path: &str, out: &mut Vec<(String, clap::Command)>) {
        let mut any = false;
        for sub in command.get_subcommands() {
            any = true;
            leaves(sub, &format!("{path} {}", sub.get_name()), out);
        }
        if !any {
            out.push((path.to_string(), command.clone()));
        }
    }

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples_that_name_it() {
        let mut all = Vec::new();
        leaves(&Cli::command(), "felix-uring", &mut all);
        assert!(all.len() >= 2, "{}", all.len());
        for (path, command) in all {
            let help = command
                .get_after_help()
                .or(command.get_after_long_help())
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(help.contains("Example"), "{path} has no examples");
            assert!(help.contains(&path), "the examples of {path} do not use it");
        }
    }

    #[test]
    fn every_flag_has_help() {
        let mut all = Vec::new();
        leaves(&Cli::command(), "felix-uring", &mut all);
        for (path, command) in all {
            for arg in command.get_arguments() {
                assert!(
                    arg.get_help().is_some(),
                    "{path}: {} has no help",
                    arg.get_id()
                );
            }
        }
    }
}
