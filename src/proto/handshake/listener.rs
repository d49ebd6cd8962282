//! The accepting side of the greeting, and the rules for frames around it.
//!
//! One machine per connection; it is asked about every frame of every stream. It does not decode
//! and does not answer requests.
//!
//! Invariants:
//! * Nothing is delivered before the greeting, and never after a close.
//! * The identity of a greeted peer does not change for the life of the connection.
//! * An answer is never answered.

use std::sync::Arc;
use std::time::Duration;

use crate::ids::{CorrelationId, NodeId};
use crate::proto::outcome::PeerCode;
use crate::proto::MonoTime;

/// What is known of the peer from the transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerIdentity {
    /// No peer certificates are checked: anything that reaches the port is a peer.
    Unauthenticated,
    /// The DNS names of the certificate the peer presented.
    Certified(Vec<String>),
}

impl PeerIdentity {
    /// Whether the peer may call itself `claimed`. Certificate wildcards do not count: a
    /// certificate speaks for the names it spells out.
    fn covers(&self, claimed: &str) -> bool {
        match self {
            Self::Unauthenticated => true,
            Self::Certified(names) => names.iter().any(|name| name.eq_ignore_ascii_case(claimed)),
        }
    }
}

/// Whether a frame came on the connection's first stream; only that one greets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamPlace {
    First,
    Later,
}

/// A frame, reduced to what the greeting has to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Incoming<'a> {
    Hello {
        correlation: CorrelationId,
        node_id: &'a str,
    },
    /// Kind 5 whose body does not decode.
    UndecodableHello { correlation: CorrelationId },
    /// Any other request kind this build knows, decodable or not.
    Request,
    /// A kind this build does not know, 27 among them.
    UnknownKind { correlation: CorrelationId },
    /// A kind that is only ever an answer.
    Answer,
}

/// Why the listener closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CloseReason {
    RequestBeforeHello,
    NameNotInCertificate,
    /// A second Hello with another name than the first.
    NameChanged,
    GreetingTimeout,
}

impl CloseReason {
    /// The reason's name as written in logs, metrics and the close frame.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RequestBeforeHello => "request before hello",
            Self::NameNotInCertificate => "node id not in certificate",
            Self::NameChanged => "node id changed",
            Self::GreetingTimeout => "greeting timeout",
        }
    }
}

/// What to do with a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenerAction {
    /// Answer HelloOk with our node id; the connection is greeted.
    Greet {
        correlation: CorrelationId,
        node_id: NodeId,
    },
    /// Answer in the shape of kind 3 and go on.
    Refuse {
        correlation: CorrelationId,
        code: PeerCode,
        detail: &'static str,
    },
    /// Answer in the shape of kind 3, flush, then close.
    RefuseAndClose {
        correlation: CorrelationId,
        code: PeerCode,
        reason: CloseReason,
    },
    /// Hand the request to its handler.
    Deliver,
    /// The stream came before the greeting: leave the frame unread until [`ListenerHandshake::is_greeted`].
    Hold,
    /// Drop the frame; it is counted.
    Drop,
    /// Close without an answer.
    Close { reason: CloseReason },
    /// The connection is closing already: drop everything.
    Ignore,
}

#[derive(Debug)]
enum State {
    Waiting { deadline: MonoTime },
    Greeted { peer: Arc<str> },
    Closed,
}

/// The greeting of one accepted connection.
#[derive(Debug)]
pub struct ListenerHandshake {
    local: NodeId,
    identity: PeerIdentity,
    state: State,
    dropped_answers: u64,
}

impl ListenerHandshake {
    /// A connection whose TLS handshake has finished; the peer has `timeout` to greet.
    pub fn new(local: NodeId, identity: PeerIdentity, now: MonoTime, timeout: Duration) -> Self {
        Self {
            local,
            identity,
            state: State::Waiting {
                deadline: now + timeout,
            },
            dropped_answers: 0,
        }
    }

    /// Whether requests may flow.
    pub fn is_greeted(&self) -> bool {
        matches!(self.state, State::Greeted { .. })
    }

