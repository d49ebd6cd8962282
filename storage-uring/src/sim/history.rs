//! A history: what happens to the logs of one core, drawn from a seed, with a check after each step.

use std::ops::AddAssign;

use serde::Serialize;

use super::device::{write_id, Pending, SimOptions};
use super::plain::Op;
use super::rig::{Rig, LEADERS};
use super::violation::{caught, holds, Violation};
use super::{payload, Rng};
use crate::machine::Action;

const SHARDS: u64 = 4;

/// What happened in a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct HistoryCounts {
    /// Power cuts a start followed.
    pub power_cuts: u64,
    /// Orderly starts.
    pub restarts: u64,
    /// Truncations, placings, raised bases, accepted generations, beginnings.
    pub events: u64,
    /// Writes that found no space.
    pub full_disks: u64,
    /// Writes and flushes that failed for good.
    pub failed_syncs: u64,
    /// Segments written anew without what nobody needs.
    pub rewritten_segments: u64,
    /// Segments given back.
    pub freed_segments: u64,
    /// Synced groups in which a bit was flipped, to see what a start says.
    pub flipped_bits: u64,
    /// Checksum over the device in the end: equal for two runs of one seed.
    #[serde(skip)]
    pub fingerprint: u32,
}

impl AddAssign for HistoryCounts {
    fn add_assign(&mut self, one: Self) {
        self.power_cuts += one.power_cuts;
        self.restarts += one.restarts;
        self.events += one.events;
        self.full_disks += one.full_disks;
        self.failed_syncs += one.failed_syncs;
        self.rewritten_segments += one.rewritten_segments;
        self.freed_segments += one.freed_segments;
        self.flipped_bits += one.flipped_bits;
        self.fingerprint ^= one.fingerprint;
    }
}

/// Runs the history of one seed to its end.
///
/// # Errors
/// With the first broken invariant.
pub fn run_history(seed: u64) -> Result<HistoryCounts, Violation> {
    caught(|| run(seed))
}

fn run(seed: u64) -> HistoryCounts {
    let mut rng = Rng(seed);
    let options = SimOptions {
        flush: rng.below(2) == 0,
        commits_in_flight: 1 + rng.below(4) as usize,
        max_transfer_bytes: 8192,
    };
    let mut rig = Rig::new(options);
    let mut counts = HistoryCounts::default();
    for _ in 0..20 + rng.below(60) {
        rig = step(rig, &mut rng, &mut counts);
        rig.check_bounds();
    }
    rig.settle();
    for shard in 0..SHARDS as u32 {
        let log = rig.logs.entry(shard).or_default();
        holds!(40, log.is_answered(), "shard {shard} waits for an answer");
        let (base, tail) = (log.acked.base, log.acked.tail());
        for from in (base..tail).step_by(7) {
            rig.check_read(shard, from, 2000);
        }
    }
    counts.flipped_bits += u64::from(rig.check_rotten(&mut rng));
    let rig = rig.restart(&mut rng);
    let images = rig.sim.durable.values();
    counts.fingerprint = images.fold(0, |crc, image| crc32c::crc32c_append(crc, image));
    counts
}

fn step(mut rig: Rig, rng: &mut Rng, counts: &mut HistoryCounts) -> Rig {
    match rng.below(64) {
        0..22 => append(&mut rig, rng),
        22..27 => {
            control(&mut rig, rng);
            counts.events += 1;
        }
        27..37 => rig.sim.pump(),
        37..52 => finish_any(&mut rig, rng),
        52..56 => read_some(&mut rig, rng),
        56 => counts.flipped_bits += u64::from(rig.check_rotten(rng)),
        57 | 58 => reclaim(&mut rig, rng, counts),
        59 => counts.full_disks += u64::from(no_space(&mut rig, rng)),
        60 => {
            if fail_for_good(&mut rig, rng) {
                counts.failed_syncs += 1;
                rig = rig.crash(rng, 8);
                counts.power_cuts += 1;
            }
        }
        61 => {
            rig = rig.restart(rng);
            counts.restarts += 1;
        }
        _ => {
            let keep = [0, 2, 8, 14, 16][rng.below(5) as usize];
            rig = rig.crash(rng, keep);
            counts.power_cuts += 1;
        }
    }
    rig
}

fn random_len(rng: &mut Rng) -> usize {
    let bound = [300, 300, 300, 300, 5000, 5000, 30_000][rng.below(7) as usize];
    rng.below(bound) as usize
}

fn append(rig: &mut Rig, rng: &mut Rng) {
    let shard = rng.below(SHARDS) as u32;
    let batch: Vec<_> = (0..rng.below(6))
        .map(|_| {
            let len = random_len(rng);
            payload(rng, len)
        })
        .collect();
    rig.append(shard, &batch);
}

/// Any event that is allowed on the log as submitted, also while earlier appends are on their way.
fn control(rig: &mut Rig, rng: &mut Rng) {
    let shard = rng.below(SHARDS) as u32;
    let log = &rig.logs.entry(shard).or_default().submitted;
    let (base, tail) = (log.base, log.tail());
    let generation = log.accepted + rng.below(2);
    let op = match rng.below(9) {
        6 => Op::Accept(generation),
        7 | 8 => Op::Begin(generation, LEADERS[rng.below(3) as usize]),
        0 => Op::Place(rng.below(50)),
        1 => Op::Place(tail),
        2 => Op::Base(base + rng.below(tail - base + 1)),
        3 => Op::Truncate(base + rng.below(tail - base + 1)),
        _ => Op::Truncate(tail - rng.below(tail - base + 1).min(4)),
    };
    rig.control(shard, op);
}

