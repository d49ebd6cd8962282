//! The end of a log that is lost with its file: the files made ahead of it, and the length it was made with, tell.

use std::collections::BTreeSet;

use super::{
    blank_segment, payload, recover_since, Images, Recovered, Rng, Sim, SimOptions, SEGMENT_BYTES,
};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::recovery::scan::Since;

const SHARDS: u32 = 3;

/// Logs over several segments, made by one start, with blank segments made ahead.
fn written() -> (Sim, u64) {
    let mut rng = Rng(23);
    let mut sim = Sim::new(SimOptions::default());
    sim.append(2, &[payload(&mut rng, 50)]);
    for i in 0..80u32 {
        let len = 50 + rng.below(4000) as usize;
        sim.append(i % 2, &[payload(&mut rng, len), payload(&mut rng, 20)]);
        sim.settle();
    }
    let block = SEGMENT_HEADER_BYTES as usize;
    let holds = |image: &[u8]| image[block..].iter().any(|byte| *byte != 0);
    let newest = sim.durable.iter().rfind(|(_, image)| holds(image));
    let newest = *newest.expect("some").0;
    let blanks = sim.durable.keys().filter(|seq| **seq > newest).count();
    assert!(
        newest > 3 && blanks == 2,
        "{newest} and {blanks} blank ones"
    );
    (sim, newest)
}

/// Each log is whole or refused.
fn check(sim: &Sim, found: &Recovered, what: &str) {
    assert!(
        found.damages > 0,
        "{what}: nothing is reported: {}",
        found.notes
    );
    for shard in 0..SHARDS {
        let Some((seed, records)) = found.logs.get(&shard) else {
            panic!("{what}: log {shard} has vanished: {}", found.notes);
        };
        let is_whole = *records == sim.shadows[&shard].submitted;
        assert!(
            seed.damage.is_some() || is_whole,
            "{what}: log {shard} is served without its end: {}",
            found.notes
        );
    }
}

/// The first start of them judges what `last_epoch` left; then come one that writes nothing, one whose only group
/// is torn, and two that write.
fn start_again_and_again(sim: &Sim, images: Images, last_epoch: u64, what: &str) {
    let mut marks = BTreeSet::new();
    let mut found = recover_since(images, Since::epoch(last_epoch));
    check(sim, &found, what);
    let refused = |found: &Recovered| -> Vec<u32> {
        let logs = found.logs.iter().filter(|(shard, _)| **shard < SHARDS);
        logs.filter(|(_, (seed, _))| seed.damage.is_some())
            .map(|(shard, _)| *shard)
            .collect()
    };
    let at_first = refused(&found);
    for (start, writes) in [false, true, true, true].into_iter().enumerate() {
        let epoch = last_epoch + 1 + start as u64;
        marks.extend(found.shortened.iter().copied());
        let mut next = Sim::start(SimOptions::default(), found, epoch);
        next.pump();
        let mut images = next.durable.clone();
        if writes {
            // A log that begins behind the loss.
            next.append(SHARDS + start as u32, &[vec![7; 9000]]);
            next.pump();
            images = next.cut_power(|_, sector| sector > 2);
        }
        if start > 1 {
            next.settle();
            images = next.durable.clone();
        }
        let since = Since {
            epoch,
            shortened: Some(&marks),
        };
        found = recover_since(images, since);
        check(sim, &found, &format!("{what}, start {start}"));
        assert_eq!(
            refused(&found),
            at_first,
            "{what}, start {start}: {}",
            found.notes
        );
        for (shard, (seed, _)) in &found.logs {
            let is_new = *shard >= SHARDS;
            assert!(
                !is_new || seed.damage.is_none(),
                "{what}, log {shard}: {}",
                found.notes
            );
        }
    }
}

#[test]
fn lost_segments_before_blank_ones_are_damage_at_every_start() {
    let (sim, newest) = written();
    for count in 1..newest {
        let mut images = sim.durable.clone();
        for lost in 0..count {
            images.remove(&(newest - lost));
        }
        start_again_and_again(&sim, images, 1, &format!("the newest {count} lost"));
        // However many of the blank ones are left.
        let mut images = sim.durable.clone();
        images.retain(|seq, _| *seq <= newest - count || *seq == newest + 2);
        start_again_and_again(
            &sim,
            images,
            1,
            &format!("the newest {count} and a blank lost"),
        );
    }
    // Nothing but a blank one is left: no log is known, but the loss is.
    let mut images = sim.durable.clone();
    images.retain(|seq, _| *seq > newest);
    assert!(recover_since(images, Since::epoch(1)).damages > 0);
}

