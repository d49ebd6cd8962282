//! Damage in and around rewritten segments, and segments that are left as they are.

use super::log_state::{Plain, World};
use super::reclaim::sweep;
use super::rewriting::{is_rewritten, rewrite, rewrite_all, rewritten, slow_beside_busy};
use super::{payload, recover, Images, Recovered, Rng, SimOptions, FREED, UUID};
use crate::format::freed::FreedRuns;
use crate::format::group::GroupHeader;
use crate::format::segment::SegmentHeader;
use crate::machine::ControlEvent;
use crate::recovery::scan::{scan_core, ScanOptions, Since};
use crate::recovery::{ImageSource, RecoveryProgress, SegmentInput, SegmentSource};
use crate::rewrite::RewriteFault;

/// No log is served wrongly: it is refused, or it is the version it was.
fn check_damaged(world: &World, recovered: &Recovered) -> u64 {
    let mut refused = 0;
    for (shard, versions) in &world.logs {
        let Some((seed, records)) = recovered.logs.get(shard) else {
            let is_new = *versions.newest() == Plain::default();
            assert!(is_new || recovered.damages > 0, "vanished without a word");
            continue;
        };
        if seed.damage.is_some() {
            refused += 1;
            continue;
        }
        let found = Plain::recovered(seed, records);
        assert!(
            found == *versions.newest(),
            "shard {shard}: {}",
            recovered.notes
        );
    }
    refused
}

#[test]
fn damage_in_a_rewritten_segment_refuses_logs_and_serves_nothing_wrong() {
    let mut rng = Rng(73);
    let mut world = slow_beside_busy(&mut rng);
    assert!(rewrite_all(&mut world) > 4);
    let (mut refused, mut reported) = (0, 0);
    let files: Vec<u64> = world
        .sim
        .durable
        .iter()
        .filter(|(_, image)| is_rewritten(image))
        .map(|(seq, _)| *seq)
        .collect();
    for round in 0..400 {
        let mut images = world.sim.durable.clone();
        let seq = files[rng.below(files.len() as u64) as usize];
        let image = images.get_mut(&seq).expect("exists");
        let used = image.iter().rposition(|byte| *byte != 0).expect("used") + 1;
        let at = rng.below(used as u64) as usize;
        let end = (at + 1 + rng.below(3000) as usize).min(image.len());
        match round % 5 {
            0 => image[at] ^= 1 << rng.below(8),
            1 => image[at..end].fill(0),
            2 => image[at..end].fill(0xff),
            3 => image.truncate(at),
            _ => drop(images.remove(&seq)),
        }
        let recovered = recover(images);
        refused += check_damaged(&world, &recovered);
        reported += u64::from(recovered.damages > 0);
        let again = recover(recovered.images.clone());
        assert_eq!(again.damages, recovered.damages);
        assert!(again.images == recovered.images, "evidence stays");
        assert_eq!(
            check_damaged(&world, &again) > 0,
            check_damaged(&world, &recovered) > 0
        );
    }
    assert!(
        refused > 100 && reported > 150,
        "{refused} refused, {reported} reported"
    );
}

/// A damaged first block does no harm: every frame tells what the segment is.
#[test]
fn a_lost_first_block_of_a_rewritten_segment_does_no_harm() {
    let mut rng = Rng(74);
    let mut world = slow_beside_busy(&mut rng);
    assert!(rewrite_all(&mut world) > 4);
    let mut images = world.sim.durable.clone();
    for image in images.values_mut().filter(|image| is_rewritten(image)) {
        image[..4096].fill(0xff);
    }
    let recovered = recover(images);
    world.check(&recovered);
}

/// Damage before a rewritten segment is not taken for an unfinished end: what was rewritten was durable.
#[test]
fn a_lost_group_before_a_rewritten_segment_is_damage() {
    let mut rng = Rng(75);
    let mut world = slow_beside_busy(&mut rng);
    assert!(rewrite_all(&mut world) > 4);
    let rewritten: Vec<u64> = world
        .sim
        .durable
        .iter()
        .filter(|(_, image)| is_rewritten(image))
        .map(|(seq, _)| *seq)
        .collect();
    for lost in rewritten {
        let mut images = world.sim.durable.clone();
        images.remove(&lost);
        let recovered = recover(images);
        assert!(recovered.damages > 0, "segment {lost}: {}", recovered.notes);
        assert!(recovered.logs[&0].0.damage.is_some(), "{}", recovered.notes);
    }
}

