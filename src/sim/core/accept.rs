//! Connections peers opened to this core: greeting, requests, answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::owner::{ServeRefusal, ServeResult, Waiter, Work};
use super::replica::ReplyTo;
use super::{Core, Timer};
use crate::ids::{CorrelationId, Offset, ShardKind};
use crate::proto::cache::CacheRequest;
use crate::proto::convert::{greeting_of, refusal_of, PeerReply};
use crate::proto::handshake::{ListenerAction, ListenerHandshake, PeerIdentity, StreamPlace};
use crate::proto::outcome::{PeerCode, Target};
use crate::proto::ownership::{
    admit_forward, names_are_complete, CredentialVerdict, ForwardAdmission, Load,
};
use crate::proto::replication::follower::FollowerRequest;
use crate::proto::replication::types::kind_of;
use crate::proto::replication::{ReplicateAnswer, ReplicateBody};
use crate::proto::MonoTime;
use crate::sim::disk::{LogKey, SimLog};
use crate::sim::env::{Env, Fault};
use crate::sim::network::{Arrival, ConnId, Side};
use crate::sim::workload;
use crate::wire::internal::{
    encode, on_request_event, refusal, unsupported_kind_refusal, CacheOk, Credential, DecodeError,
    FrameReader, Hello, Inbound, Kind, Message, ReplicaLog, ShardRef, Text,
};

const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
const REFUSAL_LINGER: Duration = Duration::from_millis(100);

/// An answer to a replicate message that a copy owes.
#[derive(Debug, Clone, Copy)]
pub struct ReplicateOwed {
    conn: ConnId,
    stream: u8,
    kind: Kind,
    correlation: CorrelationId,
}

/// One accepted connection.
#[derive(Debug)]
pub struct PeerConn {
    pub handshake: ListenerHandshake,
    streams: BTreeMap<u8, PeerStream>,
}

#[derive(Debug, Default)]
struct PeerStream {
    reader: FrameReader,
    held: Option<Inbound>,
    /// Requests read and not answered.
    owed: u32,
}

impl PeerConn {
    pub fn owed(&self) -> u32 {
        self.streams.values().map(|stream| stream.owed).sum()
    }
}

impl Core {
    pub(super) fn on_peer_arrival(&mut self, env: &mut Env, conn: ConnId, arrival: Arrival) {
        match arrival {
            Arrival::Accepted => {
                let dialler = env.network.place(conn, Side::Dialler).node;
                let name = env.catalog.nodes[dialler].as_str().to_owned();
                let identity = PeerIdentity::Certified(vec![name]);
                let now = self.now(env);
                let handshake =
                    ListenerHandshake::new(self.me.clone(), identity, now, GREETING_TIMEOUT);
                let peer = PeerConn {
                    handshake,
                    streams: BTreeMap::new(),
                };
                self.accepted.insert(conn, peer);
            }
            Arrival::Bytes { stream, bytes } => {
                if let Some(peer) = self.accepted.get_mut(&conn) {
                    peer.streams.entry(stream).or_default().reader.push(bytes);
                    self.take_peer_frames(env, conn, stream);
                }
            }
            Arrival::Closed(_) => drop(self.accepted.remove(&conn)),
            Arrival::Connected => {}
        }
    }

    fn take_peer_frames(&mut self, env: &mut Env, conn: ConnId, stream: u8) {
        loop {
            let Some(peer) = self.accepted.get_mut(&conn) else {
                return;
            };
            let Some(state) = peer.streams.get_mut(&stream) else {
                return;
            };
            let inbound = match state.held.take() {
                Some(held) => held,
                None => match state.reader.next() {
                    Some(event) => on_request_event(event),
                    None => return,
                },
            };
            if !self.on_peer_frame(env, conn, stream, inbound) {
                return;
            }
        }
    }

