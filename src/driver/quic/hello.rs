//! A TLS server that serves clients with and without an application protocol.
//!
//! rustls with protocols configured refuses a QUIC hello that offers none; without, it selects none and
//! a client that offered some refuses the server. So there are two rustls configurations, and the choice
//! between them waits until the ClientHello is complete, which may take several CRYPTO frames in several
//! datagrams. Until then the session here only collects bytes; from then on it forwards to the session of
//! the chosen configuration.
//!
//! Invariants: bytes reach TLS unchanged and in order; at most [`MAX_HELLO_BYTES`] are held; a hello this
//! module cannot parse goes to the configuration with protocols, whose TLS library answers with the alert.

use std::any::Any;
use std::sync::Arc;

use quinn_proto::crypto::rustls::QuicServerConfig;
use quinn_proto::crypto::{
    ExportKeyingMaterialError, HeaderKey, KeyPair, Keys, PacketKey, ServerConfig, Session,
    UnsupportedVersion,
};
use quinn_proto::transport_parameters::TransportParameters;
use quinn_proto::{ConnectionId, Side, TransportError, TransportErrorCode};

/// Longest ClientHello we wait for; a post-quantum key share makes about 1.7 kB.
pub const MAX_HELLO_BYTES: usize = 16 * 1024;

/// Two TLS configurations, one for each kind of client.
pub(super) struct AlpnChoice {
    pub(super) with_alpn: Arc<QuicServerConfig>,
    pub(super) without_alpn: Arc<QuicServerConfig>,
}

impl ServerConfig for AlpnChoice {
    fn initial_keys(
        &self,
        version: u32,
        dst_cid: &ConnectionId,
    ) -> Result<Keys, UnsupportedVersion> {
        self.with_alpn.initial_keys(version, dst_cid)
    }

    fn retry_tag(&self, version: u32, orig_dst_cid: &ConnectionId, packet: &[u8]) -> [u8; 16] {
        self.with_alpn.retry_tag(version, orig_dst_cid, packet)
    }

    fn start_session(
        self: Arc<Self>,
        version: u32,
        params: &TransportParameters,
    ) -> Box<dyn Session> {
        Box::new(ChoosingSession {
            version,
            params: *params,
            config: self,
            hello: Vec::new(),
            chosen: None,
        })
    }
}

struct ChoosingSession {
    version: u32,
    params: TransportParameters,
    config: Arc<AlpnChoice>,
    hello: Vec<u8>,
    chosen: Option<Box<dyn Session>>,
}

impl ChoosingSession {
    fn choose(&self, alpn: bool) -> Box<dyn Session> {
        let config = if alpn {
            &self.config.with_alpn
        } else {
            &self.config.without_alpn
        };
        config.clone().start_session(self.version, &self.params)
    }
}

impl Session for ChoosingSession {
    // Asked once, before any hello: initial keys depend on version and id only.
    fn initial_keys(&self, dst_cid: &ConnectionId, side: Side) -> Keys {
        match &self.chosen {
            Some(session) => session.initial_keys(dst_cid, side),
            None => self.choose(true).initial_keys(dst_cid, side),
        }
    }

    fn handshake_data(&self) -> Option<Box<dyn Any>> {
        self.chosen.as_ref()?.handshake_data()
    }

    fn peer_identity(&self) -> Option<Box<dyn Any>> {
        self.chosen.as_ref()?.peer_identity()
    }

    fn early_crypto(&self) -> Option<(Box<dyn HeaderKey>, Box<dyn PacketKey>)> {
        self.chosen.as_ref()?.early_crypto()
    }

    fn early_data_accepted(&self) -> Option<bool> {
        self.chosen.as_ref()?.early_data_accepted()
    }

    fn is_handshaking(&self) -> bool {
        self.chosen.as_ref().is_none_or(|s| s.is_handshaking())
    }

    fn read_handshake(&mut self, buf: &[u8]) -> Result<bool, TransportError> {
        if let Some(session) = &mut self.chosen {
            return session.read_handshake(buf);
        }
        if self.hello.len() + buf.len() > MAX_HELLO_BYTES {
            return Err(TransportError {
                code: TransportErrorCode::CRYPTO_BUFFER_EXCEEDED,
                frame: None,
                reason: "ClientHello too long".into(),
            });
        }
        self.hello.extend_from_slice(buf);
        let alpn = match offers_alpn(&self.hello) {
            Hello::Incomplete => return Ok(false),
            Hello::Complete { offers_alpn } => offers_alpn,
            Hello::Unparsable => true,
        };
        let mut session = self.choose(alpn);
        let hello = std::mem::take(&mut self.hello);
        let ready = session.read_handshake(&hello);
        self.chosen = Some(session);
        ready
    }

    fn transport_parameters(&self) -> Result<Option<TransportParameters>, TransportError> {
        match &self.chosen {
            Some(session) => session.transport_parameters(),
            None => Ok(None),
        }
    }