    /// The name the peer greeted with; under authentication its certificate carries it.
    pub fn peer(&self) -> Option<&str> {
        match &self.state {
            State::Greeted { peer } => Some(peer),
            State::Waiting { .. } | State::Closed => None,
        }
    }

    /// Answers that arrived where only requests may.
    pub fn dropped_answers(&self) -> u64 {
        self.dropped_answers
    }

    /// When [`Self::on_time`] has something to say.
    pub fn deadline(&self) -> Option<MonoTime> {
        match self.state {
            State::Waiting { deadline } => Some(deadline),
            State::Greeted { .. } | State::Closed => None,
        }
    }

    /// Closes a connection that never greeted.
    pub fn on_time(&mut self, now: MonoTime) -> Option<ListenerAction> {
        match self.state {
            State::Waiting { deadline } if now >= deadline => {
                Some(self.close(CloseReason::GreetingTimeout))
            }
            State::Waiting { .. } | State::Greeted { .. } | State::Closed => None,
        }
    }

    /// Decides about one frame.
    pub fn on_frame(&mut self, place: StreamPlace, frame: Incoming<'_>) -> ListenerAction {
        match (&self.state, place) {
            (State::Closed, _) => ListenerAction::Ignore,
            (State::Waiting { .. }, StreamPlace::Later) => ListenerAction::Hold,
            (State::Waiting { .. }, StreamPlace::First) => self.before_greeting(frame),
            (State::Greeted { .. }, _) => self.after_greeting(frame),
        }
    }

    fn before_greeting(&mut self, frame: Incoming<'_>) -> ListenerAction {
        match frame {
            Incoming::Hello {
                correlation,
                node_id,
            } => self.greet(correlation, node_id),
            Incoming::UndecodableHello { correlation } => malformed(correlation, "hello"),
            Incoming::UnknownKind { correlation } => unsupported(correlation),
            Incoming::Request => self.close(CloseReason::RequestBeforeHello),
            Incoming::Answer => self.drop_answer(),
        }
    }

    fn after_greeting(&mut self, frame: Incoming<'_>) -> ListenerAction {
        match frame {
            Incoming::Hello {
                correlation,
                node_id,
            } => self.greet(correlation, node_id),
            Incoming::UndecodableHello { correlation } => malformed(correlation, "hello"),
            Incoming::UnknownKind { correlation } => unsupported(correlation),
            Incoming::Request => ListenerAction::Deliver,
            Incoming::Answer => self.drop_answer(),
        }
    }

    fn greet(&mut self, correlation: CorrelationId, node_id: &str) -> ListenerAction {
        if node_id.is_empty() {
            return malformed(correlation, "node id is empty");
        }
        if !self.identity.covers(node_id) {
            return self.refuse_and_close(correlation, CloseReason::NameNotInCertificate);
        }
        match &self.state {
            State::Greeted { peer } if **peer != *node_id => {
                return self.refuse_and_close(correlation, CloseReason::NameChanged);
            }
            State::Greeted { .. } => {}
            State::Waiting { .. } => {
                self.state = State::Greeted {
                    peer: Arc::from(node_id),
                };
            }
            State::Closed => return ListenerAction::Ignore,
        }
        ListenerAction::Greet {
            correlation,
            node_id: self.local.clone(),
        }
    }

    fn refuse_and_close(
        &mut self,
        correlation: CorrelationId,
        reason: CloseReason,
    ) -> ListenerAction {
        self.state = State::Closed;
        ListenerAction::RefuseAndClose {
            correlation,
            code: PeerCode::Unauthorized,
            reason,
        }
    }

    fn close(&mut self, reason: CloseReason) -> ListenerAction {
        self.state = State::Closed;
        ListenerAction::Close { reason }
    }

    fn drop_answer(&mut self) -> ListenerAction {
        self.dropped_answers += 1;
        ListenerAction::Drop
    }
}

fn malformed(correlation: CorrelationId, detail: &'static str) -> ListenerAction {
    ListenerAction::Refuse {
        correlation,
        code: PeerCode::Malformed,
        detail,
    }
}

fn unsupported(correlation: CorrelationId) -> ListenerAction {
    ListenerAction::Refuse {
        correlation,
        code: PeerCode::UnsupportedKind,
        detail: "unknown kind",
    }
}
