//! Retention and giving segments back, with power cuts before, between and after every step of it.
//!
//! `FELIX_MODEL_HISTORIES` sets the number of random histories (default 40).

use super::log_state::{histories, Plain, World};
use super::{payload, recover, write_id, Images, Rng, Sim, SimOptions, FREED};
use crate::format::freed::FreedRuns;
use crate::machine::{ControlEvent, Retention};

pub(super) const DAY_US: u64 = 86_400_000_000;

/// One sweep of the machine; bases it raises are versions like any other.
pub(super) fn sweep(world: &mut World, wall_us: u64) {
    for _ in 0..200 {
        // An entry at a time, so that its steps are met on their own.
        let anew = world.sim.machine.reclaim(wall_us, 0, 1);
        for (shard, versions) in &mut world.logs {
            let Some(log) = world.sim.logs.get(shard) else {
                continue;
            };
            let state = world.sim.machine.log_state(*log);
            let mut plain = versions.newest().clone();
            if state.queued_base > plain.base {
                plain.apply(ControlEvent::Base(state.queued_base));
                versions.all.push(plain);
            }
        }
        if anew {
            break;
        }
    }
}

/// The states a power cut can leave while a segment is on its way out, oldest first.
fn leaving_states(world: &World) -> Vec<Images> {
    let Some((segment, record)) = world.sim.leaving.front() else {
        return Vec::new();
    };
    let mut named = world.sim.durable.clone();
    named.insert(FREED, record.clone());
    let mut zeroed = named.clone();
    // Its bytes are gone and its name is not.
    if let Some(image) = zeroed.get_mut(segment) {
        image.fill(0);
    }
    let mut gone = named.clone();
    gone.remove(segment);
    vec![named, zeroed, gone]
}

pub(super) fn check_everywhere(world: &World) {
    for images in leaving_states(world) {
        let first = recover(images);
        world.check(&first);
        let second = recover(first.images.clone());
        assert_eq!((second.cuts, second.damages), (0, 0));
        world.check(&second);
    }
}

/// Without the record (or with a damaged one) no log may be served wrongly: refused, or exactly a version.
pub(super) fn check_without_record(world: &World, rng: &mut Rng) {
    let Some(record) = world.sim.durable.get(&FREED) else {
        return;
    };
    let mut damaged = record.clone();
    let at = rng.below(damaged.len() as u64) as usize;
    damaged[at] ^= 1 << rng.below(8);
    for replacement in [None, Some(damaged)] {
        let mut images = world.sim.durable.clone();
        images.remove(&FREED);
        if let Some(bytes) = replacement {
            images.insert(FREED, bytes);
        }
        let recovered = recover(images);
        for (shard, versions) in &world.logs {
            let Some((seed, records)) = recovered.logs.get(shard) else {
                assert!(
                    versions.all[versions.acknowledged] == Plain::default()
                        || recovered.damages > 0,
                    "a log vanished without a word"
                );
                continue;
            };
            if seed.damage.is_none() {
                let found = Plain::recovered(seed, records);
                assert!(
                    versions.all[versions.acknowledged..].contains(&found),
                    "shard {shard}: {found:?}"
                );
            }
        }
    }
}

/// Carries out the next step of freeing.
pub(super) fn free(world: &mut World, succeeds: bool) {
    let Some((segment, record)) = world.sim.leaving.pop_front() else {
        return;
    };
    if succeeds {
        world.sim.durable.insert(FREED, record);
        world.sim.durable.remove(&segment);
        world.sim.machine.on_segment_freed(segment);
    } else {
        world.sim.machine.on_free_failed();
    }
}

