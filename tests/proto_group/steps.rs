//! What happens to a group: requests, disk work that ends, crashes, time, and healing.

use super::*;

impl World {
    /// The oldest write is done, or all are undone, as a log does it.
    pub fn finish_write(&mut self, ok: bool) {
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

    pub fn report(&mut self, write: Write, result: Result<(), CacheFailure>) {
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

    pub fn finish_read(&mut self) {
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
    pub fn crash(&mut self) {
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

    pub fn step(&mut self) {
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
    pub fn administer(&mut self) {
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
    pub fn late_ack_counts(&self, offset: u64) -> bool {
        self.attempts.contains_key(&offset)
    }

    /// Everything heals: every record that is not finished must come, and come to an end.
    pub fn heal(&mut self) {
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
