//! Simulated clusters, seed by seed. `SIM_SEEDS` asks for more than the few hundred of a usual run;
//! `cargo run --release --bin sim -- --seeds 10000` is the tool for many.

use std::collections::BTreeMap;

use felix_uring::sim::check::readings::ReadingCounts;
use felix_uring::sim::seeds::kept_seeds;
use felix_uring::sim::{keep_panics_for_reports, run_seed, run_seed_with_unsafe_promotion};
use storage_uring::sim::HistoryCounts;

const SEEDS: u64 = 300;

fn seeds() -> u64 {
    let asked = std::env::var("SIM_SEEDS").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(SEEDS)
}

/// Every seed ends with nothing to object to, and together they did what they are for.
#[test]
fn simulated_clusters_keep_their_invariants() {
    keep_panics_for_reports();
    let kept = kept_seeds().unwrap();
    let mut failures = Vec::new();
    let mut faults: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut acked, mut cached, mut refused, mut unknown) = (0, 0, 0, 0);
    let (mut quorum, mut truncations, mut bootstraps, mut rebuilds) = (0, 0, 0, 0);
    let mut to_refuse = 0;
    let mut readings = ReadingCounts::new();
    let mut storage = HistoryCounts::default();
    for seed in kept.iter().map(|kept| kept.seed).chain(0..seeds()) {
        let report = run_seed(seed, false);
        if let Some(failure) = report.failure {
            failures.push(format!("seed {seed}: {failure}"));
        }
        for (fault, count) in report.faults {
            *faults.entry(fault.name()).or_default() += count;
        }
        acked += report.acked_records;
        cached += report.acked_cache_writes;
        refused += report.refused;
        unknown += report.indeterminate;
        quorum += report.acked_quorum;
        truncations += report.replication.truncations;
        bootstraps += report.replication.bootstraps;
        rebuilds += report.replication.rebuilds;
        to_refuse += report.replication.refused_requests;
        storage += report.storage;
        for (what, count) in report.readings {
            *readings.entry(what).or_default() += count;
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for (what, count) in [
        ("acked", acked),
        ("cached", cached),
        ("refused", refused),
        ("unknown", unknown),
        ("acked by a majority", quorum),
        ("requests copies have to refuse", to_refuse),
    ] {
        assert!(count > 100, "{what}: {count}: the workload does not work");
    }
    for (what, count) in [
        ("truncations", truncations),
        ("bootstraps", bootstraps),
        ("rebuilds", rebuilds),
    ] {
        assert!(count > 0, "no {what}: repair is not exercised");
    }
    for (what, count) in [
        ("power cuts", storage.power_cuts),
        ("restarts", storage.restarts),
        ("events", storage.events),
        ("full disks", storage.full_disks),
        ("failed syncs", storage.failed_syncs),
        ("rewritten segments", storage.rewritten_segments),
        ("freed segments", storage.freed_segments),
        ("flipped bits", storage.flipped_bits),
    ] {
        assert!(count > 20, "{what}: {count}: the histories are too tame");
    }
    for must in [
        "compactions",
        "heads_given_up_by_followers",
        "copies",
        "expiries",
        "openings_of_compacted_logs",
        "first_records",
        "groups_taken_over",
        "groups_drained",
        "group_deliveries",
        "group_redeliveries",
        "group_positions",
        "handovers",
        "subscriptions",
        "subscriber_deliveries",
        "subscriptions_ended_moved",
    ] {
        assert!(readings.get(must) > Some(&0), "{must}: {readings:?}");
    }
    for must in [
        "drop_connection",
        "reset_mid_frame",
        "one_way_cut",
        "two_way_cut",
        "stall",
        "crash",
        "crash_at_write",
        "crash_at_sync",
        "failed_sync",
        "short_write",
        "full_disk",
        "full_lane",
        "pause",
        "shard_moved",
        "stale_view",
        "unknown_kind",
        "damaged_batch",
        "late_duplicate",
        "contradiction",
        "false_conflict",
        "false_refusal",
        "false_redirect",
        "old_file",
        "move_begun",
        "move_switched",
        "leader_isolated",
        "leader_replaced",
        "generation_raised",
        "raised_base",
        "damaged_copy",
        "wrong_file",
        "report_failed",
        "report_answer_lost",
        "promoted_by_report",
    ] {
        assert!(faults.contains_key(must), "{must} was never injected");
    }
}

/// The checkers notice the loss that promotion by the newest generation alone can cause.
#[test]
fn promotion_by_generation_alone_is_noticed() {
    keep_panics_for_reports();
    let lost = (700..20_000).find_map(|seed| {
        let failure = run_seed_with_unsafe_promotion(seed, false).failure?;
        failure.starts_with("I35").then_some(failure)
    });
    assert!(
        lost.is_some(),
        "nothing was lost: the operator's rule proves nothing"
    );
}

/// One seed, one run: a failure that cannot be replayed is worth little.
#[test]
fn a_seed_repeats_to_the_byte() {
    keep_panics_for_reports();
    for seed in 0..20 {
        assert_eq!(run_seed(seed, false), run_seed(seed, false), "seed {seed}");
    }
    let hashes: std::collections::BTreeSet<u64> = (0..20)
        .map(|seed| run_seed(seed, false).trace_hash)
        .collect();
    assert_eq!(hashes.len(), 20, "different seeds, different runs");
}
