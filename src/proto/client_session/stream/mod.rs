//! One stream of a client: who it is, what it is owed, how it ends.
//!
//! ```text
//! Anonymous --auth ok--> Open --client finished--> Finishing --all answered--> Ended
//!     |                    |
//!     +--refused-----------+--unreadable, one-shot refused-----------------> Ended
//! ```
//!
//! Invariants:
//! * SES-1: every acked publish gets exactly one answer, or the stream ends.
//! * SES-2: an unacked publish gets none, and no bare `error` goes to a stream because of a
//!   publish that could be told apart from the rest.
//! * SES-3: nothing is sent that the client did not offer to read.
//! * SES-4: this side finishes only after every answer owed is out, and always once the client
//!   has finished and they are.
//! * SES-5: what is owed is bounded; past the bound the stream is not read.

mod frames;

use std::collections::VecDeque;
use std::time::Duration;

use super::classify::{PublishReply, Requested};
use crate::ids::{CorrelationId, Offset};
use crate::proto::client_code;
use crate::proto::correlation::Slots;
use crate::proto::MonoTime;
use crate::wire::client::answers::{ErrorAnswer, NotLeader, PublishErrorAnswer, PublishOk};
use crate::wire::client::{
    Answer, ClientOffer, ErrorCode, Features, Flags, PublishAck, PublishOutcome, Refusal,
    RetryClass, ServerOffer, ShardOwner,
};

/// The bounds of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamLimits {
    /// Publishes taken and not settled.
    pub publishes: usize,
    /// Other requests taken and not answered.
    pub requests: usize,
    /// How long a publish may stay unsettled before it is answered `unacknowledged`. Below the
    /// client's own 30 s, and above the time a forward takes to become unknown by itself.
    pub answer_timeout: Duration,
}

impl Default for StreamLimits {
    fn default() -> Self {
        Self {
            publishes: 4096,
            requests: 64,
            answer_timeout: Duration::from_secs(8),
        }
    }
}

/// Which way a stream carries data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamDirection {
    Bidirectional,
    /// From the client only: nothing is ever answered.
    FromClient,
}

/// Names a publish that was taken and must be settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OwedId(CorrelationId);

/// What the driver does with a frame after the machine has seen it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Verify the token and call [`StreamSession::on_verified`].
    Authenticate,
    /// Route the publish and settle it under this id.
    Publish(OwedId),
    /// Serve it, then call [`StreamSession::answer`] or one of the refusals.
    Serve,
    /// Take note of the width it declares; nothing is answered.
    Declare,
    /// It was refused here, and what is told of that is among the actions; to be counted.
    Refused(RefusedFrame, ErrorCode),
    /// Nothing more to do with it: it came behind the end of its stream, or is no frame.
    Dropped,
}

/// What was refused before it reached anybody who would have counted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusedFrame {
    /// A publish that is answered.
    Publish,
    /// A publish whose client asked for no answer, or cannot be given one.
    SilentPublish,
    /// Anything else.
    Request,
}

impl RefusedFrame {
    fn of(reply: PublishReply) -> Self {
        match reply {
            PublishReply::Silent => Self::SilentPublish,
            PublishReply::Binary { .. } | PublishReply::Json { .. } => Self::Publish,
        }
    }
}

/// What is written to the client.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    Answer(Answer),
    Ack(PublishAck),
}

/// What the driver must do with the stream.
#[derive(Debug, Clone, PartialEq)]
pub enum StreamAction {
    Write(Reply),
    /// From now on frames up to the authenticated limit are read.
    RaiseFrameLimit,
    /// Finish this side.
    Finish,
    /// Tell the client to stop sending; read nothing more.
    StopReading,
}

/// A publish that is durable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Written {
    /// The batch's first record; `None` when nothing was written.
    pub first_offset: Option<Offset>,
    /// Named when another broker owns the shard.
    pub owner: Option<ShardOwner>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Anonymous,
    /// The token is being checked.
    Verifying,
    Open,
    Ended,
}

