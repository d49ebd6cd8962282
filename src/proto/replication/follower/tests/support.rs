//! A follower over a log in memory, with what is applied and what is synced kept apart.
//!
//! Every action is checked where it is carried out: nothing is read that is not durable, nothing is stored
//! anywhere but at the tail, and no answer leaves before what it rests on is synced.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use super::super::*;
use crate::catalog::Consistency;
use crate::proto::replication::history::{History, HistoryEntry};
use crate::proto::replication::types::ReplicateBody;
use crate::wire::internal::Payloads;

pub const ME: &str = "me";

pub fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

/// The view in which `leader` leads `generation` of a set of three that `me` is in.
pub fn view(generation: u64, leader: &str) -> Option<ReplicaView> {
    Some(ReplicaView {
        generation: Generation(generation),
        leader: node(leader),
        replicas: [leader, ME, "third"].iter().map(|n| node(n)).collect(),
        consistency: Consistency::Quorum,
    })
}

/// Records as bytes.
pub fn payloads(records: &[&str]) -> Payloads {
    Payloads::from_slices(records).unwrap()
}

/// What a disk holds of a log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stored {
    pub base: u64,
    /// Bytes and the generation they were appended under.
    pub records: Vec<(Bytes, u64)>,
    pub accepted: u64,
    pub commit: u64,
    pub history: History,
}

impl Stored {
    pub fn tail(&self) -> u64 {
        self.base + self.records.len() as u64
    }

    pub fn state(&self, durable_tail: u64) -> LogState {
        LogState {
            base: self.base,
            tail: self.tail(),
            durable_tail,
            accepted: Generation(self.accepted),
            commit: self.commit,
            history: self.history.clone(),
        }
    }

    pub fn bytes(&self) -> Vec<Bytes> {
        self.records
            .iter()
            .map(|(bytes, _)| bytes.clone())
            .collect()
    }

    /// Records written as `text@generation`, and a history of `(generation, start, leader)`.
    pub fn of(base: u64, records: &[(&str, u64)], history: &[(u64, u64, &str)]) -> Self {
        let entry = |&(generation, start, leader): &(u64, u64, &str)| HistoryEntry {
            generation: Generation(generation),
            start,
            leader: node(leader),
        };
        let records: Vec<(Bytes, u64)> = records
            .iter()
            .map(|(text, g)| (Bytes::copy_from_slice(text.as_bytes()), *g))
            .collect();
        Self {
            base,
            accepted: records.iter().map(|(_, g)| *g).max().unwrap_or(0),
            records,
            commit: 0,
            history: History::from_entries(history.iter().map(entry).collect()).unwrap(),
        }
    }

    pub fn history_pairs(&self) -> Vec<(u64, u64)> {
        let entries = self.history.entries().iter();
        entries.map(|e| (e.generation.0, e.start)).collect()
    }

    fn apply(&mut self, work: &DiskWork) {
        match work {
            DiskWork::Accept { generation } => self.accepted = self.accepted.max(generation.0),
            DiskWork::Begin { generation, leader } => {
                self.accepted = self.accepted.max(generation.0);
                self.history.begin(*generation, self.tail(), leader.clone());
            }
            DiskWork::Append {
                generation,
                first_offset,
                payloads,
                skip,
            } => {
                assert_eq!(*first_offset, self.tail(), "I17: stored where it was named");
                let begun = self.history.last().map(|last| last.generation);
                assert_eq!(begun, Some(*generation), "I13: its generation has begun");
                let fresh = payloads.iter().skip(*skip);
                self.records
                    .extend(fresh.map(|p| (Bytes::copy_from_slice(p), generation.0)));
            }
            DiskWork::Truncate {
                generation,
                tail,
                is_rebuild,
            } => {
                if *tail >= self.commit && self.commit == 0 && !is_rebuild {
                    let newest = self.history.newest(self.tail()).expect("a history");
                    assert!(
                        *tail >= newest.start,
                        "I19: inside the newest older generation"
                    );
                }
                for (_, g) in self.records.drain((tail - self.base) as usize..) {
                    let is_older = g < generation.0;
                    assert!(is_older || *is_rebuild, "I19, I20: only older records go");
                }
                self.history.truncate(*tail);
            }
            DiskWork::RaiseBase { base, .. } => {
                self.records.drain(..(base - self.base) as usize);
                self.history.raise_base(*base);
                self.base = *base;
            }
            DiskWork::Place { base, .. } => {
                self.records.clear();
                self.history.clear();
                self.base = *base;
            }
        }
        let tail = self.tail();
        let entries = self.history.entries();
        assert!(
            entries.iter().all(|e| e.start <= tail),
            "I12: no start above the tail"
        );
    }
}

