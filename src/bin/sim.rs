//! The deterministic simulator: `sim --start SEED --seeds N [--json]`.
//!
//! Runs the kept seeds and then N seeds from START. The last line is one JSON object
//! `{"passed","failed","faults","acked_records"}`; the exit code is 1 when a seed failed. Each
//! failure prints the line that replays it.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use felix_uring::sim::check::readings::ReadingCounts;
use felix_uring::sim::env::Fault;
use felix_uring::sim::seeds::kept_seeds;
use felix_uring::sim::{
    keep_panics_for_reports, run_seed, run_seed_with_unsafe_promotion, ReplicationCounts,
    SeedReport,
};
use storage_uring::sim::HistoryCounts;

/// Simulates clusters on virtual time, one for each seed, and checks what must always be true.
#[derive(Debug, Parser)]
#[command(name = "sim", version)]
struct Args {
    /// First seed.
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// How many seeds, counted up from the first.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// One JSON object a seed on standard output.
    #[arg(long)]
    json: bool,
    /// Leave out the kept seeds.
    #[arg(long)]
    no_kept: bool,
    /// Print every event to standard error.
    #[arg(long)]
    trace: bool,
    /// Stop at the first seed that fails.
    #[arg(long)]
    fail_fast: bool,
    /// Stop once so many seeds have failed.
    #[arg(long, conflicts_with = "fail_fast")]
    failures: Option<u64>,
    /// Let the operator promote by the newest generation alone, which loses records: the checkers
    /// must notice.
    #[arg(long)]
    unsafe_promotion: bool,
    /// Run every seed twice and compare the traces.
    #[arg(long)]
    check_determinism: bool,
}

#[derive(Debug, Default)]
struct Totals {
    passed: u64,
    failed: u64,
    faults: BTreeMap<Fault, u64>,
    requests: u64,
    acked_records: u64,
    acked_cache_writes: u64,
    refused: u64,
    indeterminate: u64,
    gone: u64,
    events: u64,
    virtual_ms: u64,
    acked_quorum: u64,
    replication: ReplicationCounts,
    readings: ReadingCounts,
    storage: HistoryCounts,
}

impl Totals {
    fn add(&mut self, report: &SeedReport) {
        match report.failure {
            Some(_) => self.failed += 1,
            None => self.passed += 1,
        }
        for (fault, count) in &report.faults {
            *self.faults.entry(*fault).or_default() += count;
        }
        self.requests += report.requests;
        self.acked_records += report.acked_records;
        self.acked_cache_writes += report.acked_cache_writes;
        self.refused += report.refused;
        self.indeterminate += report.indeterminate;
        self.gone += report.gone;
        self.events += report.events;
        self.virtual_ms += report.virtual_ms;
        self.acked_quorum += report.acked_quorum;
        let (all, one) = (&mut self.replication, report.replication);
        all.openings += one.openings;
        all.marks += one.marks;
        all.truncations += one.truncations;
        all.conflicts += one.conflicts;
        all.bootstraps += one.bootstraps;
        all.rebuilds += one.rebuilds;
        all.refused_requests += one.refused_requests;
        self.storage += report.storage;
        for (what, count) in &report.readings {
            *self.readings.entry(what).or_default() += count;
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    // A broken assertion is a failed seed, told in one line.
    keep_panics_for_reports();
    let kept = match kept_seeds() {
        Ok(kept) => kept,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    let kept = kept.into_iter().filter(|_| !args.no_kept);
    let last = args.start.saturating_add(args.seeds);
    let seeds = kept.map(|kept| kept.seed).chain(args.start..last);
    let stop_after = args.failures.or(args.fail_fast.then_some(1));
    let started = Instant::now();
    let mut totals = Totals::default();
    for seed in seeds {
        let mut report = match args.unsafe_promotion {
            true => run_seed_with_unsafe_promotion(seed, args.trace),
            false => run_seed(seed, args.trace),
        };
        if args.check_determinism {
            let again = run_seed(seed, false);
            if again != report && report.failure.is_none() {
                report.failure = Some("two runs of this seed differ".to_string());
            }
        }
        tell(&args, &report);
        totals.add(&report);
        if stop_after.is_some_and(|most| totals.failed >= most) {
            break;
        }
    }
    summarise(&totals, started);
    match totals.failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(1),
    }
}

fn tell(args: &Args, report: &SeedReport) {
    if let Some(failure) = &report.failure {
        let seed = report.seed;
        println!("FAILED {failure}; replay: sim --no-kept --start {seed} --seeds 1 --trace");
    }
    if args.json {
        let object = serde_json::json!({
            "seed": report.seed,
            "failure": report.failure,
            "trace": format!("{:016x}", report.trace_hash),
            "events": report.events,
            "virtual_ms": report.virtual_ms,
            "requests": report.requests,
            "acked_records": report.acked_records,
        });
        println!("{object}");
    }
}

fn summarise(totals: &Totals, started: Instant) {
    let seeds = totals.passed + totals.failed;
    let wall_ms = started.elapsed().as_secs_f64() * 1000.0;
    let by_name: BTreeMap<&str, u64> = totals
        .faults
        .iter()
        .map(|(fault, count)| (fault.name(), *count))
        .collect();
    let object = serde_json::json!({
        "passed": totals.passed,
        "failed": totals.failed,
        "faults": totals.faults.values().sum::<u64>(),
        "acked_records": totals.acked_records,
        "faults_by_kind": by_name,
        "acked_cache_writes": totals.acked_cache_writes,
        "acked_quorum_records": totals.acked_quorum,
        "replication": {
            "openings": totals.replication.openings,
            "marks": totals.replication.marks,
            "truncations": totals.replication.truncations,
            "conflicts": totals.replication.conflicts,
            "bootstraps": totals.replication.bootstraps,
            "rebuilds": totals.replication.rebuilds,
            "refused_requests": totals.replication.refused_requests,
        },
        "readings": totals.readings,
        "storage": totals.storage,
        "requests": totals.requests,
        "refused": totals.refused,
        "indeterminate": totals.indeterminate,
        "client_gone": totals.gone,
        "events": totals.events,
        "virtual_s": totals.virtual_ms / 1000,
        "ms_per_seed": (wall_ms / seeds.max(1) as f64 * 1000.0).round() / 1000.0,
    });
    println!("{object}");
}
