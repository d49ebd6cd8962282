//! The log contract with everything in it: appends, truncate, place, base, accept, begin, against plain
//! values, with power cuts at any moment.
//!
//! Every step of a log gives one more *version* of it. What a power cut leaves must be exactly one version,
//! not older than the last acknowledged one, and must be the same on a second start.
//!
//! `FELIX_MODEL_HISTORIES` sets the number of random histories (default 40).

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{name, payload, recover, Recovered, Rng, Sim, SimOptions};
use crate::error::AppendError;
use crate::machine::{ControlEvent, LogRef, LogSeed};

/// One log, plainly.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plain {
    pub base: u64,
    /// Records from the base on.
    pub records: Vec<Rc<[u8]>>,
    accepted: u64,
    history: Vec<(u64, u64, String)>,
}

impl Plain {
    pub fn tail(&self) -> u64 {
        self.base + self.records.len() as u64
    }

    pub fn apply(&mut self, event: ControlEvent<'_>) {
        let tail = self.tail();
        match event {
            ControlEvent::Truncate(to) => {
                self.records.truncate((to - self.base) as usize);
                self.history.retain(|(_, start, _)| *start < to);
            }
            ControlEvent::Place(base) => {
                self.base = base;
                self.records.clear();
                self.history.clear();
            }
            ControlEvent::Base(base) => {
                self.records.drain(..(base - self.base) as usize);
                self.base = base;
                while self
                    .history
                    .get(1)
                    .is_some_and(|(_, start, _)| *start <= base)
                {
                    self.history.remove(0);
                }
            }
            ControlEvent::Accept(generation) => self.accepted = generation,
            ControlEvent::Begin { generation, leader } => {
                self.accepted = generation;
                self.history.retain(|(_, start, _)| *start < tail);
                if self
                    .history
                    .last()
                    .is_none_or(|(last, _, _)| *last != generation)
                {
                    self.history.push((generation, tail, leader.to_owned()));
                }
            }
        }
    }

    pub fn recovered(seed: &LogSeed, records: &[Vec<u8>]) -> Self {
        let history = seed.control.history.iter();
        Self {
            base: seed.base,
            records: records
                .iter()
                .map(|record| record.as_slice().into())
                .collect(),
            accepted: seed.control.accepted,
            history: history
                .map(|entry| (entry.generation, entry.start, entry.leader.to_string()))
                .collect(),
        }
    }
}

/// The versions of one log.
#[derive(Debug, Clone)]
pub struct Versions {
    pub all: Vec<Plain>,
    pub acknowledged: usize,
}

impl Versions {
    pub fn newest(&self) -> &Plain {
        &self.all[self.all.len() - 1]
    }
}

/// Some logs over the model device.
pub struct World {
    pub sim: Sim,
    pub logs: BTreeMap<u32, Versions>,
    pub seen: usize,
}

impl World {
    pub fn new(options: SimOptions) -> Self {
        Self {
            sim: Sim::new(options),
            logs: BTreeMap::new(),
            seen: 0,
        }
    }

    pub fn log(&mut self, shard: u32) -> (LogRef, &mut Versions) {
        let log = self.sim.log(shard);
        let versions = self.logs.entry(shard).or_insert_with(|| Versions {
            all: vec![Plain::default()],
            acknowledged: 0,
        });
        (log, versions)
    }

    fn token(shard: u32, version: usize) -> u64 {
        ((version as u64) << 32) | u64::from(shard)
    }

    pub fn append(&mut self, shard: u32, payloads: &[Vec<u8>]) {
        let (log, versions) = self.log(shard);
        let mut plain = versions.newest().clone();
        let first = plain.tail();
        for payload in payloads {
            plain.records.push(payload.as_slice().into());
            versions.all.push(plain.clone());
        }
        let token = Self::token(shard, versions.all.len() - 1);
        let generation = plain.accepted;
        let payloads = payloads.iter().map(Vec::as_slice);
        let machine = &mut self.sim.machine;
        let range = machine.append(log, generation, 7, 0, payloads, token);
        assert_eq!(range, Ok(first..plain.tail()));
    }

    pub fn control(&mut self, shard: u32, event: ControlEvent<'_>) {
        let (log, versions) = self.log(shard);
        let mut plain = versions.newest().clone();
        plain.apply(event);
        versions.all.push(plain);
        let token = Self::token(shard, versions.all.len() - 1);
        let taken = self.sim.machine.push_control(log, event, 7, 0, token);
        assert_eq!(taken, Ok(()), "{event:?}");
    }

    pub fn collect(&mut self) {
        self.sim.collect();
        for done in &self.sim.completions[self.seen..] {
            assert_eq!(done.result, Ok(()));
            if let Some(versions) = self.logs.get_mut(&(done.token as u32)) {
                let version = (done.token >> 32) as usize;
                assert!(version >= versions.acknowledged, "outcomes in order");
                versions.acknowledged = version;
            }
        }
        self.seen = self.sim.completions.len();
    }

