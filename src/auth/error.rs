//! Why a token is refused.

/// Why a token is refused. The broker counts and logs the variant; the client is told
/// [`AuthError::client_text`], which does not say which tenants or keys exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum AuthError {
    /// Longer than any credential may be.
    #[error("the token is too long")]
    TooLong,
    /// Not three base64url parts with a JSON header and JSON claims.
    #[error("the token is not a compact JWT")]
    Malformed,
    /// The header names another algorithm than EdDSA.
    #[error("the token is not signed with EdDSA")]
    WrongAlgorithm,
    /// The catalog has no such tenant.
    #[error("the tenant is unknown")]
    UnknownTenant,
    /// No key of the tenant verifies the signature.
    #[error("no key of the tenant verifies the signature")]
    BadSignature,
    /// A required claim is missing or has the wrong type.
    #[error("a required claim is missing or has the wrong type")]
    BadClaims,
    /// `iss` is not [`super::ISSUER`].
    #[error("the issuer is not felix-auth")]
    WrongIssuer,
    /// `aud` is not [`super::AUDIENCE`].
    #[error("the audience is not felix-broker")]
    WrongAudience,
    /// `tid` is not the tenant the client named.
    #[error("the token is for another tenant")]
    WrongTenant,
    /// `exp` is past.
    #[error("the token has expired")]
    Expired,
    /// `nbf` is to come.
    #[error("the token is not valid yet")]
    NotYetValid,
    /// A permission has no colon or an action nobody knows.
    #[error("a permission in the token cannot be read")]
    BadPermission,
}

impl AuthError {
    /// All of them, for counters.
    pub const ALL: [Self; 12] = [
        Self::TooLong,
        Self::Malformed,
        Self::WrongAlgorithm,
        Self::UnknownTenant,
        Self::BadSignature,
        Self::BadClaims,
        Self::WrongIssuer,
        Self::WrongAudience,
        Self::WrongTenant,
        Self::Expired,
        Self::NotYetValid,
        Self::BadPermission,
    ];

    /// What the client may know. Nothing that is decided before the signature has been
    /// verified is told apart, so nobody can probe for tenants; the rest tells holders of a
    /// genuine token what is wrong with it.
    pub fn client_text(self) -> &'static str {
        match self {
            Self::TooLong
            | Self::Malformed
            | Self::WrongAlgorithm
            | Self::UnknownTenant
            | Self::BadSignature => "the token does not verify",
            Self::BadClaims => "the token lacks a required claim",
            Self::WrongIssuer => "the token is from another issuer",
            Self::WrongAudience => "the token is for another audience",
            Self::WrongTenant => "the token is for another tenant",
            Self::Expired => "the token has expired",
            Self::NotYetValid => "the token is not valid yet",
            Self::BadPermission => "the token has a permission that cannot be read",
        }
    }

    /// A short name for a counter's label.
    pub fn reason(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::Malformed => "malformed",
            Self::WrongAlgorithm => "wrong_algorithm",
            Self::UnknownTenant => "unknown_tenant",
            Self::BadSignature => "bad_signature",
            Self::BadClaims => "bad_claims",
            Self::WrongIssuer => "wrong_issuer",
            Self::WrongAudience => "wrong_audience",
            Self::WrongTenant => "wrong_tenant",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::BadPermission => "bad_permission",
        }
    }
}
