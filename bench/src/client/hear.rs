//! What comes back to the load generator: connections, answers, ends.

use std::time::Instant;

use felix_uring::driver::quic::{ConnId, PumpEvent, ReadEnd, StreamId};
use felix_uring::wire::client::{ErrorCode, Refusal, WireCode};

use super::lanes::{Lane, Pending, Phase, Slot};
use super::load::{Load, Retry};
use super::speak::{verdict, Heard, Verdict};
use super::spec::LoadError;

/// Attempts of one operation.
const MAX_ATTEMPTS: u32 = 8;

impl Load {
    pub(super) fn on_event(&mut self, event: PumpEvent, now: Instant) {
        match event {
            PumpEvent::Connected { conn, .. } => self.on_connected(conn, now),
            PumpEvent::Readable { conn, stream } => self.on_readable(conn, stream, now),
            PumpEvent::Closed { conn, reason } => self.on_ended(conn, &reason.to_string(), now),
            PumpEvent::HandshakeFailed {
                conn: Some(conn),
                reason,
                ..
            } => self.on_ended(conn, &reason.to_string(), now),
            PumpEvent::StreamStopped { conn, code, .. } => {
                self.break_off(
                    conn,
                    &format!("the broker stopped a stream with code {code}"),
                    now,
                );
            }
            PumpEvent::HandshakeFailed { conn: None, .. }
            | PumpEvent::StreamOpened { .. }
            | PumpEvent::Drained { .. }
            | PumpEvent::StreamFinished { .. }
            | PumpEvent::StreamsAvailable { .. }
            | PumpEvent::Stray { .. } => {}
        }
    }

    pub(super) fn on_connected(&mut self, id: ConnId, now: Instant) {
        let Some(&index) = self.by_id.get(&id) else {
            return;
        };
        for _ in 0..self.spec.streams {
            if let Err(why) = self.open_lane(index, id) {
                return self.break_off(id, &why, now);
            }
        }
        self.check_ready(index);
    }

    pub(super) fn open_lane(&mut self, index: usize, id: ConnId) -> Result<(), String> {
        let stream = self.pump.open_bi(id).map_err(|e| e.to_string())?;
        let (speaker, hello) = self.spec.protocol.open()?;
        if let Some(hello) = hello {
            self.pump
                .send(id, stream, hello)
                .map_err(|e| e.to_string())?;
        }
        let conn = &mut self.conns[index];
        conn.lanes.push(Lane {
            stream,
            is_ready: speaker.is_ready_at_once(),
            speaker,
            writer: self.next_writer,
            next_request: 1,
            next_sequence: vec![0; self.spec.targets[conn.target].shards.len()],
            // Writers start at different shards, so that few batches spread as well as many.
            next_shard: self.next_writer as usize,
            pending: Default::default(),
        });
        self.next_writer += 1;
        Ok(())
    }

    pub(super) fn check_ready(&mut self, index: usize) {
        let conn = &mut self.conns[index];
        let all = conn.lanes.len() == self.spec.streams && conn.lanes.iter().all(|l| l.is_ready);
        if conn.phase == Phase::Starting && all {
            conn.on_ready();
            let slot = Slot {
                conn: index,
                life: conn.life,
            };
            self.free
                .extend(std::iter::repeat_n(slot, self.spec.in_flight));
        }
    }

    pub(super) fn on_readable(&mut self, id: ConnId, stream: StreamId, now: Instant) {
        let Some(&index) = self.by_id.get(&id) else {
            return;
        };
        let Some(lane) = self.conns[index].lane_of(stream) else {
            return;
        };
        let speaker = &mut self.conns[index].lanes[lane].speaker;
        let end = self
            .pump
            .read_each(id, stream, usize::MAX, |chunk| speaker.push(chunk));
        while let Some(heard) = self.next_heard(index, lane) {
            self.on_heard(index, lane, heard, now);
        }
        match end {
            ReadEnd::Blocked | ReadEnd::Limit => {}
            ReadEnd::Finished | ReadEnd::Reset(_) | ReadEnd::Closed => {
                self.break_off(id, "the broker ended a publish stream", now);
            }
        }
    }

    /// Handling what was heard may end the connection and its lanes.
    pub(super) fn next_heard(&mut self, index: usize, lane: usize) -> Option<Heard> {
        self.conns[index].lanes.get_mut(lane)?.speaker.hear()
    }

