//! Stored reports: whom they name, and what has changed by the time they are stored.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;

/// What the catalog was told, and whom the report names that it has stored.
#[derive(Default)]
struct Told {
    named: Vec<Vec<usize>>,
    stored: Vec<usize>,
}

#[derive(Clone, Default)]
struct Gate(Rc<RefCell<Told>>);

impl Gate {
    /// The newest report is stored.
    fn store(&self) -> ReportId {
        let mut told = self.0.borrow_mut();
        told.stored = told.named.last().cloned().unwrap_or_default();
        ReportId(told.named.len() as u64)
    }

    fn reports(&self) -> usize {
        self.0.borrow().named.len()
    }

    fn newest(&self) -> Vec<usize> {
        self.0.borrow().named.last().cloned().unwrap_or_default()
    }
}

impl ReportGate for Gate {
    const COMPARES_LOGS: bool = false;

    fn submit(&mut self, report: &Report<'_>) -> Submitted {
        let mut told = self.0.borrow_mut();
        told.named.push(report.caught_up().collect());
        Submitted::Pending(ReportId(told.named.len() as u64))
    }

    fn is_unnamed(&self, follower: usize) -> bool {
        !self.0.borrow().stored.contains(&follower)
    }
}

struct Reported {
    leader: ShardLeader<Gate>,
    gate: Gate,
    slots: Slots,
    now: MonoTime,
}

impl Reported {
    fn with(logs: &[LogStart]) -> Self {
        let gate = Gate::default();
        let mut leader = ShardLeader::begin(spec(2, true), gate.clone(), logs).unwrap();
        for _ in 1..logs.len() {
            leader.on_recorded(true);
        }
        Self {
            leader,
            gate,
            slots: Slots { free: Cell::new(1) },
            now: MonoTime::from_micros(1),
        }
    }

    fn ask(&mut self, follower: FollowerIdx) -> Option<(ReplicaLog, Asked)> {
        let Self {
            leader, slots, now, ..
        } = self;
        leader.next_ask(follower, *now, slots)
    }

    /// The follower's next message is answered so.
    fn answer(&mut self, follower: FollowerIdx, end: u64, answer: Answered) {
        let (log, asked) = self.ask(follower).expect("something for the follower");
        if let Ask::Fetch { .. } = asked.ask {
            let fetched = Fetched::Records {
                end: Offset(end),
                bytes: 1,
            };
            let Self { leader, now, .. } = self;
            assert!(leader.on_fetched(follower, log, asked.id, fetched, *now));
        }
        let Self {
            leader, slots, now, ..
        } = self;
        leader.on_answer(follower, log, asked.id, answer, *now, slots);
    }
}

#[test]
fn i27_who_halts_while_its_report_is_stored_carries_no_mark() {
    let mut shard = Reported::with(&[main_log(0, 0, 10)]);
    shard.answer(B, 10, ok(10));
    assert_eq!(shard.gate.newest(), [0], "leader and b are two of three");
    shard.leader.on_log(MAIN, 0, 11);
    shard.answer(B, 11, refused(PeerCode::LogConflict));
    let id = shard.gate.store();
    shard.leader.on_report(id, true);
    assert_eq!(shard.leader.mark(), None, "b holds something else");
    shard.answer(C, 11, ok(11));
    let id = shard.gate.store();
    shard.leader.on_report(id, true);
    assert_eq!(shard.leader.mark(), Some(11));
    assert_eq!(shard.gate.newest(), [1]);
}

#[test]
fn i29_a_copy_to_be_made_anew_is_left_out_of_a_report_before() {
    let letters = LogStart {
        log: ReplicaLog::GroupDeadLetters,
        state: LogState {
            tail: 5,
            durable_tail: 5,
            accepted: Generation(3),
            ..LogState::default()
        },
    };
    let mut shard = Reported::with(&[main_log(0, 0, 10), letters]);
    shard.answer(B, 10, ok(10));
    let id = shard.gate.store();
    shard.leader.on_report(id, true);
    assert_eq!(
        (shard.leader.mark(), shard.gate.newest()),
        (Some(10), vec![0])
    );
    // The dead letters of b differ, and nobody writes to the shard.
    shard.answer(B, 5, refused(PeerCode::LogConflict));
    shard.now = shard.now + Duration::from_secs(10);
    assert_eq!(shard.ask(B), None, "b may be promoted as it is");
    assert_eq!((shard.gate.reports(), shard.gate.newest()), (2, vec![]));
    shard.now = shard.now + Duration::from_secs(10);
    assert_eq!(
        (shard.ask(B), shard.gate.reports()),
        (None, 2),
        "one at a time"
    );
    let id = shard.gate.store();
    shard.leader.on_report(id, true);
    assert_eq!(shard.leader.mark(), Some(10), "nothing is news");
    shard.now = shard.now + Duration::from_secs(10);
    let (log, asked) = shard.ask(B).expect("now it may");
    assert_eq!(log, ReplicaLog::GroupDeadLetters);
    assert!(matches!(asked.ask, Ask::Rebuild { .. }));
    let Reported {
        leader, slots, now, ..
    } = &mut shard;
    leader.on_answer(B, log, asked.id, ok(0), *now, slots);
    // It counts for the main log, and is not to lead while its dead letters are being filled.
    shard.leader.on_log(MAIN, 0, 11);
    shard.answer(B, 11, ok(11));
    assert_eq!(shard.gate.newest(), Vec::<usize>::new());
    let id = shard.gate.store();
    shard.leader.on_report(id, true);
    assert_eq!(shard.leader.mark(), Some(11));
    shard.answer(B, 5, ok(5));
    shard.leader.on_log(MAIN, 0, 12);
    shard.answer(B, 12, ok(12));
    assert_eq!(shard.gate.newest(), [0], "level again");
}

#[test]
fn who_counts_again_may_be_the_one_that_was_missing() {
    let mut shard = Lead::with(spec(3, true), &[main_log(0, 0, 10)]);
    shard.answer_probe(B, ok(10));
    shard.answer_probe(C, ok(10));
    let d = FollowerIdx(2);
    shard.answer_probe(d, ok(10));
    shard.append(11);
    let id = shard.send(C, 11);
    shard.answer(C, id, ok(11));
    assert_eq!(shard.leader.mark(), Some(10), "two of four");
    shard.append(12);
    let id = shard.send(C, 12);
    shard.answer(C, id, refused(PeerCode::Unauthorized));
    let id = shard.send(B, 12);
    shard.answer(B, id, ok(12));
    assert_eq!(shard.leader.mark(), Some(10), "c, halted, is not counted");
    shard.leader.on_view();
    assert_eq!(shard.leader.mark(), Some(11));
}
