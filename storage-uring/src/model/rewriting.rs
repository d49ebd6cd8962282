//! Rewriting segments, with power cuts before and after each step of it, and damage in what was written.
//!
//! `FELIX_MODEL_HISTORIES` sets the number of random histories (default 40).

use super::log_state::{histories, World};
use super::reclaim::{check_everywhere, check_without_record, free, sweep, DAY_US};
use super::{payload, recover, Images, Rng, SimOptions, FREED, UUID};
use crate::format::segment::SegmentHeader;
use crate::machine::{ControlEvent, Retention};
use crate::recovery::images::rewrite_image;
use crate::rewrite::{RewriteFault, RewritePlan, RewriteTotals};

/// The new file of a segment.
pub(super) fn rewritten(
    images: &Images,
    plan: &RewritePlan,
) -> Result<(Vec<u8>, RewriteTotals), RewriteFault> {
    rewrite_image(&UUID, 0, &images[&plan.segment], plan)
}

/// What a power cut leaves while the next segment is rewritten: the old file or the new one.
fn check_rewriting(world: &World) {
    let Some(plan) = world.sim.rewriting.front() else {
        return;
    };
    let Ok((file, _)) = rewritten(&world.sim.durable, plan) else {
        return;
    };
    let mut images = world.sim.durable.clone();
    images.insert(plan.segment, file);
    let first = recover(images);
    world.check(&first);
    let second = recover(first.images.clone());
    assert_eq!((second.cuts, second.damages), (0, 0));
    assert!(
        second.images == first.images,
        "a second start changes no byte"
    );
    world.check(&second);
}

/// Carries the next rewriting out; true when a file was replaced.
pub(super) fn rewrite(world: &mut World, succeeds: bool) -> bool {
    let Some(plan) = world.sim.rewriting.pop_front() else {
        return false;
    };
    let outcome = match succeeds {
        true => rewritten(&world.sim.durable, &plan).map_err(Some),
        false => Err(None),
    };
    let is_done = outcome.is_ok();
    let machine = &mut world.sim.machine;
    match outcome {
        Ok((file, totals)) => {
            let old = world.sim.durable[&plan.segment].len();
            let left = file.len();
            assert!(left * 2 <= old, "{left} of {old} bytes are left");
            world.sim.durable.insert(plan.segment, file);
            machine.on_segment_rewritten(plan.segment, &totals);
        }
        Err(fault) => machine.on_rewrite_failed(plan.segment, fault),
    }
    is_done
}

pub(super) fn is_rewritten(image: &[u8]) -> bool {
    SegmentHeader::decode(image).is_ok_and(|header| header.rewritten.is_some())
}

#[derive(Default)]
struct Seen {
    rewritten: u64,
    again: u64,
    freed: u64,
}

