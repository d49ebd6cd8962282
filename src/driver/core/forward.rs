//! Requests for shards of other brokers: one [`Forward`] machine each, carried out.
//!
//! The machine says whom to ask and when to stop; this file resolves names to links, keeps what
//! is sent until the one terminal outcome, and hands that to the client's answer. Publishes and
//! cache operations differ in their frame and in whom their outcome is told, in nothing else.
//!
//! Invariant INV-4: a client's forwarded request is answered from the owner's answer and from
//! nothing else.

use std::sync::Arc;
use std::time::Instant;

use crate::ids::{NodeId, ShardId};
use crate::metrics;
use crate::proto::cache::CacheFailure;
use crate::proto::convert::PeerReply;
use crate::proto::forward::{Forward, Step};
use crate::proto::forward_order::Turn;
use crate::proto::outcome::{
    ForwardKind, IndeterminateCause, NotSentCause, Outcome, PeerCode, PeerError, Refused,
    SendResult, Target, UnknownCause,
};
use crate::proto::peer::StreamSlot;

use super::append::AppendWaiter;
use super::cache::CacheWaiter;
use super::forward_body::{appended, cached, ForwardBody, ForwardWork};
use super::forward_orders::ChainId;
use super::message::{AppendRefusal, AppendResult, CacheResult, UnknownWrite};
use super::timers::Timer;
use super::{peer_code, Core};

/// A forward until its outcome.
pub(super) struct PendingForward {
    machine: Forward,
    pub body: ForwardBody,
    /// The broker asked last, and the stream it was asked on.
    pub target: Target,
    pub slot: Option<StreamSlot>,
    sent_at: Instant,
    /// An attempt that waits for others of its client stream.
    held: Option<(Target, ForwardKind)>,
    /// The client stream's chain; cache operations have none.
    pub chain: Option<ChainId>,
}

impl Core {
    pub(super) fn start_forward(&mut self, target: Target, body: ForwardBody) -> u64 {
        let limits = self.settings.forward_limits;
        let (machine, step) = Forward::start(body.work.op(), target.clone(), self.mono, limits);
        let node = target.node.clone();
        let chain = body.order().map(|key| self.forward_orders.chain(key));
        let pending = PendingForward {
            machine,
            body,
            target,
            slot: None,
            sent_at: self.now,
            held: None,
            chain,
        };
        let token = self.forwards.insert(pending);
        self.metrics
            .forwards_in_flight
            .set(self.forwards.len() as u64);
        let turn = match chain {
            Some(chain) => self.forward_orders.begin(chain, token, &node),
            None => Turn::Send,
        };
        match (turn, step) {
            (Turn::Hold, Step::Send { target, kind }) => self.hold_forward(token, target, kind),
            (Turn::Send | Turn::Hold | Turn::GiveUp, step) => self.run_forward(token, step),
        }
        token
    }

    fn hold_forward(&mut self, token: u64, target: Target, kind: ForwardKind) {
        self.metrics.forwards_held.inc();
        if let Some(pending) = self.forwards.get_mut(token) {
            pending.held = Some((target, kind));
        }
    }

    /// Whether a further attempt may be made now, given what else its client stream has under way.
    fn turn_of_retry(&mut self, token: u64, to: &NodeId) -> Turn {
        let Some(pending) = self.forwards.get_mut(token) else {
            return Turn::Send;
        };
        match pending.chain {
            Some(chain) if pending.machine.attempts() > 1 => {
                self.forward_orders.on_retry(chain, token, to)
            }
            Some(_) | None => Turn::Send,
        }
    }

    /// Sends, or ends, what was held for others of its client stream that have ended.
    pub(super) fn release_forwards(&mut self) {
        while let Some((token, turn)) = self.forward_orders.next_release() {
            let Some(pending) = self.forwards.get_mut(token) else {
                continue;
            };
            let Some((target, kind)) = pending.held.take() else {
                continue;
            };
            match turn {
                Turn::Send | Turn::Hold => {
                    if let Err((sent_as, cause)) = self.send_forward(token, &target, kind) {
                        self.on_forward_result(token, sent_as, SendResult::NotSent(cause));
                    }
                }
                Turn::GiveUp => {
                    let step = pending.machine.on_overtaken();
                    self.run_forward(token, step);
                }
            }
        }
    }

