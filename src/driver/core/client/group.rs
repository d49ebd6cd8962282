//! Consumer group requests of clients: checked, done by the core that owns the shard, answered.
//!
//! Permission before existence, as for everything else. A broker that does not lead the shard
//! names the one that does; nothing is forwarded.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::auth::{Action, Resource};
use crate::limits::{MAX_GROUP_MEMBER_BYTES, MAX_GROUP_NAME_BYTES};
use crate::proto::client_code::{invalid, of_route_refusal};
use crate::proto::client_session::Requested;
use crate::proto::group::{Delivered, GroupOp, GroupReply, Member, Poll, SeekTo};
use crate::proto::ownership::RouteRefusal;
use crate::wire::client::messages::{
    CacheOk, GroupDeadLetterList, GroupDeleted, GroupExtended, GroupInfo, GroupPosition,
    GroupRecord, GroupRecords, StartAt,
};
use crate::wire::client::{Answer, Blob, Features, Refusal, Request};

use super::super::group::AskedBy;
use super::super::message::{GroupResult, LaneMsg};
use super::auth::Identity;
use super::Core;
use crate::driver::quic::{ConnId, StreamId};

/// A group request taken from a client and not answered yet.
pub(in crate::driver::core) struct ClientGroup {
    conn: ConnId,
    stream: StreamId,
    class: Requested,
    request_id: u64,
    /// The core that owns the shard.
    core: u16,
    reads_skipped: bool,
}

/// A request whichever message it came in.
struct Asked {
    tenant_id: String,
    namespace: String,
    stream: String,
    shard: u32,
    group: String,
    request_id: u64,
    action: Action,
    op: GroupOp,
}

/// Splits a message into what all of them have and what it asks.
macro_rules! asked {
    ($m:ident, $action:ident, $op:expr) => {
        Ok(Asked {
            tenant_id: $m.tenant_id,
            namespace: $m.namespace,
            stream: $m.stream,
            shard: $m.shard,
            group: $m.group,
            request_id: $m.request_id,
            action: Action::$action,
            op: $op,
        })
    };
}

impl Asked {
    fn of(request: Request, principal: &str, session: u64) -> Result<Self, Refusal> {
        match request {
            Request::GroupPoll(m) => {
                let member = match m.consumer {
                    Some(consumer) => Some(member(principal, &consumer, session)?),
                    None => None,
                };
                let poll = Poll {
                    max_records: m.max_records as usize,
                    wait: Duration::from_millis(m.wait_ms),
                    visibility: Some(Duration::from_millis(m.visibility_ms)),
                    member,
                    reclaim: m.reclaim,
                };
                asked!(m, GroupConsume, GroupOp::Poll(poll))
            }
            Request::GroupAck(m) => {
                let offset = m.offset;
                asked!(m, GroupConsume, GroupOp::Ack { offset })
            }
            Request::GroupNack(m) => {
                let op = GroupOp::Nack {
                    offset: m.offset,
                    delay: Duration::from_millis(m.delay_ms),
                    attempts: m.attempts,
                };
                asked!(m, GroupConsume, op)
            }
            Request::GroupExtend(m) => {
                let op = GroupOp::Extend {
                    offset: m.offset,
                    attempts: m.attempts,
                    by: Duration::from_millis(m.extend_ms),
                };
                asked!(m, GroupConsume, op)
            }
            Request::GroupDeadLetter(m) => {
                let offset = m.offset;
                asked!(m, GroupConsume, GroupOp::DeadLetter { offset })
            }
            Request::GroupDeadLetters(m) => asked!(m, GroupConsume, GroupOp::ListDead),
            Request::GroupDescribe(m) => asked!(m, GroupConsume, GroupOp::Describe),
            Request::GroupDiscard(m) => {
                let offset = m.offset;
                asked!(m, GroupManage, GroupOp::Discard { offset })
            }
            Request::GroupRedrive(m) => {
                let offset = m.offset;
                asked!(m, GroupManage, GroupOp::Redrive { offset })
            }
            Request::GroupSeek(m) => {
                let to = match m.start {
                    StartAt::Latest => SeekTo::Latest,
                    StartAt::Earliest => SeekTo::Earliest,
                    StartAt::Offset(offset) => SeekTo::Offset(offset),
                };
                let if_new = m.if_new;
                asked!(m, GroupManage, GroupOp::Seek { to, if_new })
            }
            Request::GroupDelete(m) => asked!(m, GroupManage, GroupOp::Delete),
            _ => Err(invalid("not a group request")),
        }
    }

    fn is_poll(&self) -> bool {
        matches!(self.op, GroupOp::Poll(_))
    }
}

fn member(principal: &str, consumer: &str, session: u64) -> Result<Member, Refusal> {
    if consumer.is_empty() || consumer.len() > MAX_GROUP_MEMBER_BYTES {
        let why = format!("consumer must have 1 to {MAX_GROUP_MEMBER_BYTES} bytes");
        return Err(invalid(why));
    }
    Ok(Member {
        // A name belongs to its principal: no one takes another's claims back.
        name: Arc::from(format!("{principal}\n{consumer}")),
        session,
    })
}

