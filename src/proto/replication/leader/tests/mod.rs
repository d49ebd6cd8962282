//! Tests of the whole leader: one shard against scripted answers.

mod answers;
mod base;
mod opening;
mod rebuild;
mod reports;
mod scenarios;
mod shipping;

use std::cell::Cell;
use std::time::Duration;

use super::*;
use crate::ids::ShardKind;
use crate::ids::{Generation, NodeId, Offset};
use crate::proto::outcome::PeerCode;
use crate::proto::replication::history::{History, HistoryEntry};
use crate::proto::replication::types::{logs_of, LogState};
use crate::proto::MonoTime;
use crate::wire::internal::ReplicaLog;

pub const B: FollowerIdx = FollowerIdx(0);
pub const C: FollowerIdx = FollowerIdx(1);
pub const MAIN: ReplicaLog = ReplicaLog::Stream;

pub fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub struct Slots {
    pub free: Cell<usize>,
}

impl RebuildSlots for Slots {
    fn try_take(&self) -> bool {
        let free = self.free.get();
        self.free.set(free.saturating_sub(1));
        free > 0
    }
    fn give_back(&self) {
        self.free.set(self.free.get() + 1);
    }
}

/// A shard led by `a` with the followers `b`, `c`, ... and a clock of its own.
pub struct Lead {
    pub leader: ShardLeader<MajorityAlone>,
    pub slots: Slots,
    pub now: MonoTime,
    pub events: Vec<ShardEvent>,
}

/// A log at generation 3 whose own records begin at `start`; what is below was led by `b`.
pub fn main_log(base: u64, start: u64, tail: u64) -> LogStart {
    let mut history = History::new();
    let entry = |generation, start, leader: &str| HistoryEntry {
        generation: Generation(generation),
        start,
        leader: node(leader),
    };
    if start > base {
        history = History::from_entries(vec![entry(1, base, "b")]).unwrap();
    }
    if tail > start {
        let mut entries = history.entries().to_vec();
        entries.push(entry(3, start, "a"));
        history = History::from_entries(entries).unwrap();
    }
    LogStart {
        log: MAIN,
        state: LogState {
            base,
            tail,
            durable_tail: tail,
            accepted: Generation(3),
            commit: 0,
            history,
        },
    }
}

pub fn spec(followers: usize, is_quorum: bool) -> ShardSpec {
    ShardSpec {
        me: node("a"),
        generation: Generation(3),
        followers: ["b", "c", "d", "e"][..followers]
            .iter()
            .map(|n| node(n))
            .collect(),
        is_quorum,
        limits: ShipLimits::default(),
        seed: 7,
    }
}

impl Lead {
    pub fn with(spec: ShardSpec, logs: &[LogStart]) -> Self {
        let mut lead = Self {
            leader: ShardLeader::begin(spec, MajorityAlone, logs).unwrap(),
            slots: Slots { free: Cell::new(1) },
            now: MonoTime::from_micros(1_000_000),
            events: Vec::new(),
        };
        lead.collect();
        let to_record = lead.count(|event| matches!(event, ShardEvent::Record { .. }));
        for _ in 0..to_record {
            lead.leader.on_recorded(true);
        }
        lead.collect();
        lead.events
            .retain(|event| !matches!(event, ShardEvent::Record { .. }));
        lead
    }

    /// Three replicas, one log, quorum, own records from `start` on, not probed yet.
    pub fn main(base: u64, start: u64, tail: u64) -> Self {
        Self::with(spec(2, true), &[main_log(base, start, tail)])
    }

    /// As [`Self::main`], both followers level at the tail, open.
    pub fn level(tail: u64) -> Self {
        let mut lead = Self::main(0, 0, tail);
        lead.answer_probe(B, ok(tail));
        lead.answer_probe(C, ok(tail));
        assert!(lead.leader.is_open());
        lead.events.clear();
        lead
    }

    /// A stream shard with all its logs.
    pub fn stream(tail: u64, letters: u64, cursors: u64) -> Self {
        let companion = |log, tail| LogStart {
            log,
            state: LogState {
                tail,
                durable_tail: tail,
                accepted: Generation(3),
                ..LogState::default()
            },
        };
        let [main, first, second] = logs_of(ShardKind::Stream) else {
            panic!("a stream shard has three logs");
        };
        assert_eq!(*main, MAIN);
        let logs = [
            main_log(0, 0, tail),
            companion(*first, letters),
            companion(*second, cursors),
        ];
        Self::with(spec(2, true), &logs)
    }

