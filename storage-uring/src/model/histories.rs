//! Property: whatever happens to logs, in whatever order writes finish, and however often the power is cut,
//! they are the plain lists of the contract.
//!
//! `FELIX_HISTORIES=10000` runs that many instead of the suite's share; `FELIX_HISTORIES_SEED` names the
//! first seed (a failure names its own).

use super::plain::Op;
use super::rig::{Rig, LEADERS};
use super::{count, payload, write_id, Pending, Rng, SimOptions};
use crate::machine::Action;

const SHARDS: u64 = 4;

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

/// The device has no space for one write: the group and all behind it are undone. Its bytes may or may not
/// have reached the medium.
fn no_space(rig: &mut Rig, rng: &mut Rng) {
    let is_write =
        |pending: &Pending| !pending.written && matches!(pending.action, Action::Write { .. });
    let writes: Vec<usize> = (0..rig.sim.pending.len())
        .filter(|at| is_write(&rig.sim.pending[*at]))
        .collect();
    if writes.is_empty() {
        return;
    }
    let at = writes[rng.below(writes.len() as u64) as usize];
    let Pending { action, .. } = rig.sim.pending.remove(at);
    if rng.below(2) == 0 {
        rig.sim.store(&action);
    }
    rig.begin_refusal();
    let now_us = rig.sim.now_us;
    rig.sim
        .machine
        .on_write_done(write_id(&action), &action, Err(libc::ENOSPC), now_us);
    // Earlier groups may still be on their way, and outcomes leave in order. The power may go right now.
    let images = rig.sim.cut_power(|_, _| rng.below(2) == 0);
    rig.check_cut(images, rng);
    rig.settle();
}

/// One write or flush fails for good; nothing is acknowledged any more until a restart.
fn fail_for_good(rig: &mut Rig, rng: &mut Rng) {
    let finishable = rig.sim.finishable();
    if finishable.is_empty() {
        return;
    }
    let at = finishable[rng.below(finishable.len() as u64) as usize];
    rig.begin_refusal();
    let (id, now_us) = (write_id(&rig.sim.pending[at].action), rig.sim.now_us);
    if matches!(rig.sim.pending[at].action, Action::Flush { .. }) {
        rig.sim.machine.on_flush_done(id, Err(libc::EIO), now_us);
    } else {
        let action = &rig.sim.pending[at].action;
        rig.sim
            .machine
            .on_write_done(id, action, Err(libc::EIO), now_us);
    }
    assert!(rig.sim.machine.failure().is_some());
    rig.collect();
    while let Some(at) = rig.sim.finishable().first().copied() {
        if rng.below(2) == 0 {
            break;
        }
        let acked: Vec<u64> = rig.logs.values().map(|log| log.acked.tail()).collect();
        rig.finish(at);
        let after: Vec<u64> = rig.logs.values().map(|log| log.acked.tail()).collect();
        assert_eq!(acked, after, "a later success acknowledges nothing");
    }
}

fn run(seed: u64) -> [u64; 4] {
    let mut rng = Rng(seed);
    let options = SimOptions {
        flush: rng.below(2) == 0,
        commits_in_flight: 1 + rng.below(4) as usize,
        max_transfer_bytes: 8192,
    };
    let mut rig = Rig::new(options);
    let [mut crashes, mut restarts, mut events, mut undone] = [0; 4];
    for _ in 0..20 + rng.below(60) {
        match rng.below(64) {
            0..22 => append(&mut rig, &mut rng),
            22..27 => {
                control(&mut rig, &mut rng);
                events += 1;
            }
            27..38 => rig.sim.pump(),
            38..54 => finish_any(&mut rig, &mut rng),
            54..59 => read_some(&mut rig, &mut rng),
            59 => {
                no_space(&mut rig, &mut rng);
                undone += 1;
            }
            60 => {
                fail_for_good(&mut rig, &mut rng);
                if rig.sim.machine.failure().is_some() {
                    rig = rig.crash(&mut rng, 8);
                    crashes += 1;
                }
            }
            61 => {
                rig = rig.restart(&mut rng);
                restarts += 1;
            }
            _ => {
                let keep = [0, 2, 8, 14, 16][rng.below(5) as usize];
                rig = rig.crash(&mut rng, keep);
                crashes += 1;
            }
        }
    }
    rig.settle();
    for shard in 0..SHARDS as u32 {
        let log = rig.logs.entry(shard).or_default();
        assert!(log.is_answered(), "everything is answered");
        let (base, tail) = (log.acked.base, log.acked.tail());
        for from in (base..tail).step_by(7) {
            rig.check_read(shard, from, 2000);
        }
    }
    rig.restart(&mut rng);
    [crashes, restarts, events, undone]
}

#[test]
fn random_histories_are_the_plain_lists() {
    let histories = count("FELIX_HISTORIES", 250);
    let first = count("FELIX_HISTORIES_SEED", 1);
    let mut totals = [0; 4];
    for seed in first..first + histories {
        let ran = std::panic::catch_unwind(|| run(seed));
        let counts = ran.unwrap_or_else(|_| {
            panic!("replay with FELIX_HISTORIES_SEED={seed} FELIX_HISTORIES=1")
        });
        for (total, count) in totals.iter_mut().zip(counts) {
            *total += count;
        }
    }
    let [crashes, restarts, events, undone] = totals;
    println!("{histories} histories: {crashes} power cuts, {restarts} restarts, {events} events, {undone} full disks");
    assert!(histories < 100 || (crashes > 50 && restarts > 20 && events > 100 && undone > 20));
}