fn finish_any(rig: &mut Rig, rng: &mut Rng) {
    let finishable = rig.sim.finishable();
    if !finishable.is_empty() {
        rig.finish(finishable[rng.below(finishable.len() as u64) as usize]);
    }
}

fn read_some(rig: &mut Rig, rng: &mut Rng) {
    let shard = rng.below(SHARDS) as u32;
    let log = &rig.logs.entry(shard).or_default().acked;
    let (base, tail) = (log.base, log.tail());
    let from = base + rng.below(tail - base + 1);
    let max_bytes = [1, 100, 4096, 60_000][rng.below(4) as usize];
    rig.check_read(shard, from, max_bytes);
}

/// Logs give up most of what they hold; segments of which little is needed are rewritten, those of which
/// nothing is are given back. The power may go after each step of it.
fn reclaim(rig: &mut Rig, rng: &mut Rng, counts: &mut HistoryCounts) {
    for shard in 0..SHARDS as u32 {
        let log = &rig.logs.entry(shard).or_default().submitted;
        let (base, tail) = (log.base, log.tail());
        // Of one log more is kept than of the others.
        let kept = (tail - base) / (8 >> shard);
        rig.control(shard, Op::Base(tail - kept));
    }
    rig.settle();
    // The state of a log is restated before the segment with it can go.
    for _ in 0..3 {
        rig.sim.machine.reclaim(0, rig.sim.now_us, usize::MAX);
        rig.settle();
        let before = rig.contents();
        while let Some(is_done) = rig.sim.rewrite_next() {
            rig.check_same_contents(&before, &"a segment was rewritten");
            if is_done {
                counts.rewritten_segments += 1;
                may_lose_power(rig, rng);
            }
        }
        if let Some((segment, record)) = rig.sim.leaving.front() {
            let left = rig.sim.freeing(*segment, record, rng.below(3));
            rig.check_cut(left, rng);
        }
        if let Some(segment) = rig.sim.free_next() {
            counts.freed_segments += 1;
            let what = format_args!("segment {segment} was given back").to_string();
            rig.check_same_contents(&before, &what);
        }
    }
}

/// Looks at what would be left if the power went now, now and then.
fn may_lose_power(rig: &Rig, rng: &mut Rng) {
    if rng.below(2) == 0 {
        let images = rig.sim.cut_power(|_, _| rng.below(2) == 0);
        rig.check_cut(images, rng);
    }
}

/// The device has no space for one write: the group and all behind it are undone. Its bytes may or may not
/// have reached the medium.
fn no_space(rig: &mut Rig, rng: &mut Rng) -> bool {
    let is_write =
        |pending: &Pending| !pending.written && matches!(pending.action, Action::Write { .. });
    let writes: Vec<usize> = (0..rig.sim.pending.len())
        .filter(|at| is_write(&rig.sim.pending[*at]))
        .collect();
    if writes.is_empty() {
        return false;
    }
    let at = writes[rng.below(writes.len() as u64) as usize];
    let Pending { action, .. } = rig.sim.pending.remove(at);
    if rng.below(2) == 0 {
        rig.sim.store(&action);
    }
    rig.begin_refusal(&action);
    let now_us = rig.sim.now_us;
    rig.sim
        .machine
        .on_write_done(write_id(&action), &action, Err(libc::ENOSPC), now_us);
    // Earlier groups may still be on their way, and outcomes leave in order. The power may go right now.
    let images = rig.sim.cut_power(|_, _| rng.below(2) == 0);
    rig.check_cut(images, rng);
    rig.settle();
    true
}

/// One write or flush fails for good; nothing is acknowledged any more until a restart.
fn fail_for_good(rig: &mut Rig, rng: &mut Rng) -> bool {
    let finishable = rig.sim.finishable();
    if finishable.is_empty() {
        return false;
    }
    let at = finishable[rng.below(finishable.len() as u64) as usize];
    rig.begin_failure();
    let (id, now_us) = (write_id(&rig.sim.pending[at].action), rig.sim.now_us);
    if matches!(rig.sim.pending[at].action, Action::Flush { .. }) {
        rig.sim.machine.on_flush_done(id, Err(libc::EIO), now_us);
    } else {
        let action = &rig.sim.pending[at].action;
        rig.sim
            .machine
            .on_write_done(id, action, Err(libc::EIO), now_us);
    }
    let has_failed = rig.sim.machine.failure().is_some();
    holds!(47, has_failed, "a failed sync is taken for a good one");
    rig.collect();
    while let Some(at) = rig.sim.finishable().first().copied() {
        if rng.below(2) == 0 {
            break;
        }
        let acked: Vec<u64> = rig.logs.values().map(|log| log.acked.tail()).collect();
        rig.finish(at);
        let after: Vec<u64> = rig.logs.values().map(|log| log.acked.tail()).collect();
        holds!(
            47,
            acked == after,
            "a later success acknowledges {acked:?} to {after:?}"
        );
    }
    true
}