/// One follower.
#[derive(Clone)]
pub struct Replica {
    pub machine: FollowerLog,
    pub applied: Stored,
    pub synced: Stored,
    /// Work started and not durable: its ticket and what the disk holds after it.
    queue: VecDeque<(u64, Stored)>,
    pub answers: Vec<(u64, ReplicateAnswer)>,
    /// What the disk held when each answer left.
    pub at_answers: Vec<Stored>,
    pub notes: Vec<FollowerNote>,
    generations: HashMap<u64, u64>,
    next_request: u64,
    /// How the next append ends instead, at once.
    pub refuse_append: Option<DiskError>,
    /// Most records one read returns.
    pub read_at_most: usize,
    /// Whether work becomes durable as soon as it is started.
    pub syncs_at_once: bool,
    view: Option<ReplicaView>,
    connection: u64,
    /// Answered positively at this generation; nothing older may be stored any more.
    answered_at: u64,
}

impl Replica {
    pub fn new(stored: Stored, view: Option<ReplicaView>) -> Self {
        let mut machine = FollowerLog::new(node(ME), view.clone());
        machine.on_state(stored.state(stored.tail()));
        Self {
            machine,
            applied: stored.clone(),
            synced: stored,
            queue: VecDeque::new(),
            answers: Vec::new(),
            at_answers: Vec::new(),
            notes: Vec::new(),
            generations: HashMap::new(),
            next_request: 1,
            refuse_append: None,
            read_at_most: usize::MAX,
            syncs_at_once: true,
            view,
            connection: 1,
            answered_at: 0,
        }
    }

    pub fn set_view(&mut self, view: Option<ReplicaView>) {
        self.view = view.clone();
        self.machine.on_view(view);
        self.pump();
    }

    /// Requests come on another connection from here on: the leader's process is another, or may be.
    pub fn reconnect(&mut self) {
        self.connection += 1;
    }

    /// The process dies with everything that is not synced.
    pub fn crash(&mut self) {
        self.queue.clear();
        self.applied = self.synced.clone();
        self.machine = FollowerLog::new(node(ME), self.view.clone());
        self.machine.on_state(self.synced.state(self.synced.tail()));
        self.connection += 1;
    }

    /// Sends a request and returns its number; its answer may come later.
    pub fn send_from(&mut self, sender: &str, generation: u64, body: ReplicateBody) -> u64 {
        let request = self.next_request;
        self.next_request += 1;
        self.generations.insert(request, generation);
        self.machine.on_request(FollowerRequest {
            request,
            sender: Arc::from(sender),
            connection: self.connection,
            generation: Generation(generation),
            body,
        });
        self.pump();
        request
    }

    /// Sends from whoever leads by the view, and expects the answer at once.
    pub fn ask(&mut self, generation: u64, body: ReplicateBody) -> ReplicateAnswer {
        let leader = self.view.as_ref().map(|view| view.leader.clone());
        let leader = leader.as_ref().map_or("nobody", NodeId::as_str).to_owned();
        let request = self.send_from(&leader, generation, body);
        self.answer(request).expect("an answer at once")
    }

    pub fn records(&mut self, generation: u64, first: u64, records: &[&str]) -> ReplicateAnswer {
        self.ask(generation, ReplicateBody::records(first, payloads(records)))
    }

    pub fn bootstrap(&mut self, generation: u64, base_offset: u64) -> ReplicateAnswer {
        self.ask(generation, ReplicateBody::Bootstrap { base_offset })
    }

    pub fn rebuild(&mut self, generation: u64, base_offset: u64) -> ReplicateAnswer {
        self.ask(generation, ReplicateBody::Rebuild { base_offset })
    }

    pub fn answer(&self, request: u64) -> Option<ReplicateAnswer> {
        let mut found = self.answers.iter().filter(|(r, _)| *r == request);
        let answer = found.next().map(|(_, answer)| *answer);
        assert!(found.next().is_none(), "one answer a request");
        answer
    }

    /// The oldest work that is not durable becomes it.
    pub fn sync_one(&mut self) -> bool {
        let Some((ticket, stored)) = self.queue.pop_front() else {
            return false;
        };
        self.synced = stored;
        self.machine.on_disk_done(ticket, Ok(()));
        self.pump();
        true
    }

    pub fn sync_all(&mut self) {
        while self.sync_one() {}
    }

    /// Everything that is not durable fails.
    pub fn fail_all(&mut self, error: DiskError) {
        self.applied = self.synced.clone();
        for (ticket, _) in std::mem::take(&mut self.queue) {
            self.machine.on_disk_done(ticket, Err(error));
        }
        self.pump();
    }

