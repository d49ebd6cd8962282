//! What is on its way to each follower's broker.
//!
//! A lane a broker and core: shards that have something for it stand in line, each is asked for
//! one request in turn, so that a shard that is far behind never holds up the others. All
//! requests of a lane travel on one stream of the link, kept for replication, so that forwarded
//! writes do not delay them. While there is no connection nothing is asked or read: the lane dials
//! on the link's own schedule, with one timer, however many shards stand in it.
//!
//! The bounds are those of its [`Line`]; past them shards wait.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use storage_uring::LogRef;

use super::super::message::ReadResult;
use super::super::reads::ReadWaiter;
use super::super::timers::Timer;
use super::super::Core;
use super::batch::Batch;
use super::exchange::ShipBody;
use super::line::Line;
use super::LedIdx;
use crate::ids::{NodeId, Offset};
use crate::proto::peer::LinkPhase;
use crate::proto::replication::leader::{Ask, AskId, Asked, Fetched, FollowerIdx};
use crate::wire::internal::ReplicaLog;

/// How long a lane leaves a link alone that is being closed.
const DRAINING_RETRY: Duration = Duration::from_millis(200);

/// The way to one broker.
#[derive(Default)]
pub(super) struct Lane {
    /// Shards that have something for this broker, and what is on its way.
    pub line: Line<(LedIdx, FollowerIdx)>,
    is_dirty: bool,
    has_timer: bool,
}

/// Whom a request or a read is for.
#[derive(Clone)]
pub(super) struct Place {
    pub at: LedIdx,
    pub epoch: u64,
    pub follower: FollowerIdx,
    pub log: ReplicaLog,
    pub id: AskId,
    pub node: NodeId,
}

/// A fetch that goes to the disk.
pub(super) struct ShipRead {
    place: Place,
    log: LogRef,
    from: u64,
    max_bytes: usize,
    max_records: usize,
}

impl Core {
    /// Puts a shard in line at every follower it has something for.
    pub(super) fn queue_wants(&mut self, at: LedIdx) {
        let now = self.mono;
        let Some(led) = self
            .shipping
            .led
            .get_mut(at.0 as usize)
            .and_then(Option::as_mut)
        else {
            return;
        };
        let Some(machine) = &led.machine else {
            return;
        };
        for (place, node) in led.followers.iter().enumerate() {
            let follower = FollowerIdx(place as u16);
            let lane = match self.shipping.lanes.get_mut(node) {
                Some(lane) => lane,
                None => self.shipping.lanes.entry(node.clone()).or_default(),
            };
            if lane.line.stands((at, follower)) || !machine.wants(follower, now) {
                continue;
            }
            lane.line.stand((at, follower));
            if !std::mem::replace(&mut lane.is_dirty, true) {
                self.shipping.dirty_lanes.push(node.clone());
            }
        }
    }

    /// The lane may go on: its link came up, or something in it ended.
    pub(in crate::driver::core) fn dirty_lane(&mut self, node: &NodeId) {
        if let Some(lane) = self.shipping.lanes.get_mut(node) {
            if !std::mem::replace(&mut lane.is_dirty, true) {
                self.shipping.dirty_lanes.push(node.clone());
            }
        }
    }

    /// Sends what stands in line, as far as there is room.
    pub(in crate::driver::core) fn run_lanes(&mut self) {
        while let Some(node) = self.shipping.dirty_lanes.pop() {
            self.run_lane(&node);
        }
    }

    pub(in crate::driver::core) fn has_dirty_lanes(&self) -> bool {
        !self.shipping.dirty_lanes.is_empty()
    }

    pub(in crate::driver::core) fn on_lane_time(&mut self, node: &NodeId) {
        if let Some(lane) = self.shipping.lanes.get_mut(node) {
            lane.has_timer = false;
        }
        self.dirty_lane(node);
    }

