//! The command line.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use felix_uring::cli::{CommandError, Exit, EXIT_HELP};

use crate::append::{run_append, AppendArgs};
use crate::cache::{run_cache, CacheArgs};
use crate::compare::{run_compare, CompareArgs};
use crate::forward::{run_beside, run_forward, BesideArgs, ForwardArgs};
use crate::idle::{run_idle, IdleArgs};
use crate::limits::{run_limits, LimitsArgs};
use crate::lose::{run_lose, LoseArgs};
use crate::plot::{run_plot, PlotArgs};
use crate::relay::{run_ingress, run_owner, Facing, IngressArgs, OwnerArgs};
use crate::replicate::{run_replicate, ReplicateArgs};
use crate::subscribe::{run_fanout, run_subscribe, SubscribeArgs};
use crate::transport::{run_quic, run_server, QuicArgs, ServerArgs};

/// Load tool of felix-uring: publishes, measures, and checks every record it was told is written.
///
/// Without a command it runs `forward`.
#[derive(Debug, Parser)]
#[command(
    name = "felix-bench",
    version,
    propagate_version = true,
    max_term_width = 100,
    after_help = "Examples:\n  \
        # The main job: two brokers, forwarded publishes, verified, beside the relay probe\n  \
        felix-bench\n\n  \
        # A smaller one\n  \
        felix-bench forward --duration 3s --rounds 1 --no-probe\n\n  \
        # What did a change do?\n  \
        felix-bench compare before.json after.json",
    after_long_help = EXIT_HELP
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Publish to brokers, check every record, report
    Forward(Box<ForwardArgs>),
    /// Small forwarded publishes beside large ones on the same link
    Beside(BesideArgs),
    /// Kill the owner under load: how long until its waiters are answered
    Lose(LoseArgs),
    /// Let a follower fall behind, and measure how it catches up
    Replicate(ReplicateArgs),
    /// Leave replicated shards alone, and measure what they cost
    Idle(IdleArgs),
    /// Ask a cache, check every answer, report
    Cache(Box<CacheArgs>),
    /// One publisher, many subscribers, every delivery checked
    Subscribe(Box<SubscribeArgs>),
    /// Storage alone, beside raw durable writes
    Append(AppendArgs),
    /// Transport alone: our QUIC driver beside tokio and quinn
    Quic(QuicArgs),
    /// What the disk and the CPUs allow
    Limits(LimitsArgs),
    /// Two reports, field by field
    Compare(CompareArgs),
    /// Draw a report as SVG
    Plot(PlotArgs),
    #[command(hide = true)]
    RelayOwner(OwnerArgs),
    #[command(hide = true)]
    RelayIngress(IngressArgs),
    #[command(hide = true)]
    FanoutProbe(Facing),
    #[command(hide = true)]
    QuicServer(ServerArgs),
}

/// The commands by their names on the command line.
const NAMES: &[&str] = &[
    "forward",
    "beside",
    "lose",
    "replicate",
    "idle",
    "cache",
    "subscribe",
    "append",
    "quic",
    "limits",
    "compare",
    "plot",
    "relay-owner",
    "relay-ingress",
    "fanout-probe",
    "quic-server",
    "help",
];

/// Runs the program with these arguments, the first being its own name.
pub fn run(args: Vec<OsString>) -> ExitCode {
    // A broker of a cluster of our own is this very program.
    if args.get(1).is_some_and(|arg| arg == "broker") {
        let serve = ["felix-uring", "serve"].map(OsString::from);
        return felix_uring::cli::run(serve.into_iter().chain(args.into_iter().skip(2)));
    }
    let cli = match Cli::try_parse_from(with_default(args)) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are errors to clap, with status 0; a closed pipe is nothing to report.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(Exit::Usage.code()));
        }
    };
    // Not locked: a command may print from threads of its own.
    let mut out = std::io::stdout();
    let ended = dispatch(&cli.command, &mut out).and_then(|exit| {
        out.flush().map_err(CommandError::failed)?;
        Ok(exit)
    });
    match ended {
        Ok(exit) => exit.into(),
        Err(error) => {
            for line in error.message.lines() {
                eprintln!("felix-bench: {line}");
            }
            error.exit.into()
        }
    }
}