    /// What recovery made of a log is one of the versions that may be.
    pub fn check(&self, recovered: &Recovered) {
        assert_eq!(recovered.damages, 0, "{}", recovered.notes);
        for (shard, versions) in &self.logs {
            let found = match recovered.logs.get(shard) {
                Some((seed, records)) => {
                    assert_eq!(seed.damage, None, "{}", recovered.notes);
                    assert_eq!(seed.tail, seed.base + records.len() as u64);
                    Plain::recovered(seed, records)
                }
                None => Plain::default(),
            };
            let allowed = &versions.all[versions.acknowledged..];
            assert!(
                allowed.contains(&found),
                "shard {shard}: {found:?} is none of {} versions, acknowledged {:?}",
                allowed.len(),
                allowed[0],
            );
        }
    }

    pub fn cut_power(&self, rng: &mut Rng, keep: u64) {
        let images = self.sim.cut_power(|_, _| rng.below(16) < keep);
        let first = recover(images);
        self.check(&first);
        let second = recover(first.images.clone());
        assert_eq!((second.cuts, second.damages), (0, 0));
        for (shard, (seed, records)) in &first.logs {
            let (again, records_again) = &second.logs[shard];
            assert_eq!(
                (records, &seed.control, seed.base),
                (records_again, &again.control, again.base)
            );
        }
    }

    /// Starts over what a power cut left; the versions found are the only ones from then on.
    pub fn restart(&mut self, options: SimOptions, rng: &mut Rng, keep: u64, epoch: u64) {
        let recovered = recover(self.sim.cut_power(|_, _| rng.below(16) < keep));
        self.check(&recovered);
        for (shard, versions) in &mut self.logs {
            let found = recovered.logs.get(shard);
            let plain = found.map_or_else(Plain::default, |(seed, records)| {
                Plain::recovered(seed, records)
            });
            *versions = Versions {
                all: vec![plain],
                acknowledged: 0,
            };
        }
        self.sim = Sim::start(options, recovered, epoch);
        self.sim.shadows.clear();
        self.seen = 0;
        for (shard, versions) in &self.logs {
            if let Some(log) = self.sim.logs.get(shard) {
                let view = self.sim.machine.view(*log);
                let plain = versions.newest();
                assert_eq!(
                    (view.base, view.tail, view.accepted),
                    (plain.base, plain.tail(), plain.accepted)
                );
            }
        }
    }

    pub fn random_step(&mut self, rng: &mut Rng) {
        let shard = rng.below(3) as u32;
        let plain = self.log(shard).1.newest().clone();
        let leaders = ["n1", "broker-2.example", ""];
        let leader = leaders[rng.below(3) as usize];
        match rng.below(16) {
            0..=5 => {
                let lens = [0, 1, 100, 511, 3000, 9000, 40];
                let batch: Vec<_> = (0..1 + rng.below(3))
                    .map(|_| {
                        let len = lens[rng.below(7) as usize];
                        payload(rng, len)
                    })
                    .collect();
                self.append(shard, &batch);
            }
            6 => {
                let back = rng.below(1 + plain.records.len().min(6) as u64);
                self.control(shard, ControlEvent::Truncate(plain.tail() - back));
            }
            7 => {
                let up = rng.below(1 + plain.records.len() as u64);
                self.control(shard, ControlEvent::Base(plain.base + up));
            }
            8 if rng.below(3) == 0 => {
                self.control(shard, ControlEvent::Place(rng.below(200)));
            }
            8 | 9 => {
                let generation = plain.accepted + rng.below(2);
                self.control(shard, ControlEvent::Accept(generation));
            }
            10 => {
                let generation = plain.accepted + rng.below(3);
                self.control(shard, ControlEvent::Begin { generation, leader });
            }
            11 | 12 => self.sim.pump(),
            _ => {
                let finishable = self.sim.finishable();
                if !finishable.is_empty() {
                    let pick = rng.below(finishable.len() as u64) as usize;
                    self.sim.finish(finishable[pick]);
                }
            }
        }
        self.collect();
    }
}

pub fn histories() -> u64 {
    let set = std::env::var("FELIX_MODEL_HISTORIES").ok();
    set.and_then(|text| text.parse().ok()).unwrap_or(40)
}