    fn run_lane(&mut self, node: &NodeId) {
        let Some(lane) = self.shipping.lanes.get_mut(node) else {
            return;
        };
        lane.is_dirty = false;
        if !lane.line.has_work() || !self.lane_link_is_up(node) {
            return;
        }
        self.start_lane_reads(node);
        let rebuilds = Arc::clone(&self.settings.rebuilds);
        loop {
            let lane = self.shipping.lanes.get_mut(node);
            let Some((at, follower)) = lane.and_then(|lane| lane.line.next()) else {
                return;
            };
            let now = self.mono;
            let Some(led) = self.shipping.get_mut(at) else {
                continue;
            };
            // The place may belong to another shard or to another set of followers by now.
            let place = usize::from(follower.0);
            if led.followers.get(place) != Some(node) {
                continue;
            }
            let epoch = led.epoch;
            let asked = led
                .machine
                .as_mut()
                .and_then(|machine| machine.next_ask(follower, now, &*rebuilds));
            let Some((log, asked)) = asked else {
                self.arm_ship_timer(at);
                continue;
            };
            let place = Place {
                at,
                epoch,
                follower,
                log,
                id: asked.id,
                node: node.clone(),
            };
            self.carry_out(place, asked);
            // Behind the others: it may have more.
            if let Some(lane) = self.shipping.lanes.get_mut(node) {
                lane.line.stand((at, follower));
            }
        }
    }

    /// Whether the lane may send now; dials, or sets a timer, when not.
    fn lane_link_is_up(&mut self, node: &NodeId) -> bool {
        let Some(index) = self.routes.node_by_id(node.as_str()) else {
            return false;
        };
        self.ensure_link(index);
        let now = self.mono;
        let Some(machine) = self.link_machine(node) else {
            return false;
        };
        let retry_at = match machine.phase() {
            LinkPhase::Up => return true,
            LinkPhase::Connecting | LinkPhase::Greeting | LinkPhase::Retired => return false,
            LinkPhase::Idle => now,
            LinkPhase::Backoff => machine.retry_at().unwrap_or(now),
            LinkPhase::Draining => now + DRAINING_RETRY,
        };
        if retry_at <= now {
            machine.connect(now);
            self.pending_link(node);
            return false;
        }
        if let Some(lane) = self.shipping.lanes.get_mut(node) {
            if !std::mem::replace(&mut lane.has_timer, true) {
                let node = node.clone();
                self.timers.push(retry_at, Timer::ShipLane { node });
            }
        }
        false
    }

    fn carry_out(&mut self, place: Place, asked: Asked) {
        let body = match asked.ask {
            Ask::Fetch {
                from,
                max_bytes,
                max_records,
            } => return self.fetch(place, from.0, max_bytes as usize, max_records as usize),
            Ask::Probe { at } => ShipBody::Records {
                first: at.0,
                batch: Batch::empty(),
            },
            Ask::Bootstrap { base } => ShipBody::Bootstrap { base },
            Ask::Rebuild { base } => ShipBody::Rebuild { base },
        };
        self.send_ask(place, body);
    }

    fn fetch(&mut self, place: Place, from: u64, max_bytes: usize, max_records: usize) {
        let log = self.shipping.get(place.at).and_then(|led| {
            led.logs
                .iter()
                .find(|(kind, _)| *kind == place.log)
                .copied()
        });
        let Some((_, log)) = log else {
            self.metrics.internal_faults.inc();
            self.fetch_ended(place, Fetched::Failed);
            return;
        };
        if let Some(batch) = self.shipping.batches.get(log, from) {
            return self.send_batch(place, from, batch);
        }
        if let Some(read) = self.storage.read_recent(log, from, max_bytes) {
            let records = &read.records[..read.records.len().min(max_records)];
            return self.send_records(place, log, from, records);
        }
        let node = place.node.clone();
        let token = self.shipping.reads.insert(ShipRead {
            place,
            log,
            from,
            max_bytes,
            max_records,
        });
        if let Some(lane) = self.shipping.lanes.get_mut(&node) {
            lane.line.wait_to_read(token);
        }
        self.start_lane_reads(&node);
    }

