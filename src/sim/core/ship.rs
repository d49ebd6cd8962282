//! What leaves a leader for its followers, and what comes back.

use bytes::Bytes;

use super::lead::Leads;
use super::{Core, CoreInput};
use crate::ids::{CorrelationId, Offset};
use crate::proto::convert::PeerReply;
use crate::proto::correlation::Family;
use crate::proto::outcome::{ForwardKind, SendResult};
use crate::proto::peer::{Request, StreamSlot};
use crate::proto::replication::leader::{Answered, Ask, AskId, Asked, Fetched, FollowerIdx};
use crate::proto::replication::types::is_main;
use crate::proto::replication::ReplicateBody;
use crate::sim::disk::{LogKey, SimLog};
use crate::sim::env::{Env, Fault};
use crate::wire::internal::{encode, Bootstrap, Message, Payloads, Rebuild, Records, ReplicaLog};

/// The stream all replicate messages to one follower travel on.
const SHIP_STREAM: StreamSlot = StreamSlot(2);

/// A request to a follower.
#[derive(Debug)]
pub struct Ship {
    shard: usize,
    generation: u64,
    follower: FollowerIdx,
    log: ReplicaLog,
    id: AskId,
    body: ReplicateBody,
}

impl Core {
    /// Carries out what the followers of a shard want next.
    pub(super) fn ship(&mut self, env: &mut Env, shard: usize) {
        let now = self.now(env);
        let Some(led) = self.leads.led.get(&shard).filter(|led| !led.is_superseded) else {
            return;
        };
        for place in 0..led.followers.len() {
            let follower = FollowerIdx(place as u16);
            loop {
                let Leads { led, slots, .. } = &mut self.leads;
                let Some(led) = led.get_mut(&shard) else {
                    return;
                };
                let Some((log, asked)) = led.machine.next_ask(follower, now, slots) else {
                    break;
                };
                self.carry_out(env, shard, follower, log, asked);
            }
        }
    }

    fn carry_out(
        &mut self,
        env: &mut Env,
        shard: usize,
        follower: FollowerIdx,
        log: ReplicaLog,
        Asked { id, ask }: Asked,
    ) {
        let body = match ask {
            Ask::Probe { at } => ReplicateBody::records(at.0, Payloads::empty()),
            Ask::Bootstrap { base } => ReplicateBody::Bootstrap {
                base_offset: base.0,
            },
            Ask::Rebuild { base } => ReplicateBody::Rebuild {
                base_offset: base.0,
            },
            Ask::Fetch {
                from, max_records, ..
            } => {
                let Some(generation) = self.leads.led.get(&shard).map(|led| led.generation) else {
                    return;
                };
                let after_us = match env.random.disk.chance(200) {
                    true => env.random.disk.below(10_000),
                    false => 1,
                };
                let input = CoreInput::ShipRead {
                    shard,
                    generation,
                    follower,
                    log,
                    id,
                    from: from.0,
                    most: u64::from(max_records),
                };
                return env.to_core(after_us, self.at, input);
            }
        };
        self.request_ship(env, shard, follower, log, id, body);
    }

    /// Records for a follower have been read.
    pub(super) fn on_ship_read(
        &mut self,
        env: &mut Env,
        (shard, generation): (usize, u64),
        (follower, log): (FollowerIdx, ReplicaLog),
        (id, from, most): (AskId, u64, u64),
    ) {
        let now = self.now(env);
        let key = LogKey {
            shard,
            log: SimLog::of(log),
        };
        let seen = self.journal.seen(key);
        let to = self
            .journal
            .durable_tail(key)
            .min(from + env.random.schedule.between(1, 6).min(most));
        let records: Vec<Bytes> = (from..to)
            .map_while(|offset| seen.record(offset).cloned())
            .collect();
        let bytes: usize = records.iter().map(Bytes::len).sum();
        let fetched = match (from < seen.base(), records.len()) {
            (true, _) => Fetched::Trimmed,
            (false, 0) => Fetched::Failed,
            (false, count) => Fetched::Records {
                end: Offset(from + count as u64),
                bytes: bytes as u64,
            },
        };
        let Some(led) = self.leads.led.get_mut(&shard) else {
            return;
        };
        if led.generation != generation {
            return;
        }
        if led.machine.on_fetched(follower, log, id, fetched, now) {
            let payloads = Payloads::from_slices(&records).expect("a few short records fit");
            let body = ReplicateBody::records(from, payloads);
            self.request_ship(env, shard, follower, log, id, body);
        }
    }

    fn request_ship(
        &mut self,
        env: &mut Env,
        shard: usize,
        follower: FollowerIdx,
        log: ReplicaLog,
        id: AskId,
        body: ReplicateBody,
    ) {
        let Some(led) = self.leads.led.get(&shard) else {
            return;
        };
        let node = led.followers[usize::from(follower.0)];
        let family = match &body {
            ReplicateBody::Records { .. } => Family::ReplicateRecords,
            ReplicateBody::Bootstrap { .. } | ReplicateBody::Rebuild { .. } => {
                Family::ReplicateControl
            }
        };
        let ship = Ship {
            shard,
            generation: led.generation,
            follower,
            log,
            id,
            body,
        };
        let token = self.token();
        self.leads.ships.insert(token, ship);
        let now = self.now(env);
        let link = self.ensure_link(env, node);
        link.machine.request(
            now,
            Request {
                token,
                family,
                kind: ForwardKind::Authorized,
                bytes: 300,
                pin: Some(SHIP_STREAM),
            },
        );
    }

