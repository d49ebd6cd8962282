//! What the transport reports: whose connection it is about, and how connections end.

use std::time::Duration;

use crate::metrics::{CloseReason as ClosedBy, HandshakeFault};
use crate::tls::TlsRefusal;

use super::message::LaneMsg;
use super::Core;
use crate::driver::quic::{CloseReason, ConnId, EndpointId, PumpEvent, Refuser, Side, StreamId};

/// Refusals of connections over a limit are logged this often at most.
const LIMIT_TOLD_EVERY: Duration = Duration::from_secs(1);

impl Core {
    pub(super) fn on_pump_event(&mut self, event: PumpEvent) {
        match event {
            PumpEvent::Connected {
                conn,
                endpoint,
                side,
                remote,
                peer_certificates,
                ..
            } => match (side, endpoint == self.endpoints.client) {
                (Side::Client, _) => self.on_link_connected(conn),
                (Side::Server, true) => self.on_client_connected(conn, remote),
                (Side::Server, false) => self.on_peer_accepted(conn, remote, &peer_certificates),
            },
            PumpEvent::HandshakeFailed {
                conn,
                endpoint,
                side,
                remote,
                reason,
            } => {
                self.on_handshake_failed(conn, endpoint, side, remote, &reason);
            }
            PumpEvent::StreamOpened { conn, stream, bi } => {
                if self.clients.contains_key(&conn) {
                    self.on_client_stream_opened(conn, stream, bi);
                } else {
                    self.on_peer_stream_opened(conn, stream, bi);
                }
            }
            PumpEvent::Readable { conn, stream } => self.on_readable(conn, stream),
            PumpEvent::Drained { conn, stream } => {
                self.on_events_drained(conn, stream);
                self.read_again.push((conn, stream));
            }
            PumpEvent::StreamStopped { conn, stream, .. } => {
                if self.clients.contains_key(&conn) {
                    self.on_client_stream_stopped(conn, stream);
                } else {
                    self.on_link_stream_stopped(conn);
                }
            }
            PumpEvent::StreamFinished { .. } | PumpEvent::StreamsAvailable { .. } => {}
            PumpEvent::Closed { conn, reason } => self.on_closed(conn, &reason),
            PumpEvent::Stray {
                core,
                endpoint,
                datagram,
            } => {
                let message = LaneMsg::Stray { endpoint, datagram };
                match self.port.try_send(usize::from(core), message) {
                    Ok(()) => self.metrics.strays_handed_over.inc(),
                    // The transport repairs a lost datagram; a queue here would only delay it.
                    Err(_) => self.metrics.strays_dropped.inc(),
                }
            }
        }
    }

    pub(super) fn on_readable(&mut self, conn: ConnId, stream: StreamId) {
        if self.clients.contains_key(&conn) {
            self.on_client_readable(conn, stream);
        } else if self.accepted_peers.contains_key(&conn) {
            self.on_peer_readable(conn, stream);
        } else {
            self.on_link_readable(conn, stream);
        }
    }

    fn on_closed(&mut self, conn: ConnId, reason: &CloseReason) {
        if self.clients.contains_key(&conn) {
            tracing::debug!(%reason, "client connection closed");
            self.metrics.connections_closed.inc(client_end(reason));
            self.forget_client(conn);
        } else if let Some(peer) = self.forget_peer(conn) {
            tracing::info!(remote = %peer.remote, %reason, "peer connection closed");
            self.metrics.connections_closed.inc(peer_end(reason));
        } else {
            self.on_link_closed(conn, reason);
        }
    }

