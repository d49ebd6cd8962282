//! What is done about each frame of a client, by the state of its stream.

use super::{OwedId, State, StreamDirection, StreamSession, Verdict};
use crate::proto::client_code;
use crate::proto::client_session::{Incoming, PublishReply, Requested};
use crate::proto::correlation::Family;
use crate::proto::MonoTime;
use crate::wire::client::answers::Unsupported;
use crate::wire::client::{Answer, ErrorCode, Features, Refusal};

use super::Reply;

impl StreamSession {
    /// Decides about one frame.
    pub fn on_frame(&mut self, now: MonoTime, frame: Incoming) -> Verdict {
        match self.state {
            State::Ended | State::Verifying => Verdict::Dropped,
            State::Anonymous => self.on_first_frame(frame),
            State::Open => match self.direction {
                StreamDirection::Bidirectional => self.on_open_frame(now, frame),
                StreamDirection::FromClient => self.on_silent_frame(now, frame),
            },
        }
    }

    fn on_first_frame(&mut self, frame: Incoming) -> Verdict {
        match frame {
            Incoming::Auth(offer) => {
                // Read before anything is refused, so that the refusal can carry its code.
                self.offer = offer;
                if self.draining {
                    self.refuse_and_end(client_code::draining());
                    return Verdict::Dropped;
                }
                self.state = State::Verifying;
                Verdict::Authenticate
            }
            Incoming::Publish(_)
            | Incoming::Request(_)
            | Incoming::Width
            | Incoming::Unserved { .. }
            | Incoming::BadPublish { .. } => {
                let message = "the first message must be auth";
                self.refuse_and_end(Refusal::new(ErrorCode::Unauthenticated, message));
                Verdict::Dropped
            }
            Incoming::OversizePublish { .. } => {
                let message = "frame too large before auth";
                self.refuse_and_end(Refusal::new(ErrorCode::LimitExceeded, message));
                Verdict::Dropped
            }
            Incoming::Unreadable { why } => {
                self.refuse_and_end(client_code::invalid(why));
                Verdict::Dropped
            }
            Incoming::Unframeable => {
                self.end();
                Verdict::Dropped
            }
        }
    }

    fn on_open_frame(&mut self, now: MonoTime, frame: Incoming) -> Verdict {
        match frame {
            Incoming::Publish(reply) => self.take_publish(now, reply),
            Incoming::Request(class) => self.take_request(class),
            Incoming::Width => Verdict::Declare,
            Incoming::BadPublish { reply, why } => {
                self.reply_to_publish(reply, Err(client_code::invalid(why)));
                Verdict::Dropped
            }
            Incoming::OversizePublish { request_id } => {
                let refusal = Refusal::new(ErrorCode::LimitExceeded, "frame too large");
                self.reply_to_publish(PublishReply::Binary { request_id }, Err(refusal));
                Verdict::Dropped
            }
            Incoming::Unserved {
                request_type,
                extension,
                request_id,
            } => {
                self.answer_unsupported(request_type, extension, request_id);
                Verdict::Dropped
            }
            Incoming::Auth(_) => {
                self.refuse_and_end(client_code::invalid("the stream is authenticated already"));
                Verdict::Dropped
            }
            Incoming::Unreadable { why } => {
                self.refuse_and_end(client_code::invalid(why));
                Verdict::Dropped
            }
            Incoming::Unframeable => {
                self.end();
                Verdict::Dropped
            }
        }
    }

    /// On a stream without a way back everything but a publish ends it.
    fn on_silent_frame(&mut self, now: MonoTime, frame: Incoming) -> Verdict {
        match frame {
            Incoming::Publish(_) => self.take_publish(now, PublishReply::Silent),
            Incoming::BadPublish { .. } | Incoming::OversizePublish { .. } => Verdict::Dropped,
            Incoming::Auth(_)
            | Incoming::Request(_)
            | Incoming::Width
            | Incoming::Unserved { .. }
            | Incoming::Unreadable { .. }
            | Incoming::Unframeable => {
                self.end();
                Verdict::Dropped
            }
        }
    }

    fn take_publish(&mut self, now: MonoTime, reply: PublishReply) -> Verdict {
        if self.draining {
            self.reply_to_publish(reply, Err(client_code::draining()));
            return Verdict::Dropped;
        }
        let deadline = now + self.limits.answer_timeout;
        match self.owed.reserve(reply, Family::Publish, deadline) {
            Ok(id) => Verdict::Publish(OwedId(id)),
            Err(_) => {
                let message = "too many publishes are unanswered on this stream";
                let refusal = Refusal::new(ErrorCode::Overloaded, message);
                self.reply_to_publish(reply, Err(refusal));
                Verdict::Dropped
            }
        }
    }

    fn take_request(&mut self, class: Requested) -> Verdict {
        if self.draining {
            self.refuse_request(class, client_code::draining());
            return Verdict::Dropped;
        }
        if self.serving >= self.limits.requests {
            let message = "too many requests are unanswered on this stream";
            self.refuse_request(class, Refusal::new(ErrorCode::Overloaded, message));
            return Verdict::Dropped;
        }
        self.serving += 1;
        Verdict::Serve
    }

    fn answer_unsupported(
        &mut self,
        request_type: String,
        extension: Option<String>,
        request_id: Option<u64>,
    ) {
        if self.offer.features().contains(Features::UNSUPPORTED) {
            self.write(Reply::Answer(Answer::Unsupported(Unsupported {
                request_type,
                extension,
                request_id,
            })));
        } else {
            self.end();
        }
    }
}
