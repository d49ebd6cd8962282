//! The dialling side of the greeting.
//!
//! Starts when the transport has connected and the first stream is open; ends in `Up` or in a
//! [`HandshakeFailure`] that says how soon dialling again can help.
//!
//! Invariants: `Up` only after HelloOk names the broker dialled; exactly one end; whatever comes
//! after the end is ignored.

use std::time::Duration;

use crate::ids::{CorrelationId, NodeId};
use crate::proto::backoff::Severity;
use crate::proto::correlation::{AnswerShape, Family};
use crate::proto::outcome::PeerCode;
use crate::proto::MonoTime;

/// The correlation id of our Hello; the in-flight table never hands it out.
pub const HELLO_CORRELATION: CorrelationId = CorrelationId(0);

/// Why a connection ended, as the transport tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CloseCause {
    /// The peer's TLS refused our certificate (an alert about a certificate, or an access denial).
    CertificateRefused,
    /// We refused the peer's certificate.
    PeerCertificateInvalid,
    /// The two ends have no application protocol in common: no broker's internal port is there.
    NoCommonProtocol,
    /// Nothing was heard for the idle timeout.
    TimedOut,
    /// The peer closed, or reset.
    ClosedByPeer,
    /// The transport itself broke: protocol error, socket error.
    Transport,
    /// This side closed.
    ClosedLocally,
}

impl CloseCause {
    /// The cause's name as written in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CertificateRefused => "peer refused our certificate",
            Self::PeerCertificateInvalid => "peer's certificate is not acceptable",
            Self::NoCommonProtocol => "no common protocol",
            Self::TimedOut => "timed out",
            Self::ClosedByPeer => "closed by peer",
            Self::Transport => "transport error",
            Self::ClosedLocally => "closed locally",
        }
    }

    /// How soon dialling again can help.
    pub const fn severity(self) -> Severity {
        match self {
            Self::CertificateRefused | Self::PeerCertificateInvalid | Self::NoCommonProtocol => {
                Severity::Refused
            }
            Self::TimedOut | Self::ClosedByPeer | Self::Transport | Self::ClosedLocally => {
                Severity::Passing
            }
        }
    }
}

/// Why a dialled connection never came up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeFailure {
    /// Another broker answers at that address: the catalog is out of date. Re-read it.
    WrongNode { dialled: NodeId, answered: Box<str> },
    /// The peer refused our Hello.
    Refused { code: PeerCode, detail: Box<str> },
    /// An answer that no Hello can have.
    ProtocolViolation,
    /// No answer in time.
    TimedOut,
    /// The connection ended before the answer.
    Closed(CloseCause),
}

impl HandshakeFailure {
    /// How soon dialling again can help.
    pub fn severity(&self) -> Severity {
        match self {
            // Nothing changes at that address until somebody changes the catalog or the broker there.
            Self::WrongNode { .. }
            | Self::Refused {
                code: PeerCode::Unauthorized,
                ..
            } => Severity::Refused,
            Self::Refused { .. } | Self::ProtocolViolation | Self::TimedOut => Severity::Passing,
            Self::Closed(cause) => cause.severity(),
        }
    }

    /// Whether another broker seems to live at the address dialled, so that the catalog should be read
    /// again at once: it greeted, or it showed a certificate, under another name, or it is no broker.
    pub fn doubts_address(&self) -> bool {
        matches!(
            self,
            Self::WrongNode { .. }
                | Self::Closed(CloseCause::PeerCertificateInvalid | CloseCause::NoCommonProtocol)
        )
    }

    /// The failure's name as written in metrics.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::WrongNode { .. } => "wrong_node",
            Self::Refused { .. } => "hello_refused",
            Self::ProtocolViolation => "protocol_violation",
            Self::TimedOut => "timed_out",
            Self::Closed(CloseCause::CertificateRefused) => "certificate_refused",
            Self::Closed(CloseCause::PeerCertificateInvalid) => "peer_certificate_invalid",
            Self::Closed(CloseCause::NoCommonProtocol) => "no_common_protocol",
            Self::Closed(_) => "closed",
        }
    }
}

