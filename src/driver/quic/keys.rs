//! Connection ids that carry their core, and the keys all cores of a broker share.
//!
//! Invariants: byte 0 of every id we issue is the core that owns the connection, the other seven are
//! random; reset and token keys are equal on every core and survive a restart, so that a peer recognises
//! the resets of a broker that has forgotten its connections.

use std::sync::Arc;

use quinn_proto::{ConnectionId, ConnectionIdGenerator, EndpointConfig, InvalidCid};
use rand::RngCore;

/// Length of every connection id we issue.
pub const CID_BYTES: usize = 8;

/// Secret that all cores share and that has to outlive the process.
#[derive(Clone)]
pub struct SharedKeys {
    secret: [u8; Self::BYTES],
}

impl SharedKeys {
    /// Length of the persisted form.
    pub const BYTES: usize = 64;

    /// Fresh keys. Persist [`to_bytes`](Self::to_bytes), or resets after a restart go unrecognised.
    pub fn generate() -> Self {
        let mut secret = [0; Self::BYTES];
        rand::rng().fill_bytes(&mut secret);
        Self { secret }
    }

    /// Keys persisted earlier.
    pub fn from_bytes(secret: [u8; Self::BYTES]) -> Self {
        Self { secret }
    }

    /// The form to persist; secret.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.secret
    }

    pub(super) fn reset_key(&self) -> Arc<dyn quinn_proto::crypto::HmacKey> {
        Arc::new(ring::hmac::Key::new(
            ring::hmac::HMAC_SHA256,
            &self.secret[..32],
        ))
    }

    pub(super) fn token_key(&self) -> Arc<dyn quinn_proto::crypto::HandshakeTokenKey> {
        Arc::new(ring::hkdf::Salt::new(ring::hkdf::HKDF_SHA256, &[]).extract(&self.secret[32..]))
    }

    pub(super) fn endpoint_config(&self, core: u8) -> EndpointConfig {
        let mut config = EndpointConfig::new(self.reset_key());
        config.cid_generator(move || Box::new(CoreCids { core }));
        config
    }
}

impl std::fmt::Debug for SharedKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedKeys(..)")
    }
}

struct CoreCids {
    core: u8,
}

impl ConnectionIdGenerator for CoreCids {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut bytes = [0; CID_BYTES];
        rand::rng().fill_bytes(&mut bytes[1..]);
        bytes[0] = self.core;
        ConnectionId::new(&bytes)
    }

    // Any id of the right length may be one of an earlier run of ours, which deserves a reset.
    fn validate(&self, _cid: &ConnectionId) -> Result<(), InvalidCid> {
        Ok(())
    }

    fn cid_len(&self) -> usize {
        CID_BYTES
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}

/// The core a datagram names, when it is one of ours and not `this_core`.
///
/// Initial and 0-RTT packets carry an id the client chose, so they name nobody and stay where the kernel
/// put them. An id outside `0..cores` is a stateless reset, garbage, or from a run with more cores: the
/// receiving core judges it.
pub(super) fn foreign_core(datagram: &[u8], this_core: u16, cores: u16) -> Option<u16> {
    const LONG_HEADER: u8 = 0x80;
    const TYPE_MASK: u8 = 0x30;
    const HANDSHAKE: u8 = 0x20;
    let first = *datagram.first()?;
    let core = if first & LONG_HEADER == 0 {
        *datagram.get(1)?
    } else if first & TYPE_MASK == HANDSHAKE && datagram.get(5) == Some(&(CID_BYTES as u8)) {
        *datagram.get(6)?
    } else {
        return None;
    };
    let core = u16::from(core);
    (core != this_core && core < cores).then_some(core)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_carry_their_core_and_differ() {
        let mut cids = CoreCids { core: 7 };
        let (a, b) = (cids.generate_cid(), cids.generate_cid());
        assert_eq!((a[0], b[0]), (7, 7));
        assert_eq!(a.len(), CID_BYTES);
        assert_ne!(a, b);
    }

    #[test]
    fn only_short_and_handshake_packets_name_a_core() {
        let short = [0x40, 3, 9, 9];
        assert_eq!(foreign_core(&short, 0, 4), Some(3));
        assert_eq!(foreign_core(&short, 3, 4), None);
        assert_eq!(foreign_core(&short, 0, 3), None, "not a core of ours");
        let handshake = [0xe0, 0, 0, 0, 1, 8, 2, 0, 0];
        assert_eq!(foreign_core(&handshake, 0, 4), Some(2));
        let initial = [0xc0, 0, 0, 0, 1, 8, 2, 0, 0];
        assert_eq!(foreign_core(&initial, 0, 4), None);
        let zero_rtt = [0xd0, 0, 0, 0, 1, 8, 2, 0, 0];
        assert_eq!(foreign_core(&zero_rtt, 0, 4), None);
        assert_eq!(foreign_core(&[], 0, 4), None);
        assert_eq!(foreign_core(&[0x40], 0, 4), None);
    }

    #[test]
    fn keys_survive_persisting() {
        let keys = SharedKeys::generate();
        let again = SharedKeys::from_bytes(keys.to_bytes());
        let (mut a, mut b) = ([0; 32], [0; 32]);
        keys.reset_key().sign(b"cid", &mut a);
        again.reset_key().sign(b"cid", &mut b);
        assert_eq!(a, b);
    }
}
