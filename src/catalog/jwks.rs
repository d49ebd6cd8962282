//! Public keys of a tenant from a JSON Web Key Set.

use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use base64::Engine;
use serde::Deserialize;

use super::model::TenantKey;

/// Why a key set gives no keys.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JwksError {
    /// Not JSON, or not of the shape `{"keys":[...]}`.
    #[error("is not a JSON key set: {0}")]
    Json(String),
    /// An Ed25519 key whose `x` is not 32 bytes in base64url.
    #[error("key {kid:?} has an x that is not 32 bytes in base64url without padding")]
    BadKey {
        /// The key's id.
        kid: String,
    },
    /// Nothing usable in it.
    #[error("holds no Ed25519 signature key (kty OKP, crv Ed25519)")]
    NoKeys,
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<Key>,
}

#[derive(Deserialize)]
struct Key {
    kty: String,
    #[serde(default)]
    kid: String,
    crv: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    x: Option<String>,
}

impl Key {
    /// Keys of other kinds may stand in the same set and are skipped.
    fn is_ed25519_signature(&self) -> bool {
        self.kty == "OKP"
            && self.crv.as_deref() == Some("Ed25519")
            && self.alg.as_deref().is_none_or(|alg| alg == "EdDSA")
            && self.usage.as_deref().is_none_or(|usage| usage == "sig")
    }
}

/// Decodes the `x` of a key: 32 bytes in base64url without padding.
pub(super) fn decode_x(text: &str) -> Option<[u8; 32]> {
    URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()
}

/// The Ed25519 signature keys of a key set, in its order.
pub fn parse_jwks(json: &str) -> Result<Vec<TenantKey>, JwksError> {
    let set: KeySet = serde_json::from_str(json).map_err(|e| JwksError::Json(e.to_string()))?;
    let mut keys = Vec::new();
    for key in set.keys.iter().filter(|key| key.is_ed25519_signature()) {
        let x = key.x.as_deref().and_then(decode_x);
        let x = x.ok_or_else(|| JwksError::BadKey {
            kid: key.kid.clone(),
        })?;
        keys.push(TenantKey {
            kid: key.kid.clone(),
            x,
        });
    }
    if keys.is_empty() {
        return Err(JwksError::NoKeys);
    }
    Ok(keys)
}
