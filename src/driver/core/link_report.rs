//! What a link tells people: log lines, counters, its place in a status report.

use std::time::Duration;

use crate::ids::NodeId;
use crate::metrics::{CloseReason as ClosedBy, HandshakeFault};
use crate::proto::handshake::{CloseCause, HandshakeFailure};
use crate::proto::peer::{LinkClose, LinkPhase, LinkReport};

use super::Core;
use crate::driver::quic::{CloseReason, ConnStats, Refuser};

/// The TLS alert of two ends without a common application protocol (RFC 7301).
const NO_APPLICATION_PROTOCOL: u8 = 120;

/// A link's place in a status report.
pub(super) struct LinkStatus {
    pub node: NodeId,
    pub addr: String,
    pub phase: LinkPhase,
    pub in_flight: usize,
    pub failures: u64,
    pub retry_in: Option<Duration>,
    pub path: Option<ConnStats>,
    pub last_error: Option<String>,
}

impl Core {
    pub(super) fn report_link(&mut self, node: &NodeId, report: LinkReport) {
        let last_error = self
            .links
            .get(node)
            .and_then(|link| link.last_error.clone());
        match report {
            LinkReport::Up => {
                tracing::info!(peer = %node, core = self.index, "peer link up");
                if let Some(link) = self.links.get_mut(node) {
                    link.last_error = None;
                }
                self.ship_peer_up(node);
            }
            LinkReport::NeverUp(failure) => {
                self.dirty_lane(node);
                self.metrics
                    .handshakes_failed
                    .inc(handshake_fault(&failure));
                let error = last_error.unwrap_or_default();
                if failure.doubts_address() {
                    self.state.ask_for_catalog();
                }
                if failure.severity() == crate::proto::backoff::Severity::Refused {
                    tracing::error!(peer = %node, why = failure.name(), error, "peer link refused; check certificates, node ids and the peer's address in the catalog; dialled again when the catalog names another address, or after a long wait");
                } else {
                    tracing::warn!(peer = %node, why = failure.name(), error, "peer link did not come up");
                }
                if let Some(link) = self.links.get_mut(node) {
                    link.last_error = Some(format!("{}: {error}", failure.name()));
                }
            }
            LinkReport::Lost {
                cause,
                unknown_requests,
            } => {
                self.dirty_lane(node);
                // The machine reports the loss behind the last result of what waited.
                if let Some(at) = self.links.get_mut(node).and_then(|l| l.lost_at.take()) {
                    self.metrics.link_loss_release_us.record(at.elapsed());
                }
                tracing::warn!(peer = %node, cause = cause.name(), unknown_requests, "peer link lost");
            }
        }
    }

    pub(super) fn link_status(&self) -> Vec<LinkStatus> {
        self.links
            .iter()
            .map(|(node, link)| LinkStatus {
                node: node.clone(),
                addr: link.addr.map(|addr| addr.to_string()).unwrap_or_default(),
                phase: link.machine.phase(),
                in_flight: link.machine.in_flight(),
                failures: u64::from(link.machine.failures()),
                retry_in: link.machine.retry_at().map(|at| at.since(self.mono)),
                path: link.conn.as_ref().and_then(|c| self.pump.conn_stats(c.id)),
                last_error: link.last_error.clone(),
            })
            .collect()
    }
}

pub(super) fn close_cause(reason: &CloseReason) -> CloseCause {
    match reason {
        CloseReason::TlsRefused {
            alert: NO_APPLICATION_PROTOCOL,
            ..
        } => CloseCause::NoCommonProtocol,
        CloseReason::TlsRefused {
            by: Refuser::Peer, ..
        } => CloseCause::CertificateRefused,
        CloseReason::TlsRefused {
            by: Refuser::Us, ..
        } => CloseCause::PeerCertificateInvalid,
        CloseReason::TimedOut => CloseCause::TimedOut,
        CloseReason::ApplicationClosed { .. } | CloseReason::Reset | CloseReason::Refused => {
            CloseCause::ClosedByPeer
        }
        CloseReason::LocallyClosed => CloseCause::ClosedLocally,
        CloseReason::VersionMismatch | CloseReason::TransportError { .. } => CloseCause::Transport,
    }
}

/// Why this side closed a connection.
pub(super) fn closed_by_us(reason: LinkClose) -> ClosedBy {
    match reason {
        LinkClose::Idle => ClosedBy::PeerIdle,
        // Retired because the catalog names the peer no more.
        LinkClose::ShuttingDown => ClosedBy::PeerRemoved,
        LinkClose::GreetingFailed | LinkClose::LayoutDispute | LinkClose::ProtocolViolation => {
            ClosedBy::PeerProtocolFault
        }
    }
}

fn handshake_fault(failure: &HandshakeFailure) -> HandshakeFault {
    match failure {
        HandshakeFailure::WrongNode { .. } => HandshakeFault::HelloWrongNode,
        HandshakeFailure::Refused { .. } | HandshakeFailure::ProtocolViolation => {
            HandshakeFault::HelloRefused
        }
        HandshakeFailure::TimedOut => HandshakeFault::PeerTimeout,
        HandshakeFailure::Closed(
            CloseCause::CertificateRefused
            | CloseCause::PeerCertificateInvalid
            | CloseCause::NoCommonProtocol,
        ) => HandshakeFault::PeerTls,
        HandshakeFailure::Closed(_) => HandshakeFault::PeerUnreachable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tls_alert_tells_who_refused_whom() {
        let refused = |by| CloseReason::TlsRefused {
            alert: 45,
            by,
            detail: String::new(),
        };
        assert_eq!(
            close_cause(&refused(Refuser::Peer)),
            CloseCause::CertificateRefused
        );
        assert_eq!(
            close_cause(&refused(Refuser::Us)),
            CloseCause::PeerCertificateInvalid
        );
        for by in [Refuser::Us, Refuser::Peer] {
            let reason = CloseReason::TlsRefused {
                alert: NO_APPLICATION_PROTOCOL,
                by,
                detail: String::new(),
            };
            assert_eq!(close_cause(&reason), CloseCause::NoCommonProtocol);
        }
        let fault = handshake_fault(&HandshakeFailure::Closed(CloseCause::CertificateRefused));
        assert_eq!(fault, HandshakeFault::PeerTls);
    }
}
