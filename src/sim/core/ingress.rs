//! A client's request on the core it is connected to: served here, forwarded, or refused.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::owner::{ServeResult, Waiter, Work};
use super::{Core, Timer};
use crate::ids::CorrelationId;
use crate::proto::cache::CacheReply;
use crate::proto::convert::PeerReply;
use crate::proto::correlation::Family;
use crate::proto::forward::{Forward, ForwardLimits, Step};
use crate::proto::outcome::{
    ForwardKind, NotSentCause, Outcome, PeerCode, PeerError, SendResult, Target,
};
use crate::proto::ownership::{route_local, Load, LocalRoute};
use crate::proto::peer::{Request as LinkRequest, StreamSlot};
use crate::sim::check::Ended;
use crate::sim::env::{Env, Fault};
use crate::sim::workload::Request;
use crate::wire::internal::{
    encode_into, forward_publish_parts_in, AckMode, CacheOp, Message, Text,
};

/// A forward until its outcome.
#[derive(Debug)]
pub struct PendingForward {
    machine: Forward,
    request: Arc<Request>,
    target: Target,
}

impl Core {
    pub(super) fn on_request(&mut self, env: &mut Env, request: Arc<Request>) {
        let shard = request.shard;
        env.judge.on_start(&request, self.at, env.now_us);
        // What it is not allowed to do, this broker refuses itself when it owns the shard, and
        // lets through to the owner otherwise: the owner must not rely on it.
        let is_allowed = request.has_good_credential;
        match route_local(self.shard_view(env, shard), Load::Normal, true) {
            LocalRoute::Serve { .. } if !is_allowed => {
                let now_us = env.now_us;
                env.judge.on_end(request.id, now_us, Ended::Refused);
            }
            LocalRoute::Serve { generation } => {
                let work = request.work.clone();
                self.serve(env, shard, generation, work, Waiter::Client(request));
            }
            LocalRoute::Remote(target) => self.start_forward(env, request, target),
            LocalRoute::Refuse(_) => {
                let now_us = env.now_us;
                env.judge.on_end(request.id, now_us, Ended::Refused);
            }
        }
    }

    fn start_forward(&mut self, env: &mut Env, request: Arc<Request>, target: Target) {
        let mut target = target;
        // The ingress may work with a route from before the last move.
        if env.may_inject && env.random.schedule.chance(env.plan.stale_view_per_mille) {
            if let Some(stale) = self.stale_target(env, request.shard) {
                env.count_fault(Fault::StaleView);
                target = stale;
            }
        }
        let limits = ForwardLimits::default();
        let now = self.now(env);
        let (machine, step) = Forward::start(request.forward_op(), target.clone(), now, limits);
        let token = self.token();
        let pending = PendingForward {
            machine,
            request,
            target,
        };
        self.forwards.insert(token, pending);
        self.run_forward(env, token, step);
    }

    fn stale_target(&self, env: &mut Env, shard: usize) -> Option<Target> {
        let version = self.view?;
        let older = env.random.schedule.index(version + 1);
        let assignment = env.catalog.assignment(older, shard);
        Some(Target {
            node: env.catalog.nodes[assignment.leader].clone(),
            generation: crate::ids::Generation(assignment.generation),
        })
    }

    fn run_forward(&mut self, env: &mut Env, token: u64, step: Step<PeerReply>) {
        match step {
            Step::Nothing => {}
            Step::WaitUntil(at) => self.push_timer(at, Timer::Forward { token }),
            Step::Finish(outcome) => self.finish_forward(env, token, outcome),
            Step::Send { target, kind } => self.send_forward(env, token, target, kind),
        }
    }

    fn send_forward(&mut self, env: &mut Env, token: u64, target: Target, kind: ForwardKind) {
        let Some(pending) = self.forwards.get_mut(&token) else {
            return;
        };
        pending.target = target.clone();
        let request = Arc::clone(&pending.request);
        let Some(node) = env.catalog.node_by_name(target.node.as_str()) else {
            let unknown = SendResult::NotSent(NotSentCause::UnknownPeer);
            return self.on_forward_result(env, token, kind, unknown);
        };
        env.judge.on_send(request.id);
        if node == self.at.node && !request.has_good_credential {
            let refused = PeerError::bare(PeerCode::Unauthorized);
            return self.on_forward_result(env, token, kind, SendResult::Error(refused));
        }
        if node == self.at.node {
            env.judge.on_transmit(request.id, node, target.generation.0);
            let waiter = Waiter::Forward { token };
            let work = request.work.clone();
            return self.serve(env, request.shard, target.generation, work, waiter);
        }
        let (family, bytes) = match &request.work {
            Work::Publish(payloads) => (Family::Publish, payloads.as_wire().len()),
            Work::Cache(op) => (Family::Cache, op.held_bytes()),
        };
        let now = self.now(env);
        let link = self.ensure_link(env, node);
        link.machine.request(
            now,
            LinkRequest {
                token,
                family,
                kind,
                bytes: bytes as u32 + 256,
                pin: None,
            },
        );
    }