fn random_history(seed: u64) -> (u64, bool) {
    let mut rng = Rng(1000 + seed);
    let options = SimOptions {
        flush: seed % 3 == 0,
        commits_in_flight: 1 + (seed % 4) as usize,
        ..SimOptions::default()
    };
    let mut world = World::new(options);
    let (mut epoch, mut freed, mut interior) = (1, 0, false);
    for step in 0..400 {
        world.random_step(&mut rng);
        match rng.below(12) {
            0 | 1 => {
                // Shard 2 keeps more, so that segments in the middle go.
                let shard = rng.below(5).min(2) as u32;
                let plain = world.log(shard).1.newest().clone();
                let up = plain.records.len() as u64;
                let up = if shard == 2 { up / 4 } else { up - up.min(2) };
                world.control(shard, ControlEvent::Base(plain.base + up));
            }
            2 => {
                let shard = rng.below(2) as u32;
                let log = world.log(shard).0;
                let retention = Retention {
                    bytes: [0, 20_000, 60_000][rng.below(3) as usize],
                    age_us: [0, 0, DAY_US][rng.below(3) as usize],
                    below: [u64::MAX, 40][rng.below(2) as usize],
                };
                world.sim.machine.set_retention(log, retention);
            }
            3 | 4 => {
                let wall_us = [10, 2 * DAY_US][rng.below(2) as usize];
                sweep(&mut world, wall_us);
            }
            5 => {
                world.sim.settle();
                world.collect();
                sweep(&mut world, 10);
                world.sim.settle();
                sweep(&mut world, 10);
            }
            6..=8 => {
                world.sim.pump();
                check_everywhere(&world);
                freed += u64::from(!world.sim.leaving.is_empty());
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
        let record = world.sim.durable.get(&FREED);
        let runs = record.map(|bytes| FreedRuns::decode(&super::UUID, 0, bytes).expect("ours"));
        let oldest = world.sim.durable.keys().find(|seq| **seq != FREED);
        interior |=
            runs.is_some_and(|runs| oldest.is_some_and(|oldest| runs.reaches_over(*oldest)));
    }
    world.sim.settle();
    world.collect();
    world.check(&recover(world.sim.durable.clone()));
    (freed, interior)
}

#[test]
fn segments_go_and_no_power_cut_shows() {
    let (mut freed, mut interior) = (0, 0);
    for seed in 0..histories() {
        let (of_history, in_the_middle) = random_history(seed);
        freed += of_history;
        interior += u64::from(in_the_middle);
    }
    assert!(freed > 2 * histories(), "{freed} segments were freed");
    assert!(interior > 0, "segments in the middle were freed");
}

#[test]
fn an_empty_log_outlives_the_segments_it_was_in() {
    let mut rng = Rng(3);
    let mut world = World::new(SimOptions::default());
    let begin = ControlEvent::Begin {
        generation: 6,
        leader: "broker-1",
    };
    world.control(0, begin);
    for _ in 0..20 {
        world.append(0, &[payload(&mut rng, 9000)]);
    }
    world.control(0, ControlEvent::Base(20));
    for _ in 0..30 {
        world.append(1, &[payload(&mut rng, 9000)]);
        world.sim.settle();
    }
    world.collect();
    let before = world.sim.durable.len();
    for _ in 0..20 {
        sweep(&mut world, 10);
        world.sim.settle();
        check_everywhere(&world);
        free(&mut world, true);
    }
    assert!(world.sim.durable.len() < before - 1, "segments went");
    let recovered = recover(world.sim.durable.clone());
    world.check(&recovered);
    let (seed, records) = &recovered.logs[&0];
    assert_eq!((seed.base, seed.tail, records.len()), (20, 20, 0));
    assert_eq!(seed.control.accepted, 6);
    // A deposed leader is still refused after the restart, and offsets go on.
    world.restart(SimOptions::default(), &mut rng, 16, 2);
    world.append(0, &[payload(&mut rng, 10)]);
    world.sim.settle();
    world.check(&recover(world.sim.durable.clone()));
}

#[test]
fn retention_keeps_what_it_was_told_to_keep() {
    let mut rng = Rng(4);
    let mut world = World::new(SimOptions::default());
    let log = world.log(0).0;
    for _ in 0..60 {
        world.append(0, &[payload(&mut rng, 4000)]);
        world.sim.settle();
    }
    world.collect();
    sweep(&mut world, 10);
    world.sim.settle();
    assert_eq!(world.sim.machine.base(log), 0, "nothing was asked for");
    let keep = |bytes, age_us, below| Retention {
        bytes,
        age_us,
        below,
    };
    world.sim.machine.set_retention(log, keep(100_000, 0, 12));
    for _ in 0..5 {
        sweep(&mut world, 10);
        world.sim.settle();
    }
    let base = world.sim.machine.base(log);
    assert_eq!(base, 12, "never at or above the bound of replication");
    world
        .sim
        .machine
        .set_retention(log, keep(100_000, 0, u64::MAX));
    for _ in 0..5 {
        sweep(&mut world, 10);
        world.sim.settle();
    }
    let held = (60 - world.sim.machine.base(log)) * 4000;
    assert!((100_000..180_000).contains(&held), "{held} bytes are kept");
    world
        .sim
        .machine
        .set_retention(log, keep(0, DAY_US, u64::MAX));
    sweep(&mut world, 10);
    world.sim.settle();
    assert!(world.sim.machine.base(log) < 50, "too young");
    for _ in 0..5 {
        sweep(&mut world, 2 * DAY_US);
        world.sim.settle();
    }
    let base = world.sim.machine.base(log);
    assert!(base >= 45, "everything in finished segments is old: {base}");
    world.check(&recover(world.sim.durable.clone()));
}

#[test]
fn what_was_appended_behind_a_cut_is_not_given_up_with_what_was_cut() {
    let mut rng = Rng(6);
    for flush in [false, true] {
        let mut world = World::new(SimOptions {
            flush,
            ..SimOptions::default()
        });
        let log = world.log(0).0;
        for _ in 0..60 {
            world.append(0, &[payload(&mut rng, 4000)]);
            world.sim.settle();
        }
        world.collect();
        let retention = Retention {
            bytes: 0,
            age_us: DAY_US,
            below: u64::MAX,
        };
        world.sim.machine.set_retention(log, retention);
        // The copy of a former leader is cut and written anew: nothing of that is durable at the sweep.
        world.control(0, ControlEvent::Truncate(15));
        for _ in 0..10 {
            world.append(0, &[payload(&mut rng, 100)]);
        }
        sweep(&mut world, 2 * DAY_US);
        world.sim.settle();
        world.collect();
        let base = world.sim.machine.base(log);
        assert!(base <= 15, "records from 15 on are new: {base}");
        assert_eq!(world.sim.machine.tail(log), 25);
        // Old ones go in the next sweeps; the new ones are in the segment being written.
        for _ in 0..5 {
            sweep(&mut world, 2 * DAY_US);
            world.sim.settle();
        }
        assert_eq!(world.sim.machine.base(log), 15);
        world.check(&recover(world.sim.durable.clone()));
    }
}

#[test]
fn a_segment_waits_for_the_writes_of_what_was_undone() {
    let mut rng = Rng(7);
    let mut sim = Sim::new(SimOptions::default());
    sim.append(0, &[payload(&mut rng, 5000)]);
    sim.settle();
    // A group in two transfers: one finds no space, the other one is stuck.
    sim.append(0, &[payload(&mut rng, 12_000)]);
    sim.pump();
    let [refused, stuck] = [sim.pending.remove(0), sim.pending.remove(0)].map(|it| it.action);
    assert!(sim.pending.is_empty());
    let id = write_id(&refused);
    (sim.machine).on_write_done(id, &refused, Err(libc::ENOSPC), 0);
    sim.collect();
    assert_eq!(sim.machine.tail(sim.logs[&0]), 1, "undone");
    let log = sim.logs[&0];
    (sim.machine)
        .push_control(log, ControlEvent::Base(1), 1, 0, 0)
        .expect("is taken");
    for _ in 0..30 {
        sim.append(1, &[payload(&mut rng, 9000)]);
        sim.settle();
    }
    let sweep = |sim: &mut Sim| {
        for _ in 0..10 {
            sim.machine.reclaim(10, 0, 1000);
            sim.settle();
        }
    };
    sweep(&mut sim);
    assert!(sim.leaving.is_empty(), "the write may land in it yet");
    assert!(sim.machine.may_give_back(), "and it is not forgotten");
    sim.store(&stuck);
    (sim.machine).on_write_done(write_id(&stuck), &stuck, Ok(8192), 0);
    sweep(&mut sim);
    assert_eq!(sim.leaving.front().map(|(segment, _)| *segment), Some(1));
}

#[test]
fn a_lost_segment_is_not_taken_for_a_freed_one() {
    let mut rng = Rng(5);
    let mut world = World::new(SimOptions::default());
    for _ in 0..40 {
        world.append(0, &[payload(&mut rng, 9000)]);
        world.append(1, &[payload(&mut rng, 100)]);
        world.sim.settle();
    }
    world.collect();
    for lost in [1, 3] {
        let mut images = world.sim.durable.clone();
        images.remove(&lost);
        let recovered = recover(images);
        assert!(recovered.damages > 0, "segment {lost}: {}", recovered.notes);
        assert!(recovered.logs[&0].0.damage.is_some());
        assert!(recovered.logs[&1].0.damage.is_some());
    }
}
