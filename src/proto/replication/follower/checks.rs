//! The checks every request passes before its kind is looked at, in their order.

use super::position::mark_at_first_contact;
use super::{DiskWork, FollowerLog, FollowerNote, FollowerRequest, LogHealth, Matched};
use crate::ids::{Generation, NodeId};
use crate::proto::outcome::PeerCode;
use crate::proto::ownership::{check_replication, ReplicaSetView};
use crate::proto::replication::history::Newest;
use crate::proto::replication::types::{ReplicaView, ReplicateAnswer, ReplicateBody};

type Refusal = (PeerCode, &'static str);

impl FollowerLog {
    /// Takes a request through all checks and decides it as far as the log's state allows now.
    pub(super) fn decide(&mut self, request: FollowerRequest) {
        let checked = numbers_are_sound(&request.body)
            .and_then(|()| self.authorise(&request))
            .and_then(|()| checksum_holds(&request.body))
            .and_then(|()| self.usable(&request.body));
        if let Err((code, detail)) = checked {
            return self.refuse(&request, code, detail);
        }
        if self.health != LogHealth::Broken {
            self.accept(&request);
        }
        self.make_contact(&request);
        match request.body {
            ReplicateBody::Records { .. } => self.decide_records(request),
            ReplicateBody::Bootstrap { base_offset } => self.decide_bootstrap(request, base_offset),
            ReplicateBody::Rebuild { base_offset } => self.decide_rebuild(request, base_offset),
        }
    }

    /// Asked again after every wait, before the log is touched.
    pub(super) fn still_allowed(&self, request: &FollowerRequest) -> Result<(), Refusal> {
        self.authorise(request)?;
        self.usable(&request.body)
    }

    /// Generation, then membership.
    fn authorise(&self, request: &FollowerRequest) -> Result<(), Refusal> {
        let accepted = match self.health {
            LogHealth::Opening => None,
            LogHealth::Open | LogHealth::Poisoned | LogHealth::Broken | LogHealth::Unusable => {
                Some(self.at.accepted)
            }
        };
        let (me, view) = (&self.me, self.view.as_ref());
        authority(me, view, accepted, &request.sender, request.generation)
    }

    fn usable(&self, body: &ReplicateBody) -> Result<(), Refusal> {
        let is_rebuild = matches!(body, ReplicateBody::Rebuild { .. });
        match self.health {
            LogHealth::Open => Ok(()),
            LogHealth::Opening => Err((PeerCode::Unavailable, "the log is opening")),
            LogHealth::Broken if is_rebuild => Ok(()),
            // The one answer after which a leader considers to have the copy made anew. What was stored here
            // is not known any more to be what that leader wrote.
            LogHealth::Broken => Err((
                PeerCode::LogConflict,
                "the copy is damaged and has to be made anew",
            )),
            LogHealth::Unusable => Err((PeerCode::StorageFailed, "the log cannot be opened")),
            LogHealth::Poisoned => Err((
                PeerCode::StorageFailed,
                "a sync of the log failed; it is closed until the next start",
            )),
        }
    }

    /// Persists a generation newer than any accepted before; nothing is answered before it is durable.
    pub(super) fn accept(&mut self, request: &FollowerRequest) {
        let generation = request.generation;
        if generation > self.at.accepted {
            self.start(DiskWork::Accept { generation });
            self.note(FollowerNote::Accepted { generation });
        }
    }

    /// What is known of equality with this leader, from the log or from its earlier generations.
    fn make_contact(&mut self, request: &FollowerRequest) {
        let connection = request.connection;
        if let Some(matched) = &mut self.matched {
            if matched.generation == request.generation {
                if matched.connection != Some(connection) {
                    matched.connection = None;
                }
                return;
            }
        }
        let newest = self.at.history.newest(self.at.tail);
        let generation = request.generation;
        let mark = mark_at_first_contact(self.at.base, self.at.tail, newest, generation)
            .or_else(|| self.carried_mark(request, newest?));
        self.matched = Some(Matched {
            generation,
            mark,
            connection: Some(connection),
        });
        self.given_up = None;
    }

    /// The mark of the generation before stands when the same process has led ever since the newest records
    /// came: one leader by the views, one connection.
    fn carried_mark(&self, request: &FollowerRequest, newest: Newest) -> Option<u64> {
        let was = self.matched.as_ref()?;
        let same_leader = self.leader_since <= newest.generation;
        let same_process = was.connection == Some(request.connection);
        let reaches_back = was.generation >= newest.generation;
        was.mark
            .filter(|_| same_leader && same_process && reaches_back)
    }
}

/// What a broker that does not follow the shard answers; it keeps no copy to ask. `accepted` is the highest
/// generation it has ever accepted for the shard.
pub fn answer_of_outsider(
    me: &NodeId,
    view: Option<&ReplicaView>,
    accepted: Option<Generation>,
    (sender, generation): (&str, Generation),
    body: &ReplicateBody,
) -> ReplicateAnswer {
    let checked =
        numbers_are_sound(body).and_then(|()| authority(me, view, accepted, sender, generation));
    let (code, detail) = checked
        .err()
        .unwrap_or((PeerCode::Unavailable, "the assignment is changing"));
    ReplicateAnswer::refused(code, detail)
}

fn authority(
    me: &NodeId,
    view: Option<&ReplicaView>,
    accepted: Option<Generation>,
    sender: &str,
    generation: Generation,
) -> Result<(), Refusal> {
    let view = view.map(|view| ReplicaSetView {
        generation: view.generation,
        leader: Some(&view.leader),
        replicas: &view.replicas,
    });
    check_replication(me, sender, view, accepted, generation).map_err(|code| {
        let detail = match code {
            PeerCode::FencedEpoch => "a newer generation is known here",
            PeerCode::StaleRoute => "that generation or shard is not known here",
            _ => "not this shard's leader speaking to its follower",
        };
        (code, detail)
    })
}

fn numbers_are_sound(body: &ReplicateBody) -> Result<(), Refusal> {
    match body {
        ReplicateBody::Records {
            first_offset,
            payloads,
            ..
        } if first_offset.checked_add(payloads.len() as u64).is_none() => {
            Err((PeerCode::Malformed, "the batch ends past the last offset"))
        }
        ReplicateBody::Records { .. }
        | ReplicateBody::Bootstrap { .. }
        | ReplicateBody::Rebuild { .. } => Ok(()),
    }
}

fn checksum_holds(body: &ReplicateBody) -> Result<(), Refusal> {
    match body {
        ReplicateBody::Records {
            checksum, payloads, ..
        } if *checksum != payloads.batch_checksum() => {
            Err((PeerCode::Malformed, "the batch fails its checksum"))
        }
        ReplicateBody::Records { .. }
        | ReplicateBody::Bootstrap { .. }
        | ReplicateBody::Rebuild { .. } => Ok(()),
    }
}