    /// False when the stream must not be read on now.
    fn on_peer_frame(&mut self, env: &mut Env, conn: ConnId, stream: u8, inbound: Inbound) -> bool {
        if let Some(why) = unreadable(&inbound) {
            // Every sender here is sound: a frame was misread, or an unknown kind took others with it.
            env.judge.fail(41, format!("n{}: {why}", self.at.node));
        }
        let Some(incoming) = greeting_of(&inbound) else {
            self.close_peer(env, conn);
            return false;
        };
        let Some(peer) = self.accepted.get_mut(&conn) else {
            return false;
        };
        let place = match stream {
            0 => StreamPlace::First,
            _ => StreamPlace::Later,
        };
        let action = peer.handshake.on_frame(place, incoming);
        let owes = matches!(
            action,
            ListenerAction::Greet { .. }
                | ListenerAction::Refuse { .. }
                | ListenerAction::RefuseAndClose { .. }
                | ListenerAction::Deliver
        );
        if let Some(state) = peer.streams.get_mut(&stream).filter(|_| owes) {
            state.owed += 1;
        }
        match action {
            ListenerAction::Greet {
                correlation,
                node_id,
            } => {
                let node_id = Text::from(&node_id);
                let hello = Hello {
                    correlation,
                    node_id,
                };
                self.answer_peer(env, conn, stream, &Message::HelloOk(hello));
                let held: Vec<u8> = self.accepted.get(&conn).map_or(vec![], |peer| {
                    let held = peer.streams.iter().filter(|(_, s)| s.held.is_some());
                    held.map(|(stream, _)| *stream).collect()
                });
                for stream in held {
                    self.take_peer_frames(env, conn, stream);
                }
            }
            ListenerAction::Refuse {
                correlation,
                code,
                detail,
            } => {
                let answer = refusal(Kind::Hello, correlation, code, Offset(0), detail);
                self.answer_peer(env, conn, stream, &answer);
            }
            ListenerAction::RefuseAndClose {
                correlation,
                code,
                reason,
            } => {
                let answer = refusal(Kind::Hello, correlation, code, Offset(0), reason.name());
                self.answer_peer(env, conn, stream, &answer);
                let at = self.now(env) + REFUSAL_LINGER;
                self.push_timer(at, Timer::ClosePeer { conn });
                return false;
            }
            ListenerAction::Deliver => match inbound {
                Inbound::Request(message) => self.on_peer_request(env, conn, stream, message),
                Inbound::Refuse { answer, .. } => self.answer_peer(env, conn, stream, &answer),
                Inbound::StrayAnswer { .. } | Inbound::Close(_) => {}
            },
            ListenerAction::Hold => {
                if let Some(state) = peer.streams.get_mut(&stream) {
                    state.held = Some(inbound);
                }
                return false;
            }
            ListenerAction::Drop => {}
            ListenerAction::Close { .. } => {
                self.close_peer(env, conn);
                return false;
            }
            ListenerAction::Ignore => return false,
        }
        true
    }

    pub(super) fn expire_greetings(&mut self, env: &mut Env, now: MonoTime) {
        let late: Vec<ConnId> = self
            .accepted
            .iter_mut()
            .filter_map(|(conn, peer)| peer.handshake.on_time(now).map(|_| *conn))
            .collect();
        for conn in late {
            self.close_peer(env, conn);
        }
    }

    pub(super) fn close_peer(&mut self, env: &mut Env, conn: ConnId) {
        if self.accepted.remove(&conn).is_some() {
            env.close(conn, Side::Listener);
        }
    }

