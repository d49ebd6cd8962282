//! Flags of `append`, and the shapes they stand for.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use felix_uring::cli::CommandError;
use storage_uring::bench::{AppendBench, ReadBench, RecoveryBench};

use super::cell::FileState;
use crate::units::{parse_bytes, parse_duration};

/// Shards of the table by size of the commits.
const GROUP_SHARDS: [u32; 3] = [1, 64, 10_000];
/// Sizes of that table.
const GROUP_BYTES: [u64; 3] = [4 << 10, 64 << 10, 1 << 20];
/// Records of an append in the batched rows of the whole matrix.
const MATRIX_BATCH: u32 = 64;
/// Payload written for a reading back.
const COLD_BYTES: u64 = 512 << 20;

/// Flags of `append`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # 1, 64 and 1000 shards at 100 B and 1 KiB\n  \
    felix-bench append\n\n  \
    # Everything there is a figure of: by shards and payload, by size of the commits, with readers\n  \
    felix-bench append --matrix --json append.json\n\n  \
    # One outstanding record: what one durable append costs\n  \
    felix-bench append --shards 1 --payload-bytes 1K --outstanding 1\n\n\
    Each cell is set against raw O_DIRECT, O_DSYNC writes, as many at once as the storage has commits on\n\
    their way, of the very sizes its commits had, in turns. The files of both were zeroed and synced before.\n\
    `zeroing` says that segments were zeroed while they were needed, as in a log that grows for ever.")]
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
    /// Records not durable yet at most
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub outstanding: u32,
    /// Commit groups on their way to the disk at once
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4))]
    pub commits_in_flight: u16,
    /// Microseconds the core looks for outcomes before it sleeps; a broker's default
    #[arg(long, default_value_t = 50, value_name = "US", value_parser = clap::value_parser!(u64).range(0..=100_000))]
    pub spin_us: u64,
    /// Instead: the table by size of the commits, 4K, 64K and 1M, at 1, 64 and 10,000 shards
    #[arg(long)]
    pub groups: bool,
    /// Instead: appends with and without readers at the tail of every shard
    #[arg(long)]
    pub tail_reads: bool,
    /// Instead: reads of what is not in memory, beside raw reads, and recovery
    #[arg(long)]
    pub cold_reads: bool,
    /// Instead: recovery of shards nobody writes to, and the memory they take
    #[arg(long)]
    pub recovery: bool,
    /// All tables, and batches of 64 beside single records
    #[arg(long)]
    pub matrix: bool,
    /// Zero segments while they are written to, instead of before
    #[arg(long)]
    pub zeroing: bool,
    /// CPU of the core, and of the thread of the raw writes; the first one unless told
    #[arg(long, value_name = "N")]
    pub cpu: Option<usize>,
    /// Length of each measurement
    #[arg(long, default_value = "1s", value_parser = parse_duration)]
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

impl AppendArgs {
    pub(super) fn check(&self) -> Result<(), CommandError> {
        if self.shards.contains(&0) || self.payload_bytes.contains(&0) {
            return Err(CommandError::usage(
                "--shards and --payload-bytes are at least 1",
            ));
        }
        Ok(())
    }

    /// Whether the table by shards and payload is wanted.
    pub(super) fn has_cells(&self) -> bool {
        let is_other = self.groups || self.tail_reads || self.cold_reads || self.recovery;
        self.matrix || !is_other
    }

    pub(super) fn file_state(&self) -> FileState {
        match self.zeroing {
            true => FileState::Zeroing,
            false => FileState::Ready,
        }
    }

    fn shape(&self, shards: u32, payload_bytes: u64, batch: u32) -> AppendBench {
        AppendBench {
            batch,
            outstanding: self.outstanding.div_ceil(batch),
            commits_in_flight: usize::from(self.commits_in_flight),
            warm_up: super::WARM_UP,
            duration: self.duration,
            spin: Duration::from_micros(self.spin_us),
            ..AppendBench::new(shards, payload_bytes as usize)
        }
    }

    /// Rows of the table by shards and payload.
    pub(super) fn shapes(&self) -> Vec<AppendBench> {
        let batches = match self.matrix {
            true => vec![self.batch, MATRIX_BATCH],
            false => vec![self.batch],
        };
        let mut shapes = Vec::new();
        for batch in batches {
            for payload in &self.payload_bytes {
                let of = |shards: &u32| self.shape(*shards, *payload, batch);
                shapes.extend(self.shards.iter().map(of));
            }
        }
        shapes
    }

    /// Rows of the table by size of the commits: enough is outstanding that each is full.
    pub(super) fn group_shapes(&self) -> Vec<AppendBench> {
        if !self.matrix && !self.groups {
            return Vec::new();
        }
        let mut shapes = Vec::new();
        for bytes in GROUP_BYTES {
            // One record a commit of a single block; many a commit otherwise.
            let payload = if bytes < 8 << 10 { 3 << 10 } else { 1 << 10 };
            for shards in GROUP_SHARDS {
                let records = bytes / payload * 3 * u64::from(self.commits_in_flight);
                shapes.push(AppendBench {
                    outstanding: records as u32,
                    commit_max_bytes: bytes as usize,
                    ..self.shape(shards, payload, 1)
                });
            }
        }
        shapes
    }

    /// Rows of the table with readers at the tail.
    pub(super) fn tail_shapes(&self) -> Vec<AppendBench> {
        vec![
            self.shape(1, 100, MATRIX_BATCH),
            self.shape(1, 1024, MATRIX_BATCH),
            self.shape(64, 1024, MATRIX_BATCH),
        ]
    }

    /// Rows of the table of reads.
    pub(super) fn read_shapes(&self) -> Vec<ReadBench> {
        let shape = |shards, batch, read_bytes| ReadBench {
            shards,
            payload_bytes: 1024,
            batch,
            // Single records of many shards lie so far apart that an eighth of it takes as long.
            total_bytes: if batch == 1 {
                COLD_BYTES / 8
            } else {
                COLD_BYTES
            },
            read_bytes,
            cpu: None,
        };
        vec![
            shape(1, MATRIX_BATCH, 1 << 20),
            shape(1, MATRIX_BATCH, 64 << 10),
            shape(64, MATRIX_BATCH, 1 << 20),
            shape(64, 1, 1 << 20),
        ]
    }

    /// Rows of the table of starts.
    pub(super) fn recovery_shapes(&self) -> Vec<RecoveryBench> {
        let shape = |shards, total_bytes, payload_bytes| RecoveryBench {
            shards,
            total_bytes,
            payload_bytes,
            cpu: None,
        };
        vec![
            // What does not depend on the number of logs: the rows below are less this.
            shape(1, 0, 100),
            shape(10_000, 0, 100),
            shape(10_000, COLD_BYTES, 1024),
            shape(1, COLD_BYTES, 1024),
        ]
    }
}
