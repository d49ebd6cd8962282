//! Damage: never a panic, never wrong bytes, and the verdicts the format document promises.

use super::{payload, recover, Images, Rng, Sim, SimOptions};

/// Three shards, one of them quiet, some dozens of groups over several segments, no orderly stop.
fn written(rng: &mut Rng) -> Sim {
    let mut sim = Sim::new(SimOptions::default());
    sim.append(2, &[payload(rng, 50)]);
    for i in 0..60u32 {
        let len = 50 + rng.below(4000) as usize;
        sim.append(i % 2, &[payload(rng, len), payload(rng, 20)]);
        sim.settle();
    }
    sim
}

/// Positions of the groups in an image, from the real headers.
fn groups(image: &[u8]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut at = 4096;
    while let Ok(header) =
        crate::format::group::GroupHeader::decode(&super::UUID, &image[at.min(image.len())..])
    {
        found.push((at, header.used_len as usize));
        at += header.total_len as usize;
    }
    found
}

#[test]
fn random_damage_never_panics_and_never_serves_wrong_bytes() {
    let mut rng = Rng(11);
    let sim = written(&mut rng);
    let mut refused = 0;
    for _ in 0..400 {
        let mut images: Images = sim.durable.clone();
        for _ in 0..=rng.below(3) {
            let pick = rng.below(images.len() as u64) as usize;
            let Some(image) = images.values_mut().nth(pick) else {
                continue;
            };
            let at = rng.below(image.len() as u64) as usize;
            let len = 1 + rng.below(2000) as usize;
            let end = (at + len).min(image.len());
            match rng.below(4) {
                0 => image[at] ^= 1 << rng.below(8),
                1 => image[at..end].fill(0),
                2 => image[at..end]
                    .iter_mut()
                    .for_each(|byte| *byte = rng.next_u64() as u8),
                _ => image.truncate(at),
            }
        }
        let recovered = recover(images);
        for (shard, (seed, records)) in &recovered.logs {
            let expected = &sim.shadows[shard].submitted;
            refused += u64::from(seed.damage.is_some());
            let from = seed.base as usize;
            let expected = expected.get(from..).unwrap_or(&[]);
            assert!(
                records.iter().zip(expected).all(|(a, b)| a == b),
                "wrong bytes of shard {shard}"
            );
            assert!(records.len() <= expected.len());
        }
        let again = recover(recovered.images.clone());
        for (shard, (seed, records)) in &recovered.logs {
            let (seed_again, records_again) = &again.logs[shard];
            assert_eq!(records, records_again, "a second start reads the same");
            assert_eq!(
                seed.damage.is_some(),
                seed_again.damage.is_some(),
                "and refuses the same"
            );
        }
    }
    assert!(refused > 100, "{refused}");
}

#[test]
fn a_flipped_payload_bit_refuses_its_log_and_no_other() {
    let mut rng = Rng(12);
    let sim = written(&mut rng);
    let mut images = sim.durable.clone();
    // Group 9 holds one append of shard 1 or 0; flip a bit near its end.
    let (at, used) = groups(&images[&1])[9];
    images.get_mut(&1).expect("exists")[at + used - 30] ^= 4;
    let recovered = recover(images.clone());
    let refused: Vec<_> = recovered
        .logs
        .iter()
        .filter(|(_, (seed, _))| seed.damage.is_some())
        .map(|(shard, _)| *shard)
        .collect();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_ne!(refused[0], 2);
    assert_eq!(recovered.damages, 1);
    let other = 1 - refused[0];
    assert_eq!(recovered.logs[&other].1, sim.shadows[&other].submitted);
    let untouched = |(seq, image): (&u64, &Vec<u8>)| images[seq].starts_with(image);
    assert!(recovered.images.iter().all(untouched), "nothing was cut");
}

#[test]
fn a_lost_durable_header_refuses_the_logs_that_cannot_be_proven_whole() {
    let mut rng = Rng(13);
    let sim = written(&mut rng);
    let mut images = sim.durable.clone();
    let (at, _) = groups(&images[&1])[6];
    images.get_mut(&1).expect("exists")[at..at + 512].fill(0);
    let recovered = recover(images);
    let is_refused = |shard: u32| recovered.logs[&shard].0.damage.is_some();
    // One of the busy shards wrote in the lost group and has a gap; the other goes on without one; the
    // quiet shard wrote nothing since, so nobody can tell.
    assert_ne!(is_refused(0), is_refused(1));
    assert!(is_refused(2));
}

