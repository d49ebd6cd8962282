//! Random damage to copies of a log, judged by an independent oracle.
//!
//! For every copy: no panic; a log that is not refused holds exactly what it held after the last group that
//! recovery kept; a group is only left off the end if nothing that is left vouches for it; no record is read
//! that was not at that offset at some time; and every start decides the same.
//!
//! `FELIX_DAMAGED_COPIES=1000` makes that many instead of the suite's share.

use std::collections::{BTreeMap, BTreeSet};

use super::{count, payload, recover, Images, Recovered, Rng, SimOptions};
use crate::format::group::GroupHeader;
use crate::sim::plain::Op;
use crate::sim::rig::Rig;

const SHARDS: u32 = 4;

/// A group of the undamaged log.
#[derive(Debug, Clone, Copy)]
struct Whole {
    segment: u64,
    position: usize,
    header: GroupHeader,
}

/// What every log holds after a group.
type States = BTreeMap<u32, (u64, Vec<Vec<u8>>)>;

struct Original {
    /// What is damaged; some segments may be rewritten.
    images: Images,
    /// The same before segments were rewritten.
    as_written: Images,
    groups: Vec<Whole>,
    /// After group n at index n; index 0 is the empty log.
    after: Vec<States>,
    /// Every record a log ever had, by log and offset: one that was cut off again within its group is in no
    /// state after a group.
    ever: BTreeSet<(u32, u64, Vec<u8>)>,
}

fn groups_of(images: &Images) -> Vec<Whole> {
    let mut groups = Vec::new();
    for (segment, image) in images {
        let mut position = 4096;
        while let Ok(header) =
            GroupHeader::decode(&super::UUID, &image[position.min(image.len())..])
        {
            groups.push(Whole {
                segment: *segment,
                position,
                header,
            });
            position += header.total_len as usize;
        }
    }
    groups
}

fn states(recovered: &Recovered) -> States {
    let of = |(shard, (seed, records)): (&u32, &(crate::machine::LogSeed, Vec<Vec<u8>>))| {
        (*shard, (seed.base, records.clone()))
    };
    recovered.logs.iter().map(of).collect()
}

/// Logs that roll over several segments, with every event; one log falls silent early, one late.
fn written(rng: &mut Rng, rewrites: bool) -> Original {
    let mut rig = Rig::new(SimOptions::default());
    let first = payload(rng, 50);
    rig.append(3, std::slice::from_ref(&first));
    let mut ever = BTreeSet::from([(3, 0, first)]);
    for step in 0..70 {
        let shard = if step < 40 {
            rng.below(3)
        } else {
            rng.below(2)
        } as u32;
        let log = &rig.logs.entry(shard).or_default().submitted;
        let (base, tail) = (log.base, log.tail());
        match step % 11 {
            4 if tail > base => rig.control(shard, Op::Truncate(tail - 1)),
            8 => rig.control(shard, Op::Base(base + (tail - base) / 3)),
            10 if step % 3 == 0 => rig.control(shard, Op::Place(tail + 5)),
            _ => {
                let len = 50 + rng.below(4000) as usize;
                let records = [payload(rng, len), payload(rng, 20)];
                rig.append(shard, &records);
                let at = (tail..).zip(records);
                ever.extend(at.map(|(offset, record)| (shard, offset, record)));
            }
        }
        if rng.below(3) > 0 {
            rig.settle();
        }
    }
    rig.settle();
    if rewrites {
        for shard in 0..2 {
            let log = &rig.logs.entry(shard).or_default().submitted;
            let kept = (log.tail() - log.base).min(3);
            let base = log.tail() - kept;
            rig.control(shard, Op::Base(base));
        }
        // Restatements come before the groups are counted.
        for _ in 0..4 {
            rig.settle();
            rig.sim.machine.reclaim(0, rig.sim.now_us, usize::MAX);
        }
        rig.settle();
    }
    let images = rig.sim.durable.clone();
    let groups = groups_of(&images);
    assert!(groups
        .windows(2)
        .all(|two| two[0].header.group + 1 == two[1].header.group));
    let mut after = vec![States::new()];
    for group in &groups {
        let mut until = images.clone();
        until.split_off(&(group.segment + 1));
        let end = group.position + group.header.total_len as usize;
        until.get_mut(&group.segment).expect("exists").truncate(end);
        after.push(states(&recover(until)));
    }
    let rewritten = rig.sim.rewrite_waiting();
    assert!(rewritten > 0 || !rewrites, "segments are rewritten");
    Original {
        images: rig.sim.durable.clone(),
        as_written: images,
        groups,
        after,
        ever,
    }
}

fn damage(images: &mut Images, rng: &mut Rng) -> String {
    let pick = rng.below(images.len() as u64) as usize;
    let segment = *images.keys().nth(pick).expect("some");
    let used = images[&segment]
        .iter()
        .rposition(|byte| *byte != 0)
        .unwrap_or(0)
        + 1;
    let image = images.get_mut(&segment).expect("exists");
    // Mostly where something is.
    let bound = if rng.below(8) == 0 {
        image.len()
    } else {
        used.min(image.len())
    };
    let at = rng.below(bound as u64) as usize;
    let end = (at + 1 + rng.below(6000) as usize).min(image.len());
    let block = at / 4096 * 4096;
    let kind = rng.below(9);
    match kind {
        0 | 1 => image[at] ^= 1 << rng.below(8),
        2 => image[at..end].fill(0),
        3 => image[at..end]
            .iter_mut()
            .for_each(|byte| *byte = rng.next_u64() as u8),
        4 => image.truncate(at),
        5 => image[block..(block + 4096).min(end.max(block))].fill(0xff),
        // A block from elsewhere in the same file: a misdirected write.
        6 => {
            let from = rng.below(used as u64) as usize / 4096 * 4096;
            let moved = image[from..(from + 4096).min(image.len())].to_vec();
            let end = (block + moved.len()).min(image.len());
            image[block..end].copy_from_slice(&moved[..end - block]);
        }
        // A whole sector.
        7 => {
            let sector = at / 512 * 512;
            image[sector..(sector + 512).min(end.max(sector))].fill(0);
        }
        _ => drop(images.remove(&segment)),
    }
    format!("kind {kind} of segment {segment} at {at}..{end}")
}

