//! What is done about each frame of a client, by the state of its stream.

use std::borrow::Cow;

use super::{OwedId, RefusedFrame, State, StreamDirection, StreamSession, Verdict};
use crate::proto::client_code;
use crate::proto::client_session::{Incoming, PublishReply, Requested};
use crate::proto::correlation::Family;
use crate::proto::MonoTime;
use crate::wire::client::answers::Unsupported;
use crate::wire::client::{Answer, ErrorCode, Features, Refusal, WireCode};

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
        let (what, refusal) = match frame {
            Incoming::Auth(offer) => {
                // Read before anything is refused, so that the refusal can carry its code.
                self.offer = offer;
                if !self.draining {
                    self.state = State::Verifying;
                    return Verdict::Authenticate;
                }
                (RefusedFrame::Request, client_code::draining())
            }
            Incoming::Publish(reply) | Incoming::BadPublish { reply, .. } => {
                (self.refused_publish(reply), before_auth())
            }
            Incoming::Request(_) | Incoming::Width | Incoming::Unserved { .. } => {
                (RefusedFrame::Request, before_auth())
            }
            Incoming::OversizePublish { .. } => {
                let message = "frame too large before auth";
                let refusal = Refusal::new(ErrorCode::LimitExceeded, message);
                (RefusedFrame::Request, refusal)
            }
            Incoming::Unreadable { why } => (RefusedFrame::Request, client_code::invalid(why)),
            Incoming::Unframeable => {
                self.end();
                return Verdict::Dropped;
            }
        };
        let verdict = refused(what, &refusal);
        self.refuse_and_end(refusal);
        verdict
    }

    fn on_open_frame(&mut self, now: MonoTime, frame: Incoming) -> Verdict {
        match frame {
            Incoming::Publish(reply) => self.take_publish(now, reply),
            Incoming::Request(class) => self.take_request(class),
            Incoming::Width => Verdict::Declare,
            Incoming::BadPublish { reply, why } => {
                self.refuse_publish(reply, client_code::invalid(why))
            }
            Incoming::OversizePublish { request_id } => {
                let refusal = Refusal::new(ErrorCode::LimitExceeded, "frame too large");
                self.refuse_publish(PublishReply::Binary { request_id }, refusal)
            }
            Incoming::Unserved {
                request_type,
                extension,
                request_id,
            } => {
                self.answer_unsupported(request_type, extension, request_id);
                Verdict::Refused(RefusedFrame::Request, ErrorCode::InvalidRequest)
            }
            Incoming::Auth(_) => self.refuse_rest("the stream is authenticated already"),
            Incoming::Unreadable { why } => self.refuse_rest(why),
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
            Incoming::BadPublish { why, .. } => {
                self.refuse_publish(PublishReply::Silent, client_code::invalid(why))
            }
            Incoming::OversizePublish { .. } => {
                let refusal = Refusal::new(ErrorCode::LimitExceeded, "frame too large");
                self.refuse_publish(PublishReply::Silent, refusal)
            }
            Incoming::Auth(_)
            | Incoming::Request(_)
            | Incoming::Width
            | Incoming::Unserved { .. }
            | Incoming::Unreadable { .. } => self.refuse_rest("only publishes are taken here"),
            Incoming::Unframeable => {
                self.end();
                Verdict::Dropped
            }
        }
    }

    fn take_publish(&mut self, now: MonoTime, reply: PublishReply) -> Verdict {
        if self.draining {
            return self.refuse_publish(reply, client_code::draining());
        }
        let deadline = now + self.limits.answer_timeout;
        match self.owed.reserve(reply, Family::Publish, deadline) {
            Ok(id) => Verdict::Publish(OwedId(id)),
            Err(_) => {
                let message = "too many publishes are unanswered on this stream";
                self.refuse_publish(reply, Refusal::new(ErrorCode::Overloaded, message))
            }
        }
    }

    fn take_request(&mut self, class: Requested) -> Verdict {
        let refusal = if self.draining {
            client_code::draining()
        } else if self.serving >= self.limits.requests {
            let message = "too many requests are unanswered on this stream";
            Refusal::new(ErrorCode::Overloaded, message)
        } else {
            self.serving += 1;
            return Verdict::Serve;
        };
        let verdict = refused(RefusedFrame::Request, &refusal);
        self.refuse_request(class, refusal);
        verdict
    }

    /// Whoever sent it learns of the refusal only where there is a way back.
    fn refused_publish(&self, reply: PublishReply) -> RefusedFrame {
        match self.direction {
            StreamDirection::Bidirectional => RefusedFrame::of(reply),
            StreamDirection::FromClient => RefusedFrame::SilentPublish,
        }
    }

    fn refuse_publish(&mut self, reply: PublishReply, refusal: Refusal) -> Verdict {
        let verdict = refused(self.refused_publish(reply), &refusal);
        self.reply_to_publish(reply, Err(refusal));
        verdict
    }

    /// Refuses the frame and whatever comes behind it.
    fn refuse_rest(&mut self, why: impl Into<Cow<'static, str>>) -> Verdict {
        let refusal = client_code::invalid(why);
        let verdict = refused(RefusedFrame::Request, &refusal);
        self.refuse_and_end(refusal);
        verdict
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

fn before_auth() -> Refusal {
    Refusal::new(ErrorCode::Unauthenticated, "the first message must be auth")
}

fn refused(what: RefusedFrame, refusal: &Refusal) -> Verdict {
    let code = match refusal.code {
        Some(WireCode::Known(code)) => code,
        // This broker refuses by no code of its own.
        Some(WireCode::Other(_)) | None => ErrorCode::Internal,
    };
    Verdict::Refused(what, code)
}
