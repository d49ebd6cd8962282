//! `log inspect`, `log verify` and `log dump`: a data directory read without a broker.
//!
//! Read-only, also beside a running broker; memory is bounded by the number of logs, not by
//! their size. Uses the broker's own decoders.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::json;
use storage_uring::datadir::{Layout, Meta};
use storage_uring::offline::{GroupView, OfflineLog, Reader, SegmentView};
use storage_uring::recovery::{CoreVerdict, SettleStep};
use storage_uring::{ReadError, RecoveryProgress, RecoveryReport, StorageError};

use super::exit::{output_error, CommandError, Exit};
use crate::wire::internal::hex::to_hex;

/// Payload bytes read at once.
const BATCH_BYTES: usize = 256 << 10;
const MAX_THREADS: usize = 16;
/// How often a long run says on standard error how far it is.
const PROGRESS_PERIOD: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub struct LogArgs {
    #[command(subcommand)]
    command: LogCommand,
}

#[derive(Debug, Subcommand)]
enum LogCommand {
    /// List logs and segment files, or every commit group
    #[command(after_help = "Examples:\n  \
        # Which logs are there, and how far do they go?\n  \
        felix-uring log inspect /var/lib/felix-uring\n\n  \
        # Every group on disk, largest first\n  \
        felix-uring log inspect /var/lib/felix-uring --groups --json | jq -s 'map(select(.type==\"group\")) | sort_by(-.total_len)'")]
    Inspect(InspectArgs),
    /// Read every record and check it
    #[command(after_help = "Examples:\n  \
        # Is the copy good?\n  \
        felix-uring log verify /backup/felix-uring && echo good\n\n\
        Exit status 5 when anything is damaged. A torn end after a power cut is not damage: it was\n\
        never acknowledged.")]
    Verify(DirArgs),
    /// Print records
    #[command(after_help = "Examples:\n  \
        # The newest record of a stream's shard 0\n  \
        felix-uring log dump /var/lib/felix-uring --only stream/t1/default/events/0 --payload text | tail -1\n\n  \
        # A thousand records from an offset, for a script\n  \
        felix-uring log dump /var/lib/felix-uring --only stream/t1/default/events/0 --from 5000 --limit 1000 --json")]
    Dump(DumpArgs),
}

