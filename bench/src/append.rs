//! `append`: the storage alone, beside raw durable writes of the size its groups had.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Result};
use clap::Args;
use felix_uring::cli::CommandError;
use serde::{Deserialize, Serialize};
use shard_executor::rt;
use storage_uring::name::{LogKind, LogName};
use storage_uring::{recover, Storage, StorageConfig};

use crate::cpu::usable_cpus;
use crate::limits;
use crate::meter::{Latency, Spread};
use crate::place::WorkDir;
use crate::report::{count, micros, write_json};
use crate::units::{parse_bytes, parse_duration};

/// Not measured, before each cell.
const WARM_UP: Duration = Duration::from_millis(500);

/// Flags of `append`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # 1, 64 and 1000 shards at 100 B and 1 KiB\n  \
    felix-bench append\n\n  \
    # One outstanding record: what one durable append costs\n  \
    felix-bench append --shards 1 --payload-bytes 1K --outstanding 1\n\n\
    Each cell is set against raw O_DIRECT, O_DSYNC writes over written blocks, as many at once as the\n\
    storage has commits on their way and of the mean size its commits had, in turns.")]
pub struct AppendArgs {
    /// Numbers of shards that are written to
    #[arg(
        long,
        default_value = "1,64,1000",
        value_name = "N",
        value_delimiter = ','
    )]
    pub shards: Vec<u32>,
    /// Sizes of a record
    #[arg(long, default_value = "100,1K", value_name = "BYTES", value_delimiter = ',', value_parser = parse_bytes)]
    pub payload_bytes: Vec<u64>,
    /// Records of one append
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub batch: u32,
    /// Appends not durable yet at most
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub outstanding: u32,
    /// Commit groups on their way to the disk at once
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4))]
    pub commits_in_flight: u16,
    /// Length of each measurement
    #[arg(long, default_value = "2s", value_parser = parse_duration)]
    pub duration: Duration,
    /// How often each is made
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Directory for the logs, on a file system with direct I/O
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// One line of the table.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AppendCell {
    /// Shards written to in turn.
    pub shards: u32,
    /// Bytes of a record.
    pub payload_bytes: u64,
    /// Records a second.
    pub records_per_s: Spread,
    /// 10^6 payload bytes a second.
    pub mb_per_s: f64,
    /// Bytes to the disk a second, by those of the raw writes.
    pub ratio_to_raw: Spread,
    /// Records of a commit.
    pub group_records: f64,
    /// Bytes of a commit.
    pub group_bytes: f64,
    /// From the append to its completion, median and 99 %.
    pub p50_us: f64,
    /// The same.
    pub p99_us: f64,
    /// CPU seconds of the core on a million records.
    pub cpu_s_per_million_records: f64,
}

/// The report of `append`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AppendReport {
    /// The form.
    pub schema: String,
    /// Records of one append.
    pub batch: u32,
    /// Appends outstanding.
    pub outstanding: u32,
    /// The table.
    pub cells: Vec<AppendCell>,
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    shards: u32,
    payload_bytes: usize,
    batch: u32,
    outstanding: u32,
    commits_in_flight: usize,
    duration: Duration,
}

#[derive(Debug)]
struct Measured {
    records: u64,
    seconds: f64,
    commits: u64,
    appended_bytes: u64,
    latency: Latency,
    cpu_s: f64,
}

/// `append`.
pub fn run_append(args: &AppendArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    if args.shards.contains(&0) || args.payload_bytes.contains(&0) {
        return Err(CommandError::usage(
            "--shards and --payload-bytes are at least 1",
        ));
    }
    let dir = WorkDir::for_logs(args.data_dir.as_deref(), 1, 128)?;
    let failed = |error: anyhow::Error| CommandError::failed(format!("{error:#}"));
    let mut report = AppendReport {
        schema: "felix-bench-append/1".into(),
        batch: args.batch,
        outstanding: args.outstanding,
        cells: Vec::new(),
    };
    writeln!(
        out,
        "{:>6} {:>9} {:>24} {:>9} {:>20} {:>10} {:>10} {:>10} {:>10} {:>9}",
        "shards",
        "payload",
        "records/s",
        "MB/s",
        "of raw writes",
        "records/c",
        "KiB/commit",
        "p50",
        "p99",
        "CPU s/M"
    )
    .map_err(CommandError::failed)?;
    for &payload_bytes in &args.payload_bytes {
        for &shards in &args.shards {
            let shape = Shape {
                shards,
                payload_bytes: payload_bytes as usize,
                batch: args.batch,
                outstanding: args.outstanding,
                commits_in_flight: usize::from(args.commits_in_flight),
                duration: args.duration,
            };
            let cell = measure_cell(dir.path(), shape, args.rounds).map_err(failed)?;
            print(&cell, out).map_err(CommandError::failed)?;
            report.cells.push(cell);
        }
    }
    if let Some(path) = &args.json {
        write_json(path, &report).map_err(failed)?;
    }
    Ok(())
}