/// One stream of a client.
#[derive(Debug)]
pub struct StreamSession {
    direction: StreamDirection,
    limits: StreamLimits,
    state: State,
    offer: ClientOffer,
    owed: Slots<PublishReply>,
    serving: usize,
    client_finished: bool,
    /// The client reads nothing more of this stream.
    client_deaf: bool,
    draining: bool,
    actions: VecDeque<StreamAction>,
}

impl StreamSession {
    /// A stream the client has just opened.
    pub fn new(direction: StreamDirection, limits: StreamLimits) -> Self {
        Self {
            direction,
            limits,
            state: State::Anonymous,
            offer: ClientOffer::default(),
            owed: Slots::new(limits.publishes),
            serving: 0,
            client_finished: false,
            client_deaf: false,
            draining: false,
            actions: VecDeque::new(),
        }
    }

    /// What the client said it can read.
    pub fn offer(&self) -> &ClientOffer {
        &self.offer
    }

    /// Whether the stream's token was good and the stream has not ended.
    pub fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Whether nothing more will come of the stream.
    pub fn is_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// Whether the next frame may be read.
    pub fn may_read(&self) -> bool {
        match self.state {
            State::Anonymous => true,
            State::Open => !self.owed.is_full() && self.serving < self.limits.requests,
            State::Verifying | State::Ended => false,
        }
    }

    /// Answers outstanding: publishes to settle and requests being served.
    pub fn owed(&self) -> usize {
        self.owed.len() + self.serving
    }

    /// When [`Self::on_time`] has something to do.
    pub fn next_deadline(&self) -> Option<MonoTime> {
        self.owed.next_deadline()
    }

    /// The next thing to do. Call until `None` after every input.
    pub fn poll_action(&mut self) -> Option<StreamAction> {
        let next = self.actions.pop_front();
        if next.is_none() && self.owed() == 0 {
            // A client keeps dozens of idle streams; the room of a busy one is not kept for them.
            self.actions = VecDeque::new();
        }
        next
    }

    /// The broker is stopping: what is owed is still answered, nothing new is taken.
    pub fn begin_drain(&mut self) {
        self.draining = true;
    }

    /// The token was checked. `server` is what this broker offers; `Err` is what to tell.
    pub fn on_verified(&mut self, server: &ServerOffer, verdict: Result<(), Refusal>) {
        if self.state != State::Verifying {
            return;
        }
        match verdict {
            Err(refusal) => self.refuse_and_end(refusal),
            Ok(()) => {
                self.state = State::Open;
                self.actions.push_back(StreamAction::RaiseFrameLimit);
                let answer = server.answer(&self.offer);
                self.write(Reply::Answer(answer));
                self.finish_if_done();
            }
        }
    }

    /// A publish is durable, or failed. A publish that was answered meanwhile is left alone.
    pub fn settle(&mut self, id: OwedId, result: Result<Written, Refusal>) {
        if let Some(reply) = self.owed.take(id.0) {
            self.reply_to_publish(reply, result);
            self.finish_if_done();
        }
    }

    /// The answer of a request being served.
    pub fn answer(&mut self, answer: Answer) {
        if self.end_serving() {
            self.write(Reply::Answer(answer));
            self.finish_if_done();
        }
    }

    /// A request being served is refused.
    pub fn refuse(&mut self, class: Requested, refusal: Refusal) {
        if self.end_serving() {
            self.refuse_request(class, refusal);
        }
    }

    /// The shard a request is bound to is led elsewhere.
    pub fn redirect(&mut self, class: Requested, owner: ShardOwner) {
        if !self.end_serving() {
            return;
        }
        if self.offer.features().contains(Features::REDIRECT) {
            self.write(Reply::Answer(Answer::NotLeader(NotLeader {
                node_id: owner.node_id,
                addr: owner.addr,
                generation: owner.generation,
            })));
            self.after_refusal(class);
        } else {
            let message = "another broker leads the shard";
            self.refuse_request(class, Refusal::new(ErrorCode::NotLeader, message));
        }
    }

    /// Nothing more is taken from the stream: it is told why and ended.
    pub fn give_up(&mut self, refusal: Refusal) {
        if self.state != State::Ended {
            self.refuse_and_end(refusal);
        }
    }

