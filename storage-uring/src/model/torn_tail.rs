//! A log cut at each byte of its end: every whole record is kept, nothing else is served, and a second start
//! finds nothing to do.
//!
//! `FELIX_TORN_BYTES=65536` cuts at each byte of the last 64 KiB instead of the suite's share.

use super::{count, payload, recover, Images, Rng, Sim, SimOptions};
use crate::format::group::GroupHeader;

/// Three logs over two segments; the end is made of groups of many sizes.
fn written(rng: &mut Rng) -> Sim {
    let mut sim = Sim::new(SimOptions::default());
    let mut len = 1;
    while sim.next_segment < 5 {
        sim.append(len as u32 % 3, &[payload(rng, len), payload(rng, 30)]);
        sim.settle();
        len = len * 7 % 12_007;
    }
    sim
}

/// Number of records of each log below position `end` of segment `newest` and in the segments before.
fn whole_records(images: &Images, newest: u64, end: usize) -> [u64; 3] {
    let mut images = images.clone();
    images.split_off(&(newest + 1));
    images.get_mut(&newest).expect("exists").truncate(end);
    let recovered = recover(images);
    std::array::from_fn(|shard| {
        recovered
            .logs
            .get(&(shard as u32))
            .map_or(0, |(seed, _)| seed.tail)
    })
}

#[test]
fn every_byte_of_the_end_of_a_log() {
    let mut rng = Rng(9);
    let sim = written(&mut rng);
    let newest = *sim
        .durable
        .iter()
        .rfind(|(_, image)| image[4096] != 0)
        .expect("some")
        .0;
    // The newest segment alone is shorter than the wanted share: go on in the one before it, without its
    // successors, as if they had not been made yet.
    let mut left = count("FELIX_TORN_BYTES", 1500) as usize;
    let mut checked = 0;
    for segment in [newest, newest - 1] {
        let image = &sim.durable[&segment];
        let mut ends = vec![4096];
        while let Ok(header) = GroupHeader::decode(
            &super::UUID,
            &image[ends[ends.len() - 1].min(image.len())..],
        ) {
            ends.push(ends[ends.len() - 1] + header.used_len as usize);
            let next = ends[ends.len() - 1].next_multiple_of(4096);
            ends.push(next);
        }
        let end = *ends.last().expect("some");
        let whole: Vec<(usize, [u64; 3])> = ends
            .iter()
            .map(|end| (*end, whole_records(&sim.durable, segment, *end)))
            .collect();
        let take = left.min(end - 4096);
        for cut in (end - take..end).rev() {
            let mut images = sim.durable.clone();
            images.split_off(&(segment + 1));
            images.get_mut(&segment).expect("exists").truncate(cut);
            let expected = whole.iter().rfind(|(end, _)| *end <= cut).expect("some").1;
            check(&sim, images, expected, cut);
        }
        left -= take;
        checked += take;
    }
    println!("{checked} bytes");
}

fn check(sim: &Sim, images: Images, expected: [u64; 3], cut: usize) {
    let recovered = recover(images);
    assert_eq!(recovered.damages, 0, "cut at {cut}: {}", recovered.notes);
    for (shard, expected) in expected.iter().enumerate() {
        let records = recovered
            .logs
            .get(&(shard as u32))
            .map_or(&[][..], |(_, records)| records);
        assert_eq!(
            records.len() as u64,
            *expected,
            "cut at {cut}: {}",
            recovered.notes
        );
        let submitted = &sim.shadows[&(shard as u32)].submitted;
        assert_eq!(records, &submitted[..records.len()], "cut at {cut}");
    }
    let again = recover(recovered.images.clone());
    assert_eq!(
        (again.cuts, again.damages),
        (0, 0),
        "cut at {cut}: {}",
        again.notes
    );
    assert!(again.images == recovered.images, "cut at {cut}");
}
