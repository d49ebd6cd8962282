//! The load: workers that ask, one request on its way each, and judge what they are told.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};

use super::args::{CacheArgs, Mix};
use super::check::{value_of, CacheVerify, KeyState};
use super::session::{connect, CachePlan, Session, Told};
use super::zipf::{Dice, Zipf};
use crate::meter::Latency;

/// Keys asked for each shard after a kill; enough that every shard is met.
const KEYS_TO_MEET_A_SHARD: u64 = 16;
/// Keys read back at once at the end.
const READERS: usize = 32;

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Get,
    Put,
    Delete,
    Add,
}

/// Latencies by operation, and what was refused.
#[derive(Debug, Default)]
pub struct Measured {
    pub get: Latency,
    pub put: Latency,
    pub delete: Latency,
    pub add: Latency,
    pub operations: u64,
    /// Answers that refuse; nothing is known to be written.
    pub refused: u64,
    /// When each operation ended, and how long it took; kept only to be set beside compaction.
    pub timed: Vec<(Instant, u64)>,
}

impl Measured {
    fn of(&mut self, op: Op) -> &mut Latency {
        match op {
            Op::Get => &mut self.get,
            Op::Put => &mut self.put,
            Op::Delete => &mut self.delete,
            Op::Add => &mut self.add,
        }
    }
}

/// What all workers of a run share.
pub struct Shared {
    pub keys: Vec<KeyState>,
    pub verify: CacheVerify,
    pub measured: Measured,
    pub first_refusal: Option<String>,
}

/// One worker of the load; writes the keys whose number leaves `index` when divided by the workers.
pub struct Worker {
    pub index: usize,
    pub workers: usize,
    pub value_bytes: usize,
    pub mix: Mix,
    pub zipf: Rc<Zipf>,
    pub shared: Rc<RefCell<Shared>>,
    pub dice: Dice,
    pub keeps_times: bool,
}

impl Worker {
    fn choose(&mut self) -> (Op, usize) {
        let mut at = self.dice.below(self.mix.total()) as u32;
        let mut op = Op::Add;
        for (this, share) in [
            (Op::Get, self.mix.get),
            (Op::Put, self.mix.put),
            (Op::Delete, self.mix.delete),
        ] {
            if at < share {
                op = this;
                break;
            }
            at -= share;
        }
        let key = self.zipf.pick(&mut self.dice);
        let own = key - key % self.workers + self.index;
        let count = self.shared.borrow().keys.len();
        match op {
            Op::Get => (op, key),
            Op::Put | Op::Delete | Op::Add if own < count => (op, own),
            Op::Put | Op::Delete | Op::Add => (op, self.index),
        }
    }

    /// Writes every key of its own once.
    pub async fn fill(&mut self, session: &mut Session) -> Result<()> {
        let count = self.shared.borrow().keys.len();
        for key in (self.index..count).step_by(self.workers) {
            self.operate(session, Op::Put, key).await?;
        }
        Ok(())
    }

    /// Asks until `end`; what was asked from `measure_from` on is measured.
    pub async fn run(
        &mut self,
        session: &mut Session,
        measure_from: Instant,
        end: Instant,
    ) -> Result<()> {
        loop {
            let started = Instant::now();
            if started >= end {
                return Ok(());
            }
            let (op, key) = self.choose();
            let was_done = self.operate(session, op, key).await?;
            let ended = Instant::now();
            if started >= measure_from && ended <= end && was_done {
                let mut shared = self.shared.borrow_mut();
                shared.measured.operations += 1;
                let took_ns = (ended - started).as_nanos() as u64;
                shared.measured.of(op).record(took_ns);
                if self.keeps_times {
                    shared.measured.timed.push((ended, took_ns));
                }
            }
        }
    }