    /// Carries out steps until the forward waits for something or ends.
    pub(super) fn run_forward(&mut self, token: u64, step: Step<PeerReply>) {
        let mut step = step;
        loop {
            match step {
                Step::Nothing => return,
                Step::WaitUntil(at) => return self.timers.push(at, Timer::Forward { token }),
                Step::Finish(outcome) => return self.finish_forward(token, outcome),
                Step::Send { target, kind } => {
                    let tried = match self.turn_of_retry(token, &target.node) {
                        Turn::Send => self.send_forward(token, &target, kind),
                        Turn::Hold => return self.hold_forward(token, target, kind),
                        Turn::GiveUp => {
                            let Some(pending) = self.forwards.get_mut(token) else {
                                return;
                            };
                            step = pending.machine.on_overtaken();
                            continue;
                        }
                    };
                    let Err((sent_as, cause)) = tried else {
                        return;
                    };
                    self.count_not_sent(cause);
                    self.note_refused(token);
                    let Some(pending) = self.forwards.get_mut(token) else {
                        return;
                    };
                    let result = SendResult::NotSent(cause);
                    step = pending.machine.on_result(self.mono, sent_as, result);
                }
            }
        }
    }

    /// An attempt was surely not applied; its chain may move on.
    fn note_refused(&mut self, token: u64) {
        if let Some(chain) = self.forwards.get_mut(token).and_then(|p| p.chain) {
            self.forward_orders.on_refused(chain, token);
        }
    }

    fn send_forward(
        &mut self,
        token: u64,
        target: &Target,
        kind: ForwardKind,
    ) -> Result<(), (ForwardKind, NotSentCause)> {
        if target.node == self.me {
            self.apply_forward_here(token, target);
            return Ok(());
        }
        let Some(node) = self.routes.node_by_id(target.node.as_str()) else {
            return Err((kind, NotSentCause::UnknownPeer));
        };
        let Some(pending) = self.forwards.get_mut(token) else {
            return Ok(());
        };
        pending.sent_at = self.now;
        if pending.machine.attempts() > 1 {
            self.metrics.forwards_retried.inc();
        }
        self.send_on_link(node, token, target, kind)
    }

    /// A redirect named this very broker: the request goes through our own ownership check.
    fn apply_forward_here(&mut self, token: u64, target: &Target) {
        let Some(pending) = self.forwards.get_mut(token) else {
            return;
        };
        let shard = Arc::clone(&pending.body.shard_id);
        let core = match self.routes.shard(&shard) {
            Some(route) => route.core.0,
            None => self.index,
        };
        match &pending.body.work {
            ForwardWork::Publish { payloads, .. } => {
                let payloads = payloads.clone();
                let waiter = AppendWaiter::Forward { token };
                self.append(&shard, core, target.generation, payloads, waiter);
            }
            ForwardWork::Cache { request, .. } => {
                let request = request.clone();
                let waiter = CacheWaiter::Forward { token };
                self.cache(&shard, core, target.generation, request, waiter);
            }
        }
    }

    pub(super) fn forward_cache_applied_here(&mut self, token: u64, result: CacheResult) {
        let result = match result {
            Ok(reply) => SendResult::Ok(PeerReply::Cached(reply.to_wire())),
            // Our own view moved on: as from a peer whose view lags, the route is looked up again.
            Err(CacheFailure::Moved) => SendResult::Error(PeerError::bare(PeerCode::StaleRoute)),
            Err(failure) => SendResult::Error(PeerError::bare(failure.to_peer().0)),
        };
        self.on_forward_result(token, ForwardKind::Authorized, result);
    }

    pub(super) fn forward_applied_here(&mut self, token: u64, result: AppendResult) {
        let result = match result {
            AppendResult::Stored(at) => SendResult::Ok(PeerReply::Appended(at)),
            AppendResult::StorageFailed | AppendResult::Refused(AppendRefusal::LogFailed) => {
                SendResult::Error(PeerError::bare(PeerCode::StorageFailed))
            }
            AppendResult::Unknown(UnknownWrite::QuorumTimeout) => {
                SendResult::Unknown(UnknownCause::Timeout)
            }
            AppendResult::Unknown(UnknownWrite::LeadershipLost) => {
                SendResult::Unknown(UnknownCause::Disconnect)
            }
            AppendResult::Refused(AppendRefusal::Moved) => {
                SendResult::Error(PeerError::bare(PeerCode::StaleRoute))
            }
            AppendResult::Refused(AppendRefusal::Opening) => {
                SendResult::Error(PeerError::bare(PeerCode::Unavailable))
            }
            AppendResult::Refused(AppendRefusal::Overloaded | AppendRefusal::DiskFull) => {
                SendResult::Error(PeerError::bare(PeerCode::Overload))
            }
            AppendResult::Refused(AppendRefusal::TooLarge) => {
                SendResult::Error(PeerError::bare(PeerCode::Malformed))
            }
        };
        self.on_forward_result(token, ForwardKind::Authorized, result);
    }

