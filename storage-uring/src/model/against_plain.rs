//! Property: whatever is appended, in whatever order writes finish, the logs are the plain lists.

use proptest::prelude::*;

use super::{name, payload, read_all, recover, Rng, Sim, SimOptions};
use crate::machine::ControlEvent;

#[derive(Debug, Clone)]
enum Step {
    Append { shard: u32, lens: Vec<usize> },
    Pump,
    Finish(u64),
    Truncate { shard: u32, back: u64 },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![4 => 0usize..300, 2 => 300usize..5000, 1 => 5000usize..30_000];
    prop_oneof![
        6 => (0u32..4, prop::collection::vec(len, 0..6)).prop_map(|(shard, lens)| Step::Append { shard, lens }),
        4 => Just(Step::Pump),
        6 => any::<u64>().prop_map(Step::Finish),
        1 => (0u32..4, 0u64..5).prop_map(|(shard, back)| Step::Truncate { shard, back }),
        1 => Just(Step::Restart),
    ]
}

fn check_memory(sim: &Sim) {
    for (shard, log) in &sim.logs {
        let shadow = &sim.shadows.get(shard).cloned().unwrap_or_default();
        assert_eq!(sim.machine.tail(*log), shadow.submitted.len() as u64);
        let durable = sim.machine.durable_tail(*log);
        assert!(durable >= shadow.acknowledged.min(shadow.submitted.len() as u64));
        let from = durable.saturating_sub(3);
        if let Some(batch) = sim.machine.read_recent(*log, from, 20_000) {
            let to = batch.next_offset;
            assert!(to <= durable && to > from);
            let expected = &shadow.submitted[from as usize..to as usize];
            assert!(batch.records.iter().zip(expected).all(|(a, b)| a == b));
            assert_eq!(batch.records.len(), expected.len());
        }
    }
}

fn run(steps: Vec<Step>, options: SimOptions) {
    let mut rng = Rng(5);
    let mut sim = Sim::new(options);
    let mut epoch = 1;
    for step in steps {
        match step {
            Step::Append { shard, lens } => {
                let batch: Vec<_> = lens.iter().map(|len| payload(&mut rng, *len)).collect();
                sim.append(shard, &batch);
                sim.collect();
            }
            Step::Pump => sim.pump(),
            Step::Finish(pick) => {
                let finishable = sim.finishable();
                if !finishable.is_empty() {
                    sim.finish(finishable[(pick % finishable.len() as u64) as usize]);
                }
            }
            Step::Truncate { shard, back } => {
                // On a quiet log, as a follower does; then the shadow is exact.
                sim.settle();
                let log = sim.log(shard);
                let to = sim.machine.tail(log).saturating_sub(back);
                sim.machine
                    .push_control(log, ControlEvent::Truncate(to), 9, 0, 99)
                    .expect("is taken");
                let shadow = sim.shadows.entry(shard).or_default();
                shadow.submitted.truncate(to as usize);
                shadow.acknowledged = to;
                sim.settle();
            }
            Step::Restart => {
                sim.settle();
                epoch += 1;
                let recovered = recover(sim.durable.clone());
                assert_eq!((recovered.cuts, recovered.damages), (0, 0));
                for (shard, shadow) in &sim.shadows {
                    let records = recovered
                        .logs
                        .get(shard)
                        .map_or(&[][..], |(_, records)| records);
                    assert_eq!(records, shadow.submitted);
                }
                sim = Sim::start(options, recovered, epoch);
            }
        }
        check_memory(&sim);
    }
    sim.settle();
    check_memory(&sim);
    for (shard, log) in sim.logs.clone() {
        let shadow = sim.shadows.get(&shard).cloned().unwrap_or_default();
        assert_eq!(shadow.acknowledged, shadow.submitted.len() as u64);
        let state = recover(sim.durable.clone());
        if let Some((seed, _)) = state.logs.get(&shard) {
            assert_eq!(
                read_all(&state.images, &name(shard), seed),
                shadow.submitted
            );
            assert_eq!(seed.tail, sim.machine.tail(log));
        } else {
            assert!(shadow.submitted.is_empty());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn logs_are_the_plain_lists(steps in prop::collection::vec(step(), 1..40), in_flight in 1usize..5, flush: bool) {
        run(steps, SimOptions { flush, commits_in_flight: in_flight, max_transfer_bytes: 8192 });
    }
}