/// Puts `forward` in front of flags that name no command.
fn with_default(mut args: Vec<OsString>) -> Vec<OsString> {
    let first = args.get(1).and_then(|arg| arg.to_str()).unwrap_or_default();
    let is_general = ["-h", "--help", "-V", "--version"].contains(&first);
    if !NAMES.contains(&first) && !is_general && (first.is_empty() || first.starts_with('-')) {
        let at = args.len().min(1);
        args.insert(at, "forward".into());
    }
    args
}

fn dispatch(command: &Command, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let failed = |error: anyhow::Error| CommandError::failed(format!("{error:#}"));
    match command {
        Command::Forward(args) => run_forward(args, out),
        Command::Beside(args) => run_beside(args, out),
        Command::Lose(args) => run_lose(args, out),
        Command::Replicate(args) => run_replicate(args, out),
        Command::Idle(args) => run_idle(args, out),
        Command::Cache(args) => run_cache(args, out),
        Command::Subscribe(args) => run_subscribe(args, out),
        Command::Append(args) => run_append(args, out).map(|()| Exit::Done),
        Command::Quic(args) => run_quic(args, out).map(|()| Exit::Done).map_err(failed),
        Command::Limits(args) => run_limits(args, out).map(|()| Exit::Done),
        Command::Compare(args) => run_compare(args, out).map(|()| Exit::Done),
        Command::Plot(args) => run_plot(args, out).map(|()| Exit::Done),
        Command::RelayOwner(args) => run_owner(args.clone()).map(|()| Exit::Done).map_err(failed),
        Command::RelayIngress(args) => run_ingress(args.clone())
            .map(|()| Exit::Done)
            .map_err(failed),
        Command::FanoutProbe(args) => run_fanout(args.clone())
            .map(|()| Exit::Done)
            .map_err(failed),
        Command::QuicServer(args) => run_server(args.clone())
            .map(|()| Exit::Done)
            .map_err(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        let args = line.split_whitespace().map(OsString::from).collect();
        Cli::try_parse_from(with_default(args))
    }

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
        for sub in Cli::command().get_subcommands() {
            assert!(NAMES.contains(&sub.get_name()), "{}", sub.get_name());
        }
    }

    #[test]
    fn every_shown_command_has_examples_and_every_flag_help() {
        for sub in Cli::command()
            .get_subcommands()
            .filter(|s| !s.is_hide_set())
        {
            let help = sub
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(
                help.contains("Examples:"),
                "{} has no examples",
                sub.get_name()
            );
            for arg in sub.get_arguments() {
                assert!(
                    arg.get_help().is_some(),
                    "{}: {}",
                    sub.get_name(),
                    arg.get_id()
                );
            }
        }
    }

    #[test]
    fn forward_is_the_default() {
        for line in [
            "felix-bench",
            "felix-bench --duration 3s",
            "felix-bench forward --duration 3s",
        ] {
            assert!(
                matches!(parse(line).unwrap().command, Command::Forward(_)),
                "{line}"
            );
        }
        assert!(matches!(
            parse("felix-bench quic").unwrap().command,
            Command::Quic(_)
        ));
        assert!(parse("felix-bench nonsense").is_err());
        assert_eq!(parse("felix-bench --help").unwrap_err().exit_code(), 0);
    }

    #[test]
    fn contradictions_are_refused() {
        for line in [
            "felix-bench --payload-bytes 10",
            "felix-bench --brokers 1",
            "felix-bench --batch 65536 --payload-bytes 1K",
            "felix-bench --in-flight 1 --streams 2",
            "felix-bench --addr 127.0.0.1:1 --ca x --token y --verify log",
            "felix-bench --replicas 3",
        ] {
            let Command::Forward(args) = parse(line).unwrap().command else {
                panic!("{line}");
            };
            assert_eq!(args.check().unwrap_err().exit, Exit::Usage, "{line}");
        }
        assert!(
            parse("felix-bench --addr 127.0.0.1:1").is_err(),
            "needs --ca and --token"
        );
    }
}