fn random_history(seed: u64, seen: &mut Seen) {
    let mut rng = Rng(7000 + seed);
    let options = SimOptions {
        flush: seed % 3 == 0,
        commits_in_flight: 1 + (seed % 4) as usize,
        ..SimOptions::default()
    };
    let mut world = World::new(options);
    let mut epoch = 1;
    for step in 0..400 {
        world.random_step(&mut rng);
        match rng.below(12) {
            0..=2 => {
                // Shard 2 keeps more: little of it stays in many segments.
                let shard = rng.below(5).min(2) as u32;
                let plain = world.log(shard).1.newest().clone();
                let up = plain.records.len() as u64;
                let up = if shard == 2 { up / 6 } else { up - up.min(2) };
                world.control(shard, ControlEvent::Base(plain.base + up));
            }
            3 => {
                let log = world.log(rng.below(2) as u32).0;
                let retention = Retention {
                    bytes: [0, 20_000][rng.below(2) as usize],
                    age_us: [0, 0, DAY_US][rng.below(3) as usize],
                    below: u64::MAX,
                };
                world.sim.machine.set_retention(log, retention);
            }
            4..=6 => {
                world.sim.settle();
                world.collect();
                sweep(&mut world, [10, 2 * DAY_US][rng.below(2) as usize]);
            }
            7..=9 => {
                world.sim.pump();
                check_rewriting(&world);
                let plan = world.sim.rewriting.front();
                let again =
                    plan.is_some_and(|plan| is_rewritten(&world.sim.durable[&plan.segment]));
                let succeeds = rng.below(8) > 0;
                if rewrite(&mut world, succeeds) {
                    seen.rewritten += 1;
                    seen.again += u64::from(again);
                }
            }
            10 => {
                world.sim.pump();
                check_everywhere(&world);
                let leaving = world.sim.leaving.front();
                let image = leaving.and_then(|(seq, _)| world.sim.durable.get(seq));
                seen.freed += u64::from(image.is_some_and(|image| is_rewritten(image)));
                free(&mut world, rng.below(4) > 0);
            }
            _ => {}
        }
        if step % 8 == 0 {
            world.cut_power(&mut rng, 8);
            check_without_record(&world, &mut rng);
        }
        if rng.below(100) == 0 {
            epoch += 1;
            world.restart(options, &mut rng, 8, epoch);
        }
    }
    world.sim.settle();
    world.collect();
    world.check(&recover(world.sim.durable.clone()));
}

#[test]
fn segments_shrink_and_no_power_cut_shows() {
    let mut seen = Seen::default();
    for seed in 0..histories() {
        random_history(seed, &mut seen);
    }
    let Seen {
        rewritten,
        again,
        freed,
    } = seen;
    println!("{rewritten} segments rewritten, {again} of them again, {freed} given back later");
    assert!(rewritten > 2 * histories(), "{rewritten} rewritten");
    assert!(again > 0 && freed > 0, "{again} again, {freed} given back");
}

/// A slow log that keeps everything beside a busy one whose records were given up.
pub(super) fn slow_beside_busy(rng: &mut Rng) -> World {
    let mut world = World::new(SimOptions::default());
    let begin = ControlEvent::Begin {
        generation: 3,
        leader: "broker-1",
    };
    world.control(0, begin);
    world.control(1, begin);
    for round in 0..40 {
        // The busy log's record comes first where a segment begins; the slow one's lie between.
        world.append(1, &[payload(rng, 9000)]);
        if round % 2 == 0 {
            world.append(0, &[payload(rng, 100 + round)]);
        }
        world.sim.settle();
    }
    world.control(1, ControlEvent::Base(39));
    world.sim.settle();
    world.collect();
    world
}

pub(super) fn rewrite_all(world: &mut World) -> u64 {
    let mut done = 0;
    for _ in 0..20 {
        sweep(world, 10);
        world.sim.settle();
        world.collect();
        loop {
            world.sim.pump();
            check_rewriting(world);
            if !rewrite(world, true) {
                break;
            }
            done += 1;
        }
    }
    done
}

fn live_bytes(images: &Images) -> u64 {
    let segments = images.iter().filter(|(seq, _)| **seq != FREED);
    segments.map(|(_, image)| image.len() as u64).sum()
}

#[test]
fn one_slow_log_no_longer_keeps_whole_segments() {
    let mut rng = Rng(71);
    let mut world = slow_beside_busy(&mut rng);
    let before = live_bytes(&world.sim.durable);
    let done = rewrite_all(&mut world);
    let stats = world.sim.machine.stats();
    assert_eq!(stats.segments_rewritten, done);
    assert!(stats.rewrite_copied_bytes <= stats.rewrite_returned_bytes);
    let after = live_bytes(&world.sim.durable);
    assert_eq!(before - after, stats.rewrite_returned_bytes);
    // What is left: a small file for each old segment, and the segments in use.
    assert!(done >= 5 && after < before / 2, "{before} to {after}");
    let nothing = rewrite_all(&mut world);
    assert_eq!(nothing, 0, "what was rewritten is left alone");
    // All records are read, before and after a start, and the name of the slow log is known.
    let recovered = recover(world.sim.durable.clone());
    world.check(&recovered);
    assert_eq!(recovered.logs[&0].1.len(), 20);
    world.restart(SimOptions::default(), &mut rng, 16, 2);
    world.append(0, &[payload(&mut rng, 10)]);
    world.sim.settle();
    world.collect();
    world.check(&recover(world.sim.durable.clone()));
}