    /// The disk fills up inside the newest batch: `kept` of its records are there all the same.
    pub fn fill_up_keeping(&mut self, kept: usize) {
        let (ticket, whole) = self.queue.pop_back().expect("a batch on its way");
        self.sync_all();
        let tail = self.synced.records.len() + kept;
        self.synced = whole;
        self.synced.records.truncate(tail);
        self.applied = self.synced.clone();
        self.machine.on_disk_done(ticket, Err(DiskError::Full));
        self.pump();
    }

    /// What was started does not happen; its tickets.
    pub fn forget_work(&mut self) -> Vec<u64> {
        self.applied = self.synced.clone();
        self.queue.drain(..).map(|(ticket, _)| ticket).collect()
    }

    /// As [`Self::pump`] over a log that storage calls damaged.
    pub fn pump_broken(&mut self, accepted: Generation) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                FollowerAction::ReportState => self.machine.on_broken(accepted),
                other => self.carry_out(other),
            }
        }
    }

    pub fn pump(&mut self) {
        loop {
            match self.machine.poll_action() {
                Some(action) => self.carry_out(action),
                None if self.syncs_at_once && !self.queue.is_empty() => {
                    if let Some((ticket, stored)) = self.queue.pop_front() {
                        self.synced = stored;
                        self.machine.on_disk_done(ticket, Ok(()));
                    }
                }
                None => return,
            }
        }
    }

    fn carry_out(&mut self, action: FollowerAction) {
        match action {
            FollowerAction::Answer { request, answer } => self.take_answer(request, answer),
            FollowerAction::Disk { ticket, work } => self.do_work(ticket, &work),
            FollowerAction::Read {
                ticket, from, to, ..
            } => {
                assert!(
                    from >= self.synced.base && to <= self.synced.tail(),
                    "durable"
                );
                assert!(from < to, "something is asked for");
                let at = (from - self.synced.base) as usize;
                let until = (to - self.synced.base) as usize;
                let until = until.min(at.saturating_add(self.read_at_most));
                let records = self.synced.bytes()[at..until].to_vec();
                self.machine.on_read(ticket, Ok((from, &records)));
            }
            FollowerAction::ReportState => {
                let durable_tail = self.synced.tail().min(self.applied.tail());
                self.machine.on_state(self.applied.state(durable_tail));
            }
            FollowerAction::Note(note) => self.notes.push(note),
        }
    }

    fn do_work(&mut self, ticket: u64, work: &DiskWork) {
        let is_append = matches!(work, DiskWork::Append { .. });
        if let Some(error) = self.refuse_append.take_if(|_| is_append) {
            return self.machine.on_disk_done(ticket, Err(error));
        }
        let generation = match work {
            DiskWork::Accept { generation }
            | DiskWork::Begin { generation, .. }
            | DiskWork::Append { generation, .. }
            | DiskWork::Truncate { generation, .. }
            | DiskWork::RaiseBase { generation, .. }
            | DiskWork::Place { generation, .. } => generation.0,
        };
        assert!(
            generation >= self.answered_at,
            "I10: nothing for an older generation"
        );
        self.applied.apply(work);
        self.queue.push_back((ticket, self.applied.clone()));
    }

    fn take_answer(&mut self, request: u64, answer: ReplicateAnswer) {
        let generation = self.generations[&request];
        let (is_at_generation, durable) = match answer {
            ReplicateAnswer::Ok { durable_offset } => (true, durable_offset),
            ReplicateAnswer::Refused { code, .. } => (code == PeerCode::LogGap, 0),
        };
        if is_at_generation {
            assert!(self.synced.accepted >= generation, "I9: accepted on disk");
            assert!(
                durable <= self.synced.tail().max(durable.min(self.synced.base)),
                "synced"
            );
            self.answered_at = self.answered_at.max(generation);
        }
        self.answers.push((request, answer));
        self.at_answers.push(self.synced.clone());
    }
}

/// A positive answer.
pub fn ok(durable_offset: u64) -> ReplicateAnswer {
    ReplicateAnswer::Ok { durable_offset }
}

/// The code of a refusal, with the offset of a gap.
pub fn refusal(answer: ReplicateAnswer) -> (PeerCode, Option<u64>) {
    match answer {
        ReplicateAnswer::Ok { durable_offset } => panic!("Ok {durable_offset}"),
        ReplicateAnswer::Refused {
            code: PeerCode::LogGap,
            expected_offset,
            ..
        } => (PeerCode::LogGap, Some(expected_offset)),
        ReplicateAnswer::Refused { code, .. } => (code, None),
    }
}

pub fn gap(expected_offset: u64) -> (PeerCode, Option<u64>) {
    (PeerCode::LogGap, Some(expected_offset))
}

pub fn refused(code: PeerCode) -> (PeerCode, Option<u64>) {
    (code, None)
}