    /// What an attempt came to.
    pub(super) fn on_forward_result(
        &mut self,
        token: u64,
        sent_as: ForwardKind,
        result: SendResult<PeerReply>,
    ) {
        let Some(pending) = self.forwards.get_mut(token) else {
            return;
        };
        let waited = self.now.saturating_duration_since(pending.sent_at);
        match &result {
            SendResult::NotSent(_) | SendResult::NotLeader(_) | SendResult::Error(_) => {
                self.note_refused(token);
            }
            SendResult::Ok(_) | SendResult::Unknown(_) => {}
        }
        match &result {
            SendResult::Ok(_) => self.metrics.forward_round_trip_us.record(waited),
            SendResult::NotLeader(_) => self.metrics.forwards_redirected.inc(),
            SendResult::Error(error) if error.code == PeerCode::UnsupportedKind => {
                self.metrics.forwards_fell_back.inc();
            }
            SendResult::NotSent(cause) => {
                let cause = *cause;
                self.count_not_sent(cause);
            }
            SendResult::Error(_) | SendResult::Unknown(_) => {}
        }
        let Some(pending) = self.forwards.get_mut(token) else {
            return;
        };
        let step = pending.machine.on_result(self.mono, sent_as, result);
        self.run_forward(token, step);
    }

    pub(super) fn on_forward_time(&mut self, token: u64) {
        let Some(pending) = self.forwards.get_mut(token) else {
            return;
        };
        let current = current_target(&self.routes, &pending.body.shard_id);
        let step = pending.machine.on_time(self.mono, current.as_ref());
        self.run_forward(token, step);
    }

    /// Forwards that wait are told of a newer owner at once.
    pub(super) fn forwards_after_catalog(&mut self) {
        for token in self.forwards.tokens() {
            let Some(pending) = self.forwards.get_mut(token) else {
                continue;
            };
            let Some(current) = current_target(&self.routes, &pending.body.shard_id) else {
                continue;
            };
            let step = pending.machine.on_route_changed(self.mono, &current);
            self.run_forward(token, step);
        }
    }

    fn finish_forward(&mut self, token: u64, outcome: Outcome<PeerReply>) {
        let Some(pending) = self.forwards.remove(token) else {
            return;
        };
        self.metrics
            .forwards_in_flight
            .set(self.forwards.len() as u64);
        if let Some(chain) = pending.chain {
            let may_be_applied = !matches!(outcome, Outcome::Refused(_));
            self.forward_orders
                .on_finished(chain, token, may_be_applied);
        }
        match &outcome {
            Outcome::Done { .. } => self.metrics.forwards_acked.inc(),
            Outcome::Refused(Refused::Peer(error)) => {
                self.metrics.forwards_refused.inc(peer_code(error.code));
            }
            Outcome::Refused(Refused::RedirectLoop(_) | Refused::RedirectsExhausted(_)) => {
                self.metrics
                    .forwards_refused
                    .inc(metrics::PeerCode::NotLeader);
            }
            Outcome::Refused(Refused::NotSent(_)) => {}
            Outcome::Indeterminate(cause) => {
                self.metrics.forwards_unknown.inc(unknown_label(*cause));
            }
        }
        match pending.body.work {
            ForwardWork::Publish { client, .. } => {
                self.answer_forwarded_publish(*client, appended(outcome));
            }
            ForwardWork::Cache { request, client } => {
                let op = request.forward_op();
                self.answer_forwarded_cache(*client, cached(op, outcome));
            }
        }
    }

    fn count_not_sent(&self, cause: NotSentCause) {
        match cause {
            NotSentCause::InFlightFull => self.metrics.forwards_shed.inc(),
            NotSentCause::Backoff { .. }
            | NotSentCause::Unreachable
            | NotSentCause::Draining
            | NotSentCause::UnknownPeer
            | NotSentCause::Unencodable => self.metrics.forwards_unreachable.inc(),
        }
    }
}

fn current_target(routes: &crate::catalog::RouteTable, shard: &ShardId) -> Option<Target> {
    let route = routes.shard(shard)?;
    let node: NodeId = routes.node(route.leader).node_id.clone();
    Some(Target {
        node,
        generation: route.generation,
    })
}

fn unknown_label(cause: IndeterminateCause) -> metrics::UnknownCause {
    match cause {
        IndeterminateCause::Unknown(UnknownCause::Disconnect) => {
            metrics::UnknownCause::ConnectionLost
        }
        IndeterminateCause::Unknown(UnknownCause::Timeout) => metrics::UnknownCause::Timeout,
        IndeterminateCause::Unknown(UnknownCause::ProtocolViolation)
        | IndeterminateCause::UnexpectedCode(_)
        | IndeterminateCause::StorageFailed => metrics::UnknownCause::BadAnswer,
    }
}