/// What was rewritten was durable, and so was everything before it, also when no group that is left says so.
#[test]
fn a_rewritten_segment_vouches_for_what_lies_before_it() {
    let mut rng = Rng(78);
    let mut world = World::new(SimOptions {
        commits_in_flight: 4,
        ..SimOptions::default()
    });
    let commit = |world: &mut World, shard: u32, len: usize, rng: &mut Rng| {
        world.append(shard, &[payload(rng, len)]);
    };
    commit(&mut world, 1, 26_000, &mut rng);
    world.sim.settle();
    // In flight together: the end of the first segment, the second, and the beginning of the third.
    for (shard, len) in [(1, 26_000), (1, 26_000), (0, 100)] {
        commit(&mut world, shard, len, &mut rng);
        world.sim.pump();
    }
    commit(&mut world, 1, 30_000, &mut rng);
    world.control(1, ControlEvent::Base(3));
    world.sim.settle();
    world.collect();
    sweep(&mut world, 10);
    assert_eq!(world.sim.machine.durable_group(), 5);
    world.sim.pump();
    assert_eq!(
        world.sim.rewriting.front().map(|plan| plan.segment),
        Some(2)
    );
    assert!(rewrite(&mut world, true));
    let mut images = world.sim.durable.clone();
    images.get_mut(&1).expect("exists")[4096 + 28_672..].fill(0);
    let recovered = recover(images);
    assert_eq!(recovered.damages, 1, "{}", recovered.notes);
    assert_eq!(recovered.cuts, 0, "{}", recovered.notes);
    assert_eq!(recovered.end.0, 3, "{}", recovered.notes);
    assert!(recovered.images.contains_key(&2), "{}", recovered.notes);
}

/// What went may be needed without the events that came later: a log that has lost its end is damaged, also
/// when what is missing would pass for an unfinished write.
#[test]
fn a_lost_end_is_damage_once_segments_were_rewritten() {
    let mut rng = Rng(79);
    let mut world = slow_beside_busy(&mut rng);
    assert!(rewrite_all(&mut world) > 4);
    for _ in 0..4 {
        world.append(1, &[payload(&mut rng, 30_000)]);
        world.append(0, &[payload(&mut rng, 50)]);
        world.sim.settle();
    }
    // Of the last group more than a block is used, and it was durable when the last segments were rewritten.
    world.control(1, ControlEvent::Base(44));
    world.sim.settle();
    world.append(0, &[payload(&mut rng, 3000)]);
    world.sim.settle();
    world.collect();
    sweep(&mut world, 10);
    world.sim.pump();
    while rewrite(&mut world, true) {
        world.sim.pump();
    }
    let images = &world.sim.durable;
    let rewritten = images.iter().filter(|(_, image)| is_rewritten(image));
    let marks = rewritten.filter_map(|(seq, image)| {
        let header = SegmentHeader::decode(image).ok()?;
        Some((*seq, header.rewritten?.durable_group))
    });
    let (newest_rewritten, mark) = marks.max().expect("some");
    let (segment, at, group) = last_group(images);
    assert!(segment > newest_rewritten && mark >= group);
    let lose = |change: &dyn Fn(&mut Images)| {
        let mut images = images.clone();
        change(&mut images);
        images
    };
    let mut copies = vec![
        // The segments behind the last rewritten one, the last group, its first sector.
        lose(&|images| drop(images.split_off(&(newest_rewritten + 1)))),
        lose(&|images| images.get_mut(&segment).expect("exists")[at..].fill(0)),
        lose(&|images| images.get_mut(&segment).expect("exists")[at..at + 512].fill(0)),
    ];
    copies.push(lose(&|images| {
        images.get_mut(&segment).expect("exists").truncate(at)
    }));
    for images in copies {
        let first = recover(images);
        assert!(first.damages > 0 && first.cuts == 0, "{}", first.notes);
        assert!(first.logs[&0].0.damage.is_some(), "{}", first.notes);
        assert!(first.logs[&1].0.damage.is_some(), "{}", first.notes);
        let second = recover(first.images.clone());
        assert_eq!((second.damages, second.cuts), (first.damages, 0));
        assert!(
            second.images == first.images,
            "a second start changes no byte"
        );
        // Other logs go on behind it, and are whole on every start; the damage does not go away.
        let mut sim = super::Sim::start(SimOptions::default(), second, 2);
        let record = payload(&mut rng, 3000);
        for _ in 0..30 {
            sim.append(5, std::slice::from_ref(&record));
            sim.settle();
        }
        for _ in 0..2 {
            let after = recover(sim.durable.clone());
            assert!(after.damages > 0 && after.cuts == 0, "{}", after.notes);
            assert!(after.logs[&0].0.damage.is_some(), "{}", after.notes);
            let (seed, records) = &after.logs[&5];
            assert_eq!(
                (&seed.damage, records.len()),
                (&None, 30),
                "{}",
                after.notes
            );
            sim.durable = after.images;
        }
        // Also once nobody vouches any more: what was rewritten and holds no damage has been given back.
        let after = recover(sim.durable.clone());
        let (mut images, mut freed) = (after.images, FreedRuns::default());
        for (seq, segment) in after.segments.iter() {
            if is_rewritten(&images[&seq]) && !segment.is_damaged {
                freed.add(segment.as_run(seq));
                images.remove(&seq);
            }
        }
        assert!(!freed.is_empty(), "{}", after.notes);
        images.insert(FREED, freed.encode(&UUID, 0));
        let after = recover(images);
        let (seed, records) = &after.logs[&5];
        assert_eq!(
            (&seed.damage, records.len()),
            (&None, 30),
            "{}",
            after.notes
        );
    }
}