    /// Does one operation and judges its answer; whether it was done.
    async fn operate(&mut self, session: &mut Session, op: Op, at: usize) -> Result<bool> {
        let key = at as u64;
        let low = self.shared.borrow().keys[at].low();
        let told = match op {
            Op::Get => session.get(key).await,
            Op::Put => {
                let number = self.shared.borrow_mut().keys[at].issue(false);
                session
                    .put(key, value_of(key, number, self.value_bytes))
                    .await
            }
            Op::Delete => {
                self.shared.borrow_mut().keys[at].issue(true);
                session.delete(key).await
            }
            Op::Add => {
                let delta = self.dice.below(2001) as i64 - 1000;
                let told = session.add(key, delta).await;
                return self.judge_add(at, delta, told);
            }
        };
        let shared = &mut *self.shared.borrow_mut();
        let state = &mut shared.keys[at];
        match told {
            Ok(Told::Value(value)) if op == Op::Get => {
                state.judge(key, low, value.as_deref(), &mut shared.verify);
                Ok(true)
            }
            Ok(Told::Done) if op == Op::Put => {
                state.answer();
                Ok(true)
            }
            Ok(Told::Value(removed)) if op == Op::Delete => {
                judge_removed(state, key, low, removed.as_deref(), &mut shared.verify);
                state.answer();
                Ok(true)
            }
            Ok(Told::Refused(why)) => {
                // Whatever its class says: the key is not judged any more if it was being written.
                state.is_tainted |= op != Op::Get;
                shared.measured.refused += 1;
                shared.first_refusal.get_or_insert(why);
                Ok(false)
            }
            Ok(Told::Done | Told::Value(_) | Told::Sum(_)) => bail!("the answer to something else"),
            Err(error) => {
                state.is_tainted |= op != Op::Get;
                Err(error)
            }
        }
    }

    fn judge_add(&self, at: usize, delta: i64, told: Result<Told>) -> Result<bool> {
        let shared = &mut *self.shared.borrow_mut();
        let state = &mut shared.keys[at];
        match told {
            Ok(Told::Sum(Some(sum))) => {
                state.sum += delta;
                state.has_sum = true;
                if !state.is_tainted {
                    shared.verify.checked += 1;
                    shared.verify.wrong += u64::from(sum != state.sum);
                }
                Ok(true)
            }
            Ok(Told::Refused(why)) => {
                state.is_tainted = true;
                shared.measured.refused += 1;
                shared.first_refusal.get_or_insert(why);
                Ok(false)
            }
            Ok(_) => bail!("the answer to something else"),
            Err(error) => {
                state.is_tainted = true;
                Err(error)
            }
        }
    }
}

/// What a delete removed is the write before it.
fn judge_removed(
    state: &KeyState,
    key: u64,
    low: u64,
    removed: Option<&[u8]>,
    verify: &mut CacheVerify,
) {
    // Seen as a read that ended before the delete was sent.
    let before = state.before_newest();
    before.judge(key, low, removed, verify);
}

/// Every key, or about `most` of them evenly spread, as it must be now that nothing is on its way.
pub async fn read_back(
    plan: &CachePlan,
    connection: &quinn::Connection,
    shared: &Rc<RefCell<Shared>>,
    most: Option<usize>,
) -> Result<()> {
    let every = most.map_or(1, |most| shared.borrow().keys.len().div_ceil(most.max(1)));
    let local = tokio::task::LocalSet::new();
    let mut readers = Vec::new();
    for reader in 0..READERS {
        let mut session = Session::open(plan, connection).await?;
        let shared = Rc::clone(shared);
        readers.push(local.spawn_local(async move {
            let count = shared.borrow().keys.len();
            for at in (reader * every..count).step_by(READERS * every) {
                let value = session.get(at as u64).await?;
                let sum = session.sum(at as u64).await?;
                let shared = &mut *shared.borrow_mut();
                let state = shared.keys[at];
                match (value, sum) {
                    (Told::Value(value), Told::Sum(sum)) => {
                        let low = state.low();
                        state.judge(at as u64, low, value.as_deref(), &mut shared.verify);
                        if !state.is_tainted {
                            let expected = state.has_sum.then_some(state.sum);
                            shared.verify.checked += 1;
                            shared.verify.wrong += u64::from(sum != expected);
                        }
                    }
                    (Told::Refused(why), _) | (_, Told::Refused(why)) => {
                        bail!("a key cannot be read back: {why}")
                    }
                    _ => bail!("the answer to something else"),
                }
            }
            Ok(())
        }));
    }
    local
        .run_until(async {
            for reader in readers {
                reader.await??;
            }
            Ok(())
        })
        .await
}