/// A segment can be read alone, also when the extent that carried a log's name went.
#[test]
fn a_name_outlives_the_extent_that_carried_it() {
    let mut rng = Rng(80);
    let mut world = World::new(SimOptions::default());
    // An extent of its own for each record.
    for shard in [0, 1, 0, 1, 0] {
        world.append(shard, &[payload(&mut rng, 6000)]);
        world.sim.settle();
    }
    world.append(1, &[payload(&mut rng, 50_000)]);
    world.control(0, ControlEvent::Base(2));
    world.control(1, ControlEvent::Base(3));
    world.sim.settle();
    world.collect();
    // What is left is rewritten once more, with the name in a piece of its own already.
    for _ in 0..2 {
        sweep(&mut world, 10);
        world.sim.pump();
        let mut plan = world.sim.rewriting.pop_front().expect("one is due");
        plan.max_bytes = u64::MAX;
        let (file, totals) = rewritten(&world.sim.durable, &plan).expect("is whole");
        world.sim.durable.insert(plan.segment, file);
        world
            .sim
            .machine
            .on_segment_rewritten(plan.segment, &totals);
        let alone = Images::from([(1, world.sim.durable[&1].clone())]);
        let names = super::scan(&alone).chapters.names;
        assert_eq!(names.get(&super::name(0).id()), Some(&super::name(0)));
        assert_eq!(names.len(), 1, "{names:?}");
        world.check(&recover(world.sim.durable.clone()));
        // As if less of it were needed.
        if let Some(segment) = world.sim.machine.segments_for_tests().get_mut(1) {
            segment.file_bytes = 1 << 20;
        }
    }
}

/// What a sweep gives up does not count at once, and is needed until the raised base is durable: nothing is
/// tried before.
#[test]
fn nothing_is_rewritten_for_a_base_that_is_not_durable() {
    let mut rng = Rng(81);
    let mut world = World::new(SimOptions::default());
    for _ in 0..12 {
        world.append(0, &[payload(&mut rng, 100)]);
        world.append(1, &[payload(&mut rng, 30_000)]);
        world.sim.settle();
    }
    let log = world.log(1).0;
    let retention = Retention {
        bytes: 30_000,
        ..Retention::default()
    };
    world.sim.machine.set_retention(log, retention);
    for _ in 0..3 {
        sweep(&mut world, 10);
    }
    world.sim.pump();
    assert!(world.sim.rewriting.is_empty(), "the base is on its way");
    world.sim.settle();
    world.collect();
    sweep(&mut world, 10);
    world.sim.pump();
    let plan = world.sim.rewriting.front().expect("one is due");
    assert!(rewritten(&world.sim.durable, plan).is_ok());
}

