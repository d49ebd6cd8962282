//! Shards this broker leads that other brokers hold copies of: carries out what [`ShardLeader`]
//! decides.
//!
//! * [`assign`]: which shards are led, and the change from one assignment to the next;
//! * this file: what a machine decides is carried out;
//! * [`lane`]: what is on its way to each broker, and the answers;
//! * [`losses`]: writes that may not be acknowledged any more;
//! * [`wait`]: writes and cache reads that wait for a majority;
//! * [`show`]: what operators are told.
//!
//! A shard without other holders never comes here: its path has no look-up, hop or allocation
//! more than before.
//!
//! Bounds: requests and bytes on their way to one broker ([`lane`]), one timer a shard that waits
//! for something, none for one that does not.
//!
//! Invariants:
//! * INV-6: nothing is appended to a replicated shard before its leader machine is open at exactly
//!   the generation of the request.
//! * INV-7: a write to a `Quorum` shard is answered as stored only once the mark has passed it;
//!   a write that was on its way when leadership was lost is answered as unknown.
//! * INV-8: what is sent under a generation is sent only while the machine of that generation
//!   lives and is not superseded.

mod assign;
mod batch;
mod exchange;
mod lane;
mod line;
mod losses;
mod show;
mod wait;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use storage_uring::{ControlEvent, LogRef};

use crate::admin::ShardFailure;
use crate::ids::{Generation, NodeId, ShardId};
use crate::proto::replication::leader::{
    FollowerIdx, MajorityAlone, OpeningPhase, QuorumWaits, RebuildSlots, ShardEvent, ShardLeader,
    ShownMark,
};
use crate::proto::replication::types::log_word;
use crate::proto::MonoTime;
use crate::wire::internal::{ReplicaLog, ShardRef};

use super::append::AppendWaiter;
use super::slots::Slots;
use super::timers::Timer;
use super::Core;
use batch::RecentBatches;
use exchange::ShipAsk;
use lane::{Lane, ShipRead};
use losses::Losses;
use wait::QuorumWaiter;

pub(super) use exchange::ShipToken;
pub(super) use wait::QuorumCache;

/// A place in the table of led shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct LedIdx(u32);

/// New copies of followers being made at once, over all cores of the broker.
#[derive(Debug)]
pub struct RebuildBudget {
    free: AtomicUsize,
}

impl RebuildBudget {
    /// `at_once` copies; 0 means that only an operator makes new ones.
    pub fn new(at_once: usize) -> Self {
        Self {
            free: AtomicUsize::new(at_once),
        }
    }
}

impl RebuildSlots for RebuildBudget {
    fn try_take(&self) -> bool {
        let take = |free: usize| free.checked_sub(1);
        self.free
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }

    fn give_back(&self) {
        self.free.fetch_add(1, Ordering::Relaxed);
    }
}

/// One shard this broker leads.
struct LedShard {
    shard: Arc<ShardId>,
    /// Grows with every machine; what was asked by an earlier one finds nothing.
    epoch: u64,
    generation: Generation,
    is_quorum: bool,
    followers: Vec<NodeId>,
    /// The shard as requests name it, made once a generation.
    shard_ref: ShardRef,
    logs: Vec<(ReplicaLog, LogRef)>,
    /// `None` while writes of an earlier role are still on their way to the disk.
    machine: Option<ShardLeader<MajorityAlone>>,
    waits: QuorumWaits<QuorumWaiter>,
    /// What readers have been shown; outlives a generation under this leader.
    shown: ShownMark,
    timer_at: Option<MonoTime>,
}

impl LedShard {
    /// A newer generation exists: nothing more is sent or acknowledged at this one.
    fn is_superseded(&self) -> bool {
        let opening = self.machine.as_ref().map(ShardLeader::opening);
        opening == Some(OpeningPhase::Fenced)
    }
}