fn measure_cell(dir: &Path, shape: Shape, rounds: u32) -> Result<AppendCell> {
    let mut rates = Vec::new();
    let mut ratios = Vec::new();
    let mut latency = Latency::new();
    let (mut records, mut commits, mut bytes, mut cpu_s) = (0u64, 0u64, 0u64, 0.0);
    for _ in 0..rounds {
        let data = dir.join("append");
        let measured = measure_storage(&data, shape)?;
        let group = measured.appended_bytes / measured.commits.max(1);
        let raw = limits::disk(dir, group, shape.commits_in_flight, shape.duration)?;
        let to_disk = measured.appended_bytes as f64 / measured.seconds / 1e6;
        ratios.push(to_disk / raw.mb_per_s);
        rates.push(measured.records as f64 / measured.seconds);
        latency.absorb(&measured.latency);
        records += measured.records;
        commits += measured.commits;
        bytes += measured.appended_bytes;
        cpu_s += measured.cpu_s;
        std::fs::remove_dir_all(&data)?;
    }
    let rates = Spread::of(rates);
    Ok(AppendCell {
        shards: shape.shards,
        payload_bytes: shape.payload_bytes as u64,
        records_per_s: rates,
        mb_per_s: rates.median * shape.payload_bytes as f64 / 1e6,
        ratio_to_raw: Spread::of(ratios),
        group_records: records as f64 / commits.max(1) as f64,
        group_bytes: bytes as f64 / commits.max(1) as f64,
        p50_us: latency.at(0.5),
        p99_us: latency.at(0.99),
        cpu_s_per_million_records: cpu_s / (records.max(1) as f64 / 1e6),
    })
}

fn measure_storage(data: &Path, shape: Shape) -> Result<Measured> {
    std::fs::create_dir_all(data)?;
    let mut core = rt::CoreSpec::new(0);
    core.cpu = usable_cpus().last().copied();
    core.warm_up_file = Some(rt::prepare_warm_up_file(data)?);
    core.name = "append".into();
    let data = data.to_path_buf();
    rt::spawn_core(core, move || async move {
        let mut config = StorageConfig::new(&data, 0, 1);
        config.commits_in_flight = shape.commits_in_flight;
        let storage = Storage::open(config, recover(&data, 1)?).await?;
        let measured = append_for(&storage, shape).await;
        storage.close().await?;
        measured
    })?
    .join()?
}

async fn append_for(storage: &Storage, shape: Shape) -> Result<Measured> {
    let mut logs = Vec::new();
    for shard in 0..shape.shards {
        logs.push(storage.open_log(&LogName {
            kind: LogKind::Stream,
            tenant: "t1".into(),
            namespace: "default".into(),
            name: "bench".into(),
            shard,
        })?);
    }
    let payload = vec![0x5a_u8; shape.payload_bytes];
    let batch = vec![payload.as_slice(); shape.batch as usize];
    let signal = storage.signal();
    let began = Instant::now();
    let measure_from = began + WARM_UP;
    let end = measure_from + shape.duration;
    let mut sent_at: std::collections::VecDeque<Instant> = Default::default();
    let mut done = Vec::new();
    let (mut next, mut records) = (0u64, 0u64);
    let mut latency = Latency::new();
    let mut at_start = None;
    loop {
        let now = Instant::now();
        if at_start.is_none() && now >= measure_from {
            at_start = Some((now, storage.stats(), crate::cpu::thread_cpu_seconds()));
        }
        if now >= end {
            break;
        }
        while sent_at.len() < shape.outstanding as usize {
            let log = logs[(next % logs.len() as u64) as usize];
            storage
                .append(log, 1, 0, batch.iter().copied(), next)
                .map_err(|error| anyhow!("append {next}: {error}"))?;
            sent_at.push_back(now);
            next += 1;
        }
        storage.kick();
        signal.wait_take().await;
        storage.poll_completions(&mut done);
        let now = Instant::now();
        for completion in done.drain(..) {
            if let Err(error) = completion.result {
                bail!("a commit failed: {error}");
            }
            let sent = sent_at.pop_front();
            if at_start.is_some() {
                records += u64::from(shape.batch);
                latency.record(sent.map_or(0, |at| (now - at).as_nanos() as u64));
            }
        }
        rt::yield_if_needed().await;
    }
    let (started, before, cpu) =
        at_start.ok_or_else(|| anyhow!("the measurement was too short"))?;
    let after = storage.stats();
    Ok(Measured {
        records,
        seconds: started.elapsed().as_secs_f64(),
        commits: after.machine.commits - before.machine.commits,
        appended_bytes: after.machine.committed_bytes - before.machine.committed_bytes,
        latency,
        cpu_s: crate::cpu::thread_cpu_seconds() - cpu,
    })
}

fn print(cell: &AppendCell, out: &mut dyn Write) -> std::io::Result<()> {
    let rate = &cell.records_per_s;
    let rates = format!(
        "{} ({:.0}k-{:.0}k)",
        count(rate.median),
        rate.min / 1e3,
        rate.max / 1e3
    );
    let ratio = &cell.ratio_to_raw;
    let ratios = format!("{:.2} ({:.2}-{:.2})", ratio.median, ratio.min, ratio.max);
    writeln!(
        out,
        "{:>6} {:>9} {rates:>24} {:>9.1} {ratios:>20} {:>10.1} {:>10.1} {:>10} {:>10} {:>9.3}",
        cell.shards,
        cell.payload_bytes,
        cell.mb_per_s,
        cell.group_records,
        cell.group_bytes / 1024.0,
        micros(cell.p50_us),
        micros(cell.p99_us),
        cell.cpu_s_per_million_records
    )
}