#[test]
fn a_power_cut_leaves_one_version_of_every_log() {
    for seed in 0..histories() {
        let mut rng = Rng(seed);
        let options = SimOptions {
            flush: seed % 3 == 0,
            commits_in_flight: 1 + (seed % 4) as usize,
            ..SimOptions::default()
        };
        let mut world = World::new(options);
        let mut epoch = 1;
        for step in 0..120 {
            world.random_step(&mut rng);
            if step % 4 == 0 {
                let keep = [0, 2, 8, 14, 16][rng.below(5) as usize];
                world.cut_power(&mut rng, keep);
            }
            if rng.below(50) == 0 {
                epoch += 1;
                let keep = [0, 8, 16][rng.below(3) as usize];
                world.restart(options, &mut rng, keep, epoch);
            }
        }
        world.sim.settle();
        world.collect();
        for versions in world.logs.values() {
            assert_eq!(versions.acknowledged, versions.all.len() - 1);
        }
        world.check(&recover(world.sim.durable.clone()));
    }
}

#[test]
fn a_deposed_leader_is_refused_also_before_the_new_one_is_durable() {
    let mut world = World::new(SimOptions::default());
    world.control(0, ControlEvent::Accept(5));
    let log = world.sim.log(0);
    let machine = &mut world.sim.machine;
    assert_eq!(machine.accepted(log), 0, "not durable yet");
    let stale = Err(AppendError::StaleGeneration { accepted: 5 });
    assert_eq!(
        machine.push_control(log, ControlEvent::Accept(4), 7, 0, 1),
        stale
    );
    let begin = ControlEvent::Begin {
        generation: 4,
        leader: "n1",
    };
    assert_eq!(machine.push_control(log, begin, 7, 0, 1), stale);
    world.sim.settle();
    assert_eq!(world.sim.machine.accepted(log), 5);
}

#[test]
fn what_is_undone_by_a_full_disk_leaves_no_trace() {
    let mut world = World::new(SimOptions::default());
    world.append(0, &[b"first".to_vec()]);
    world.control(0, ControlEvent::Accept(2));
    world.sim.settle();
    world.collect();
    let before = world.sim.machine.view(world.sim.logs[&0]);
    world.control(0, ControlEvent::Accept(3));
    world.control(
        0,
        ControlEvent::Begin {
            generation: 7,
            leader: "n1",
        },
    );
    world.control(0, ControlEvent::Truncate(0));
    world.sim.pump();
    let action = world.sim.pending.remove(0).action;
    let id = super::write_id(&action);
    let machine = &mut world.sim.machine;
    machine.on_write_done(id, &action, Err(libc::ENOSPC), 0);
    assert_eq!(machine.view(world.sim.logs[&0]), before);
    let log = world.sim.logs[&0];
    let taken = machine.push_control(log, ControlEvent::Accept(3), 7, 0, 1);
    assert_eq!(taken, Ok(()), "3 is new again");
    world.sim.settle();
    let (seed, records) = &recover(world.sim.durable.clone()).logs[&0];
    assert_eq!((seed.control.accepted, records.len()), (3, 1));
}

#[test]
fn a_lost_event_refuses_its_log_and_no_other() {
    let mut rng = Rng(31);
    let mut world = World::new(SimOptions::default());
    world.append(0, &[payload(&mut rng, 100)]);
    world.append(1, &[payload(&mut rng, 100)]);
    world.sim.settle();
    let at = world.sim.durable[&1].iter().rposition(|byte| *byte != 0);
    let at = at.expect("written").next_multiple_of(4096);
    world.control(0, ControlEvent::Accept(9));
    world.sim.settle();
    // Both go on without a gap in their offsets.
    world.append(0, &[payload(&mut rng, 100)]);
    world.append(1, &[payload(&mut rng, 100)]);
    world.sim.settle();
    let mut images = world.sim.durable.clone();
    images.get_mut(&1).expect("exists")[at..at + 512].fill(0);
    let recovered = recover(images);
    let damage = |shard: u32| recovered.logs[&shard].0.damage.clone();
    assert!(damage(0).is_some(), "generation 9 must not be forgotten");
    assert_eq!(damage(1), None);
}

#[test]
fn every_bit_of_an_event_is_covered() {
    let mut world = World::new(SimOptions::default());
    world.append(0, &[b"a".to_vec()]);
    world.sim.settle();
    let at = 4096 * 2;
    let begin = ControlEvent::Begin {
        generation: 6,
        leader: "broker-2.example",
    };
    world.control(0, begin);
    world.sim.settle();
    world.append(1, &[b"b".to_vec()]);
    world.sim.settle();
    let used = world.sim.durable[&1][at..at + 4096]
        .iter()
        .rposition(|byte| *byte != 0);
    for byte in 128..=used.expect("written") {
        let mut images = world.sim.durable.clone();
        images.get_mut(&1).expect("exists")[at + byte] ^= 1 << (byte % 8);
        let recovered = recover(images);
        assert!(
            recovered.logs[&0].0.damage.is_some(),
            "byte {byte} of the group"
        );
    }
    assert_eq!(name(0), *world.sim.machine.log_name(world.sim.logs[&0]));
}
