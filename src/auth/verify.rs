//! Checking a token: a compact JWT with an Ed25519 signature of one of the tenant's keys.
//!
//! The format is taken apart here, on top of the signature check of `ring`, because the rules
//! are narrower than a general JWT library's: whole-number times, `aud` as one string, no
//! algorithm but one, no duplicate claims.

use std::collections::HashMap;
use std::sync::Arc;

use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use base64::Engine;
use ring::signature::{UnparsedPublicKey, ED25519};
use serde::Deserialize;

use crate::catalog::{Catalog, TenantKey};
use crate::ids::TenantId;
use crate::limits::MAX_CREDENTIAL_BYTES;

use super::error::AuthError;
use super::grant::Grant;
use super::permission::Permission;
use super::remembered::Remembered;
use super::{AUDIENCE, ISSUER};

/// Bytes of tokens one verifier remembers at most.
const MAX_REMEMBERED_BYTES: usize = 4 << 20;

/// How often a verifier did what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VerifierStats {
    /// Tokens that were remembered.
    pub remembered: u64,
    /// Tokens whose signature was checked and good.
    pub verified: u64,
    /// Tokens refused for any reason.
    pub refused: u64,
}

/// Checks tokens on one core.
#[derive(Debug)]
pub struct Verifier {
    keys: HashMap<TenantId, Vec<TenantKey>>,
    remembered: Remembered,
    stats: VerifierStats,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    /// Extensions a verifier must understand; this one understands none.
    crit: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Claims {
    iss: String,
    aud: String,
    sub: String,
    tid: String,
    exp: u64,
    #[serde(rename = "iat")]
    _iat: u64,
    nbf: Option<u64>,
    #[serde(rename = "jti")]
    _jti: Option<String>,
    perms: Vec<String>,
}

fn keys_of(catalog: &Catalog) -> HashMap<TenantId, Vec<TenantKey>> {
    let tenants = catalog.tenants().iter();
    tenants.map(|t| (t.id.clone(), t.keys.clone())).collect()
}

impl Verifier {
    /// A verifier with the keys of the catalog that remembers up to `max_remembered` tokens.
    pub fn new(catalog: &Catalog, max_remembered: usize) -> Self {
        Self {
            keys: keys_of(catalog),
            remembered: Remembered::new(max_remembered, MAX_REMEMBERED_BYTES),
            stats: VerifierStats::default(),
        }
    }

    /// Takes over the keys of a new catalog. Tokens are checked anew: their key may be gone.
    pub fn replace_keys(&mut self, catalog: &Catalog) {
        let keys = keys_of(catalog);
        if keys != self.keys {
            self.keys = keys;
            self.remembered.clear();
        }
    }

    /// Checks `token` for a client that says it belongs to `tenant`, at `now_s` seconds since
    /// the epoch.
    pub fn verify(
        &mut self,
        token: &str,
        tenant: &str,
        now_s: u64,
    ) -> Result<Arc<Grant>, AuthError> {
        let verdict = self.judge(token, tenant, now_s);
        if verdict.is_err() {
            self.stats.refused += 1;
        }
        verdict
    }

    fn judge(&mut self, token: &str, tenant: &str, now_s: u64) -> Result<Arc<Grant>, AuthError> {
        if let Some(grant) = self.remembered.get(token) {
            if grant.tenant.as_str() != tenant {
                return Err(AuthError::WrongTenant);
            }
            if let Err(error) = grant.check_time(now_s) {
                self.remembered.remove(token);
                return Err(error);
            }
            self.stats.remembered += 1;
            return Ok(grant);
        }
        let grant = Arc::new(self.verify_anew(token, tenant, now_s)?);
        self.stats.verified += 1;
        self.remembered.insert(token, Arc::clone(&grant));
        Ok(grant)
    }

    fn verify_anew(&self, token: &str, tenant: &str, now_s: u64) -> Result<Grant, AuthError> {
        if token.len() > MAX_CREDENTIAL_BYTES {
            return Err(AuthError::TooLong);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(AuthError::Malformed)?;
        let (header, claims) = signed.split_once('.').ok_or(AuthError::Malformed)?;
        let decode = |part: &str| {
            URL_SAFE_NO_PAD
                .decode(part)
                .map_err(|_| AuthError::Malformed)
        };
        let header = decode(header)?;
        let header: Header = serde_json::from_slice(&header).map_err(|_| AuthError::Malformed)?;
        if header.alg != "EdDSA" {
            return Err(AuthError::WrongAlgorithm);
        }
        if header.crit.is_some() {
            return Err(AuthError::Malformed);
        }
        let claims = decode(claims)?;
        let signature = decode(signature)?;
        let (tenant_id, keys) = self
            .keys
            .get_key_value(tenant)
            .ok_or(AuthError::UnknownTenant)?;
        check_signature(keys, header.kid.as_deref(), signed.as_bytes(), &signature)?;
        let claims: Claims = serde_json::from_slice(&claims).map_err(|_| AuthError::BadClaims)?;
        let grant = accept_claims(claims, tenant_id)?;
        grant.check_time(now_s)?;
        Ok(grant)
    }

    /// Counts since the start.
    pub fn stats(&self) -> VerifierStats {
        self.stats
    }

    /// Entries and bytes of remembered tokens, never above the bounds.
    pub fn remembered_size(&self) -> (usize, usize) {
        self.remembered.size()
    }
}

/// The key the token names comes first; an unknown or missing key id is no refusal.
fn check_signature(
    keys: &[TenantKey],
    kid: Option<&str>,
    signed: &[u8],
    signature: &[u8],
) -> Result<(), AuthError> {
    let is_named = |key: &&TenantKey| kid == Some(key.kid.as_str());
    let named = keys.iter().filter(is_named);
    let others = keys.iter().filter(|key| !is_named(key));
    let verifies = |key: &TenantKey| {
        let key = UnparsedPublicKey::new(&ED25519, key.x);
        key.verify(signed, signature).is_ok()
    };
    if named.chain(others).any(verifies) {
        Ok(())
    } else {
        Err(AuthError::BadSignature)
    }
}

fn accept_claims(claims: Claims, tenant: &TenantId) -> Result<Grant, AuthError> {
    if claims.iss != ISSUER {
        return Err(AuthError::WrongIssuer);
    }
    if claims.aud != AUDIENCE {
        return Err(AuthError::WrongAudience);
    }
    if claims.tid != tenant.as_str() {
        return Err(AuthError::WrongTenant);
    }
    if claims.sub.is_empty() {
        return Err(AuthError::BadClaims);
    }
    let perms = claims.perms.iter().map(|text| Permission::parse(text));
    let perms: Result<Vec<Permission>, _> = perms.collect();
    Ok(Grant {
        tenant: tenant.clone(),
        sub: claims.sub,
        exp: claims.exp,
        nbf: claims.nbf,
        perms: perms.map_err(|_| AuthError::BadPermission)?,
    })
}