    pub fn collect(&mut self) {
        while let Some(event) = self.leader.poll_event() {
            self.events.push(event);
        }
    }

    pub fn count(&self, is_wanted: impl Fn(&ShardEvent) -> bool) -> usize {
        self.events.iter().filter(|event| is_wanted(event)).count()
    }

    pub fn ask(&mut self, follower: FollowerIdx) -> Option<(ReplicaLog, Asked)> {
        let wanted = self.leader.wants(follower, self.now);
        let asked = self.leader.next_ask(follower, self.now, &self.slots);
        assert!(wanted || asked.is_none(), "wants() knows of every ask");
        asked
    }

    pub fn ask_main(&mut self, follower: FollowerIdx) -> Option<Asked> {
        let (log, asked) = self.ask(follower)?;
        assert_eq!(log, MAIN);
        Some(asked)
    }

    /// Asks, and for records reads up to `end` and sends them.
    pub fn send(&mut self, follower: FollowerIdx, end: u64) -> AskId {
        let asked = self.ask_main(follower).expect("something to send");
        let Ask::Fetch { from, .. } = asked.ask else {
            panic!("not records: {asked:?}");
        };
        let fetched = Fetched::Records {
            end: Offset(end),
            bytes: (end - from.0) * 100,
        };
        assert!(self
            .leader
            .on_fetched(follower, MAIN, asked.id, fetched, self.now));
        asked.id
    }

    pub fn answer(&mut self, follower: FollowerIdx, id: AskId, answer: Answered) {
        self.answer_log(follower, MAIN, id, answer);
    }

    pub fn answer_log(
        &mut self,
        follower: FollowerIdx,
        log: ReplicaLog,
        id: AskId,
        answer: Answered,
    ) {
        self.leader
            .on_answer(follower, log, id, answer, self.now, &self.slots);
        self.collect();
    }

    pub fn answer_probe(&mut self, follower: FollowerIdx, answer: Answered) -> Offset {
        Offset(self.answer_probe_of(follower, MAIN, answer))
    }

    /// Answers the probe of one of the shard's logs, which must be what is asked next.
    pub fn answer_probe_of(
        &mut self,
        follower: FollowerIdx,
        log: ReplicaLog,
        answer: Answered,
    ) -> u64 {
        let (of, asked) = self.ask(follower).expect("a probe");
        assert_eq!(of, log, "{asked:?}");
        let Ask::Probe { at } = asked.ask else {
            panic!("not a probe: {asked:?}");
        };
        self.answer_log(follower, log, asked.id, answer);
        at.0
    }

    /// The leader has made records up to `tail` durable.
    pub fn append(&mut self, tail: u64) {
        self.leader.on_log(MAIN, 0, tail);
        self.collect();
    }

    pub fn pass(&mut self, span: Duration) {
        self.now = self.now + span;
        self.leader.on_time(self.now);
        self.collect();
    }

    pub fn cursor(&self, follower: FollowerIdx) -> &Cursor {
        self.leader.cursor(follower, MAIN).unwrap()
    }

    /// How long until the cursor may ask again.
    pub fn wait(&self, follower: FollowerIdx) -> Duration {
        self.cursor(follower)
            .next_deadline()
            .expect("a wait")
            .since(self.now)
    }
}

pub fn ok(durable: u64) -> Answered {
    Answered::Ok { durable }
}

pub fn refused(code: PeerCode) -> Answered {
    Answered::Refused { code, expected: 0 }
}

pub fn gap(expected: u64) -> Answered {
    Answered::Refused {
        code: PeerCode::LogGap,
        expected,
    }
}

pub fn probe(at: u64) -> Ask {
    Ask::Probe { at: Offset(at) }
}

pub fn fetch_from(asked: Option<Asked>) -> u64 {
    match asked.expect("something to send").ask {
        Ask::Fetch { from, .. } => from.0,
        other => panic!("not records: {other:?}"),
    }
}
