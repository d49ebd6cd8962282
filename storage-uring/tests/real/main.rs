//! Tests of a real storage with O_DIRECT, on the file system of the build directory and on small ones.

mod common;
mod core_counts;
mod cut_damage;
mod device;
mod faults;
mod killed;
mod loop_fs;
mod offline;
mod reading_ahead;
mod reclaim;
mod rewriting;
mod small_disks;