    /// The client finished its side. That ends no subscription and loses no answer.
    pub fn on_client_finished(&mut self) {
        self.client_finished = true;
        match self.state {
            State::Anonymous => self.end(),
            State::Verifying | State::Open | State::Ended => self.finish_if_done(),
        }
    }

    /// The client reads no more answers. What it sends still counts.
    pub fn on_client_deaf(&mut self) {
        self.client_deaf = true;
    }

    /// The stream was reset, or its connection is gone: nobody is left to answer.
    pub fn on_lost(&mut self) {
        self.state = State::Ended;
        self.actions.clear();
        for _ in self.owed.fail_all() {}
        self.serving = 0;
    }

    /// Answers publishes that took too long.
    pub fn on_time(&mut self, now: MonoTime) {
        let late: Vec<_> = self.owed.expire(now).map(|(_, reply)| reply).collect();
        for reply in late {
            self.reply_to_publish(reply, Err(client_code::unacknowledged()));
        }
        self.finish_if_done();
    }

    fn reply_to_publish(&mut self, reply: PublishReply, result: Result<Written, Refusal>) {
        let reply = match (reply, result) {
            (PublishReply::Silent, _) => return,
            (PublishReply::Binary { request_id }, result) => {
                let (outcome, owner) = match result {
                    Ok(written) => {
                        let offset = written.first_offset.map(|offset| offset.0);
                        (PublishOutcome::Accepted { offset }, written.owner)
                    }
                    Err(refusal) => (PublishOutcome::Failed(refusal), None),
                };
                let ack = PublishAck {
                    request_id,
                    outcome,
                    owner,
                };
                Reply::Ack(ack.for_client(&self.offer))
            }
            (PublishReply::Json { request_id }, Ok(written)) => {
                let reads_offsets = self.offer.may_send(Flags::ACK_OFFSET);
                let offset = written.first_offset.filter(|_| reads_offsets);
                Reply::Answer(Answer::PublishOk(PublishOk {
                    request_id,
                    offset: offset.map(|offset| offset.0),
                }))
            }
            (PublishReply::Json { request_id }, Err(refusal)) => {
                let refusal = refusal.for_json(&self.offer);
                Reply::Answer(PublishErrorAnswer::new(request_id, refusal).into())
            }
        };
        self.write(reply);
    }

    fn refuse_request(&mut self, class: Requested, refusal: Refusal) {
        self.write_error(refusal);
        self.after_refusal(class);
    }

    fn after_refusal(&mut self, class: Requested) {
        match class {
            Requested::Repeated => self.finish_if_done(),
            Requested::OneShot | Requested::OneShotAtLeader => self.end(),
        }
    }

    fn refuse_and_end(&mut self, refusal: Refusal) {
        self.write_error(refusal);
        self.end();
    }

    fn write_error(&mut self, refusal: Refusal) {
        let error = ErrorAnswer::from(refusal.for_json(&self.offer));
        self.write(Reply::Answer(error.into()));
    }

    fn write(&mut self, reply: Reply) {
        let can_answer = self.direction == StreamDirection::Bidirectional;
        if can_answer && !self.client_deaf && self.state != State::Ended {
            self.actions.push_back(StreamAction::Write(reply));
        }
    }

    /// Takes one request off those being served; false when none is (a repeated answer, or the
    /// stream has ended).
    fn end_serving(&mut self) -> bool {
        let was_serving = self.serving > 0;
        self.serving = self.serving.saturating_sub(1);
        was_serving && self.state == State::Open
    }

    fn finish_if_done(&mut self) {
        let all_out = self.owed.is_empty() && self.serving == 0;
        if self.state == State::Open && self.client_finished && all_out {
            self.end();
        }
    }

    /// Ends the stream; answers still owed are given up.
    fn end(&mut self) {
        if self.state == State::Ended {
            return;
        }
        self.state = State::Ended;
        if self.direction == StreamDirection::Bidirectional {
            self.actions.push_back(StreamAction::Finish);
        }
        if !self.client_finished {
            self.actions.push_back(StreamAction::StopReading);
        }
    }
}

/// The class of the refusal that says "another broker".
const _: () = assert!(matches!(
    ErrorCode::NotLeader.usual_class(),
    RetryClass::Redirect
));