/// What an input led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiallerStep {
    /// Still waiting.
    Wait,
    /// The link is up.
    Up,
    /// Close the connection (if it is still there); the link never was up.
    Failed(HandshakeFailure),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    AwaitingHelloOk { deadline: MonoTime },
    Done,
}

/// The greeting of one dialled connection. The driver sends Hello when it makes this.
#[derive(Debug)]
pub struct DiallerHandshake {
    dialled: NodeId,
    state: State,
}

impl DiallerHandshake {
    /// Hello is being sent to `dialled` under [`HELLO_CORRELATION`].
    pub fn new(dialled: NodeId, now: MonoTime, timeout: Duration) -> Self {
        Self {
            dialled,
            state: State::AwaitingHelloOk {
                deadline: now + timeout,
            },
        }
    }

    /// When [`Self::on_time`] has something to say.
    pub fn deadline(&self) -> Option<MonoTime> {
        match self.state {
            State::AwaitingHelloOk { deadline } => Some(deadline),
            State::Done => None,
        }
    }

    /// HelloOk arrived.
    pub fn on_hello_ok(&mut self, correlation: CorrelationId, node_id: &str) -> DiallerStep {
        match self.state {
            State::Done => DiallerStep::Wait,
            State::AwaitingHelloOk { .. } if correlation != HELLO_CORRELATION => DiallerStep::Wait,
            State::AwaitingHelloOk { .. } => {
                self.state = State::Done;
                if node_id == self.dialled.as_str() {
                    DiallerStep::Up
                } else {
                    DiallerStep::Failed(HandshakeFailure::WrongNode {
                        dialled: self.dialled.clone(),
                        answered: Box::from(node_id),
                    })
                }
            }
        }
    }

    /// Another answer arrived: an error in any shape refuses the greeting, anything else is a
    /// protocol violation.
    pub fn on_answer(
        &mut self,
        correlation: CorrelationId,
        shape: AnswerShape,
        detail: &str,
    ) -> DiallerStep {
        if self.state == State::Done || correlation != HELLO_CORRELATION {
            return DiallerStep::Wait;
        }
        let code = match shape {
            AnswerShape::ForwardPublishError(code)
            | AnswerShape::ReplicateError(code)
            | AnswerShape::ForwardCacheError(code) => code,
            AnswerShape::ForwardPublishOk
            | AnswerShape::NotLeader
            | AnswerShape::HelloOk
            | AnswerShape::ReplicateOk
            | AnswerShape::ForwardCacheOk => return self.fail(HandshakeFailure::ProtocolViolation),
        };
        debug_assert!(Family::Hello.allows(shape));
        self.fail(HandshakeFailure::Refused {
            code,
            detail: Box::from(detail),
        })
    }

    /// Something arrived that cannot be read as an answer.
    pub fn on_unreadable(&mut self) -> DiallerStep {
        self.fail(HandshakeFailure::ProtocolViolation)
    }

    /// The connection ended.
    pub fn on_closed(&mut self, cause: CloseCause) -> DiallerStep {
        self.fail(HandshakeFailure::Closed(cause))
    }

    /// Time passed.
    pub fn on_time(&mut self, now: MonoTime) -> DiallerStep {
        match self.state {
            State::AwaitingHelloOk { deadline } if now >= deadline => {
                self.fail(HandshakeFailure::TimedOut)
            }
            State::AwaitingHelloOk { .. } | State::Done => DiallerStep::Wait,
        }
    }

    fn fail(&mut self, failure: HandshakeFailure) -> DiallerStep {
        match self.state {
            State::Done => DiallerStep::Wait,
            State::AwaitingHelloOk { .. } => {
                self.state = State::Done;
                DiallerStep::Failed(failure)
            }
        }
    }
}
