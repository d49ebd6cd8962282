//! The tables in words.

use std::io::{Result, Write};

use super::cell::FileState;
use super::{AppendCell, ReadCell, StartCell, TailCell};
use crate::meter::Spread;
use crate::report::{count, micros};

fn ratio(of: &Spread) -> String {
    format!("{:.2} ({:.2}-{:.2})", of.median, of.min, of.max)
}

fn rate(of: &Spread) -> String {
    format!(
        "{} ({:.0}k-{:.0}k)",
        count(of.median),
        of.min / 1e3,
        of.max / 1e3
    )
}

pub(super) fn cell_head(out: &mut dyn Write, what: &str) -> Result<()> {
    writeln!(
        out,
        "{:>6} {what:>10} {:>5} {:>8} {:>26} {:>8} {:>18} {:>8} {:>10} {:>11} {:>9} {:>9} {:>8}",
        "shards",
        "batch",
        "files",
        "records/s",
        "MB/s",
        "of raw writes",
        "raw MB/s",
        "records/c",
        "KiB/commit",
        "p50",
        "p99",
        "CPU s/M"
    )
}

pub(super) fn cell(out: &mut dyn Write, cell: &AppendCell) -> Result<()> {
    let by_size = cell.commit_max_bytes != 1 << 20 || cell.outstanding > 4096;
    let what = match by_size {
        true => cell.commit_max_bytes,
        false => cell.payload_bytes,
    };
    let files = match cell.files {
        FileState::Ready => "ready",
        FileState::Zeroing => "zeroing",
    };
    writeln!(
        out,
        "{:>6} {what:>10} {:>5} {files:>8} {:>26} {:>8.1} {:>18} {:>8.0} {:>10.1} {:>11.1} {:>9} {:>9} {:>8.3}",
        cell.shards,
        cell.batch,
        rate(&cell.records_per_s),
        cell.mb_per_s,
        ratio(&cell.ratio_to_raw),
        cell.raw_mb_per_s,
        cell.group_records,
        cell.group_bytes / 1024.0,
        micros(cell.p50_us),
        micros(cell.p99_us),
        cell.cpu_s_per_million_records
    )
}

pub(super) fn tail_head(out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "{:>6} {:>10} {:>5} {:>26} {:>26} {:>18} {:>6}",
        "shards", "payload", "batch", "alone/s", "with tail readers/s", "ratio", "read"
    )
}

pub(super) fn tail(out: &mut dyn Write, cell: &TailCell) -> Result<()> {
    writeln!(
        out,
        "{:>6} {:>10} {:>5} {:>26} {:>26} {:>18} {:>5.0}%",
        cell.shards,
        cell.payload_bytes,
        cell.batch,
        rate(&cell.alone_per_s),
        rate(&cell.with_readers_per_s),
        ratio(&cell.ratio),
        cell.read_share * 100.0
    )
}

pub(super) fn read_head(out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "{:>6} {:>5} {:>10} {:>18} {:>12} {:>8} {:>18} {:>6} {:>18} {:>18}",
        "shards",
        "batch",
        "read of",
        "payload MB/s",
        "KiB/device",
        "x device",
        "of raw reads",
        "CPU",
        "recovery s",
        "recovery s/GiB"
    )
}

pub(super) fn read(out: &mut dyn Write, cell: &ReadCell) -> Result<()> {
    let rate = &cell.payload_mb_per_s;
    let rates = format!("{:.0} ({:.0}-{:.0})", rate.median, rate.min, rate.max);
    writeln!(
        out,
        "{:>6} {:>5} {:>10} {rates:>18} {:>12.1} {:>8.2} {:>18} {:>6.2} {:>18} {:>18}",
        cell.shards,
        cell.batch,
        cell.read_bytes,
        cell.device_read_bytes / 1024.0,
        cell.amplification,
        ratio(&cell.ratio_to_raw),
        cell.cpu_share,
        ratio(&cell.recovery_s),
        ratio(&cell.recovery_s_per_gib)
    )
}

pub(super) fn start_head(out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "{:>6} {:>10} {:>9} {:>18} {:>18} {:>18} {:>14}",
        "shards",
        "records",
        "MiB",
        "recovery s",
        "recovery s/GiB",
        "whole start s",
        "bytes a shard"
    )
}

pub(super) fn start(out: &mut dyn Write, cell: &StartCell) -> Result<()> {
    let memory = cell
        .bytes_per_shard
        .map_or_else(|| "-".to_owned(), |bytes| format!("{bytes:.0}"));
    writeln!(
        out,
        "{:>6} {:>10} {:>9.1} {:>18} {:>18} {:>18} {memory:>14}",
        cell.shards,
        cell.records,
        cell.bytes as f64 / f64::from(1u32 << 20),
        ratio(&cell.recovery_s),
        ratio(&cell.recovery_s_per_gib),
        ratio(&cell.start_s)
    )
}
