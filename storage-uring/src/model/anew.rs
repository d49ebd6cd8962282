//! Logs that recovery refused and their owner had begun anew.

use super::{payload, recover, write_id, Images, Pending, Recovered, Rng, Sim, SimOptions};
use crate::error::{AppendError, CommitError};
use crate::format::group::GroupHeader;
use crate::machine::ControlEvent;

/// Where a log begins anew in these tests.
const BASE: u64 = 3;

/// Shard 0 under several leaders, shard 1 beside it, over several segments.
fn written(rng: &mut Rng) -> Sim {
    let mut sim = Sim::new(SimOptions::default());
    for step in 0..40u64 {
        if step % 10 == 5 {
            let log = sim.log(0);
            let begin = ControlEvent::Begin {
                generation: step,
                leader: "a",
            };
            sim.machine
                .push_control(log, begin, 0, sim.now_us, 0)
                .expect("is taken");
            // In a group of its own, so that damage to it is no damage to the shard beside.
            sim.settle();
        }
        let len = 50 + rng.below(4000) as usize;
        sim.append((step % 2) as u32, &[payload(rng, len)]);
        sim.settle();
    }
    sim
}

/// Start and used bytes of the groups of an image.
fn groups(image: &[u8]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut at = 4096;
    while let Ok(header) = GroupHeader::decode(&super::UUID, &image[at.min(image.len())..]) {
        found.push((at, header.used_len as usize));
        at += header.total_len as usize;
    }
    found
}

/// Every way to flip one bit in a group of the first two segments that refuses shard 0 and not shard 1.
fn damaged_for_one(sim: &Sim) -> Vec<Images> {
    let mut found = Vec::new();
    for segment in [1, 2] {
        for (at, used) in groups(&sim.durable[&segment]) {
            let mut images = sim.durable.clone();
            images.get_mut(&segment).expect("exists")[at + used - 3] ^= 4;
            let recovered = recover(images.clone());
            let is_refused = |shard: u32| recovered.logs[&shard].0.damage.is_some();
            if is_refused(0) && !is_refused(1) {
                found.push(images);
            }
        }
    }
    assert!(found.len() > 4, "{}", found.len());
    found
}

/// A start over a recovery; shadows know nothing of what the damage left.
fn start(recovered: Recovered, epoch: u64) -> Sim {
    let mut sim = Sim::start(SimOptions::default(), recovered, epoch);
    sim.keeps_shadows = false;
    sim
}

fn begin_anew(sim: &mut Sim) -> Result<(), AppendError> {
    let log = sim.log(0);
    let place = ControlEvent::Place(BASE);
    sim.machine.push_control(log, place, 9, sim.now_us, 77)
}

fn append(sim: &mut Sim, record: &[u8]) {
    let log = sim.log(0);
    let records = [record].into_iter();
    let now_us = sim.now_us;
    let taken = sim.machine.append(log, 50, 7, now_us, records, 78);
    taken.expect("is taken");
}

#[test]
fn a_refused_log_begins_anew_and_stays_whole_whatever_was_lost() {
    let mut rng = Rng(41);
    let sim = written(&mut rng);
    let beside = sim.shadows[&1].submitted.clone();
    for images in damaged_for_one(&sim) {
        let recovered = recover(images);
        let named = recovered.logs[&0].0.generation;
        let mut next = start(recovered, 2);
        let log = next.log(0);
        assert!(next.machine.damage(log).is_some());
        for event in [ControlEvent::Accept(99), ControlEvent::Truncate(5)] {
            let refused = next.machine.push_control(log, event, 0, 0, 1);
            assert_eq!(refused, Err(AppendError::Damaged), "{event:?}");
        }
        assert!(next.machine.accepted(log) >= named, "a record names it");
        begin_anew(&mut next).expect("is taken");
        assert_eq!(next.machine.damage(log), None);
        append(&mut next, b"first");
        append(&mut next, b"second");
        next.settle();
        assert!(next.completions.iter().all(|done| done.result.is_ok()));
        let mut images = next.durable;
        for epoch in 3..5 {
            let again = recover(images);
            let (seed, records) = &again.logs[&0];
            assert_eq!(seed.damage, None, "start {epoch}");
            assert_eq!((seed.base, seed.tail), (BASE, BASE + 2));
            assert_eq!(*records, [b"first".to_vec(), b"second".to_vec()]);
            assert!(seed.control.accepted >= named, "it never falls");
            assert!(seed.control.history.is_empty());
            assert_eq!(again.logs[&1].1, beside, "its neighbour is as it was");
            assert!(again.damages > 0, "the damage stays to be looked at");
            let mut idle = start(again, epoch);
            idle.settle();
            images = idle.durable;
        }
    }
}