#[derive(Debug, Args)]
struct DirArgs {
    /// Data directory of a broker
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct InspectArgs {
    #[command(flatten)]
    dir: DirArgs,
    /// Every commit group as well
    #[arg(long)]
    groups: bool,
}

#[derive(Debug, Args)]
struct DumpArgs {
    #[command(flatten)]
    dir: DirArgs,
    /// Only this log, as `inspect` names it; may be repeated
    #[arg(long = "only", value_name = "LOG")]
    logs: Vec<String>,
    /// First offset
    #[arg(long, default_value_t = 0, value_name = "OFFSET")]
    from: u64,
    /// Most records of each log
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// How to print payloads
    #[arg(long, value_enum, default_value_t = PayloadForm::Hex)]
    payload: PayloadForm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PayloadForm {
    /// Hexadecimal digits
    Hex,
    /// UTF-8, what is not replaced
    Text,
    /// Only the length
    None,
}

/// Runs one of the three.
pub fn run(args: &LogArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    match &args.command {
        LogCommand::Inspect(args) => inspect(args, out),
        LogCommand::Verify(args) => verify(args, out),
        LogCommand::Dump(args) => dump(args, out),
    }
}

fn open(dir: &Path) -> Result<Reader, CommandError> {
    if !dir.is_dir() {
        return Err(CommandError::usage(format!(
            "{} is not a directory",
            dir.display()
        )));
    }
    if Meta::read(&Layout::new(dir))
        .map_err(storage_error)?
        .is_none()
    {
        return Err(CommandError::usage(format!(
            "{} holds no data of a broker; name the directory given to `serve --data-dir`",
            dir.display()
        )));
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let progress = RecoveryProgress::default();
    let (ended_tx, ended) = mpsc::channel::<()>();
    let opened = std::thread::scope(|scope| {
        let shown = &progress;
        scope.spawn(move || {
            // Ends when the other end is dropped below.
            while ended.recv_timeout(PROGRESS_PERIOD) == Err(mpsc::RecvTimeoutError::Timeout) {
                tracing::info!("scanned {}", shown.view());
            }
        });
        let opened = Reader::open_with(dir, threads.min(MAX_THREADS), &progress);
        drop(ended_tx);
        opened
    });
    opened.map_err(storage_error)
}

fn storage_error(error: StorageError) -> CommandError {
    let exit = match &error {
        StorageError::MetaDamaged { .. }
        | StorageError::MetaMissing { .. }
        | StorageError::CoreMissing { .. }
        | StorageError::SequencesUsedUp { .. } => Exit::Damaged,
        StorageError::Config(_) => Exit::Usage,
        StorageError::Locked { .. }
        | StorageError::UnknownVersion { .. }
        | StorageError::NotAFile { .. }
        | StorageError::Io { .. }
        | StorageError::Ring(_)
        | StorageError::Failed(_)
        | StorageError::SegmentThread(_) => Exit::Failed,
    };
    CommandError::new(exit, error)
}

fn read_error(log: &str, error: &ReadError) -> CommandError {
    let exit = match error {
        ReadError::Damaged { .. } | ReadError::LogDamaged => Exit::Damaged,
        ReadError::Trimmed { .. } | ReadError::Io(_) | ReadError::Overloaded => Exit::Failed,
    };
    CommandError::new(exit, format!("{log}: {error}"))
}

fn title(log: &OfflineLog) -> String {
    match &log.name {
        Some(name) => name.to_string(),
        None => format!("{:016x}", log.id),
    }
}

/// One typed object on a line of its own.
fn json_line(out: &mut dyn Write, kind: &str, value: &impl Serialize) -> Result<(), CommandError> {
    let mut line = json!({ "type": kind });
    let fields = serde_json::to_value(value).map_err(CommandError::failed)?;
    if let (Some(line), serde_json::Value::Object(fields)) = (line.as_object_mut(), fields) {
        line.extend(fields);
    }
    writeln!(out, "{line}").map_err(output_error)
}

fn inspect(args: &InspectArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let reader = open(&args.dir.dir)?;
    // A place may be damaged of which no log needs anything.
    let mut damaged = !reader.report().damages.is_empty();
    for log in reader.logs() {
        damaged |= log.damage.is_some();
        let name = title(&log);
        if args.dir.json {
            let value = json!({
                "log": name, "base": log.base, "tail": log.tail, "generation": log.generation,
                "accepted": log.accepted, "history": log.history, "damage": log.damage,
            });
            json_line(out, "log", &value)?;
        } else {
            let damage = log
                .damage
                .map(|d| format!("  DAMAGED, a start refuses it: {d}"));
            writeln!(
                out,
                "{name}  offsets {}..{}  generation {}  accepted {}{}",
                log.base,
                log.tail,
                log.generation,
                log.accepted,
                damage.unwrap_or_default()
            )
            .map_err(output_error)?;
            for entry in &log.history {
                writeln!(
                    out,
                    "  generation {} from offset {}  leader {}",
                    entry.generation, entry.start, entry.leader
                )
                .map_err(output_error)?;
            }
        }
    }
    print_start(reader.report(), args.dir.json, out)?;
    // The reader calls two closures; what they could not write is kept in one place.
    let sink = std::cell::RefCell::new((out, Ok(())));
    let print = |segment: &SegmentView, group: Option<&GroupView>| {
        let (out, result) = &mut *sink.borrow_mut();
        if result.is_ok() {
            *result = print_part(*out, args.dir.json, segment, group);
        }
    };
    reader
        .inspect(
            |segment| print(segment, None),
            |segment, group| {
                if args.groups {
                    print(segment, Some(group));
                }
            },
        )
        .map_err(storage_error)?;
    sink.into_inner().1?;
    Ok(if damaged { Exit::Damaged } else { Exit::Done })
}

/// What a start would make of the directory as it is now.
fn print_start(
    report: &RecoveryReport,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    for core in &report.cores {
        let cuts: Vec<_> = report.cuts.iter().filter(|c| c.core == core.core).collect();
        let damages: Vec<_> = report
            .damages
            .iter()
            .filter(|d| d.core == core.core)
            .collect();
        if json {
            let mut value = serde_json::to_value(core).map_err(CommandError::failed)?;
            value["cuts"] = json!(cuts);
            value["damages"] = json!(damages);
            json_line(out, "start", &value)?;
            continue;
        }
        writeln!(out, "{}", start_line(core)).map_err(output_error)?;
        for cut in cuts {
            writeln!(
                out,
                "  cut {} bytes at {} of segment {}: {} ({})",
                cut.dropped_bytes,
                cut.position,
                cut.segment,
                cut.reason,
                cut.logs.join(", ")
            )
            .map_err(output_error)?;
        }
        for damage in damages {
            let (file, at) = (damage.file.display(), damage.position);
            writeln!(out, "  DAMAGE at {at} of {file}: {}", damage.reason).map_err(output_error)?;
        }
        for step in &core.steps {
            writeln!(out, "  {}", step_line(*step)).map_err(output_error)?;
        }
    }
    Ok(())
}

fn start_line(core: &CoreVerdict) -> String {
    let stop = if core.orderly_stop {
        "the last stop was orderly"
    } else {
        "no orderly stop"
    };
    format!(
        "a start of core log {} goes on with group {} behind segment {} at {}; {stop}{}",
        core.core,
        core.next_group,
        core.end_segment,
        core.end_position,
        if core.steps.is_empty() {
            "; it changes no file"
        } else {
            ""
        }
    )
}

fn step_line(step: SettleStep) -> String {
    match step {
        SettleStep::SetAside { segment } => {
            format!("set segment {segment} aside: it is not of this directory")
        }
        SettleStep::Remove { segment } => {
            format!("remove segment {segment}: it is no part of the log")
        }
        SettleStep::Shorten { segment, bytes } => {
            format!("shorten segment {segment} to {bytes} bytes")
        }
        SettleStep::SyncDirectory => "sync the directory".to_owned(),
    }
}

fn print_part(
    out: &mut dyn Write,
    json: bool,
    segment: &SegmentView,
    group: Option<&GroupView>,
) -> Result<(), CommandError> {
    match (json, group) {
        (true, None) => json_line(out, "segment", segment),
        (true, Some(group)) => {
            let mut value = serde_json::to_value(group).map_err(CommandError::failed)?;
            value["core"] = json!(segment.core);
            value["segment"] = json!(segment.segment);
            json_line(out, "group", &value)
        }
        (false, None) => writeln!(
            out,
            "core {} segment {}  {} bytes  {}{}  {}",
            segment.core,
            segment.segment,
            segment.file_bytes,
            segment
                .boot_epoch
                .map_or("no readable header".into(), |e| format!("start {e}")),
            segment
                .rewritten_groups
                .map_or_else(String::new, |(first, last)| {
                    format!("  rewritten, was groups {first} to {last}")
                }),
            segment.file.display()
        )
        .map_err(output_error),
        (false, Some(group)) => writeln!(
            out,
            "  group {} at {}  {} of {} bytes  {} records of {} logs{}{}",
            group.group,
            group.position,
            group.used_len,
            group.total_len,
            group.records,
            group.extents,
            if group.closing { "  closing mark" } else { "" },
            if group.body_matches {
                ""
            } else {
                "  BODY DOES NOT MATCH"
            },
        )
        .map_err(output_error),
    }
}

fn verify(args: &DirArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let mut reader = open(&args.dir)?;
    let recovery = reader.report().clone();
    let mut say_at = Instant::now() + PROGRESS_PERIOD;
    let report = reader.verify_with(|so_far| {
        if Instant::now() >= say_at {
            say_at = Instant::now() + PROGRESS_PERIOD;
            let (read, all) = (so_far.records, recovery.counts.records);
            tracing::info!(
                "verified {read} records of at most {all}, in {} logs",
                so_far.logs
            );
        }
    });
    let clean = report.is_clean() && recovery.damages.is_empty();
    if args.json {
        let value = json!({ "clean": clean, "verify": report, "recovery": recovery });
        writeln!(out, "{value}").map_err(output_error)?;
    } else {
        for (log, damage) in &report.damaged {
            writeln!(out, "DAMAGED {log}: {damage}").map_err(output_error)?;
        }
        for log in &report.given_back {
            writeln!(
                out,
                "given back by the running broker while it was read: {log}"
            )
            .map_err(output_error)?;
        }
        for stray in &recovery.strays {
            writeln!(out, "not of this directory: {stray}").map_err(output_error)?;
        }
        writeln!(
            out,
            "{} logs, {} records, {} payload bytes: {}; {} torn ends, {} places with damage",
            report.logs,
            report.records,
            report.payload_bytes,
            if clean { "good" } else { "DAMAGED" },
            recovery.cuts.len(),
            recovery.damages.len(),
        )
        .map_err(output_error)?;
    }
    Ok(if clean { Exit::Done } else { Exit::Damaged })
}

fn dump(args: &DumpArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let mut reader = open(&args.dir.dir)?;
    let all = reader.logs();
    let unknown: Vec<&String> = args
        .logs
        .iter()
        .filter(|wanted| !all.iter().any(|log| title(log) == **wanted))
        .collect();
    if let Some(name) = unknown.first() {
        return Err(CommandError::usage(format!(
            "there is no log {name:?}; `felix-uring log inspect {}` lists them",
            args.dir.dir.display()
        )));
    }
    let mut first_error = None;
    for log in all {
        let name = title(&log);
        if !args.logs.is_empty() && !args.logs.contains(&name) {
            continue;
        }
        // The other logs may still be whole.
        match dump_log(args, &mut reader, &log, &name, out) {
            Ok(()) => {}
            Err(error) if error.exit == Exit::Damaged => {
                first_error.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    first_error.map_or(Ok(Exit::Done), Err)
}

fn dump_log(
    args: &DumpArgs,
    reader: &mut Reader,
    log: &OfflineLog,
    name: &str,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let mut next = args.from.max(log.base);
    let mut left = args.limit.unwrap_or(u64::MAX);
    while left > 0 {
        let batch = reader
            .read(log.id, next, BATCH_BYTES)
            .map_err(|error| read_error(name, &error))?;
        if batch.records.is_empty() {
            return Ok(());
        }
        for (offset, payload) in (batch.first_offset..).zip(&batch.records) {
            if left == 0 {
                return Ok(());
            }
            left -= 1;
            print_record(args, name, offset, payload, out).map_err(output_error)?;
        }
        next = batch.next_offset;
    }
    Ok(())
}

fn print_record(
    args: &DumpArgs,
    log: &str,
    offset: u64,
    payload: &[u8],
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let shown = match args.payload {
        PayloadForm::Hex => Some(to_hex(payload)),
        PayloadForm::Text => Some(String::from_utf8_lossy(payload).into_owned()),
        PayloadForm::None => None,
    };
    if args.dir.json {
        let mut line = json!({ "log": log, "offset": offset, "bytes": payload.len() });
        if let Some(text) = shown {
            line["payload"] = json!(text);
        }
        writeln!(out, "{line}")
    } else {
        // A payload with line feeds must not look like several records.
        let text = shown.map(|text| match args.payload {
            PayloadForm::Text => escaped(&text),
            PayloadForm::Hex | PayloadForm::None => text,
        });
        write!(out, "{log} {offset} {}", payload.len())?;
        if let Some(text) = text {
            out.write_all(b" ")?;
            out.write_all(text.as_bytes())?;
        }
        out.write_all(b"\n")
    }
}

/// As [`str::escape_debug`], which takes its time over every character: most need no escape, and of those of
/// a binary payload most are replacements for what is no text.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 4);
    for (at, c) in text.char_indices() {
        match c {
            '"' | '\'' | '\\' => out.extend(['\\', c]),
            ' '..='~' | char::REPLACEMENT_CHARACTER => out.push(c),
            '\0'..='\x1f' | '\x7f' => push_control(&mut out, c),
            _ if at == 0 => out.extend(c.escape_debug()),
            _ if c.is_alphanumeric() => out.push(c),
            _ => push_escaped_behind_another(&mut out, c),
        }
    }
    out
}

fn push_control(out: &mut String, c: char) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    match c {
        '\0' => out.push_str("\\0"),
        '\t' => out.push_str("\\t"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        _ => {
            let (high, low) = (c as usize >> 4, c as usize & 15);
            out.push_str("\\u{");
            if high > 0 {
                out.push(DIGITS[high & 15].into());
            }
            out.push(DIGITS[low].into());
            out.push('}');
        }
    }
}

/// A character that combines with the one before it is escaped only where there is none.
fn push_escaped_behind_another(out: &mut String, c: char) {
    let mut pair = String::from("x");
    pair.push(c);
    out.extend(pair.escape_debug().skip(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_as_the_standard_library_does() {
        let every: String = (0..=0x3_ffffu32).filter_map(char::from_u32).collect();
        for text in [
            "",
            "plain",
            "a \"b\" 'c' \\ \n\t\0\x1b\x7f",
            "\u{301}e\u{301}",
            "\u{fffd}\u{fffd}x",
        ] {
            assert_eq!(escaped(text), text.escape_debug().to_string(), "{text:?}");
        }
        assert!(escaped(&every) == every.escape_debug().to_string());
    }
}
