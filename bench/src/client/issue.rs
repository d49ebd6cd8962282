//! What the load generator sends, and when it may.

use std::time::Instant;

use super::lanes::{Op, Pending, Phase, Slot};
use super::load::{Load, Retry};
use super::spec::LoadError;

impl Load {
    pub(super) fn issue(&mut self, now: Instant) {
        let now_ns = self.at_ns(now);
        while self.retries.front().is_some_and(|r| r.at_ns <= now_ns) {
            let Some(Retry { slot, op, .. }) = self.retries.pop_front() else {
                break;
            };
            if self.is_current(slot) && !self.schedule.is_over(now_ns) {
                self.tally.retried += 1;
                self.publish(slot, op, now_ns);
            } else {
                self.tally.failed += 1;
            }
        }
        loop {
            let Some(slot) = self.next_free() else {
                self.schedule.on_full();
                break;
            };
            let Some(due_ns) = self.schedule.take(now_ns) else {
                self.free.push_front(slot);
                break;
            };
            self.publish(
                slot,
                Op {
                    due_ns,
                    attempts: 0,
                },
                now_ns,
            );
        }
    }

    pub(super) fn is_current(&self, slot: Slot) -> bool {
        let conn = &self.conns[slot.conn];
        conn.life == slot.life && conn.phase == Phase::Ready
    }

    pub(super) fn next_free(&mut self) -> Option<Slot> {
        while let Some(slot) = self.free.pop_front() {
            if self.is_current(slot) {
                return Some(slot);
            }
        }
        None
    }

    pub(super) fn publish(&mut self, slot: Slot, op: Op, now_ns: u64) {
        let conn = &mut self.conns[slot.conn];
        let Some(id) = conn.id else { return };
        let lane_index = conn.next_lane % conn.lanes.len().max(1);
        conn.next_lane = lane_index + 1;
        let shards = &self.spec.targets[conn.target].shards;
        let Some(lane) = conn.lanes.get_mut(lane_index) else {
            return;
        };
        let place = lane.next_shard % shards.len();
        lane.next_shard = place + 1;
        let (shard, first_sequence) = (shards[place], lane.next_sequence[place]);
        let section = self
            .maker
            .section(lane.writer, shard, first_sequence, self.spec.batch);
        let key = self.spec.keys.get(shard as usize).cloned().flatten();
        let request = lane.next_request;
        let parts = match self.spec.protocol.publish(request, key, section.freeze()) {
            Ok(parts) => parts,
            Err(why) => {
                self.fatal = Some(LoadError::Setup(why));
                return;
            }
        };
        if self.pump.send_parts(id, lane.stream, parts).is_err() {
            // The end of the connection is on its way as an event; nothing was sent.
            self.tally.failed += 1;
            return;
        }
        lane.next_request += 1;
        lane.next_sequence[place] += u64::from(self.spec.batch);
        let op = Op {
            attempts: op.attempts + 1,
            ..op
        };
        lane.pending.insert(
            request,
            Pending {
                op,
                shard,
                first_sequence,
                sent_ns: now_ns,
            },
        );
        self.ledger.on_sent(lane.writer, shard, first_sequence);
        self.per_shard[shard as usize] += u64::from(self.spec.batch);
    }
}