/// The records that named a generation are gone with the log. What had been accepted by them is not.
#[test]
fn a_log_begun_anew_has_accepted_what_anything_of_it_named() {
    let mut rng = Rng(45);
    let sim = written(&mut rng);
    for images in damaged_for_one(&sim) {
        let recovered = recover(images);
        let seed = &recovered.logs[&0].0;
        let named = seed.generation.max(seed.control.accepted);
        assert!(named > 0);
        let mut next = start(recovered, 2);
        begin_anew(&mut next).expect("is taken");
        next.settle();
        let again = recover(next.durable);
        let seed = &again.logs[&0].0;
        assert_eq!((&seed.damage, seed.base, seed.tail), (&None, BASE, BASE));
        assert!(
            seed.control.accepted >= named,
            "{} of {named}",
            seed.control.accepted
        );
    }
}

#[test]
fn a_power_cut_leaves_a_refused_log_or_one_that_has_begun_anew() {
    let mut rng = Rng(42);
    let sim = written(&mut rng);
    let (mut refused, mut whole) = (0, 0);
    for images in damaged_for_one(&sim) {
        let mut next = start(recover(images), 2);
        begin_anew(&mut next).expect("is taken");
        append(&mut next, &payload(&mut rng, 9000));
        for steps in 0..3 {
            next.pump();
            for keep in [0, 4, 12, 16] {
                let left = next.cut_power(|_, _| rng.below(16) < keep);
                let found = recover(left);
                let (seed, records) = &found.logs[&0];
                let acked = next.completions.len();
                if seed.damage.is_some() {
                    assert_eq!(acked, 0, "an acknowledged beginning is refused");
                    refused += 1;
                } else {
                    assert_eq!(seed.base, BASE);
                    assert!(records.len() + 1 >= acked, "an acknowledged record is gone");
                    whole += 1;
                }
            }
            if steps < 2 && !next.pending.is_empty() {
                next.finish(0);
            }
        }
    }
    assert!(refused > 10 && whole > 10, "{refused} and {whole}");
}

#[test]
fn a_full_disk_leaves_it_refused_until_it_is_asked_again() {
    let mut rng = Rng(43);
    let sim = written(&mut rng);
    let images = damaged_for_one(&sim).swap_remove(0);
    let mut next = start(recover(images), 2);
    let log = next.log(0);
    let before = next.machine.view(log);
    begin_anew(&mut next).expect("is taken");
    next.pump();
    let Pending { action, .. } = next.pending.remove(0);
    let id = write_id(&action);
    next.machine
        .on_write_done(id, &action, Err(libc::ENOSPC), 0);
    next.collect();
    let outcomes: Vec<_> = next.completions.drain(..).map(|done| done.result).collect();
    assert_eq!(outcomes, [Err(CommitError::DiskFull)]);
    assert!(next.machine.damage(log).is_some(), "as it was found");
    assert_eq!(next.machine.view(log), before);
    begin_anew(&mut next).expect("is taken");
    append(&mut next, b"first");
    next.settle();
    let again = recover(next.durable.clone());
    assert_eq!(again.logs[&0].0.damage, None);
    assert_eq!(again.logs[&0].1, [b"first".to_vec()]);
}

#[test]
fn a_segment_with_damage_in_it_stays_after_its_log_has_begun_anew() {
    let mut rng = Rng(44);
    let sim = written(&mut rng);
    for images in damaged_for_one(&sim) {
        let segments: Vec<u64> = images.keys().copied().collect();
        let mut next = start(recover(images), 2);
        begin_anew(&mut next).expect("is taken");
        let other = next.log(1);
        let everything = next.machine.tail(other);
        let base = ControlEvent::Base(everything);
        next.machine
            .push_control(other, base, 0, 0, 79)
            .expect("is taken");
        for _ in 0..20 {
            append(&mut next, &payload(&mut rng, 9000));
            next.settle();
            while next.machine.reclaim(0, 0, 4096) && !next.leaving.is_empty() {
                let Some((segment, _)) = next.leaving.pop_front() else {
                    break;
                };
                next.durable.remove(&segment);
                next.machine.on_segment_freed(segment);
            }
        }
        let left = |seq: &&u64| next.durable.contains_key(*seq);
        let kept: Vec<u64> = segments.iter().filter(left).copied().collect();
        assert!(!kept.is_empty(), "the evidence is gone");
        assert!(
            kept.len() < segments.len(),
            "what is sound and unneeded goes"
        );
    }
}
