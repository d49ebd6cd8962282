//! All short sequences of events, and long random ones, against leaders with honest logs.
//!
//! A leader's log is a prefix of an earlier leader's and its own records behind it; no two records have
//! equal bytes. After every event: a positive answer claims no more than is equal to the log of the leader
//! it went to and synced (I16), and a repeated delivery changes nothing (I18). At the end the newest leader
//! brings the copy level with its log, by a rebuild at most.
//!
//! `FELIX_FOLLOWER_DEPTH` (2) is the length of the exhaustive sequences, `FELIX_FOLLOWER_SEEDS` (300) the
//! number of random ones of 60 events.

use super::super::*;
use super::support::*;
use crate::proto::replication::types::ReplicateBody;

/// The logs of the leaders of generations 1, 2 and 3.
struct World {
    logs: [Vec<&'static str>; 3],
}

const LEADERS: [&str; 3] = ["l1", "l2", "l3"];

fn worlds() -> Vec<World> {
    let a = ["a0", "a1", "a2", "a3"];
    let b = [&a[..2], &["b2", "b3", "b4"]].concat();
    vec![
        World {
            logs: [a.to_vec(), b.clone(), [&b[..3], &["c3", "c4"]].concat()],
        },
        World {
            logs: [a.to_vec(), b.clone(), [&a[..3], &["c3"]].concat()],
        },
        World {
            logs: [
                a.to_vec(),
                b,
                [&a[..1], &["c1", "c2", "c3", "c4", "c5"]].concat(),
            ],
        },
    ]
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Ship {
        generation: u64,
        first: u64,
        count: u64,
    },
    Bootstrap {
        generation: u64,
        base: u64,
    },
    Rebuild {
        generation: u64,
        base: u64,
    },
    Sync,
    DiskFull,
    Crash,
}

/// Every event with small numbers.
fn alphabet() -> Vec<Event> {
    let mut events = vec![Event::Sync, Event::DiskFull, Event::Crash];
    for generation in 1..=3 {
        for first in 0..=4 {
            for count in 0..=2 {
                events.push(Event::Ship {
                    generation,
                    first,
                    count,
                });
            }
        }
        for base in [0, 2] {
            events.push(Event::Bootstrap { generation, base });
            events.push(Event::Rebuild { generation, base });
        }
    }
    events
}

#[derive(Clone)]
struct Run {
    follower: Replica,
    /// What each answered request was sent at.
    sent: Vec<(u64, u64)>,
    checked: usize,
}

impl Run {
    fn new() -> Self {
        let mut follower = Replica::new(Stored::default(), view(1, LEADERS[0]));
        follower.syncs_at_once = false;
        follower.read_at_most = 1;
        Self {
            follower,
            sent: Vec::new(),
            checked: 0,
        }
    }

    fn send(&mut self, generation: u64, body: ReplicateBody) -> u64 {
        let leader = LEADERS[generation as usize - 1];
        // Whoever ships at a generation was assigned before; the follower's view may be the newest or
        // may have stayed behind, never have gone back.
        let known = self.follower.machine.view.as_ref().map(|v| v.generation.0);
        if known < Some(generation) {
            self.follower.set_view(view(generation, leader));
            self.follower.reconnect();
        }
        let request = self.follower.send_from(leader, generation, body);
        self.sent.push((request, generation));
        request
    }

    fn step(&mut self, world: &World, event: Event) {
        match event {
            Event::Ship {
                generation,
                first,
                count,
            } => {
                let log = &world.logs[generation as usize - 1];
                let from = (first as usize).min(log.len());
                let until = (from + count as usize).min(log.len());
                let batch = payloads(&log[from..until]);
                self.send(generation, ReplicateBody::records(from as u64, batch));
            }
            Event::Bootstrap { generation, base } => {
                self.send(generation, ReplicateBody::Bootstrap { base_offset: base });
            }
            Event::Rebuild { generation, base } => {
                self.send(generation, ReplicateBody::Rebuild { base_offset: base });
            }
            Event::Sync => self.follower.sync_all(),
            Event::DiskFull => self.follower.fail_all(DiskError::Full),
            Event::Crash => self.follower.crash(),
        }
        self.check(world);
    }

    /// I16 of every answer that is new.
    fn check(&mut self, world: &World) {
        let fresh = self.follower.answers.iter().zip(&self.follower.at_answers);
        for ((request, answer), held) in fresh.skip(self.checked) {
            let sent = self.sent.iter().find(|(sent, _)| sent == request);
            let Some((_, generation)) = sent else {
                continue;
            };
            let ReplicateAnswer::Ok { durable_offset } = answer else {
                continue;
            };
            let log = &world.logs[*generation as usize - 1];
            for (at, (bytes, _)) in (held.base..).zip(&held.records) {
                if at < *durable_offset {
                    let of_leader = log.get(at as usize).map(|r| r.as_bytes());
                    assert_eq!(Some(&bytes[..]), of_leader, "I16 at {at} of {generation}");
                }
            }
            assert!(*durable_offset <= held.tail().max(held.base), "I16: synced");
        }
        self.checked = self.follower.answers.len();
    }