    fn on_handshake_failed(
        &mut self,
        conn: Option<ConnId>,
        endpoint: EndpointId,
        side: Side,
        remote: std::net::SocketAddr,
        reason: &CloseReason,
    ) {
        if side == Side::Client {
            if let Some(conn) = conn {
                self.on_link_closed(conn, reason);
            }
            return;
        }
        let is_client = endpoint == self.endpoints.client;
        let fault = match (is_client, reason) {
            (true, CloseReason::TlsRefused { alert: 120, .. }) => HandshakeFault::ClientAlpn,
            (true, CloseReason::TlsRefused { .. }) => HandshakeFault::ClientTls,
            (true, CloseReason::Refused) => HandshakeFault::ClientLimit,
            (true, _) => HandshakeFault::ClientTimeout,
            (false, CloseReason::TlsRefused { .. }) => HandshakeFault::PeerTls,
            (false, CloseReason::Refused) => HandshakeFault::PeerLimit,
            (false, _) => HandshakeFault::PeerTimeout,
        };
        self.metrics.handshakes_failed.inc(fault);
        match (is_client, reason) {
            // Whoever goes on trying must not fill the log.
            (_, CloseReason::Refused)
                if self
                    .limit_told_at
                    .is_some_and(|told| self.now < told + LIMIT_TOLD_EVERY) => {}
            (_, CloseReason::Refused) => {
                self.limit_told_at = Some(self.now);
                let limit = match is_client {
                    true => "max-connections",
                    false => "peer-connections",
                };
                tracing::warn!(%remote, limit, "connections are refused: there are too many");
            }
            (
                false,
                CloseReason::TlsRefused {
                    by: Refuser::Us,
                    alert,
                    ..
                },
            ) => {
                let refused = refused_peer(*alert);
                tracing::warn!(%remote, %reason, "{refused}");
            }
            (false, _) => tracing::warn!(%remote, %reason, "a peer's handshake failed"),
            (true, _) => tracing::debug!(%remote, %reason, "a client's handshake failed"),
        }
    }
}

/// What of a peer was refused with a TLS alert of ours.
fn refused_peer(alert: u8) -> &'static str {
    match TlsRefusal::from_alert(alert) {
        TlsRefusal::WrongProtocol => {
            "refused a peer's connection: it does not offer the brokers' protocol; this is the internal port"
        }
        TlsRefusal::Other => "refused a peer's handshake",
        TlsRefusal::NoCertificate
        | TlsRefusal::UnknownIssuer
        | TlsRefusal::OutsideValidity
        | TlsRefusal::WrongName
        | TlsRefusal::WrongUsage
        | TlsRefusal::Revoked
        | TlsRefusal::NotAcceptable
        | TlsRefusal::BadSignature => "refused a peer's certificate",
    }
}

fn client_end(reason: &CloseReason) -> ClosedBy {
    match reason {
        CloseReason::ApplicationClosed { .. } => ClosedBy::ClientClosed,
        CloseReason::TimedOut => ClosedBy::ClientIdle,
        CloseReason::Reset => ClosedBy::ClientReset,
        CloseReason::LocallyClosed => ClosedBy::ClientDraining,
        CloseReason::TlsRefused { .. }
        | CloseReason::Refused
        | CloseReason::VersionMismatch
        | CloseReason::TransportError { .. } => ClosedBy::ClientTransportError,
    }
}

/// Why a connection to or from another broker ended, when this side did not end it.
pub(super) fn peer_end(reason: &CloseReason) -> ClosedBy {
    match reason {
        CloseReason::ApplicationClosed { .. } => ClosedBy::PeerClosed,
        CloseReason::TimedOut => ClosedBy::PeerIdle,
        CloseReason::Reset => ClosedBy::PeerReset,
        CloseReason::LocallyClosed => ClosedBy::PeerDraining,
        CloseReason::TlsRefused { .. }
        | CloseReason::Refused
        | CloseReason::VersionMismatch
        | CloseReason::TransportError { .. } => ClosedBy::PeerTransportError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_protocol_is_not_told_as_a_certificate() {
        for (alert, said) in [(120, "protocol"), (48, "certificate"), (40, "handshake")] {
            assert!(refused_peer(alert).contains(said), "{alert}");
        }
        assert!(!refused_peer(120).contains("certificate"));
    }
}
