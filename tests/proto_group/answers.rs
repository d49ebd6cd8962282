//! What a group answers and writes, held against what it was asked.

use super::*;

impl World {
    pub fn new(seed: u64) -> Self {
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

    pub fn ask(&mut self, asked: Asked, op: GroupOp) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.asked.insert(ticket, asked);
        self.group.on_request(self.now, ticket, op);
        self.drain();
    }

    pub fn drain(&mut self) {
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
    pub fn check_position(&self, position: u64) {
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

    pub fn on_answer(&mut self, ticket: u64, result: Result<GroupReply, GroupRefusal>) {
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

    pub fn on_delivered(&mut self, records: Vec<Delivered>) {
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
}