    /// The newest leader brings the copy level.
    fn converge(mut self, world: &World) {
        self.follower.syncs_at_once = true;
        self.follower.sync_all();
        let log = &world.logs[2];
        let tail = log.len() as u64;
        let mut next = tail;
        for _ in 0..16 {
            let until = (next + 2).min(tail) as usize;
            let batch = payloads(&log[next as usize..until]);
            let request = self.send(3, ReplicateBody::records(next, batch));
            self.follower.sync_all();
            self.check(world);
            match self.follower.answer(request).expect("an answer") {
                ReplicateAnswer::Ok { durable_offset } if durable_offset == tail => break,
                ReplicateAnswer::Ok { durable_offset } => next = durable_offset,
                ReplicateAnswer::Refused {
                    code: PeerCode::LogGap,
                    expected_offset,
                    ..
                } if expected_offset <= tail => next = expected_offset,
                ReplicateAnswer::Refused {
                    code: PeerCode::LogConflict | PeerCode::LogGap,
                    ..
                } => {
                    let rebuild = self.send(3, ReplicateBody::Rebuild { base_offset: 0 });
                    self.follower.sync_all();
                    assert_eq!(self.follower.answer(rebuild), Some(ok(0)));
                    next = 0;
                }
                other @ ReplicateAnswer::Refused { .. } => panic!("{other:?}"),
            }
        }
        let held = &self.follower.synced;
        let expected = &log[held.base as usize..];
        assert_eq!(held.bytes()[..expected.len()], *expected);
        for (request, _) in &self.sent {
            // A crash takes the answers that were owed with it; nothing else does.
            let answers = self.follower.answers.iter().filter(|(r, _)| r == request);
            assert!(answers.count() <= 1);
        }
    }
}

fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

fn walk(world: &World, run: &Run, events: &[Event], depth: u64, path: &mut Vec<Event>) -> u64 {
    let mut walked = 0;
    for event in events {
        path.push(*event);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut next = run.clone();
            next.step(world, *event);
            next.clone().converge(world);
            next
        }));
        let next = outcome.unwrap_or_else(|_| panic!("after {path:?}"));
        walked += 1;
        if depth > 1 {
            walked += walk(world, &next, events, depth - 1, path);
        }
        path.pop();
    }
    walked
}

#[test]
fn every_short_sequence_keeps_the_invariants_and_converges() {
    let depth = from_env("FELIX_FOLLOWER_DEPTH", 2);
    let events = alphabet();
    for world in worlds() {
        let walked = walk(&world, &Run::new(), &events, depth, &mut Vec::new());
        assert!(walked >= events.len() as u64);
    }
}

#[test]
fn long_random_sequences_keep_the_invariants_and_converge() {
    let events = alphabet();
    for seed in 1..=from_env("FELIX_FOLLOWER_SEEDS", 300) {
        let world = &worlds()[seed as usize % 3];
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut draw = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        let mut run = Run::new();
        for _ in 0..60 {
            // Half of the events are syncs, or little would ever be durable.
            let event = match draw(2) {
                0 => Event::Sync,
                _ => events[draw(events.len())],
            };
            let before = run.clone();
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run.step(world, event);
            }));
            assert!(
                outcome.is_ok(),
                "seed {seed}, {event:?} on {:?}",
                before.follower.synced
            );
        }
        let kept = run.follower.synced.clone();
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.converge(world)));
        assert!(
            outcome.is_ok(),
            "seed {seed} does not converge from {kept:?}"
        );
    }
}

/// I18: any batch delivered twice, and any prefix of the batches again, changes nothing.
#[test]
fn repeated_deliveries_change_nothing() {
    let log: Vec<String> = (0..12).map(|n| format!("r{n}")).collect();
    let log: Vec<&str> = log.iter().map(String::as_str).collect();
    for cut in [1usize, 2, 3, 5] {
        let mut f = Replica::new(Stored::default(), view(1, "l1"));
        let batches: Vec<(u64, &[&str])> = log
            .chunks(cut)
            .enumerate()
            .map(|(n, chunk)| ((n * cut) as u64, chunk))
            .collect();
        for upto in 0..batches.len() {
            f.records(1, batches[upto].0, batches[upto].1);
            let before = f.synced.clone();
            let tail = before.tail();
            for (first, chunk) in &batches[..=upto] {
                assert_eq!(f.records(1, *first, chunk), ok(tail));
                assert_eq!(f.synced, before, "I18");
            }
        }
    }
}