/// A sweep that is inside a segment while its entries change begins with it anew: else it would pass over what
/// is needed, and give the segment back.
#[test]
fn a_sweep_inside_a_segment_that_was_rewritten_begins_with_it_anew() {
    let mut rng = Rng(82);
    let mut shards = [0, 1, 2];
    shards.sort_by_key(|shard| super::name(*shard).id());
    let [first, second, needed] = shards;
    let mut world = World::new(SimOptions::default());
    for (shard, len) in [(first, 20_000), (second, 20_000), (needed, 100)] {
        world.append(shard, &[payload(&mut rng, len)]);
        world.sim.settle();
    }
    world.append(first, &[payload(&mut rng, 50_000)]);
    world.control(first, ControlEvent::Base(1));
    world.control(second, ControlEvent::Base(1));
    world.sim.settle();
    world.collect();
    for looked_at in 1..=3 {
        let recovered = recover(world.sim.durable.clone());
        let mut world = World {
            sim: super::Sim::start(SimOptions::default(), recovered, 2),
            logs: world.logs.clone(),
            seen: 0,
        };
        world.append(first, &[payload(&mut rng, 10)]);
        world.sim.settle();
        world.sim.machine.step_entries = 1;
        sweep(&mut world, 10);
        world.sim.pump();
        let plan = world.sim.rewriting.pop_front().expect("one is due");
        assert_eq!(plan.segment, 1);
        let (file, totals) = rewritten(&world.sim.durable, &plan).expect("is whole");
        for _ in 0..looked_at {
            world.sim.machine.reclaim(10, 0, 1);
        }
        world.sim.durable.insert(1, file);
        world.sim.machine.on_segment_rewritten(1, &totals);
        for _ in 0..5 {
            sweep(&mut world, 10);
            world.sim.pump();
        }
        let leaving = world.sim.leaving.iter().any(|(segment, _)| *segment == 1);
        assert!(!leaving, "{looked_at} entries were looked at");
        let (_, records) = &recover(world.sim.durable.clone()).logs[&needed];
        assert_eq!(records.len(), 1);
    }
}

/// One that finds no room does not keep the others from being rewritten.
#[test]
fn without_room_for_one_another_is_tried() {
    let mut rng = Rng(83);
    let mut world = slow_beside_busy(&mut rng);
    sweep(&mut world, 10);
    world.sim.pump();
    let mut tried = Vec::new();
    while let Some(plan) = world.sim.rewriting.pop_front() {
        assert!(plan.expected_bytes <= plan.max_bytes);
        tried.push(plan.segment);
        let no_room = Some(RewriteFault::NoRoom);
        world.sim.machine.on_rewrite_failed(plan.segment, no_room);
        world.sim.pump();
    }
    let segments: std::collections::BTreeSet<u64> = tried.iter().copied().collect();
    assert!(
        tried.len() > 3 && segments.len() == tried.len(),
        "{tried:?}"
    );
    // And all of them again, once a sweep has found them again.
    sweep(&mut world, 10);
    world.sim.pump();
    assert!(!world.sim.rewriting.is_empty());
}

/// What is given up of a rewritten segment is given back, a little at first and then the whole.
#[test]
fn a_rewritten_segment_shrinks_again_and_goes() {
    let mut rng = Rng(72);
    let mut world = World::new(SimOptions::default());
    for _ in 0..6 {
        world.append(1, &[payload(&mut rng, 30_000)]);
        world.append(2, &[payload(&mut rng, 14_000)]);
        world.append(0, &[payload(&mut rng, 2500)]);
        world.sim.settle();
    }
    let mut lengths = vec![world.sim.durable[&2].len()];
    for shard in [1, 2] {
        world.control(shard, ControlEvent::Base(6));
        world.sim.settle();
        world.collect();
        assert!(rewrite_all(&mut world) > 0);
        lengths.push(world.sim.durable[&2].len());
    }
    let halves = |pair: &[usize]| pair[1] * 2 <= pair[0];
    assert!(lengths.windows(2).all(halves), "{lengths:?}");
    world.control(0, ControlEvent::Base(6));
    for _ in 0..10 {
        world.append(1, &[payload(&mut rng, 30_000)]);
        world.sim.settle();
    }
    world.collect();
    for _ in 0..30 {
        sweep(&mut world, 10);
        world.sim.settle();
        world.collect();
        check_everywhere(&world);
        free(&mut world, true);
    }
    let oldest = world.sim.durable.keys().find(|seq| **seq != FREED);
    assert!(oldest.is_some_and(|oldest| *oldest > 2), "{oldest:?}");
    world.check(&recover(world.sim.durable.clone()));
}
