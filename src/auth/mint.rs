//! Making tokens and signing keys, for the `token` command and local clusters.

use std::fmt;

use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use base64::Engine;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde::Serialize;

use super::permission::{Permission, PermissionError};
use super::{AUDIENCE, ISSUER};

/// What precedes the 32 secret bytes in a PKCS#8 version 1 document of an Ed25519 key
/// (RFC 8410). Version 1, because common tools do not read ring's version 2.
const PKCS8_PREFIX: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// Why a token or a key could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MintError {
    /// Not a PEM file with an Ed25519 private key in PKCS#8.
    #[error("the signing key is not an Ed25519 private key in PKCS#8 PEM (\"BEGIN PRIVATE KEY\")")]
    BadKey,
    /// The system gave no random bytes.
    #[error("the system gives no random bytes")]
    NoRandom,
    /// A permission no broker would accept.
    #[error("permission {text:?}: {why}")]
    BadPermission {
        /// The permission.
        text: String,
        /// What is wrong with it.
        why: PermissionError,
    },
}

/// An Ed25519 key pair that signs tokens. `Debug` hides the private half.
#[derive(Clone)]
pub struct SigningKey {
    secret: [u8; 32],
    public: [u8; 32],
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey {{ x: {:?}, secret: hidden }}", self.x())
    }
}

impl SigningKey {
    /// A fresh key pair.
    pub fn generate() -> Result<Self, MintError> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|_| MintError::NoRandom)?;
        Self::from_secret(secret)
    }

    fn from_secret(secret: [u8; 32]) -> Result<Self, MintError> {
        let pair = Ed25519KeyPair::from_seed_unchecked(&secret).map_err(|_| MintError::BadKey)?;
        let public = pair.public_key().as_ref().try_into();
        Ok(Self {
            secret,
            public: public.map_err(|_| MintError::BadKey)?,
        })
    }

    /// Reads a PKCS#8 PEM file's text.
    pub fn from_pem(pem: &str) -> Result<Self, MintError> {
        use rustls::pki_types::pem::PemObject;
        let document = rustls::pki_types::PrivatePkcs8KeyDer::from_pem_slice(pem.as_bytes())
            .map_err(|_| MintError::BadKey)?;
        let der = document.secret_pkcs8_der();
        // Version 2 has the same layout with version 1 and the public key behind the secret.
        let same_algorithm = der.len() >= 48 && der[5..16] == PKCS8_PREFIX[5..16];
        if !same_algorithm
            || der[0] != 0x30
            || Ed25519KeyPair::from_pkcs8_maybe_unchecked(der).is_err()
        {
            return Err(MintError::BadKey);
        }
        let secret = der[16..48].try_into().map_err(|_| MintError::BadKey)?;
        Self::from_secret(secret)
    }

    /// The PKCS#8 PEM document. Secret.
    pub fn to_pem(&self) -> String {
        let mut der = PKCS8_PREFIX.to_vec();
        der.extend_from_slice(&self.secret);
        let body = STANDARD.encode(der);
        format!("-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n")
    }

    /// The public half as the `x` of a JSON web key.
    pub fn x(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.public)
    }

    /// A key set with this key alone.
    pub fn to_jwks(&self, kid: &str) -> String {
        let key = serde_json::json!({
            "kty": "OKP", "kid": kid, "alg": "EdDSA", "use": "sig", "crv": "Ed25519",
            "x": self.x(),
        });
        serde_json::json!({ "keys": [key] }).to_string()
    }
}

/// What a new token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MintRequest {
    /// The tenant.
    pub tenant: String,
    /// The principal.
    pub sub: String,
    /// When it is made, in seconds since the epoch.
    pub iat: u64,
    /// When it expires, in seconds since the epoch.
    pub exp: u64,
    /// When it becomes valid, if not at once.
    pub nbf: Option<u64>,
    /// The key id to name.
    pub kid: Option<String>,
    /// The permissions, `action:pattern`.
    pub perms: Vec<String>,
}

#[derive(Serialize)]
struct Header<'a> {
    alg: &'static str,
    typ: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    kid: Option<&'a str>,
}

#[derive(Serialize)]
struct Claims<'a> {
    iss: &'static str,
    aud: &'static str,
    sub: &'a str,
    tid: &'a str,
    exp: u64,
    iat: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    nbf: Option<u64>,
    perms: &'a [String],
}

/// Makes a token. Permissions no broker would accept are refused here already.
pub fn mint(request: &MintRequest, key: &SigningKey) -> Result<String, MintError> {
    for text in &request.perms {
        Permission::parse(text).map_err(|why| MintError::BadPermission {
            text: text.clone(),
            why,
        })?;
    }
    let header = Header {
        alg: "EdDSA",
        typ: "JWT",
        kid: request.kid.as_deref(),
    };
    let claims = Claims {
        iss: ISSUER,
        aud: AUDIENCE,
        sub: &request.sub,
        tid: &request.tenant,
        exp: request.exp,
        iat: request.iat,
        nbf: request.nbf,
        perms: &request.perms,
    };
    // Strings, numbers and lists always have a JSON form.
    let encode = |json: serde_json::Result<Vec<u8>>| {
        json.map(|bytes| URL_SAFE_NO_PAD.encode(bytes))
            .map_err(|_| MintError::BadKey)
    };
    let header = encode(serde_json::to_vec(&header))?;
    let claims = encode(serde_json::to_vec(&claims))?;
    let signed = format!("{header}.{claims}");
    let pair = Ed25519KeyPair::from_seed_unchecked(&key.secret).map_err(|_| MintError::BadKey)?;
    let signature = URL_SAFE_NO_PAD.encode(pair.sign(signed.as_bytes()));
    Ok(format!("{signed}.{signature}"))
}