    fn start_lane_reads(&mut self, node: &NodeId) {
        while let Some(token) = self
            .shipping
            .lanes
            .get_mut(node)
            .and_then(|lane| lane.line.next_read())
        {
            if !self.start_lane_read(token) {
                self.lane_read_ended(node);
            }
        }
    }

    /// False when nobody wants it any more.
    fn start_lane_read(&mut self, token: u64) -> bool {
        let Some(read) = self.shipping.reads.get_mut(token) else {
            return false;
        };
        let (log, from, max_bytes, at) = (read.log, read.from, read.max_bytes, read.place.at);
        let Some(led) = self.shipping.get(at) else {
            self.shipping.reads.remove(token);
            return false;
        };
        let shard = Arc::clone(&led.shard);
        self.metrics.ship_disk_reads.inc();
        self.read_disk(&shard, log, from, max_bytes, ReadWaiter::Ship { token });
        true
    }

    fn lane_read_ended(&mut self, node: &NodeId) {
        if let Some(lane) = self.shipping.lanes.get_mut(node) {
            lane.line.read_ended();
        }
    }

    pub(in crate::driver::core) fn on_ship_read(&mut self, token: u64, result: ReadResult) {
        let Some(read) = self.shipping.reads.remove(token) else {
            return;
        };
        let ShipRead {
            place,
            log,
            from,
            max_records,
            ..
        } = read;
        let node = place.node.clone();
        self.lane_read_ended(&node);
        match result {
            ReadResult::Records {
                first_offset,
                records,
                ..
            } if first_offset == from && !records.is_empty() => {
                let records = &records[..records.len().min(max_records)];
                self.send_records(place, log, from, records);
            }
            ReadResult::Trimmed { .. } => {
                self.fetch_ended(place, Fetched::Trimmed);
            }
            ReadResult::Records { .. }
            | ReadResult::Bounds { .. }
            | ReadResult::NotReady
            | ReadResult::NotOwner
            | ReadResult::Failed(_) => {
                self.fetch_ended(place, Fetched::Failed);
            }
        }
        self.dirty_lane(&node);
    }

    fn send_records(&mut self, place: Place, log: LogRef, from: u64, records: &[Bytes]) {
        match Batch::of(records) {
            Ok(batch) if !batch.payloads.is_empty() => {
                self.shipping.batches.keep(log, from, &batch);
                self.send_batch(place, from, batch);
            }
            Ok(_) => {
                self.fetch_ended(place, Fetched::Failed);
            }
            Err(error) => {
                self.metrics.internal_faults.inc();
                tracing::error!(%error, "records of a log do not fit a batch");
                self.fetch_ended(place, Fetched::Failed);
            }
        }
    }

    fn send_batch(&mut self, place: Place, first: u64, batch: Batch) {
        let fetched = Fetched::Records {
            end: Offset(first + batch.payloads.len() as u64),
            bytes: batch.payloads.as_wire().len() as u64,
        };
        if self.fetch_ended(place.clone(), fetched) {
            self.metrics.ship_records.add(batch.payloads.len() as u64);
            self.metrics
                .ship_bytes
                .add(batch.payloads.total_payload_bytes() as u64);
            self.send_ask(place, ShipBody::Records { first, batch });
        }
    }

    /// Tells the machine; true when it wants the records sent.
    fn fetch_ended(&mut self, place: Place, fetched: Fetched) -> bool {
        let now = self.mono;
        let Some(machine) = self.shipping.machine(place.at, place.epoch) else {
            return false;
        };
        let is_wanted = machine.on_fetched(place.follower, place.log, place.id, fetched, now);
        if !is_wanted {
            self.run_led(place.at);
        }
        is_wanted
    }
}
