//! What a read of a log takes from the device when its records lie far apart among those of others.

use bytes::Bytes;

use super::{name, payload, Rng, Sim, SimOptions};
use crate::walk::{ReadWalk, WalkStep};

const SHARDS: u32 = 32;
const RECORD_BYTES: usize = 1000;

/// Reads of the device and their bytes, for all records of one log.
fn reads_of(sim: &mut Sim, shard: u32) -> (u64, u64) {
    let log = sim.log(shard);
    let tail = sim.machine.durable_tail(log);
    let index = &sim.machine.log_state(log).index;
    let (mut from, mut reads, mut bytes) = (0, 0, 0);
    while from < tail {
        let interval = index.interval(from, tail).expect("is indexed");
        let mut walk = ReadWalk::new(name(shard).id(), from, usize::MAX, interval);
        let mut input = None;
        let batch = loop {
            match walk.step(input.take()).expect("reads") {
                WalkStep::Done(batch) => break batch,
                WalkStep::Read(wanted) => {
                    let image = &sim.durable[&wanted.segment];
                    let end = image.len().min((wanted.position + wanted.len) as usize);
                    let found = &image[wanted.position as usize..end];
                    reads += 1;
                    bytes += found.len() as u64;
                    input = Some((wanted, Bytes::copy_from_slice(found)));
                }
            }
        };
        for (offset, record) in (from..).zip(&batch.records) {
            assert_eq!(record[..], sim.shadows[&shard].submitted[offset as usize]);
        }
        assert!(batch.next_offset > from);
        from = batch.next_offset;
    }
    (reads, bytes)
}

#[test]
fn single_records_among_those_of_many_shards_cost_their_blocks_and_few_more() {
    let mut rng = Rng(81);
    let mut sim = Sim::new(SimOptions::default());
    for _ in 0..100 {
        for shard in 0..SHARDS {
            sim.append(shard, &[payload(&mut rng, RECORD_BYTES)]);
        }
        sim.settle();
    }
    for shard in [0, 7, SHARDS - 1] {
        let (reads, bytes) = reads_of(&mut sim, shard);
        // One read a record: a record and its header fit one block, or lie in two.
        assert!(reads <= 105, "{reads} reads");
        let of_a_record = bytes / 100;
        assert!(of_a_record <= 9000, "{of_a_record} bytes a record");
    }
}

#[test]
fn extents_of_changing_length_are_read_whole() {
    let mut rng = Rng(82);
    let mut sim = Sim::new(SimOptions::default());
    for round in 0..60u64 {
        // Short after long and long after short; the first one in each segment carries the name, too.
        let len = [10, 9000, 200, 30_000, 4096, 0][(round % 6) as usize];
        sim.append(0, &[payload(&mut rng, len)]);
        for shard in 1..6 {
            sim.append(shard, &[payload(&mut rng, 3000)]);
        }
        sim.settle();
    }
    let (reads, _) = reads_of(&mut sim, 0);
    assert!(reads < 200, "{reads} reads");
    reads_of(&mut sim, 3);
}

#[test]
fn a_long_extent_makes_no_read_of_a_short_one_longer() {
    let mut rng = Rng(83);
    let mut sim = Sim::new(SimOptions::default());
    for _ in 0..20 {
        // A long one, then a short one; the walk from the next long one leads over the short one.
        sim.append(0, &[payload(&mut rng, 36_000)]);
        sim.settle();
        sim.append(0, &[payload(&mut rng, 1000)]);
        for _ in 0..3 {
            sim.append(1, &[payload(&mut rng, 4000)]);
        }
        sim.settle();
    }
    let (_, bytes) = reads_of(&mut sim, 0);
    let of_a_round = bytes / 20;
    // The long one, with a window around its header, and a window for the short one.
    assert!(
        of_a_round <= 40_960 + 2 * 16_384,
        "{of_a_round} bytes a round"
    );
}