/// Groups of the original that are whole in a copy.
fn intact<'a>(original: &'a Original, copy: &'a Images) -> impl Iterator<Item = &'a Whole> {
    original.groups.iter().filter(|group| {
        let range = group.position..group.position + group.header.used_len as usize;
        let found = copy
            .get(&group.segment)
            .and_then(|image| image.get(range.clone()));
        found == Some(&original.as_written[&group.segment][range])
    })
}

#[derive(Default)]
struct Outcomes {
    refused_logs: u64,
    whole_logs: u64,
    copies_cut: u64,
    copies_untouched: u64,
}

fn judge(original: &Original, copy: &Images, what: &str, outcomes: &mut Outcomes) {
    let recovered = recover(copy.clone());
    let detail = || format!("{what}: {}", recovered.notes);
    let last = original.groups.len();
    let kept = (recovered.next_group as usize - 1).min(last);
    let left: Vec<&Whole> = intact(original, copy)
        .filter(|group| group.header.group as usize > kept)
        .collect();
    let vouches = left
        .iter()
        .any(|group| group.header.durable_group as usize > kept);
    assert!(
        !vouches,
        "a group was left off that another vouches for; {}",
        detail()
    );
    assert!(
        left.len() <= 3,
        "{} whole groups were left off; {}",
        left.len(),
        detail()
    );
    outcomes.copies_cut += u64::from(kept < last);
    outcomes.copies_untouched += u64::from(kept == last && recovered.damages == 0);
    for shard in 0..SHARDS {
        let expected = original.after[kept].get(&shard);
        let Some((seed, records)) = recovered.logs.get(&shard) else {
            // Nobody knows a log all of whose records lie in a place that cannot be read, or in missing oldest
            // segments; that is what the report of the damage is for.
            let oldest = copy.keys().next() > original.images.keys().next();
            let is_excused = expected.is_none() || oldest || recovered.damages > 0;
            assert!(is_excused, "log {shard} has vanished; {}", detail());
            continue;
        };
        if seed.damage.is_some() {
            outcomes.refused_logs += 1;
            for (offset, record) in (seed.base..).zip(records) {
                let was_there = original.ever.contains(&(shard, offset, record.clone()));
                assert!(was_there, "offset {offset} of a refused log; {}", detail());
            }
            continue;
        }
        outcomes.whole_logs += 1;
        let (base, expected) = expected.map_or((0, &[][..]), |(base, records)| (*base, records));
        assert_eq!(
            (seed.base, records.len()),
            (base, expected.len()),
            "log {shard}; {}",
            detail()
        );
        assert_eq!(
            seed.tail,
            base + expected.len() as u64,
            "log {shard}; {}",
            detail()
        );
        assert!(
            records == expected,
            "log {shard} holds other bytes; {}",
            detail()
        );
    }
    let again = recover(recovered.images.clone());
    let nothing_left = again.cuts == 0 || again.damages > 0;
    assert!(nothing_left, "{} then {}", detail(), again.notes);
    assert_eq!(again.damages, recovered.damages, "{}", detail());
    assert_eq!(
        (again.end, again.next_group),
        (recovered.end, recovered.next_group)
    );
    for (shard, (seed, records)) in &recovered.logs {
        let (seed_again, records_again) = &again.logs[shard];
        assert_eq!(
            seed.damage.is_some(),
            seed_again.damage.is_some(),
            "{} then {}",
            detail(),
            again.notes
        );
        assert_eq!(
            (seed.base, seed.tail),
            (seed_again.base, seed_again.tail),
            "{}",
            detail()
        );
        assert_eq!(records, records_again, "{}", detail());
    }
}

#[test]
fn random_damage_has_the_documented_outcome() {
    let copies = count("FELIX_DAMAGED_COPIES", 120);
    let first = count("FELIX_DAMAGED_COPIES_SEED", 1);
    let mut outcomes = Outcomes::default();
    let mut original = written(&mut Rng(first), true);
    for seed in first..first + copies {
        if seed % 50 == 0 {
            original = written(&mut Rng(seed), seed / 50 % 2 == 0);
        }
        let mut rng = Rng(seed.wrapping_mul(0x1234_5677));
        let mut copy = original.images.clone();
        let mut what = format!("copy {seed}");
        for _ in 0..=rng.below(3) {
            if !copy.is_empty() {
                what = format!("{what}, {}", damage(&mut copy, &mut rng));
            }
        }
        judge(&original, &copy, &what, &mut outcomes);
    }
    let Outcomes {
        refused_logs,
        whole_logs,
        copies_cut,
        copies_untouched,
    } = outcomes;
    println!("{copies} copies: {refused_logs} logs refused, {whole_logs} whole, {copies_cut} copies with a shorter end, {copies_untouched} not affected");
    assert!(copies < 100 || (refused_logs > 50 && whole_logs > 50 && copies_cut > 5));
}