    fn on_peer_request(&mut self, env: &mut Env, conn: ConnId, stream: u8, message: Message) {
        let (kind, correlation) = (message.kind(), message.correlation());
        let is_new_kind = matches!(
            kind,
            Kind::AuthorizedForwardPublish | Kind::AuthorizedForwardCacheOp
        );
        if self.is_legacy && is_new_kind {
            let answer = unsupported_kind_refusal(correlation, kind as u16);
            return self.answer_peer(env, conn, stream, &answer);
        }
        let waiter = Waiter::Peer {
            conn,
            stream,
            correlation,
            kind,
        };
        let asking = ((conn, stream), (kind, correlation));
        match message {
            Message::ForwardPublish(m) => {
                let work = Work::Publish(m.payloads);
                let asked = (ShardKind::Stream, &m.shard, m.credential.as_ref());
                self.on_forward(env, asked, Ok(work), waiter);
            }
            Message::CacheOp(m) => {
                let work = CacheRequest::of_forward(&m).map(Work::Cache);
                let asked = (ShardKind::Cache, &m.shard, m.credential.as_ref());
                let work = work.map_err(ServeRefusal::Cache);
                self.on_forward(env, asked, work, waiter);
            }
            Message::Records(m) => {
                let body = ReplicateBody::Records {
                    first_offset: m.first_offset.0,
                    checksum: m.checksum,
                    payloads: m.payloads,
                };
                self.on_peer_replicate(env, asking, (m.log, &m.shard), body);
            }
            Message::Bootstrap(m) => {
                let base_offset = m.base_offset.0;
                let body = ReplicateBody::Bootstrap { base_offset };
                self.on_peer_replicate(env, asking, (m.log, &m.shard), body);
            }
            Message::Rebuild(m) => {
                let base_offset = m.base_offset.0;
                let body = ReplicateBody::Rebuild { base_offset };
                self.on_peer_replicate(env, asking, (m.log, &m.shard), body);
            }
            Message::Hello(_)
            | Message::HelloOk(_)
            | Message::ForwardPublishOk { .. }
            | Message::ForwardPublishError(_)
            | Message::NotLeader(_)
            | Message::ReplicateOk { .. }
            | Message::ReplicateError(_)
            | Message::CacheOk(_)
            | Message::CacheError(_) => {
                unreachable!("greetings and answers never reach the handlers")
            }
        }
    }

    /// A replicate message goes to the core that owns its log.
    fn on_peer_replicate(
        &mut self,
        env: &mut Env,
        ((conn, stream), (kind, correlation)): ((ConnId, u8), (Kind, CorrelationId)),
        (log, named): (ReplicaLog, &ShardRef),
        body: ReplicateBody,
    ) {
        let shard = env.catalog.shard_by_ref(kind_of(log), named);
        let shard = shard.filter(|shard| env.catalog.is_replicated(*shard));
        let sender = self
            .accepted
            .get(&conn)
            .and_then(|peer| peer.handshake.peer());
        let (Some(shard), Some(sender)) = (shard, sender.map(Arc::from)) else {
            let code = PeerCode::StaleRoute;
            let answer = refusal(kind, correlation, code, Offset(0), "unknown shard");
            return self.answer_peer(env, conn, stream, &answer);
        };
        let request = FollowerRequest {
            request: 0,
            sender,
            connection: u64::from(conn.0),
            generation: named.generation,
            body,
        };
        let key = LogKey {
            shard,
            log: SimLog::of(log),
        };
        let ticket = self.token();
        let owed = ReplicateOwed {
            conn,
            stream,
            kind,
            correlation,
        };
        self.replicate_owed.insert(ticket, owed);
        let core = self.owner_core(shard);
        if core == self.at.core {
            let reply = ReplyTo { core, ticket };
            return self.on_replicate(env, key, request, reply);
        }
        if !self.replicate_on_lane(env, core, ticket, key, request) {
            let full = ReplicateAnswer::refused(PeerCode::Overload, "lane full");
            self.answer_peer_replicate(env, ticket, full);
        }
    }

    /// The answer of a copy, on the core its question arrived on.
    pub(super) fn answer_peer_replicate(
        &mut self,
        env: &mut Env,
        ticket: u64,
        answer: ReplicateAnswer,
    ) {
        let Some(owed) = self.replicate_owed.remove(&ticket) else {
            return;
        };
        let correlation = owed.correlation;
        let message = match answer {
            ReplicateAnswer::Ok { durable_offset } => Message::ReplicateOk {
                correlation,
                durable_offset: Offset(durable_offset),
            },
            ReplicateAnswer::Refused {
                code,
                expected_offset,
                detail,
            } => refusal(
                owed.kind,
                correlation,
                code,
                Offset(expected_offset),
                detail,
            ),
        };
        self.answer_peer(env, owed.conn, owed.stream, &message);
    }