impl Core {
    pub(super) fn on_group_request(
        &mut self,
        conn: ConnId,
        stream: StreamId,
        identity: &Rc<Identity>,
        class: Requested,
        request: Request,
    ) {
        let client = self.clients.get(&conn);
        let session = client.map_or(0, |client| client.session_number);
        let asked = match Asked::of(request, &identity.grant.sub, session) {
            Ok(asked) => asked,
            Err(refusal) => return self.refuse(conn, stream, class, refusal),
        };
        let resource = Resource::Group {
            tenant: &asked.tenant_id,
            namespace: &asked.namespace,
            stream: &asked.stream,
            group: &asked.group,
        };
        if !identity.grant.allows(asked.action, &resource) {
            let refusal = of_route_refusal(RouteRefusal::Forbidden);
            return self.refuse(conn, stream, class, refusal);
        }
        let routes = Arc::clone(&self.routes);
        let Some(route) = routes.stream(&asked.tenant_id, &asked.namespace, &asked.stream) else {
            let refusal = of_route_refusal(RouteRefusal::NotFound);
            return self.refuse(conn, stream, class, refusal);
        };
        let Some(shard) = route.shards.get(asked.shard as usize) else {
            return self.refuse(conn, stream, class, invalid("the shard is out of range"));
        };
        if asked.group.is_empty() || asked.group.len() > MAX_GROUP_NAME_BYTES {
            let why = format!("a group's name has 1 to {MAX_GROUP_NAME_BYTES} bytes");
            return self.refuse(conn, stream, class, invalid(why));
        }
        if !shard.is_local {
            return self.redirect(conn, stream, class, shard);
        }
        let Some(state) = self.client_stream(conn, stream) else {
            return;
        };
        let features = state.session.offer().features();
        let is_poll = asked.is_poll();
        let ask = self.group_asks.insert(ClientGroup {
            conn,
            stream,
            class,
            request_id: asked.request_id,
            core: shard.core.0,
            reads_skipped: features.contains(Features::GROUP_SKIPPED),
        });
        if let Some(client) = self.clients.get_mut(&conn).filter(|_| is_poll) {
            client.polls.insert(stream, ask);
        }
        let group: Arc<str> = Arc::from(asked.group);
        self.ask_group(
            &shard.shard_id,
            shard.core.0,
            shard.generation,
            &group,
            asked.op,
            ask,
        );
    }

    /// What a group answered to a request of a client of this core.
    pub(in crate::driver::core) fn finish_group_ask(&mut self, ask: u64, result: GroupResult) {
        let Some(client) = self.group_asks.remove(ask) else {
            return;
        };
        let (conn, stream) = (client.conn, client.stream);
        if let Some(connection) = self.clients.get_mut(&conn) {
            if connection.polls.get(&stream) == Some(&ask) {
                connection.polls.remove(&stream);
            }
        }
        match result {
            Ok(reply) => self.answer(conn, stream, answer_of(&client, reply)),
            Err(refusal) => self.refuse(conn, stream, client.class, refusal.to_client()),
        }
    }

    /// The client does not wait for its poll any more.
    pub(in crate::driver::core) fn give_up_poll(&mut self, ask: u64) {
        let Some(client) = self.group_asks.remove(ask) else {
            return;
        };
        match client.core == self.index {
            true => self.cancel_poll(AskedBy {
                core: usize::from(self.index),
                ask,
            }),
            // Like an answer it may not be lost: the poll would claim records for nobody.
            false => self.send_answer(usize::from(client.core), LaneMsg::CancelPoll { ask }),
        }
    }
}

fn answer_of(client: &ClientGroup, reply: GroupReply) -> Answer {
    let request_id = client.request_id;
    match reply {
        GroupReply::Records(records) => {
            let records = records.into_iter();
            GroupRecords {
                records: records
                    .map(|record| record_of(record, client.reads_skipped))
                    .collect(),
                request_id,
            }
            .into()
        }
        GroupReply::Settled => CacheOk { request_id }.into(),
        GroupReply::Extended { visible } => GroupExtended {
            visible_ms: visible.as_millis() as u64,
            request_id,
        }
        .into(),
        GroupReply::DeadLetters(offsets) => GroupDeadLetterList {
            offsets,
            request_id,
        }
        .into(),
        GroupReply::Position { offset, moved } => GroupPosition {
            offset,
            moved,
            request_id,
        }
        .into(),
        GroupReply::Info(info) => GroupInfo {
            committed: info.committed,
            tail: info.tail,
            in_flight: info.in_flight,
            owed: info.owed,
            dead_letters: info.dead_letters,
            request_id,
        }
        .into(),
        GroupReply::Deleted { existed } => GroupDeleted {
            existed,
            request_id,
        }
        .into(),
    }
}

fn record_of(record: Delivered, reads_skipped: bool) -> GroupRecord {
    GroupRecord {
        offset: record.offset,
        payload: Blob(record.payload),
        attempts: record.attempts,
        skipped_before: match reads_skipped {
            true => record.skipped_before,
            false => 0,
        },
        publisher: None,
        timestamp_micros: None,
    }
}