#[test]
fn the_last_group_with_a_flipped_bit_is_refused_on_every_start() {
    let mut rng = Rng(14);
    let mut sim = written(&mut rng);
    sim.append(0, &[payload(&mut rng, 700)]);
    sim.settle();
    let newest = *sim
        .durable
        .iter()
        .rfind(|(_, image)| !groups(image).is_empty())
        .map(|(seq, _)| seq)
        .expect("some");
    let (at, used) = *groups(&sim.durable[&newest]).last().expect("some");
    for flip in [at + 3, at + 40, at + 130, at + used - 5] {
        let mut images = sim.durable.clone();
        images.get_mut(&newest).expect("exists")[flip] ^= 0x10;
        let mut recovered = recover(images);
        for epoch in 2..4 {
            assert!(
                recovered.logs[&0].0.damage.is_some(),
                "flip at {flip}, epoch {epoch}"
            );
            assert_eq!(recovered.cuts, 0);
            // Another log goes on writing; the verdict on this one must not change.
            let mut next = Sim::start(SimOptions::default(), recovered, epoch);
            let log = next
                .machine
                .add_log(&super::name(7 + epoch as u32), Default::default())
                .expect("new");
            next.logs.insert(7 + epoch as u32, log);
            next.append(7 + epoch as u32, &[b"x".to_vec()]);
            next.settle();
            recovered = recover(next.durable.clone());
        }
    }
}

#[test]
fn garbage_behind_the_end_is_cut_and_blank_files_are_no_error() {
    let mut rng = Rng(15);
    let sim = written(&mut rng);
    let newest = *sim
        .durable
        .iter()
        .rfind(|(_, image)| !groups(image).is_empty())
        .map(|(seq, _)| seq)
        .expect("some");
    let (at, used) = *groups(&sim.durable[&newest]).last().expect("some");
    let end = (at + used).next_multiple_of(4096);
    let whole = |images: Images| {
        let recovered = recover(images);
        assert_eq!(recovered.damages, 0);
        for (shard, shadow) in &sim.shadows {
            assert_eq!(recovered.logs[shard].1, shadow.submitted);
        }
        recovered.cuts
    };
    for len in [1, 4096, 9000] {
        let mut images = sim.durable.clone();
        let image = images.get_mut(&newest).expect("exists");
        let garbage = payload(&mut rng, len);
        image.resize(image.len().max(end + len), 0);
        image[end..end + len].copy_from_slice(&garbage);
        assert_eq!(whole(images), 1, "{len} random bytes");
        let mut images = sim.durable.clone();
        let image = images.get_mut(&newest).expect("exists");
        image.truncate(end);
        image.extend_from_slice(&garbage);
        assert_eq!(whole(images), 1, "{len} random bytes behind a short file");
        let mut images = sim.durable.clone();
        let image = images.get_mut(&newest).expect("exists");
        image.extend(std::iter::repeat_n(0, len));
        assert_eq!(whole(images), 0, "{len} zeros");
    }
    let next = sim.durable.keys().last().expect("some") + 1;
    for blank in [vec![0; 4 << 20], super::blank_segment(next, 1)] {
        let mut images = sim.durable.clone();
        images.insert(next, blank);
        assert_eq!(whole(images), 0);
    }
}

#[test]
fn a_file_that_is_shorter_than_the_log_in_it_is_damage_the_oldest_included() {
    let mut rng = Rng(19);
    let sim = written(&mut rng);
    for segment in [1, 2] {
        let boundary = groups(&sim.durable[&segment])[1].0;
        for len in [0, 2059, 4096, boundary] {
            let mut images = sim.durable.clone();
            images.get_mut(&segment).expect("exists").truncate(len);
            let recovered = recover(images);
            let found = (recovered.damages, recovered.cuts);
            assert_eq!(
                found,
                (1, 0),
                "segment {segment} cut at {len}: {}",
                recovered.notes
            );
            let is_refused = |shard: u32| {
                let log = recovered.logs.get(&shard);
                log.is_none_or(|(seed, _)| seed.damage.is_some())
            };
            assert!(is_refused(0) || is_refused(1), "records are missing");
            let again = recover(recovered.images.clone());
            assert_eq!(
                (again.damages, again.cuts),
                found,
                "the same on every start"
            );
        }
    }
}

/// A lost group whose segment's end nobody tells, because the next segment begins with garbage: what lies
/// behind it was durable, and is not cut as the rest of an unfinished end.
#[test]
fn groups_behind_a_lost_one_are_looked_at_without_a_link_to_their_end() {
    let mut rng = Rng(16);
    let sim = written(&mut rng);
    let used: Vec<u64> = sim
        .durable
        .iter()
        .filter(|(_, image)| !groups(image).is_empty())
        .map(|(seq, _)| *seq)
        .collect();
    let [.., before, last] = used[..] else {
        panic!("several segments");
    };
    let mut images = sim.durable.clone();
    let found = groups(&images[&before]);
    let (at, newest) = (found[2].0, found[found.len() - 1].0);
    let newest = &images[&before][newest..];
    let newest = crate::format::group::GroupHeader::decode(&super::UUID, newest).expect("a group");
    let image = images.get_mut(&before).expect("exists");
    image[at..at + 4096].fill(0);
    let as_left = image.clone();
    let image = images.get_mut(&last).expect("exists");
    image[4096..].fill(0);
    image[4096..5000].fill(0x5a);
    let recovered = recover(images);
    assert!(recovered.damages > 0, "{}", recovered.notes);
    assert!(
        recovered.images[&before].starts_with(&as_left),
        "{}",
        recovered.notes
    );
    assert!(recovered.next_group > newest.group, "{}", recovered.notes);
}
