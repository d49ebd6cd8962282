//! A directory of format version 1 is read, and gone on with in version 2.

use super::{payload, recover, Images, Rng, Sim, SimOptions, FREED, UUID};
use crate::format::extent::{ExtentHeader, EXTENT_HEADER_BYTES};
use crate::format::group::{GroupHeader, GROUP_HEADER_BYTES};
use crate::format::{put_u32, ALIGN};
use crate::machine::ControlEvent;

/// Rewrites a segment as version 1 wrote it: no numbers of changes in extent headers.
fn as_version_1(image: &mut [u8]) {
    put_u32(image, 8, 1);
    let crc = crc32c::crc32c(&image[..ALIGN - 4]);
    put_u32(image, ALIGN - 4, crc);
    let mut at = ALIGN;
    while let Ok(header) = GroupHeader::decode(&UUID, &image[at.min(image.len())..]) {
        let group = &mut image[at..at + header.total_len as usize];
        let mut extent_at = GROUP_HEADER_BYTES;
        for _ in 0..header.extents {
            let extent = ExtentHeader::decode(&group[extent_at..]).expect("an extent");
            let former = ExtentHeader {
                changes: 0,
                ..extent
            };
            former.encode(&mut group[extent_at..]);
            extent_at += extent.total_len();
            assert!(extent.total_len() >= EXTENT_HEADER_BYTES);
        }
        header.seal(&UUID, group);
        put_u32(group, 8, 1);
        let crc = crc32c::crc32c_append(crc32c::crc32c(&UUID), &group[..GROUP_HEADER_BYTES - 4]);
        put_u32(group, GROUP_HEADER_BYTES - 4, crc);
        at += header.total_len as usize;
    }
}

#[test]
fn version_1_is_read_and_gone_on_with() {
    let mut rng = Rng(51);
    let mut sim = Sim::new(SimOptions::default());
    for i in 0..20 {
        sim.append(i % 2, &[payload(&mut rng, 300), payload(&mut rng, 5000)]);
        sim.settle();
    }
    let log = sim.log(0);
    for event in [ControlEvent::Truncate(15), ControlEvent::Base(3)] {
        let taken = sim.machine.push_control(log, event, 7, 0, 99);
        assert_eq!(taken, Ok(()));
        sim.settle();
    }
    let mut images: Images = sim.durable.clone();
    images.values_mut().for_each(|image| as_version_1(image));
    let found = recover(images);
    assert_eq!((found.cuts, found.damages), (0, 0));
    let (seed, records) = &found.logs[&0];
    assert_eq!((seed.base, seed.tail, &seed.damage), (3, 15, &None));
    let (expected, other) = (
        sim.shadows[&0].submitted[3..15].to_vec(),
        sim.shadows[&1].submitted.clone(),
    );
    assert_eq!(*records, expected);
    assert_eq!(found.logs[&1].1, other);
    let mut next = Sim::start(SimOptions::default(), found, 2);
    next.shadows.clear();
    let log = next.logs[&0];
    let accept = ControlEvent::Accept(4);
    assert_eq!(next.machine.push_control(log, accept, 7, 0, 99), Ok(()));
    let record = [&b"after"[..]];
    let appended = next
        .machine
        .append(log, 4, 7, 0, record.iter().copied(), 99);
    assert_eq!(appended, Ok(15..16));
    next.settle();
    let found = recover(next.durable.clone());
    let (seed, records) = &found.logs[&0];
    assert_eq!((seed.control.accepted, &seed.damage), (4, &None));
    assert_eq!(records[..12], expected[..]);
    assert_eq!(records[12], b"after");
}

/// Appends without a shadow: offsets of a log that was cut are not those of what was submitted.
fn append(sim: &mut Sim, shard: u32, payload: &[u8]) {
    let log = sim.log(shard);
    (sim.machine)
        .append(log, 1, 7, 0, [payload].into_iter(), 99)
        .expect("is taken");
    sim.settle();
}

fn control(sim: &mut Sim, shard: u32, event: ControlEvent<'_>) {
    let log = sim.log(shard);
    (sim.machine)
        .push_control(log, event, 7, 0, 99)
        .expect("is taken");
    sim.settle();
}

/// Fills more than a segment with records of a log that nothing else is about.
fn fill(sim: &mut Sim) {
    for _ in 0..10 {
        append(sim, 1, &[1; 9000]);
    }
}

#[test]
fn a_cut_by_version_1_outlives_the_segment_it_was_in() {
    let mut sim = Sim::new(SimOptions::default());
    sim.keeps_shadows = false;
    for old in 0..20u8 {
        append(&mut sim, 0, &[old; 100]);
    }
    fill(&mut sim);
    control(&mut sim, 0, ControlEvent::Truncate(15));
    fill(&mut sim);
    for new in 0..10u8 {
        append(&mut sim, 0, &[100 + new; 100]);
    }
    let mut images = sim.durable.clone();
    images.values_mut().for_each(|image| as_version_1(image));
    let mut next = Sim::start(SimOptions::default(), recover(images), 2);
    next.keeps_shadows = false;
    fill(&mut next);
    let tail = next.machine.tail(next.logs[&1]);
    control(&mut next, 1, ControlEvent::Base(tail));
    fill(&mut next);
    let mut freed = Vec::new();
    for _ in 0..20 {
        next.machine.reclaim(10, 0, 10_000);
        next.settle();
        if let Some((segment, record)) = next.leaving.pop_front() {
            next.durable.insert(FREED, record);
            next.durable.remove(&segment);
            next.machine.on_segment_freed(segment);
            freed.push(segment);
        }
    }
    assert!(freed.len() > 1, "the segment with the cut went: {freed:?}");
    let found = recover(next.durable.clone());
    assert_eq!((found.damages, found.cuts), (0, 0), "{}", found.notes);
    let (seed, records) = &found.logs[&0];
    assert_eq!((seed.tail, &seed.damage), (25, &None));
    let first: Vec<u8> = records.iter().map(|record| record[0]).collect();
    let expected: Vec<u8> = (0..15).chain(100..110).collect();
    assert_eq!(first, expected);
}
