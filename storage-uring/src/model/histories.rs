//! Property: whatever happens to logs, in whatever order writes finish, and however often the power is cut,
//! they are the plain lists of the contract.
//!
//! `FELIX_HISTORIES=10000` runs that many instead of the suite's share; `FELIX_HISTORIES_SEED` names the
//! first seed (a failure names its own).

use super::count;
use crate::sim::{run_history, HistoryCounts};

#[test]
fn random_histories_are_the_plain_lists() {
    let histories = count("FELIX_HISTORIES", 250);
    let first = count("FELIX_HISTORIES_SEED", 1);
    let mut totals = HistoryCounts::default();
    for seed in first..first + histories {
        let counts = run_history(seed).unwrap_or_else(|broken| {
            panic!("{broken}; replay with FELIX_HISTORIES_SEED={seed} FELIX_HISTORIES=1")
        });
        totals += counts;
    }
    println!("{histories} histories: {totals:?}");
    let HistoryCounts {
        power_cuts,
        restarts,
        events,
        full_disks,
        failed_syncs,
        rewritten_segments,
        freed_segments,
        flipped_bits,
        ..
    } = totals;
    assert!(histories < 100 || (power_cuts > 50 && restarts > 20 && events > 100));
    assert!(histories < 100 || (full_disks > 20 && failed_syncs > 20 && flipped_bits > 50));
    assert!(histories < 100 || (rewritten_segments > 20 && freed_segments > 20));
}