/// The whole load: fills, runs, and leaves what came of it in `shared`.
pub async fn run(args: &CacheArgs, plan: &CachePlan, shared: &Rc<RefCell<Shared>>) -> Result<()> {
    let mut connections = Vec::new();
    for _ in 0..args.connections {
        connections.push(connect(plan).await?);
    }
    let zipf = Rc::new(Zipf::new(args.keys, args.theta));
    let mut sessions = Vec::new();
    for index in 0..args.in_flight {
        let (_, connection) = &connections[index % args.connections];
        sessions.push(Session::open(plan, connection).await?);
    }
    let local = tokio::task::LocalSet::new();
    let barrier = Rc::new(tokio::sync::Barrier::new(args.in_flight));
    let begun = Rc::new(std::cell::Cell::new(None::<Instant>));
    let (warmup, duration) = (args.warmup, args.duration);
    let mut workers = Vec::new();
    for (index, mut session) in sessions.into_iter().enumerate() {
        let mut worker = Worker {
            index,
            workers: args.in_flight,
            value_bytes: args.value_bytes as usize,
            mix: args.mix,
            zipf: Rc::clone(&zipf),
            shared: Rc::clone(shared),
            dice: Dice::new(),
            keeps_times: args.compaction,
        };
        let (barrier, begun) = (Rc::clone(&barrier), Rc::clone(&begun));
        workers.push(local.spawn_local(async move {
            worker.fill(&mut session).await?;
            barrier.wait().await;
            let started = begun.get().unwrap_or_else(|| {
                let now = Instant::now();
                begun.set(Some(now));
                now
            });
            let measure_from = started + warmup;
            worker
                .run(&mut session, measure_from, measure_from + duration)
                .await
        }));
    }
    local
        .run_until(async {
            for worker in workers {
                worker.await??;
            }
            anyhow::Ok(())
        })
        .await
}

/// Gets with nothing else on the way.
pub async fn lone_gets(args: &CacheArgs, plan: &CachePlan, latency: &mut Latency) -> Result<()> {
    let (_endpoint, connection) = connect(plan).await?;
    let mut session = Session::open(plan, &connection).await?;
    let mut dice = Dice::new();
    let end = Instant::now() + args.probe_duration;
    while Instant::now() < end {
        let key = dice.below(args.keys as u64);
        let started = Instant::now();
        match session.get(key).await? {
            Told::Value(_) => latency.record(started.elapsed().as_nanos() as u64),
            Told::Refused(why) => bail!("a get was refused: {why}"),
            Told::Done | Told::Sum(_) => bail!("the answer to something else"),
        }
    }
    Ok(())
}

/// Asks for keys of every shard until the answers are not refusals: the indexes are there.
pub async fn first_answers(plan: CachePlan, shards: u32) -> Result<()> {
    let (_endpoint, connection) = connect(&plan).await?;
    let mut session = Session::open(&plan, &connection).await?;
    for key in 0..KEYS_TO_MEET_A_SHARD * u64::from(shards) {
        loop {
            match session.get(key).await? {
                Told::Value(_) => break,
                Told::Refused(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                Told::Done | Told::Sum(_) => bail!("the answer to something else"),
            }
        }
    }
    Ok(())
}
