//! Power cuts: acknowledged within recovered within submitted, at every boundary and for many survivor sets.

use super::{payload, recover, Images, Rng, Sim, SimOptions};

/// Lengths that cross sectors, blocks and transfers.
const LENGTHS: [usize; 10] = [0, 1, 100, 511, 513, 3000, 4096, 9000, 12_000, 40];

/// Checks one state a power cut left behind, a second start, and going on from it.
fn check(sim: &Sim, options: SimOptions, images: Images, go_on: bool) {
    let first = recover(images);
    assert_eq!(first.damages, 0, "a power cut is not damage");
    for (shard, shadow) in &sim.shadows {
        let recovered = first.logs.get(shard).map_or(&[][..], |(seed, records)| {
            assert!(seed.damage.is_none(), "{:?}", seed.damage);
            assert_eq!(seed.tail, records.len() as u64);
            records
        });
        assert!(
            recovered.len() as u64 >= shadow.acknowledged,
            "an acknowledged record is lost"
        );
        assert!(recovered.len() <= shadow.submitted.len());
        assert!(
            recovered.iter().zip(&shadow.submitted).all(|(a, b)| a == b),
            "other bytes came back"
        );
    }
    let second = recover(first.images.clone());
    assert_eq!(
        (second.cuts, second.damages),
        (0, 0),
        "a second start finds nothing to do: {}, then {}",
        first.notes,
        second.notes
    );
    assert_eq!(second.end, first.end);
    for (shard, (seed, records)) in &first.logs {
        assert_eq!(
            (&second.logs[shard].0.tail, &second.logs[shard].1),
            (&seed.tail, records)
        );
    }
    if go_on {
        let mut next = Sim::start(options, second, 2);
        for shard in 0..3 {
            next.append(shard, &[b"after".to_vec()]);
        }
        next.settle();
        let third = recover(next.durable.clone());
        assert_eq!((third.cuts, third.damages), (0, 0));
        for (shard, shadow) in &next.shadows {
            assert_eq!(
                third.logs[shard].1, shadow.submitted,
                "what was cut stays cut"
            );
            assert_eq!(shadow.acknowledged, shadow.submitted.len() as u64);
        }
    }
}

/// Cuts the power now: nothing, everything, each write alone, and sampled sector sets.
fn cut_everywhere(sim: &Sim, options: SimOptions, rng: &mut Rng, samples: usize) -> usize {
    check(sim, options, sim.cut_power(|_, _| false), false);
    check(sim, options, sim.cut_power(|_, _| true), false);
    for alone in 0..sim.pending.len() {
        check(sim, options, sim.cut_power(|at, _| at == alone), true);
        check(sim, options, sim.cut_power(|at, _| at != alone), false);
        // The first sector alone, and all but the first: header and body apart.
        check(
            sim,
            options,
            sim.cut_power(|at, sector| at == alone && sector == 0),
            false,
        );
        check(
            sim,
            options,
            sim.cut_power(|at, sector| at != alone || sector != 0),
            false,
        );
    }
    for sample in 0..samples {
        let keep = [1, 2, 4, 8, 15][sample % 5];
        check(
            sim,
            options,
            sim.cut_power(|_, _| rng.below(16) < keep),
            sample % 8 == 0,
        );
    }
    2 + 4 * sim.pending.len() + samples
}

fn run(options: SimOptions, seed: u64, steps: usize, samples: usize) -> usize {
    let mut rng = Rng(seed);
    let mut sim = Sim::new(options);
    let mut states = 0;
    for _ in 0..steps {
        match rng.below(5) {
            0 | 1 => {
                let shard = rng.below(3) as u32;
                let count = 1 + rng.below(3);
                let batch: Vec<_> = (0..count)
                    .map(|_| {
                        let len = LENGTHS[rng.below(LENGTHS.len() as u64) as usize];
                        payload(&mut rng, len)
                    })
                    .collect();
                sim.append(shard, &batch);
                continue;
            }
            2 => sim.pump(),
            _ => {
                let finishable = sim.finishable();
                if finishable.is_empty() {
                    continue;
                }
                let at = finishable[rng.below(finishable.len() as u64) as usize];
                sim.finish(at);
            }
        }
        states += cut_everywhere(&sim, options, &mut rng, samples);
    }
    states
}

#[test]
fn every_boundary_of_a_script_with_o_dsync() {
    let states = run(SimOptions::default(), 1, 120, 40);
    assert!(states > 2500, "{states}");
}

#[test]
fn every_boundary_of_a_script_with_flushes() {
    let options = SimOptions {
        flush: true,
        ..SimOptions::default()
    };
    let states = run(options, 2, 120, 40);
    assert!(states > 2500, "{states}");
}

#[test]
fn one_and_four_commits_in_flight() {
    for commits_in_flight in [1, 4] {
        let options = SimOptions {
            commits_in_flight,
            ..SimOptions::default()
        };
        let states = run(options, 3 + commits_in_flight as u64, 100, 24);
        assert!(states > 500, "{states}");
    }
}

#[test]
fn torn_tail_at_every_byte_of_the_last_group() {
    let options = SimOptions::default();
    let mut rng = Rng(9);
    let mut sim = Sim::new(options);
    for len in [100, 3000, 1] {
        sim.append(0, &[payload(&mut rng, len)]);
        sim.settle();
    }
    let before = sim.durable.clone();
    sim.append(0, &[payload(&mut rng, 5000)]);
    sim.append(1, &[payload(&mut rng, 40)]);
    sim.settle();
    let image = &sim.durable[&1];
    let end = image.iter().rposition(|byte| *byte != 0).expect("written") + 1;
    let start = before[&1]
        .iter()
        .rposition(|byte| *byte != 0)
        .expect("written")
        .next_multiple_of(4096);
    for cut in start..=end {
        let mut images = sim.durable.clone();
        let keep = images.get_mut(&1).expect("exists");
        keep.truncate(cut);
        let recovered = recover(images);
        let (_, records) = &recovered.logs[&0];
        assert_eq!(recovered.damages, 0, "cut at {cut}");
        let expected = if cut == end { 4 } else { 3 };
        assert_eq!(records.len(), expected, "cut at {cut}");
        assert_eq!(records[..], sim.shadows[&0].submitted[..expected]);
    }
}