    /// The frame of a replicate message whose turn has come; `None` when it must not leave any more.
    pub(super) fn transmit_ship(
        &mut self,
        env: &mut Env,
        token: u64,
        correlation: CorrelationId,
        to: usize,
    ) -> Option<Bytes> {
        let ship = self.leads.ships.get(&token)?;
        let led = self.leads.led.get(&ship.shard)?;
        if led.generation != ship.generation || led.is_superseded {
            return None;
        }
        let shard = env.catalog.shard_ref(ship.shard, ship.generation);
        let key = LogKey {
            shard: ship.shard,
            log: SimLog::of(ship.log),
        };
        env.judge.on_ship(
            (self.at.node, to),
            key,
            ship.generation,
            &ship.body,
            self.leads.mark(ship.shard),
            env.catalog.shards[ship.shard].acknowledge,
        );
        if let ReplicateBody::Rebuild { .. } = &ship.body {
            let report = env.reports.of(ship.shard, ship.generation);
            env.judge.check_unnamed((self.at.node, to), key, report);
        }
        let log = ship.log;
        let message = match &ship.body {
            ReplicateBody::Records {
                first_offset,
                checksum,
                payloads,
            } => {
                let damage = env.may_inject && env.random.faults.chance(10);
                let payloads = match damage {
                    true => {
                        env.count_fault(Fault::DamagedBatch);
                        damaged(payloads, env.random.faults.number())
                    }
                    false => payloads.clone(),
                };
                Message::Records(Records {
                    correlation,
                    log,
                    shard,
                    first_offset: Offset(*first_offset),
                    checksum: *checksum,
                    payloads,
                })
            }
            ReplicateBody::Bootstrap { base_offset } => Message::Bootstrap(Bootstrap {
                correlation,
                log,
                shard,
                base_offset: Offset(*base_offset),
            }),
            ReplicateBody::Rebuild { base_offset } => Message::Rebuild(Rebuild {
                correlation,
                shard,
                log,
                base_offset: Offset(*base_offset),
            }),
        };
        encode(&message).ok()
    }

    /// A batch in which this leader contradicts what it wrote at its own generation and the follower has
    /// said it holds: the copy must stay as it is.
    pub(super) fn contradiction(&self, env: &mut Env, token: u64) -> Option<Bytes> {
        if !env.may_inject || !env.random.faults.chance(15) {
            return None;
        }
        let ship = self.leads.ships.get(&token)?;
        let led = self.leads.led.get(&ship.shard)?;
        let held = led.machine.cursor(ship.follower, ship.log)?.counted()?;
        let is_own = is_main(ship.log) && held > led.machine.floor();
        let is_current = led.generation == ship.generation && !led.is_superseded;
        let at = held.checked_sub(1).filter(|_| is_own && is_current)?;
        let key = LogKey {
            shard: ship.shard,
            log: SimLog::of(ship.log),
        };
        let record = self.journal.seen(key).record(at)?;
        let mut other = record.to_vec();
        other.push(b'?');
        let payloads = Payloads::from_slices([&other]).ok()?;
        encode(&Message::Records(Records {
            // Nobody waits for the answer.
            correlation: CorrelationId(u64::MAX - 2),
            log: ship.log,
            shard: env.catalog.shard_ref(ship.shard, ship.generation),
            first_offset: Offset(at),
            checksum: payloads.batch_checksum(),
            payloads,
        }))
        .ok()
    }

    /// What a replicate message came to.
    pub(super) fn on_ship_result(
        &mut self,
        env: &mut Env,
        token: u64,
        result: SendResult<PeerReply>,
    ) {
        let now = self.now(env);
        let Some(ship) = self.leads.ships.remove(&token) else {
            return;
        };
        let answer = match result {
            SendResult::Ok(PeerReply::Durable(durable)) => Answered::Ok { durable: durable.0 },
            SendResult::Error(error) => Answered::Refused {
                code: error.code,
                expected: error.expected_offset.0,
            },
            SendResult::NotSent(_) => Answered::NotSent,
            SendResult::Ok(_) | SendResult::NotLeader(_) | SendResult::Unknown(_) => {
                Answered::Unknown
            }
        };
        env.judge
            .on_ship_answer(self.at.node, ship.shard, ship.generation, answer);
        let Leads { led, slots, .. } = &mut self.leads;
        let Some(led) = led.get_mut(&ship.shard) else {
            return;
        };
        if led.generation == ship.generation {
            let machine = &mut led.machine;
            machine.on_answer(ship.follower, ship.log, ship.id, answer, now, slots);
        }
        // What this answer led to is carried out before the next one is looked at.
        self.take_lead_events(env, ship.shard);
    }
}

/// The same batch with a bit turned, or with a byte moved from one payload to the next.
fn damaged(payloads: &Payloads, draw: u64) -> Payloads {
    let mut records: Vec<Vec<u8>> = payloads.iter().map(<[u8]>::to_vec).collect();
    let moves_boundary = draw % 2 == 0 && records.len() > 1;
    if moves_boundary {
        if let Some(byte) = records[0].pop() {
            records[1].insert(0, byte);
        }
    } else if let Some(record) = records.last_mut() {
        let at = (draw as usize / 2) % record.len().max(1);
        if let Some(byte) = record.get_mut(at) {
            *byte ^= 1 << (draw % 8);
        }
    }
    Payloads::from_slices(records).expect("as long as before")
}