    fn write_handshake(&mut self, buf: &mut Vec<u8>) -> Option<Keys> {
        self.chosen.as_mut()?.write_handshake(buf)
    }

    fn next_1rtt_keys(&mut self) -> Option<KeyPair<Box<dyn PacketKey>>> {
        self.chosen.as_mut()?.next_1rtt_keys()
    }

    // Only a client receives Retry packets.
    fn is_valid_retry(
        &self,
        _orig_dst_cid: &ConnectionId,
        _header: &[u8],
        _payload: &[u8],
    ) -> bool {
        false
    }

    fn export_keying_material(
        &self,
        output: &mut [u8],
        label: &[u8],
        context: &[u8],
    ) -> Result<(), ExportKeyingMaterialError> {
        match &self.chosen {
            Some(session) => session.export_keying_material(output, label, context),
            None => Err(ExportKeyingMaterialError),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Hello {
    Incomplete,
    Complete { offers_alpn: bool },
    Unparsable,
}

/// Looks for the ALPN extension in a ClientHello (RFC 8446 section 4.1.2).
fn offers_alpn(bytes: &[u8]) -> Hello {
    const CLIENT_HELLO: u8 = 1;
    match bytes.first() {
        None => return Hello::Incomplete,
        Some(&CLIENT_HELLO) => {}
        Some(_) => return Hello::Unparsable,
    }
    let Some(length) = bytes.get(1..4) else {
        return Hello::Incomplete;
    };
    let length =
        usize::from(length[0]) << 16 | usize::from(length[1]) << 8 | usize::from(length[2]);
    if length + 4 > MAX_HELLO_BYTES {
        return Hello::Unparsable;
    }
    match bytes.get(4..4 + length) {
        None => Hello::Incomplete,
        Some(body) => match has_alpn_extension(body) {
            Some(offers_alpn) => Hello::Complete { offers_alpn },
            None => Hello::Unparsable,
        },
    }
}

fn has_alpn_extension(body: &[u8]) -> Option<bool> {
    const ALPN: usize = 16;
    const VERSION_AND_RANDOM: usize = 2 + 32;
    let mut rest = body.get(VERSION_AND_RANDOM..)?;
    take_vector(&mut rest, 1)?; // session id
    take_vector(&mut rest, 2)?; // cipher suites
    take_vector(&mut rest, 1)?; // compression methods
    if rest.is_empty() {
        return Some(false);
    }
    let mut extensions = take_vector(&mut rest, 2)?;
    while !extensions.is_empty() {
        let kind = take_number(&mut extensions, 2)?;
        take_vector(&mut extensions, 2)?;
        if kind == ALPN {
            return Some(true);
        }
    }
    Some(false)
}

fn take_number(rest: &mut &[u8], width: usize) -> Option<usize> {
    let (number, tail) = rest.split_at_checked(width)?;
    *rest = tail;
    Some(number.iter().fold(0, |n, &b| n << 8 | usize::from(b)))
}

fn take_vector<'a>(rest: &mut &'a [u8], length_width: usize) -> Option<&'a [u8]> {
    let length = take_number(rest, length_width)?;
    let (vector, tail) = rest.split_at_checked(length)?;
    *rest = tail;
    Some(vector)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(extensions: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.push(0);
        body.extend([0, 2, 0x13, 0x01]);
        body.extend([1, 0]);
        let mut ext = Vec::new();
        for (kind, value) in extensions {
            ext.extend(kind.to_be_bytes());
            ext.extend((value.len() as u16).to_be_bytes());
            ext.extend(*value);
        }
        body.extend((ext.len() as u16).to_be_bytes());
        body.extend(ext);
        let mut out = vec![1, 0];
        out.extend((body.len() as u16).to_be_bytes());
        out.extend(body);
        out
    }

    #[test]
    fn finds_the_extension_only_in_a_complete_hello() {
        let with = hello(&[(0, b"name"), (16, b"\0\x08\x07felix/1")]);
        let without = hello(&[(0, b"name"), (51, &[0; 1200])]);
        for cut in 0..with.len() {
            assert_eq!(offers_alpn(&with[..cut]), Hello::Incomplete, "cut {cut}");
        }
        assert_eq!(offers_alpn(&with), Hello::Complete { offers_alpn: true });
        assert_eq!(
            offers_alpn(&without),
            Hello::Complete { offers_alpn: false }
        );
    }

    #[test]
    fn damage_never_panics_and_never_waits_for_ever() {
        let good = hello(&[(16, b"\0\x08\x07felix/1")]);
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                offers_alpn(&bad);
            }
        }
        assert_eq!(offers_alpn(&[2, 0, 0, 0]), Hello::Unparsable);
        assert_eq!(offers_alpn(&[1, 0xff, 0xff, 0xff]), Hello::Unparsable);
        assert_eq!(offers_alpn(&[1, 0, 0, 0]), Hello::Unparsable);
    }
}