    pub(super) fn on_heard(&mut self, index: usize, lane: usize, heard: Heard, now: Instant) {
        match heard {
            Heard::Ready => {
                self.conns[index].lanes[lane].is_ready = true;
                self.check_ready(index);
            }
            Heard::Accepted { request_id, offset } => {
                if let Some((writer, pending)) = self.take_pending(index, lane, request_id) {
                    self.on_acked(writer, &pending, offset, now);
                    self.free_slot(index);
                }
            }
            Heard::Refused {
                request_id,
                refusal,
            } => {
                if let Some((writer, pending)) = self.take_pending(index, lane, request_id) {
                    self.on_refused(index, writer, &pending, &refusal, now);
                }
            }
            Heard::Broken(why) => {
                if self.started.is_none() {
                    self.fatal = Some(LoadError::Refused(why.clone()));
                }
                if let Some(id) = self.conns[index].id {
                    self.break_off(id, &why, now);
                }
            }
        }
    }

    pub(super) fn take_pending(
        &mut self,
        index: usize,
        lane: usize,
        request: u64,
    ) -> Option<(u32, Pending)> {
        let lane = &mut self.conns[index].lanes[lane];
        let pending = lane.pending.remove(&request);
        if pending.is_none() {
            self.tally.late_answers += 1;
        }
        Some((lane.writer, pending?))
    }

    pub(super) fn on_acked(
        &mut self,
        writer: u32,
        pending: &Pending,
        offset: Option<u64>,
        now: Instant,
    ) {
        let records = u64::from(self.spec.batch);
        let now_ns = self.at_ns(now);
        self.ledger
            .on_acked(writer, pending.shard, pending.first_sequence, offset);
        self.meter
            .on_acked(now_ns, pending.op.due_ns, records, self.spec.batch_bytes());
        self.tally.acked += 1;
        self.acked_records += records;
    }

    pub(super) fn on_refused(
        &mut self,
        index: usize,
        writer: u32,
        pending: &Pending,
        refusal: &Refusal,
        now: Instant,
    ) {
        let code = refusal.code.as_ref().map_or("no code", WireCode::name);
        self.tally.note(&format!("{code}: {}", refusal.message));
        let verdict = verdict(refusal);
        if verdict == Verdict::Unknown {
            self.tally.unknown += 1;
            return self.free_slot(index);
        }
        self.tally.refusals += 1;
        self.ledger
            .on_refused(writer, pending.shard, pending.first_sequence);
        let now_ns = self.at_ns(now);
        let op = pending.op;
        match verdict {
            Verdict::Retry { after_ms }
                if op.attempts < MAX_ATTEMPTS && !self.schedule.is_over(now_ns) =>
            {
                let at_ns = now_ns + after_ms.max(1) * 1_000_000;
                let slot = Slot {
                    conn: index,
                    life: self.conns[index].life,
                };
                let behind = self.retries.partition_point(|r| r.at_ns <= at_ns);
                self.retries.insert(behind, Retry { at_ns, slot, op });
            }
            Verdict::Retry { .. } | Verdict::Failed | Verdict::Unknown => {
                self.tally.failed += 1;
                self.free_slot(index);
            }
        }
        if self.tally.acked == 0 && is_hopeless(refusal) {
            self.fatal = Some(LoadError::Refused(format!("{code}: {}", refusal.message)));
        }
    }

    pub(super) fn free_slot(&mut self, index: usize) {
        let life = self.conns[index].life;
        self.free.push_back(Slot { conn: index, life });
    }

    pub(super) fn break_off(&mut self, id: ConnId, why: &str, now: Instant) {
        self.pump.close(id, 0, b"", now);
        self.on_ended(id, why, now);
    }

    pub(super) fn on_ended(&mut self, id: ConnId, why: &str, now: Instant) {
        let Some(index) = self.by_id.remove(&id) else {
            return;
        };
        let now_ns = self.at_ns(now);
        let lost = self.conns[index].on_end(now_ns, why.to_string());
        self.tally.unknown += lost.len() as u64;
        if self.started.is_some() {
            self.tally.connections_lost += 1;
            self.tally.note(why);
        }
    }

    pub(super) fn time_out(&mut self, now_ns: u64) {
        let patience_ns = self.spec.request_timeout.as_nanos() as u64;
        for index in 0..self.conns.len() {
            let conn = &mut self.conns[index];
            let slot = Slot {
                conn: index,
                life: conn.life,
            };
            for lane in &mut conn.lanes {
                while let Some(oldest) = lane.pending.first_entry() {
                    if oldest.get().sent_ns + patience_ns > now_ns {
                        break;
                    }
                    oldest.remove();
                    self.tally.unknown += 1;
                    self.tally.note("no answer in time");
                    self.free.push_back(slot);
                }
            }
        }
    }
}

/// Refusals that no later batch would escape.
fn is_hopeless(refusal: &Refusal) -> bool {
    matches!(
        refusal.code,
        Some(WireCode::Known(
            ErrorCode::Unauthenticated
                | ErrorCode::Forbidden
                | ErrorCode::NotFound
                | ErrorCode::InvalidRequest
                | ErrorCode::LimitExceeded
                | ErrorCode::Revoked
        ))
    )
}