    /// The frame of a forward whose turn has come.
    pub(super) fn transmit_forward(
        &mut self,
        env: &mut Env,
        token: u64,
        _stream: StreamSlot,
        correlation: CorrelationId,
        kind: ForwardKind,
    ) -> Option<Bytes> {
        let pending = self.forwards.get(&token)?;
        let request = &pending.request;
        let generation = pending.target.generation.0;
        let node = env.catalog.node_by_name(pending.target.node.as_str())?;
        env.judge.on_transmit(request.id, node, generation);
        let shard = env.catalog.shard_ref(request.shard, generation);
        let credential = request.credential();
        let credential = match kind {
            ForwardKind::Authorized => Some(&credential),
            ForwardKind::Legacy => None,
        };
        let mut out = BytesMut::new();
        match &request.work {
            Work::Publish(payloads) => {
                let mut scratch = BytesMut::new();
                let parts = forward_publish_parts_in(
                    &mut scratch,
                    correlation,
                    &shard,
                    AckMode::OnCommit,
                    payloads,
                    credential,
                );
                for part in parts.ok()? {
                    out.extend_from_slice(&part);
                }
            }
            Work::Cache(op) => {
                let (kind, ttl_ms, value) = op.wire_parts();
                let message = Message::CacheOp(CacheOp {
                    correlation,
                    shard,
                    op: kind,
                    key: Text::new(&op.key).ok()?,
                    ttl_ms,
                    value,
                    credential: credential.cloned(),
                });
                encode_into(&message, &mut out).ok()?;
            }
        }
        Some(out.freeze())
    }

    pub(super) fn on_forward_result(
        &mut self,
        env: &mut Env,
        token: u64,
        sent_as: ForwardKind,
        result: SendResult<PeerReply>,
    ) {
        let now = self.now(env);
        let Some(pending) = self.forwards.get_mut(&token) else {
            return;
        };
        let id = pending.request.id;
        let is_redirect = matches!(result, SendResult::NotLeader(_));
        env.note(|| format!("{:?} request {id}: {result:?}", self.at));
        let step = pending.machine.on_result(now, sent_as, result);
        if let (Step::Send { target, .. }, true) = (&step, is_redirect) {
            env.judge.on_redirect(id, &env.catalog, target);
        }
        self.run_forward(env, token, step);
    }

    pub(super) fn on_forward_time(&mut self, env: &mut Env, token: u64) {
        let now = self.now(env);
        let Some(shard) = self.forwards.get(&token).map(|p| p.request.shard) else {
            return;
        };
        let current = self.current_target(env, shard);
        let Some(pending) = self.forwards.get_mut(&token) else {
            return;
        };
        let step = pending.machine.on_time(now, current.as_ref());
        self.run_forward(env, token, step);
    }

    pub(super) fn forwards_after_view(&mut self, env: &mut Env) {
        let now = self.now(env);
        let tokens: Vec<u64> = self.forwards.keys().copied().collect();
        for token in tokens {
            let Some(shard) = self.forwards.get(&token).map(|p| p.request.shard) else {
                continue;
            };
            let current = self.current_target(env, shard);
            let (Some(pending), Some(current)) = (self.forwards.get_mut(&token), current) else {
                continue;
            };
            let step = pending.machine.on_route_changed(now, &current);
            self.run_forward(env, token, step);
        }
    }

    /// A forward whose target is this broker went through its own ownership check.
    pub(super) fn forward_applied_here(&mut self, env: &mut Env, token: u64, result: ServeResult) {
        let result = match result {
            Ok(reply) => SendResult::Ok(reply),
            Err(super::ServeRefusal::Moved) => {
                SendResult::Error(PeerError::bare(PeerCode::StaleRoute))
            }
            Err(refusal) => SendResult::Error(PeerError::bare(refusal.peer_code())),
        };
        self.on_forward_result(env, token, ForwardKind::Authorized, result);
    }

    fn finish_forward(&mut self, env: &mut Env, token: u64, outcome: Outcome<PeerReply>) {
        let Some(pending) = self.forwards.remove(&token) else {
            return;
        };
        let op = pending.machine.op();
        let ended = match outcome {
            Outcome::Done { reply, owner } => {
                let node = env.catalog.node_by_name(owner.node.as_str());
                match (reply, &pending.request.work) {
                    (PeerReply::Appended(at), Work::Publish(_)) => Ended::Stored { node, at },
                    (PeerReply::Cached(value), Work::Cache(_)) => {
                        match CacheReply::of_wire(op, value) {
                            Some(reply) => Ended::Cached(reply),
                            None => Ended::Indeterminate,
                        }
                    }
                    _ => Ended::Indeterminate,
                }
            }
            Outcome::Refused(_) => Ended::Refused,
            Outcome::Indeterminate(_) => Ended::Indeterminate,
        };
        let now_us = env.now_us;
        env.judge.on_end(pending.request.id, now_us, ended);
    }

    /// The answer to a client whose request was served on this broker.
    pub(super) fn answer_client(&mut self, env: &mut Env, request: &Request, result: ServeResult) {
        let node = Some(self.at.node);
        let ended = match result {
            Ok(PeerReply::Appended(at)) => Ended::Stored { node, at },
            Ok(PeerReply::Cached(value)) => {
                match CacheReply::of_wire(request.forward_op(), value) {
                    Some(reply) => Ended::Cached(reply),
                    None => Ended::Indeterminate,
                }
            }
            Ok(PeerReply::Durable(_)) => Ended::Indeterminate,
            Err(refusal) if refusal.is_certain() => Ended::Refused,
            Err(_) => Ended::Indeterminate,
        };
        let now_us = env.now_us;
        env.judge.on_end(request.id, now_us, ended);
    }
}