#[test]
fn a_torn_group_does_not_hide_that_segments_behind_it_are_lost() {
    let (sim, newest) = written();
    let mut images = sim.durable.clone();
    images.remove(&newest);
    let image = images.get_mut(&(newest - 1)).expect("exists");
    let used = image.iter().rposition(|byte| *byte != 0).expect("some");
    image[used / 4096 * 4096..].fill(0);
    start_again_and_again(&sim, images, 1, "a torn group before the loss");
}

#[test]
fn a_newest_segment_that_is_shorter_than_it_was_made_is_damage_at_every_start() {
    let (sim, newest) = written();
    let image = &sim.durable[&newest];
    let used = image.iter().rposition(|byte| *byte != 0).expect("some") + 1;
    let block = used.next_multiple_of(4096);
    let lengths = [
        0,
        100,
        4095,
        4096,
        used / 2,
        block - 4096,
        used - 1,
        block,
        SEGMENT_BYTES as usize - 1,
    ];
    for len in lengths {
        for blanks in [0, 2] {
            let mut images = sim.durable.clone();
            images.retain(|seq, _| *seq <= newest + blanks);
            images.get_mut(&newest).expect("exists").truncate(len);
            let what = format!("{len} bytes left of the newest, {blanks} behind it");
            start_again_and_again(&sim, images, 1, &what);
        }
    }
}

/// What a start does to the segments of the one before, in any part, is no damage.
#[test]
fn segments_that_a_start_shortened_or_removed_are_no_damage() {
    let (sim, newest) = written();
    let whole = |images: Images, last_epoch: u64, what: &str| {
        let found = recover_since(images, Since::epoch(last_epoch));
        assert_eq!(
            (found.damages, found.cuts),
            (0, 0),
            "{what}: {}",
            found.notes
        );
        for (shard, shadow) in &sim.shadows {
            assert_eq!(found.logs[shard].1, shadow.submitted, "{what}");
        }
        found
    };
    let found = whole(sim.durable.clone(), 1, "as it was left");
    // The next start has its epoch, and died when it had settled.
    let settled = found.images.clone();
    assert!(settled[&newest].len() < SEGMENT_BYTES as usize);
    whole(settled.clone(), 2, "settled");
    // It died in the middle: blank ones go newest first.
    for left in 0..=2 {
        let mut images = sim.durable.clone();
        images.retain(|seq, _| *seq <= newest + left);
        whole(images, 2, "settled in part");
    }
    // A later start has numbers behind those of the blank ones that are gone, or the same ones again.
    for first in [newest + 1, newest + 3] {
        let mut images = settled.clone();
        images.insert(first, blank_segment(first, 2));
        images.insert(first + 1, blank_segment(first + 1, 2));
        whole(images, 2, "blank ones of a later start");
    }
}

#[test]
fn segments_under_each_others_names_are_damage_and_stay() {
    let (sim, newest) = written();
    let exchanged = |one: u64, other: u64| {
        let mut images = sim.durable.clone();
        let (a, b) = (images[&one].clone(), images[&other].clone());
        images.insert(one, b);
        images.insert(other, a);
        images
    };
    let all: Vec<u64> = sim.durable.keys().copied().filter(|seq| *seq > 1).collect();
    for one in &all {
        for other in all.iter().filter(|other| *other > one) {
            let images = exchanged(*one, *other);
            let what = format!("{one} and {other} exchanged");
            if *one > newest {
                // Nothing was ever in them.
                assert_eq!(recover_since(images, Since::epoch(1)).damages, 0);
                continue;
            }
            let found = recover_since(images.clone(), Since::epoch(1));
            for seq in [one, other].into_iter().filter(|seq| **seq <= newest) {
                let moved = images.values().find(|image| **image == sim.durable[seq]);
                let stays = found.images.values().any(|image| Some(image) == moved);
                assert!(
                    stays,
                    "{what}: the records of {seq} are gone: {}",
                    found.notes
                );
            }
            start_again_and_again(&sim, images, 1, &what);
        }
    }
    let mut images = sim.durable.clone();
    images.insert(newest + 3, images[&newest].clone());
    start_again_and_again(&sim, images, 1, "a second copy of the newest");
}
