//! Consumer groups against a plain model: random histories of polls, acks, nacks, lapses, redrives,
//! seeks, trims and failed writes, cut by crashes that keep a random prefix of what was on its way.
//!
//! `FELIX_GROUP_HISTORIES` is the number of histories (400 unless set), `FELIX_GROUP_SEED` the
//! first seed. A failure names its seed.

mod answers;
mod steps;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use felix_uring::proto::cache::CacheFailure;
use felix_uring::proto::group::{
    DeadEntry, Delivered, Group, GroupAction, GroupLimits, GroupOp, GroupRefusal, GroupReply, Poll,
    Restored, SeekTo,
};
use felix_uring::proto::MonoTime;

const LIMITS: GroupLimits = GroupLimits {
    claim: Duration::from_secs(30),
    longest_claim: Duration::from_secs(100),
    attempts: 3,
    longest_wait: Duration::from_secs(30),
    poll_records: 8,
    poll_bytes: 24,
    poll_reads: 16,
    unsettled: 12,
    dead_letters: 6,
    waiting_polls: 4,
    idle: Duration::from_secs(600),
    write_retry: Duration::from_secs(1),
};

/// A small generator of its own, so that a seed means the same everywhere.
struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Self {
        let mut rng = Self(seed ^ 0x9E37_79B9_7F4A_7C15);
        rng.next();
        rng
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let at = self.below(from.len() as u64) as usize;
        from.get(at).copied()
    }
}

/// A write on its way, in the order of the core's log.
#[derive(Debug, Clone, Copy)]
enum Write {
    Cursor(Option<u64>),
    Entry(u64, Option<DeadEntry>),
}

/// What is on disk.
#[derive(Debug, Default, Clone)]
struct Disk {
    position: Option<u64>,
    entries: BTreeMap<u64, DeadEntry>,
}

impl Disk {
    fn apply(&mut self, write: Write) {
        match write {
            Write::Cursor(position) => self.position = position,
            Write::Entry(offset, Some(entry)) => drop(self.entries.insert(offset, entry)),
            Write::Entry(offset, None) => drop(self.entries.remove(&offset)),
        }
    }

    fn restored(&self) -> Restored {
        Restored {
            position: self.position,
            entries: self.entries.iter().map(|(at, e)| (*at, *e)).collect(),
            stale: Vec::new(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Poll,
    Ack(u64),
    Nack(u64),
    Extend(u64),
    DeadLetter(u64),
    List,
    Redrive(u64),
    Discard(u64),
    Seek(Option<u64>),
    Describe,
    Delete,
}

/// The world around one group.
struct World {
    rng: Rng,
    now: MonoTime,
    base: u64,
    tail: u64,
    group: Group,
    disk: Disk,
    writes: VecDeque<Write>,
    read: Option<(u64, usize)>,
    asked: BTreeMap<u64, Asked>,
    next_ticket: u64,
    /// Records a member asked to finish since the last seek or delete that went below them.
    acked: BTreeSet<u64>,
    /// Records whose entry was durable at some time, and those discarded.
    buried: BTreeSet<u64>,
    /// The redrives answered and not finished since.
    redriven: BTreeSet<u64>,
    /// Claims that stand: until when, and in which delivery.
    claims: BTreeMap<u64, (MonoTime, u32)>,
    /// Deliveries since the counts were last reset.
    attempts: BTreeMap<u64, u32>,
    crashes: u32,
    answers: u64,
}

fn payload(offset: u64) -> Bytes {
    Bytes::from(format!("r{offset}"))
}

fn count(name: &str, default: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn no_history_loses_a_record_or_breaks_a_bound() {
    let first = count("FELIX_GROUP_SEED", 1);
    let histories = count("FELIX_GROUP_HISTORIES", 400);
    let (mut crashes, mut answers, mut buried) = (0, 0, 0);
    for seed in first..first + histories {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            for _ in 0..60 + world.rng.below(240) {
                world.step();
            }
            world.heal();
            (world.crashes, world.answers, world.buried.len())
        });
        let Ok(done) = run else {
            panic!("seed {seed}: run again with FELIX_GROUP_SEED={seed} FELIX_GROUP_HISTORIES=1");
        };
        crashes += done.0;
        answers += done.1;
        buried += done.2;
    }
    // The histories reach what they are about.
    assert!(u64::from(crashes) > histories / 2, "{crashes} crashes");
    assert!(answers > 10 * histories, "{answers} answers");
    assert!(buried as u64 > histories / 4, "{buried} dead letters");
}
