//! Cache and counter state against plain models: random histories with completions, failures,
//! evictions, sweeps and clock steps, and a replay of every prefix of the log they leave behind.

mod counters;
mod times;
mod values;

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;

use bytes::Bytes;
use felix_uring::proto::cache::record::ValueRecord;
use felix_uring::proto::cache::{
    Applied, CacheIndex, CounterIndex, Lookup, Overflow, OwnerClock, StagedAdd, StagedWrite,
};
use proptest::prelude::*;

const BASE: u64 = 7;

fn key(name: u8) -> Arc<str> {
    // Key 0 is the empty string, which is a key like any other.
    Arc::from("k".repeat(usize::from(name)))
}
