//! Power cuts: acknowledged within recovered within submitted, at every boundary of a script and for many
//! survivor sets.
//!
//! `FELIX_POWER_CUTS=100000` samples that many survivor sets instead of the suite's share.

use super::{count, payload, Rng, SimOptions};
use crate::sim::plain::Op;
use crate::sim::rig::{Rig, LEADERS};

/// Lengths that cross sectors, blocks and transfers.
const LENGTHS: [usize; 10] = [0, 1, 100, 511, 513, 3000, 4096, 9000, 12_000, 40];

/// What was done at the boundaries of a script.
#[derive(Default)]
struct Cuts {
    boundaries: u64,
    states: u64,
    samples: u64,
    segments: u64,
    rewritten: u64,
}

/// Cuts the power now: nothing, everything, each write alone, and sampled sector sets.
fn cut_everywhere(rig: &Rig, rng: &mut Rng, samples: u64, cuts: &mut Cuts) {
    let mut check =
        |rig: &Rig, rng: &mut Rng, survives: &mut dyn FnMut(usize, usize, &mut Rng) -> bool| {
            let images = {
                let mut chosen = Rng(rng.next_u64());
                rig.sim
                    .cut_power(|at, sector| survives(at, sector, &mut chosen))
            };
            cuts.states += 1;
            rig.check_cut(images, rng)
        };
    check(rig, rng, &mut |_, _, _| false);
    check(rig, rng, &mut |_, _, _| true);
    for alone in 0..rig.sim.pending.len() {
        check(rig, rng, &mut |at, _, _| at == alone);
        check(rig, rng, &mut |at, _, _| at != alone);
        // The first sector alone, and all but the first: header and body apart.
        check(rig, rng, &mut |at, sector, _| at == alone && sector == 0);
        check(rig, rng, &mut |at, sector, _| at != alone || sector != 0);
    }
    if rig.sim.pending.is_empty() {
        return;
    }
    for sample in 0..samples {
        let keep = [1, 2, 4, 8, 15][sample as usize % 5];
        let recovered = check(rig, rng, &mut |_, _, chosen| chosen.below(16) < keep);
        if sample % 8 == 0 {
            go_on(rig, recovered, rng);
        }
    }
    cuts.samples += samples;
    cuts.boundaries += 1;
}

/// What was cut stays cut when a new start goes on from there, and its power is cut, too.
fn go_on(rig: &Rig, recovered: super::Recovered, rng: &mut Rng) {
    let mut next = Rig::start(rig.options, recovered, 2);
    for shard in 0..3 {
        next.append(shard, &[b"after".to_vec()]);
    }
    next.sim.pump();
    let images = next.sim.cut_power(|_, _| rng.below(2) == 0);
    next.check_cut(images, rng);
    next.restart(rng);
}

/// Rewrites segments of which little is needed; the power is cut while the next ones are on their way.
fn rewrite(rig: &mut Rig, rng: &mut Rng, cuts: &mut Cuts) {
    for shard in 0..3 {
        let log = &rig.logs.entry(shard).or_default().submitted;
        let (base, tail) = (log.base, log.tail());
        // Of one log more is kept than of the others.
        let kept = (tail - base) / (8 >> shard);
        rig.control(shard, Op::Base(tail - kept));
    }
    rig.settle();
    rig.sim.machine.reclaim(0, rig.sim.now_us, usize::MAX);
    rig.sim.pump();
    cuts.rewritten += rig.sim.rewrite_waiting();
    cut_everywhere(rig, rng, 1, cuts);
}

/// The script: publishes over three logs that roll segments, and between them every event a log has.
fn scripted(rig: &mut Rig, rng: &mut Rng, step: u64) {
    let shard = rng.below(3) as u32;
    let log = &rig.logs.entry(shard).or_default().submitted;
    let (base, tail, accepted) = (log.base, log.tail(), log.accepted);
    let held = tail - base;
    match step % 16 {
        5 => rig.control(shard, Op::Truncate(tail - held.min(1 + rng.below(3)))),
        9 => rig.control(shard, Op::Base(base + held / 2)),
        7 => rig.control(shard, Op::Accept(accepted + step % 2)),
        11 => rig.control(shard, Op::Begin(accepted + 1, LEADERS[step as usize % 3])),
        13 if step % 3 == 0 => rig.control(shard, Op::Place(tail + 10)),
        _ => {
            let batch: Vec<_> = (0..1 + rng.below(3))
                .map(|_| {
                    let len = LENGTHS[rng.below(LENGTHS.len() as u64) as usize];
                    payload(rng, len)
                })
                .collect();
            rig.append(shard, &batch);
        }
    }
}

fn run(options: SimOptions, seed: u64, steps: u64, samples: u64) -> Cuts {
    let mut rng = Rng(seed);
    let mut rig = Rig::new(options);
    let mut cuts = Cuts::default();
    let mut step = 0;
    while step < steps {
        if rng.below(5) < 2 {
            scripted(&mut rig, &mut rng, step);
            step += 1;
            if step % 8 == 0 {
                rewrite(&mut rig, &mut rng, &mut cuts);
            }
            continue;
        }
        if rng.below(3) == 0 {
            rig.sim.pump();
        } else {
            let finishable = rig.sim.finishable();
            if finishable.is_empty() {
                continue;
            }
            rig.finish(finishable[rng.below(finishable.len() as u64) as usize]);
        }
        cut_everywhere(&rig, &mut rng, samples, &mut cuts);
    }
    cuts.segments = rig.sim.next_segment;
    cuts
}

/// All survivor sets of all ways to write: O_DSYNC and flushes, one to four commits in flight.
#[test]
fn every_boundary_of_a_script() {
    let wanted = count("FELIX_POWER_CUTS", 200);
    let ways = [
        (false, 2),
        (true, 2),
        (false, 4),
        (true, 4),
        (false, 1),
        (true, 1),
    ];
    // By hand the whole script and many samples at each boundary; in the suite its first part, three ways.
    let (ways, steps, samples) = match wanted > 1000 {
        true => (&ways[..], 64, 40),
        false => (&ways[..3], 24, 2),
    };
    let started = std::time::Instant::now();
    let mut all = Cuts::default();
    let mut seed = 1;
    while all.samples < wanted {
        for (flush, commits_in_flight) in ways {
            let options = SimOptions {
                flush: *flush,
                commits_in_flight: *commits_in_flight,
                ..SimOptions::default()
            };
            let cuts = run(options, seed, steps, samples);
            all.boundaries += cuts.boundaries;
            all.states += cuts.states;
            all.samples += cuts.samples;
            all.segments += cuts.segments;
            all.rewritten += cuts.rewritten;
            seed += 1;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{} boundaries with writes under way, {} states, of them {} sampled survivor sets, {} segments rewritten, in {seconds:.1} s",
        all.boundaries, all.states, all.samples, all.rewritten
    );
    assert!(all.rewritten > 0, "segments are rewritten between");
    assert!(all.boundaries > 50 && all.states > all.samples);
    assert!(all.segments > 4 * (seed - 1), "the script rolls segments");
}
