//! Deterministic simulation of a cluster: the broker's own machines on virtual time.
//!
//! One thread, one seed, one sequence of events: the same seed gives the same run, byte for byte.
//! A seed draws a cluster, a workload and faults; checkers look at every step and at the disks in
//! the end. `docs/simulation.md` says how to use it, what it injects, and what it checks.
//!
//! * [`world`], [`env`], [`queue`], [`random`], [`trace`]: time, chance, what happened.
//! * [`network`], [`disk`], [`log`], [`catalog`]: what surrounds a broker.
//! * [`core`]: a broker's core, the machines of [`crate::proto`] behind a thin driver.
//! * [`workload`], [`consumers`], [`subscribers`], [`faults`], [`operator`], [`moves`], [`figure_eight`],
//!   [`reports`], [`mistakes`]: what is asked, what goes wrong, who leads next.
//! * [`check`]: the invariants. [`storage`]: those of what lies below a record.

pub mod catalog;
pub mod check;
pub mod consumers;
pub mod core;
pub mod disk;
pub mod env;
pub mod faults;
pub mod figure_eight;
pub mod log;
pub mod mistakes;
pub mod moves;
pub mod network;
pub mod operator;
pub mod queue;
pub mod random;
pub mod reports;
pub mod seeds;
pub mod storage;
pub mod subscribers;
pub mod trace;
pub mod workload;
pub mod world;

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{catch_unwind, AssertUnwindSafe};

use check::readings::ReadingCounts;
use env::Fault;
use storage_uring::sim::HistoryCounts;
use world::World;

/// What one seed came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeedReport {
    pub seed: u64,
    /// The first broken invariant, or the message of a panic.
    pub failure: Option<String>,
    /// Equal for two runs of one seed.
    pub trace_hash: u64,
    pub events: u64,
    pub virtual_ms: u64,
    pub faults: BTreeMap<Fault, u64>,
    pub requests: u64,
    pub acked_records: u64,
    pub acked_cache_writes: u64,
    pub refused: u64,
    pub indeterminate: u64,
    pub gone: u64,
    /// Acknowledged records of `Quorum` shards with followers.
    pub acked_quorum: u64,
    pub replication: ReplicationCounts,
    pub readings: ReadingCounts,
    pub storage: HistoryCounts,
    /// A hash of everything subscribers were handed, in order.
    pub handed_hash: u64,
}

/// What replication did in one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplicationCounts {
    pub openings: u64,
    pub marks: u64,
    pub truncations: u64,
    pub conflicts: u64,
    pub bootstraps: u64,
    pub rebuilds: u64,
    /// Requests that copies at rest had to refuse before anything of them counted.
    pub refused_requests: u64,
}

thread_local! {
    static PANICKED_AT: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Makes panics silent and keeps their place for the report: in a run they are findings.
pub fn keep_panics_for_reports() {
    std::panic::set_hook(Box::new(|info| {
        let place = info
            .location()
            .map(|l| format!("{}:{}", l.file(), l.line()));
        PANICKED_AT.with(|at| *at.borrow_mut() = place.unwrap_or_default());
    }));
}

/// Runs one seed to its end, its cluster and its storage history. With `is_shown` every event is printed to standard error.
pub fn run_seed(seed: u64, is_shown: bool) -> SeedReport {
    let mut report = run_world(World::new(seed, is_shown), seed);
    match storage::run(seed) {
        Ok(counts) => report.storage = counts,
        Err(broken) => {
            let place = PANICKED_AT.with(|at| at.take());
            report.failure = report.failure.or(Some(format!("{broken} {place}")));
        }
    }
    report
}

/// Runs one seed under an operator who goes by the newest generation in a history alone.
pub fn run_seed_with_unsafe_promotion(seed: u64, is_shown: bool) -> SeedReport {
    let mut world = World::new(seed, is_shown);
    world.unsafe_promotion = true;
    run_world(world, seed)
}

fn run_world(mut world: World, seed: u64) -> SeedReport {
    let panicked = catch_unwind(AssertUnwindSafe(|| world.run())).err();
    let env = &world.env;
    let failure = match (panicked, env.judge.violations.first()) {
        (Some(panic), _) => {
            let place = PANICKED_AT.with(|at| at.take());
            Some(format!("panic: {} {place}", panic_text(panic.as_ref())))
        }
        (None, Some(first)) => Some(format!("I{}: {}", first.invariant, first.seen)),
        (None, None) => None,
    };
    SeedReport {
        seed,
        failure,
        trace_hash: env.trace.hash(),
        events: env.trace.events(),
        virtual_ms: env.now_us / 1000,
        faults: env.faults.clone(),
        requests: env.judge.requests() as u64,
        acked_records: env.judge.acked_records,
        acked_cache_writes: env.judge.acked_cache_writes,
        refused: env.judge.refused,
        indeterminate: env.judge.indeterminate,
        gone: env.judge.gone,
        acked_quorum: env.judge.acked_quorum,
        replication: env.judge.replication.counts,
        readings: env.judge.readings.counts.clone(),
        storage: HistoryCounts::default(),
        handed_hash: env.judge.subscribers.hash,
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    match (
        panic.downcast_ref::<String>(),
        panic.downcast_ref::<&'static str>(),
    ) {
        (Some(text), _) => text,
        (None, Some(text)) => text,
        (None, None) => "without a message",
    }
}
