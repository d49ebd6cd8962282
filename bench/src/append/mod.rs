//! `append`: the storage alone, beside raw durable writes of the sizes its commits had.

mod args;
mod cell;
mod reads;
mod starts;
mod table;

use std::io::Write;
use std::time::Duration;

use felix_uring::cli::CommandError;
use serde::{Deserialize, Serialize};
use storage_uring::bench::{AppendBench, RawFiles};

pub use args::AppendArgs;
pub use cell::AppendCell;
pub use reads::{ReadCell, TailCell};
pub use starts::StartCell;

use crate::cpu::usable_cpus;
use crate::place::WorkDir;
use crate::report::write_json;
use cell::{Bench, FileState};

/// Not measured, before each.
const WARM_UP: Duration = Duration::from_millis(300);
/// As large as a broker's segments are by default.
const FILE_BYTES: u64 = 64 << 20;
/// Raw files, and zeroed segments at hand, at most: 4 GiB.
const FILES_MAX: usize = 64;

/// The report of `append`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AppendReport {
    /// The form.
    pub schema: String,
    /// Rates by shards and payload.
    pub cells: Vec<AppendCell>,
    /// Rates by shards and size of the commits.
    pub groups: Vec<AppendCell>,
    /// Appends with and without readers at the tail.
    pub tails: Vec<TailCell>,
    /// Starts over shards nobody writes to.
    pub starts: Vec<StartCell>,
    /// Reads of what is not in memory.
    pub reads: Vec<ReadCell>,
}

/// `append`.
pub fn run_append(args: &AppendArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    args.check()?;
    let dir = WorkDir::for_logs(args.data_dir.as_deref(), 1, 128)?;
    let failed = |error: anyhow::Error| CommandError::failed(format!("{error:#}"));
    let report = measure(args, &dir, out).map_err(failed)?;
    if let Some(path) = &args.json {
        write_json(path, &report).map_err(failed)?;
    }
    Ok(())
}

fn measure(args: &AppendArgs, dir: &WorkDir, out: &mut dyn Write) -> anyhow::Result<AppendReport> {
    let mut report = AppendReport {
        schema: "felix-bench-append/3".into(),
        ..AppendReport::default()
    };
    let mut bench = Bench::prepare(dir.path(), args)?;
    if args.has_cells() {
        table::cell_head(out, "payload")?;
        for shape in args.shapes() {
            let cell = bench.measure(&shape, args.file_state())?;
            table::cell(out, &cell)?;
            report.cells.push(cell);
        }
    }
    if args.matrix {
        // What writing costs while segments are zeroed for it, beside the same raw writes.
        for shape in args.shapes().into_iter().filter(|s| s.shards == 1) {
            let cell = bench.measure(&shape, FileState::Zeroing)?;
            table::cell(out, &cell)?;
            report.cells.push(cell);
        }
    }
    let groups = args.group_shapes();
    if !groups.is_empty() {
        table::cell_head(out, "commits of")?;
        for shape in groups {
            let cell = bench.measure(&shape, args.file_state())?;
            table::cell(out, &cell)?;
            report.groups.push(cell);
        }
    }
    if args.matrix || args.tail_reads {
        table::tail_head(out)?;
        for shape in args.tail_shapes() {
            let cell = reads::measure_tail(&mut bench, &shape)?;
            table::tail(out, &cell)?;
            report.tails.push(cell);
        }
    }
    if args.matrix || args.recovery {
        table::start_head(out)?;
        let mut base_bytes = None;
        for shape in args.recovery_shapes() {
            let cell = starts::measure_start(&bench, &shape, base_bytes)?;
            base_bytes = base_bytes.or(Some(cell.grown_bytes));
            table::start(out, &cell)?;
            report.starts.push(cell);
        }
    }
    if args.matrix || args.cold_reads {
        table::read_head(out)?;
        for shape in args.read_shapes() {
            let cell = reads::measure_cold(&bench, &shape)?;
            table::read(out, &cell)?;
            report.reads.push(cell);
        }
    }
    Ok(report)
}
