//! Consumer groups against a plain model: random histories of polls, acks, nacks, lapses, redrives,
//! seeks, trims and failed writes, cut by crashes that keep a random prefix of what was on its way.
//!
//! `FELIX_GROUP_HISTORIES` is the number of histories (400 unless set), `FELIX_GROUP_SEED` the
//! first seed. A failure names its seed.

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

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let base = rng.below(4);
        let tail = base + rng.below(10);
        let group = Group::new(LIMITS, MonoTime::ZERO, Restored::default(), base, tail);
        Self {
            rng,
            now: MonoTime::ZERO,
            base,
            tail,
            group,
            disk: Disk::default(),
            writes: VecDeque::new(),
            read: None,
            asked: BTreeMap::new(),
            next_ticket: 1,
            acked: BTreeSet::new(),
            buried: BTreeSet::new(),
            redriven: BTreeSet::new(),
            claims: BTreeMap::new(),
            attempts: BTreeMap::new(),
            crashes: 0,
            answers: 0,
        }
    }

    fn ask(&mut self, asked: Asked, op: GroupOp) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.asked.insert(ticket, asked);
        self.group.on_request(self.now, ticket, op);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(action) = self.group.poll_action() {
            match action {
                GroupAction::Answer { ticket, result } => self.on_answer(ticket, result),
                GroupAction::Read { from, max_bytes } => {
                    assert!(self.read.is_none(), "two reads at once");
                    self.read = Some((from, max_bytes));
                }
                GroupAction::WriteCursor { position } => {
                    let on_its_way = |w: &Write| matches!(w, Write::Cursor(_));
                    assert!(!self.writes.iter().any(on_its_way), "two cursors at once");
                    if let Some(position) = position {
                        self.check_position(position);
                    }
                    self.writes.push_back(Write::Cursor(position));
                }
                GroupAction::WriteEntry { offset, entry } => {
                    self.writes.push_back(Write::Entry(offset, entry));
                }
            }
        }
        let most = LIMITS.unsettled + 2 * LIMITS.dead_letters + LIMITS.waiting_polls;
        assert!(self.group.held() <= most);
    }

    /// GRP-1 and GRP-2: what a position passes is acked, durably buried, or trimmed.
    fn check_position(&self, position: u64) {
        assert!(position <= self.tail);
        for offset in self.base..position {
            assert!(
                self.acked.contains(&offset)
                    || self.buried.contains(&offset)
                    || self.disk.entries.contains_key(&offset),
                "position {position} passes {offset}"
            );
        }
    }

    fn on_answer(&mut self, ticket: u64, result: Result<GroupReply, GroupRefusal>) {
        self.answers += 1;
        let asked = self
            .asked
            .remove(&ticket)
            .expect("answered once, if at all");
        match (asked, result) {
            (Asked::Poll, Ok(GroupReply::Records(records))) => self.on_delivered(records),
            (Asked::Ack(offset), Ok(GroupReply::Settled)) => {
                self.claims.remove(&offset);
                self.redriven.remove(&offset);
            }
            (Asked::Nack(offset), Ok(GroupReply::Settled)) => {
                self.claims.remove(&offset);
            }
            (Asked::Extend(offset), Ok(GroupReply::Extended { visible })) => {
                let (until, _) = self.claims.get_mut(&offset).expect("a claim that stands");
                *until = self.now + visible;
            }
            (Asked::DeadLetter(offset), Ok(GroupReply::Settled)) => {
                assert!(
                    self.buried.contains(&offset),
                    "told before its entry is durable"
                );
                self.claims.remove(&offset);
            }
            (Asked::List, Ok(GroupReply::DeadLetters(offsets))) => {
                for offset in &offsets {
                    assert_eq!(self.disk.entries.get(offset), Some(&DeadEntry::Dead));
                }
                assert!(offsets.is_sorted());
            }
            (Asked::Redrive(offset), Ok(GroupReply::Settled)) => {
                assert_eq!(self.disk.entries.get(&offset), Some(&DeadEntry::Redriven));
                self.redriven.insert(offset);
                self.attempts.remove(&offset);
            }
            (Asked::Discard(offset), Ok(GroupReply::Settled)) => {
                assert_eq!(self.disk.entries.get(&offset), None);
            }
            (Asked::Seek(to), Ok(GroupReply::Position { offset, moved })) => {
                assert_eq!(to.is_some_and(|to| to == offset), moved);
            }
            (Asked::Describe, Ok(GroupReply::Info(info))) => {
                assert_eq!((info.committed, info.tail), (self.disk.position, self.tail));
                assert!(info.in_flight + info.owed <= LIMITS.unsettled as u64);
            }
            (Asked::Delete, Ok(GroupReply::Deleted { .. })) => {
                assert_eq!(self.disk.position, None);
                assert!(self.disk.entries.is_empty());
                self.redriven.clear();
            }
            // The record is owed again: its member had given it up, or finished it, and that was not
            // written.
            (Asked::DeadLetter(offset) | Asked::Ack(offset), Err(GroupRefusal::Log(_))) => {
                self.claims.remove(&offset);
            }
            (_, Ok(reply)) => panic!("{asked:?} answered {reply:?}"),
            (_, Err(_)) => {}
        }
    }

    fn on_delivered(&mut self, records: Vec<Delivered>) {
        assert!(records.len() <= LIMITS.poll_records);
        let bytes: usize = records.iter().skip(1).map(|r| r.payload.len()).sum();
        assert!(bytes <= LIMITS.poll_bytes);
        assert!(records.windows(2).all(|two| two[0].offset < two[1].offset));
        for record in records {
            let offset = record.offset;
            assert_eq!(record.payload, payload(offset));
            assert!(offset < self.tail);
            if let Some((until, _)) = self.claims.get(&offset) {
                assert!(*until <= self.now, "{offset} is held by another member");
            }
            let count = self.attempts.entry(offset).or_default();
            *count += 1;
            assert_eq!(*count, record.attempts, "attempts of {offset}");
            assert!(
                record.attempts <= LIMITS.attempts,
                "{offset} is delivered too often"
            );
            let is_passed = self.disk.position.is_some_and(|at| offset < at);
            assert!(
                !is_passed
                    || offset < self.base
                    || self.disk.entries.get(&offset) == Some(&DeadEntry::Redriven),
                "{offset} was finished for good"
            );
            self.claims
                .insert(offset, (self.now + LIMITS.claim, record.attempts));
        }
    }

    /// The oldest write is done, or all are undone, as a log does it.
    fn finish_write(&mut self, ok: bool) {
        if ok {
            let Some(write) = self.writes.pop_front() else {
                return;
            };
            self.disk.apply(write);
            self.report(write, Ok(()));
        } else {
            for write in std::mem::take(&mut self.writes) {
                self.report(write, Err(CacheFailure::DiskFull));
            }
        }
    }

    fn report(&mut self, write: Write, result: Result<(), CacheFailure>) {
        match write {
            Write::Cursor(_) => self.group.on_cursor_written(self.now, result),
            Write::Entry(offset, entry) => {
                if result.is_ok() && entry == Some(DeadEntry::Dead) {
                    self.buried.insert(offset);
                    self.redriven.remove(&offset);
                }
                self.group.on_entry_written(self.now, offset, result);
            }
        }
        self.drain();
    }

    fn finish_read(&mut self) {
        let Some((from, max_bytes)) = self.read.take() else {
            return;
        };
        if self.rng.chance(3) {
            self.group.on_read_failed(self.now);
            return self.drain();
        }
        if from < self.base {
            self.group.on_trimmed(self.now, self.base);
            return self.drain();
        }
        assert!(from < self.tail, "a read past what may be shown");
        let most = match max_bytes {
            1 => 1,
            _ => 1 + self.rng.below(6),
        };
        let to = (from + most).min(self.tail);
        let records = (from..to).map(payload).collect();
        self.group.on_records(self.now, from, records);
        self.drain();
    }

    /// The process dies: some of what was on its way is on disk, in order; memory is gone.
    fn crash(&mut self) {
        self.crashes += 1;
        for _ in 0..self.rng.below(self.writes.len() as u64 + 1) {
            if let Some(write) = self.writes.pop_front() {
                self.disk.apply(write);
                match write {
                    Write::Entry(offset, Some(DeadEntry::Dead)) => {
                        self.buried.insert(offset);
                        self.redriven.remove(&offset);
                    }
                    // Finished, though nobody was told.
                    Write::Entry(offset, None) => {
                        self.redriven.remove(&offset);
                    }
                    Write::Entry(_, Some(DeadEntry::Redriven)) | Write::Cursor(_) => {}
                }
            }
        }
        self.writes.clear();
        self.read = None;
        self.asked.clear();
        self.claims.clear();
        self.attempts.clear();
        let restored = self.disk.restored();
        self.group = Group::new(LIMITS, self.now, restored, self.base, self.tail);
        self.drain();
    }

    fn step(&mut self) {
        let claimed: Vec<u64> = self.claims.keys().copied().collect();
        let dead: Vec<u64> = self.disk.entries.keys().copied().collect();
        match self.rng.below(100) {
            0..=24 => {
                let poll = Poll {
                    max_records: self.rng.below(10) as usize,
                    wait: Duration::from_secs(self.rng.below(3) * 10),
                    visibility: None,
                    member: None,
                    reclaim: false,
                };
                self.ask(Asked::Poll, GroupOp::Poll(poll));
            }
            25..=44 => {
                if let Some(offset) = self.rng.pick(&claimed) {
                    self.acked.insert(offset);
                    self.ask(Asked::Ack(offset), GroupOp::Ack { offset });
                }
            }
            45..=46 => {
                // A guess: never handed out, or finished long ago.
                let offset = self.rng.below(self.tail + 2);
                if !self.claims.contains_key(&offset) {
                    let op = GroupOp::Ack { offset };
                    let was_open = self.acked.insert(offset);
                    self.ask(Asked::Ack(offset), op);
                    if was_open && !self.late_ack_counts(offset) {
                        self.acked.remove(&offset);
                    }
                }
            }
            47..=54 => {
                if let Some(offset) = self.rng.pick(&claimed) {
                    let attempts = match self.rng.chance(50) {
                        true => self.claims[&offset].1,
                        false => 0,
                    };
                    let delay = Duration::from_secs(self.rng.below(2) * 5);
                    let op = GroupOp::Nack {
                        offset,
                        delay,
                        attempts,
                    };
                    self.ask(Asked::Nack(offset), op);
                }
            }
            55..=56 => {
                if let Some(offset) = self.rng.pick(&claimed) {
                    let (until, attempts) = self.claims[&offset];
                    if until > self.now {
                        let by = Duration::from_secs(40);
                        let op = GroupOp::Extend {
                            offset,
                            attempts,
                            by,
                        };
                        self.ask(Asked::Extend(offset), op);
                    }
                }
            }
            57 => {
                if let Some(offset) = self.rng.pick(&claimed) {
                    self.ask(Asked::DeadLetter(offset), GroupOp::DeadLetter { offset });
                }
            }
            58..=59 => self.ask(Asked::List, GroupOp::ListDead),
            60..=61 => {
                if let Some(offset) = self.rng.pick(&dead) {
                    self.ask(Asked::Redrive(offset), GroupOp::Redrive { offset });
                }
            }
            62 => {
                if let Some(offset) = self.rng.pick(&dead) {
                    self.ask(Asked::Discard(offset), GroupOp::Discard { offset });
                }
            }
            63..=64 => self.tail += 1 + self.rng.below(4),
            65 => self.base += self.rng.below(self.tail - self.base + 1).min(3),
            66..=79 => self.finish_write(true),
            80 => self.finish_write(false),
            81..=92 => self.finish_read(),
            93..=96 => {
                self.now = self.now + Duration::from_secs(1 + self.rng.below(35));
                self.group.on_time(self.now);
            }
            97 => self.ask(Asked::Describe, GroupOp::Describe),
            98 => self.administer(),
            _ => self.crash(),
        }
        self.group.on_bounds(self.now, self.base, self.tail);
        self.drain();
    }

    /// A seek or a delete of a group that nothing else is done to.
    fn administer(&mut self) {
        if !self.writes.is_empty() || self.read.is_some() {
            return;
        }
        self.claims.clear();
        self.attempts.retain(|at, _| self.redriven.contains(at));
        if self.rng.chance(40) {
            self.ask(Asked::Delete, GroupOp::Delete);
            while !self.writes.is_empty() {
                self.finish_write(true);
            }
            self.acked.clear();
            self.buried.clear();
            self.attempts.clear();
            return;
        }
        let to = self.base + self.rng.below(self.tail - self.base + 1);
        self.acked.retain(|at| *at < to);
        self.acked.extend(self.base..to);
        let entries = &self.disk.entries;
        self.buried
            .retain(|at| entries.get(at) == Some(&DeadEntry::Dead));
        let seek = GroupOp::Seek {
            to: SeekTo::Offset(to),
            if_new: false,
        };
        self.ask(Asked::Seek(Some(to)), seek);
        self.finish_write(true);
        assert_eq!(self.disk.position, Some(to));
    }

    /// Whether an ack of a record without a standing claim finished it: it was owed again.
    fn late_ack_counts(&self, offset: u64) -> bool {
        self.attempts.contains_key(&offset)
    }

    /// Everything heals: every record that is not finished must come, and come to an end.
    fn heal(&mut self) {
        for _ in 0..400 {
            while !self.writes.is_empty() || self.read.is_some() {
                self.finish_write(true);
                self.finish_read();
            }
            let claimed: Vec<u64> = self.claims.keys().copied().collect();
            for offset in claimed {
                self.acked.insert(offset);
                self.ask(Asked::Ack(offset), GroupOp::Ack { offset });
                self.finish_write(true);
            }
            // Makes room on a full list.
            let dead = self.disk.entries.iter();
            let listed: Vec<u64> = dead
                .filter(|(_, entry)| **entry == DeadEntry::Dead)
                .map(|(offset, _)| *offset)
                .collect();
            if listed.len() >= LIMITS.dead_letters {
                let offset = listed[0];
                self.ask(Asked::Discard(offset), GroupOp::Discard { offset });
            }
            let poll = Poll {
                max_records: LIMITS.poll_records,
                ..Poll::default()
            };
            self.ask(Asked::Poll, GroupOp::Poll(poll));
            self.now = self.now + Duration::from_secs(7);
            self.group.on_time(self.now);
            self.drain();
            let is_through = self.disk.position.unwrap_or(self.base) >= self.tail;
            if is_through && self.redriven.is_empty() && self.group.is_still() {
                break;
            }
        }
        assert_eq!(
            self.disk.position.unwrap_or(self.base).max(self.base),
            self.tail,
            "the group does not come to the end"
        );
        assert!(
            self.redriven.iter().all(|at| *at < self.base),
            "{:?}",
            self.redriven
        );
        let lost: Vec<u64> = (self.base..self.tail)
            .filter(|at| !self.acked.contains(at) && !self.buried.contains(at))
            .collect();
        assert!(lost.is_empty(), "lost: {lost:?}");
    }
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