/// Segment, position and number of the last group.
fn last_group(images: &Images) -> (u64, usize, u64) {
    let mut last = (0, 0, 0);
    for (seq, image) in images.iter().filter(|(seq, _)| **seq != FREED) {
        let mut at = 4096;
        while let Ok(header) = GroupHeader::decode(&UUID, &image[at.min(image.len())..]) {
            last = (*seq, at, header.group);
            at += header.total_len as usize;
        }
    }
    last
}

/// A segment whose bytes are not what they should be stays as it is, and is not tried again.
#[test]
fn a_segment_with_damage_is_not_rewritten() {
    let mut rng = Rng(76);
    let mut world = slow_beside_busy(&mut rng);
    sweep(&mut world, 10);
    world.sim.pump();
    let plan = world.sim.rewriting.pop_front().expect("one is due");
    let mut images = world.sim.durable.clone();
    images.get_mut(&plan.segment).expect("exists")[4096 + 300] ^= 1;
    let fault = rewritten(&images, &plan).expect_err("is noticed");
    assert!(matches!(fault, RewriteFault::Source(_)), "{fault:?}");
    world
        .sim
        .machine
        .on_rewrite_failed(plan.segment, Some(fault));
    for _ in 0..5 {
        sweep(&mut world, 10);
        world.sim.settle();
        while let Some(next) = world.sim.rewriting.pop_front() {
            assert_ne!(next.segment, plan.segment);
            let (_, totals) = rewritten(&world.sim.durable, &next).expect("is whole");
            world
                .sim
                .machine
                .on_segment_rewritten(next.segment, &totals);
        }
    }
}

/// A plan that lets too little go is given up, and not repeated until less is needed.
#[test]
fn what_is_not_worth_it_is_left_alone() {
    let mut rng = Rng(77);
    let mut world = slow_beside_busy(&mut rng);
    sweep(&mut world, 10);
    world.sim.pump();
    let mut plan = world.sim.rewriting.pop_front().expect("one is due");
    plan.max_bytes = 8192;
    plan.logs.iter_mut().for_each(|need| need.records_above = 0);
    let fault = rewritten(&world.sim.durable, &plan).expect_err("is too long");
    assert_eq!(fault, RewriteFault::NotWorth);
    let segment = plan.segment;
    world.sim.machine.on_rewrite_failed(segment, Some(fault));
    for _ in 0..5 {
        sweep(&mut world, 10);
        world.sim.settle();
        let again = world
            .sim
            .rewriting
            .iter()
            .any(|plan| plan.segment == segment);
        assert!(!again);
        rewrite(&mut world, true);
    }
}

/// A segment that is another one when it is looked at again.
struct Replaced {
    now: ImageSource,
    later: Vec<u8>,
}

impl SegmentSource for Replaced {
    fn len(&self) -> u64 {
        self.now.len()
    }

    fn read_at(&self, position: u64, out: &mut [u8]) -> std::io::Result<usize> {
        self.now.read_at(position, out)
    }

    fn refresh(&mut self) {
        self.now = ImageSource(self.later.clone());
    }
}

/// A running broker rewrote segments after they were listed, and what went is explained by groups in segments
/// that were not: that is to be looked at again, not to be told as damage of logs.
#[test]
fn what_was_rewritten_after_it_was_listed_is_looked_at_again() {
    let mut rng = Rng(84);
    let mut world = slow_beside_busy(&mut rng);
    let listed = world.sim.durable.clone();
    for _ in 0..8 {
        world.append(1, &[payload(&mut rng, 30_000)]);
        world.sim.settle();
    }
    world.control(1, ControlEvent::Base(48));
    world.sim.settle();
    world.collect();
    assert!(rewrite_all(&mut world) > 4);
    let now = &world.sim.durable;
    let scan = |images: &Images| {
        let inputs = images.iter().filter(|(seq, _)| **seq != FREED);
        let inputs = inputs.map(|(seq, image)| SegmentInput {
            seq: *seq,
            file: format!("seg-{seq}").into(),
            source: Box::new(Replaced {
                now: ImageSource(image.clone()),
                later: now.get(seq).unwrap_or(image).clone(),
            }),
        });
        let options = ScanOptions {
            since: Since::epoch(super::UNKNOWN_EPOCH),
            in_use: true,
            progress: &RecoveryProgress::default(),
        };
        let freed = FreedRuns::default();
        scan_core(&UUID, 0, inputs.collect(), freed, options).expect("scans")
    };
    assert!(scan(&listed).lost_end, "the listed segments end too early");
    let again = scan(now);
    assert!(!again.lost_end && again.damages.is_empty());
}