    fn on_forward(
        &mut self,
        env: &mut Env,
        (shard_kind, named, credential): (ShardKind, &ShardRef, Option<&Credential>),
        work: Result<Work, ServeRefusal>,
        waiter: Waiter,
    ) {
        let names = (
            named.tenant.as_str(),
            named.namespace.as_str(),
            named.stream.as_str(),
        );
        if names_are_complete(names.0, names.1, names.2).is_err() {
            let malformed = ServeRefusal::Peer(PeerCode::Malformed);
            return self.finish(env, waiter, Err(malformed));
        }
        let shard = env.catalog.shard_by_ref(shard_kind, named);
        let load = match env.may_inject && env.random.schedule.chance(env.plan.shed_per_mille) {
            true => {
                env.count_fault(Fault::Shedding);
                Load::Shedding
            }
            false => Load::Normal,
        };
        let is_legacy = self.is_legacy;
        let verdict = || match credential.map(Credential::as_str) {
            Some(workload::GOOD_CREDENTIAL) => CredentialVerdict::Allowed,
            Some(_) => CredentialVerdict::NotAllowed,
            None if is_legacy => CredentialVerdict::Allowed,
            None => CredentialVerdict::Missing,
        };
        let generation = named.generation;
        let view = shard.and_then(|shard| self.shard_view(env, shard));
        let mut admission = admit_forward(&self.me, view, generation, load, verdict);
        let is_served = admission == ForwardAdmission::Serve;
        if is_served && env.may_inject && env.random.faults.chance(4) {
            // An owner that is not sound names somebody else, who will name it.
            env.count_fault(Fault::FalseRedirect);
            let node = env.random.faults.index(env.plan.nodes);
            let node = env.catalog.nodes[node].clone();
            admission = ForwardAdmission::NotLeader(Target { node, generation });
        }
        let Waiter::Peer {
            conn,
            stream,
            correlation,
            kind,
        } = waiter
        else {
            return;
        };
        match (
            refusal_of(kind, correlation, &admission, |_| "sim".into()),
            shard,
        ) {
            (Ok(None), Some(shard)) => {
                debug_assert_eq!(admission, ForwardAdmission::Serve);
                match work {
                    Ok(work) => self.serve(env, shard, generation, work, waiter),
                    Err(refusal) => self.finish(env, waiter, Err(refusal)),
                }
            }
            (Ok(Some(answer)), _) => self.answer_peer(env, conn, stream, &answer),
            (Ok(None), None) | (Err(_), _) => unreachable!("an unknown shard is never served"),
        }
    }

    /// The answer to a request of a peer, in the shape of its kind.
    pub(super) fn answer_work(
        &mut self,
        env: &mut Env,
        (conn, stream): (ConnId, u8),
        (kind, correlation): (Kind, CorrelationId),
        result: ServeResult,
    ) {
        let answer = match result {
            Ok(PeerReply::Appended(at)) => Message::ForwardPublishOk {
                correlation,
                first_offset: at.first,
                last_offset: at.last,
            },
            Ok(PeerReply::Cached(value)) => Message::CacheOk(CacheOk { correlation, value }),
            Ok(PeerReply::Durable(durable_offset)) => Message::ReplicateOk {
                correlation,
                durable_offset,
            },
            Err(why) => refusal(kind, correlation, why.peer_code(), Offset(0), "refused"),
        };
        self.answer_peer(env, conn, stream, &answer);
    }

    pub(super) fn answer_peer(
        &mut self,
        env: &mut Env,
        conn: ConnId,
        stream: u8,
        answer: &Message,
    ) {
        let Some(peer) = self.accepted.get_mut(&conn) else {
            return;
        };
        if let Some(state) = peer.streams.get_mut(&stream) {
            assert!(state.owed > 0, "I40: a second answer to one request");
            state.owed -= 1;
        }
        let frame: Bytes = encode(answer).expect("an answer of bounded fields encodes");
        env.send(conn, Side::Listener, stream, frame);
    }
}

/// What a reader could not make sense of; a kind it does not know is none of that.
fn unreadable(inbound: &Inbound) -> Option<String> {
    match inbound {
        Inbound::Request(_)
        | Inbound::Refuse {
            error: DecodeError::UnknownKind { .. },
            ..
        } => None,
        Inbound::Refuse { error, .. } => Some(error.to_string()),
        Inbound::StrayAnswer { kind } => Some(format!("{kind:?} where requests belong")),
        Inbound::Close(reason) => Some(reason.to_string()),
    }
}
