//! Tests over the model device of [`crate::sim`] that cut its power at every boundary of a script or damage
//! its bytes.

mod against_plain;
mod anew;
mod damage;
mod damaged_copies;
mod faults;
mod forged;
mod histories;
mod log_state;
mod lost_ends;
mod power_cut;
mod reclaim;
mod rewriting;
mod rewritten_damage;
mod scattered;
mod torn_tail;
mod unreadable;
mod version1;

use crate::recovery::scan::{CoreScan, Since};
use crate::sim::device::{blank_segment, store_bytes, write_id, Pending, Sim, SimOptions};
use crate::sim::recovered::{
    read_all, recover, recover_since, scan_since, settle_step, Images, Recovered, FREED,
    UNKNOWN_EPOCH,
};
use crate::sim::{name, payload, Rng, SEGMENT_BYTES, UUID};

fn scan(images: &Images) -> CoreScan {
    scan_since(images, Since::epoch(UNKNOWN_EPOCH))
}

/// A count from the environment, for runs by hand that are larger than the suite's.
pub fn count(variable: &str, of_the_suite: u64) -> u64 {
    let set = std::env::var(variable).ok();
    set.map_or(of_the_suite, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is a number"))
    })
}