/// All of one core's led shards.
#[derive(Default)]
pub(super) struct Shipping {
    led: Vec<Option<LedShard>>,
    free: Vec<u32>,
    by_shard: HashMap<Arc<ShardId>, LedIdx>,
    logs: HashMap<LogRef, (LedIdx, ReplicaLog)>,
    /// Shards whose machine waits for their logs to be quiet.
    settling: Vec<LedIdx>,
    /// Shards this broker may not lead at the generation the catalog names.
    refused: HashMap<Arc<ShardId>, ShardFailure>,
    lost: Losses<LogRef>,
    /// Whether the catalog gives this core any replicated `Quorum` shard, as leader or follower.
    holds_quorum_shards: bool,
    lanes: HashMap<NodeId, Lane>,
    dirty_lanes: Vec<NodeId>,
    asks: Slots<ShipAsk>,
    reads: Slots<ShipRead>,
    batches: RecentBatches,
    last_epoch: u64,
    waiting_writes: usize,
}

impl Shipping {
    fn get(&self, at: LedIdx) -> Option<&LedShard> {
        self.led.get(at.0 as usize)?.as_ref()
    }

    fn get_mut(&mut self, at: LedIdx) -> Option<&mut LedShard> {
        self.led.get_mut(at.0 as usize)?.as_mut()
    }

    /// The led shard of a log, when its machine has that epoch.
    fn machine(&mut self, at: LedIdx, epoch: u64) -> Option<&mut ShardLeader<MajorityAlone>> {
        let led = self.get_mut(at).filter(|led| led.epoch == epoch)?;
        led.machine.as_mut()
    }

    fn insert(&mut self, led: LedShard) -> LedIdx {
        let shard = Arc::clone(&led.shard);
        let at = match self.free.pop() {
            Some(at) => {
                self.led[at as usize] = Some(led);
                LedIdx(at)
            }
            None => {
                self.led.push(Some(led));
                LedIdx((self.led.len() - 1) as u32)
            }
        };
        self.by_shard.insert(shard, at);
        at
    }

    fn remove(&mut self, at: LedIdx) -> Option<LedShard> {
        let led = self.led.get_mut(at.0 as usize)?.take()?;
        for (_, log) in &led.logs {
            self.logs.remove(log);
        }
        self.by_shard.remove(&led.shard);
        self.settling.retain(|settling| *settling != at);
        self.free.push(at.0);
        Some(led)
    }

    fn indices(&self) -> Vec<LedIdx> {
        let live = self.led.iter().enumerate().filter(|(_, led)| led.is_some());
        live.map(|(at, _)| LedIdx(at as u32)).collect()
    }

    /// Whether a replicated shard takes writes now.
    pub fn is_open(&self, shard: &ShardId, generation: Generation) -> bool {
        self.by_shard
            .get(shard)
            .and_then(|at| self.get(*at))
            .filter(|led| led.generation == generation)
            .and_then(|led| led.machine.as_ref())
            .is_some_and(ShardLeader::is_open)
    }

    /// The highest mark readers of a shard have been shown.
    pub fn shown_mark(&self, shard: &ShardId) -> Option<u64> {
        self.get(*self.by_shard.get(shard)?)?.shown.get()
    }

    /// Writes and reads that wait for a majority.
    pub fn waiting(&self) -> usize {
        self.waiting_writes
    }
}

impl Core {
    /// The synced tail or the base of a log moved.
    pub(super) fn ship_log_moved(&mut self, log: LogRef) {
        let Some((at, kind)) = self.shipping.logs.get(&log).copied() else {
            return;
        };
        let (base, synced) = (self.storage.base(log), self.storage.durable_tail(log));
        if let Some(machine) = self
            .shipping
            .get_mut(at)
            .and_then(|led| led.machine.as_mut())
        {
            machine.on_log(kind, base, synced);
            self.run_led(at);
        }
    }

    /// A log's generation record is durable, or will never be.
    pub(super) fn ship_recorded(&mut self, at: LedIdx, epoch: u64, is_durable: bool) {
        if let Some(led) = self.shipping.get(at).filter(|_| is_durable) {
            self.state.note_accepted(&led.shard, led.generation);
        }
        if let Some(machine) = self.shipping.machine(at, epoch) {
            machine.on_recorded(is_durable);
            self.run_led(at);
        }
    }

    pub(super) fn on_ship_time(&mut self, at: LedIdx) {
        let now = self.mono;
        if let Some(led) = self.shipping.get_mut(at) {
            led.timer_at = None;
            if let Some(machine) = &mut led.machine {
                machine.on_time(now);
            }
            self.expire_waits(at);
            self.run_led(at);
        }
    }

    /// The connection to a broker has come up.
    pub(super) fn ship_peer_up(&mut self, node: &NodeId) {
        for at in self.shipping.indices() {
            let Some(led) = self.shipping.get_mut(at) else {
                continue;
            };
            let place = led.followers.iter().position(|follower| follower == node);
            let (Some(place), Some(machine)) = (place, led.machine.as_mut()) else {
                continue;
            };
            machine.on_peer_up(FollowerIdx(place as u16));
            self.run_led(at);
        }
        self.dirty_lane(node);
    }

    /// Carries out what a machine decided, and queues what it wants to send.
    fn run_led(&mut self, at: LedIdx) {
        while let Some(event) = self
            .shipping
            .get_mut(at)
            .and_then(|led| led.machine.as_mut())
            .and_then(ShardLeader::poll_event)
        {
            self.on_shard_event(at, event);
        }
        self.queue_wants(at);
        self.arm_ship_timer(at);
    }

    fn on_shard_event(&mut self, at: LedIdx, event: ShardEvent) {
        match event {
            ShardEvent::Record { log } => self.record_generation(at, log),
            ShardEvent::Opened => self.tell_opened(at),
            ShardEvent::Marked { mark } => {
                let Some(led) = self.shipping.get_mut(at) else {
                    return;
                };
                let shown = led.shown.raise(mark);
                if let (true, Some((_, log))) = (led.is_quorum, led.logs.first().copied()) {
                    self.storage.set_retention_bound(log, shown);
                    self.wake_readers(log);
                }
                self.release_waits(at, mark);
            }
            ShardEvent::Superseded => {
                if let Some(led) = self.shipping.get(at) {
                    tracing::warn!(shard = %led.shard, generation = %led.generation, "a newer generation of the shard exists: nothing more is taken, sent or acknowledged at this one");
                }
                self.fail_waits(at);
            }
            ShardEvent::Halted { .. }
            | ShardEvent::Paused { .. }
            | ShardEvent::RebuildStarted { .. }
            | ShardEvent::RebuildRefused { .. }
            | ShardEvent::RebuildCompleted { .. } => self.tell_follower_event(at, event),
        }
    }

    fn record_generation(&mut self, at: LedIdx, log: ReplicaLog) {
        let Some(led) = self.shipping.get(at) else {
            return;
        };
        let Some((kind, log)) = led.logs.iter().find(|(kind, _)| *kind == log).copied() else {
            return;
        };
        let (epoch, generation) = (led.epoch, led.generation.0);
        let shard = Arc::clone(&led.shard);
        let token = self.appends.insert(AppendWaiter::Recorded { at, epoch });
        let event = ControlEvent::Begin {
            generation,
            leader: self.me.as_str(),
        };
        if let Err(error) = self.storage.control(log, event, self.wall_us, token) {
            let word = log_word(kind);
            let error = format!("its generation cannot be recorded in its {word} log: {error}");
            self.refuse_to_lead(&shard, error);
            self.appends.remove(token);
            if let Some(machine) = self.shipping.machine(at, epoch) {
                machine.on_recorded(false);
            }
        }
    }

    fn arm_ship_timer(&mut self, at: LedIdx) {
        let now = self.mono;
        let Some(led) = self.shipping.get_mut(at) else {
            return;
        };
        let of_machine = led.machine.as_ref().and_then(ShardLeader::next_deadline);
        // What is due already waits for something else than time.
        let of_machine = of_machine.filter(|deadline| *deadline > now);
        let of_waits = led.waits.next_deadline();
        let Some(deadline) = of_machine.into_iter().chain(of_waits).min() else {
            return;
        };
        if led.timer_at.is_some_and(|armed| armed <= deadline) {
            return;
        }
        led.timer_at = Some(deadline);
        self.timers.push(deadline, Timer::Ship { at });
    }
}
