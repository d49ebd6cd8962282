//! Why a handshake between brokers was refused, as a reason to count and a text to log.

/// Who refused whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusedBy {
    /// The peer refused this broker's certificate.
    Peer,
    /// This broker refused the peer's.
    Us,
}

/// Why a handshake was refused. Never a passing network fault: dialling again soon is useless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TlsRefusal {
    /// No certificate was presented.
    NoCertificate,
    /// Another authority issued it.
    UnknownIssuer,
    /// It has expired or is not valid yet.
    OutsideValidity,
    /// It does not carry the name, or cannot be decoded.
    WrongName,
    /// It may not be used for this side of a connection.
    WrongUsage,
    /// It was withdrawn.
    Revoked,
    /// It is not acceptable for another reason, such as being an authority's.
    NotAcceptable,
    /// The other side does not speak the brokers' protocol.
    WrongProtocol,
    /// Its signature is wrong: it does not hold the key.
    BadSignature,
    /// Any other alert of the handshake.
    Other,
}

/// QUIC carries TLS alert `n` as error code `0x100 + n`.
const QUIC_CRYPTO_BASE: u64 = 0x100;

impl TlsRefusal {
    /// All of them, for counters.
    pub const ALL: [Self; 10] = [
        Self::NoCertificate,
        Self::UnknownIssuer,
        Self::OutsideValidity,
        Self::WrongName,
        Self::WrongUsage,
        Self::Revoked,
        Self::NotAcceptable,
        Self::WrongProtocol,
        Self::BadSignature,
        Self::Other,
    ];

    /// The reason behind a QUIC transport error code; `None` when it is not about TLS.
    pub fn from_quic_code(code: u64) -> Option<Self> {
        let alert = u8::try_from(code.checked_sub(QUIC_CRYPTO_BASE)?).ok()?;
        Some(Self::from_alert(alert))
    }

    /// The reason behind a TLS alert.
    pub fn from_alert(alert: u8) -> Self {
        match alert {
            41 | 116 => Self::NoCertificate,
            42 | 112 => Self::WrongName,
            43 => Self::WrongUsage,
            44 => Self::Revoked,
            45 => Self::OutsideValidity,
            46 | 49 => Self::NotAcceptable,
            48 => Self::UnknownIssuer,
            51 => Self::BadSignature,
            120 => Self::WrongProtocol,
            _ => Self::Other,
        }
    }

    /// A short name for a counter's label.
    pub fn reason(self) -> &'static str {
        match self {
            Self::NoCertificate => "no_certificate",
            Self::UnknownIssuer => "unknown_issuer",
            Self::OutsideValidity => "outside_validity",
            Self::WrongName => "wrong_name",
            Self::WrongUsage => "wrong_usage",
            Self::Revoked => "revoked",
            Self::NotAcceptable => "not_acceptable",
            Self::WrongProtocol => "wrong_protocol",
            Self::BadSignature => "bad_signature",
            Self::Other => "other",
        }
    }

    /// A sentence for the log, without the peer's name or address.
    pub fn text(self, by: RefusedBy) -> String {
        let (who, whose) = match by {
            RefusedBy::Peer => ("the peer refused", "our certificate"),
            RefusedBy::Us => ("refused", "the peer's certificate"),
        };
        let why = match self {
            Self::NoCertificate => "none was presented; set the three peer TLS files on both sides",
            Self::UnknownIssuer => "another authority issued it; both sides need the same CA file",
            Self::OutsideValidity => "it has expired or is not valid yet; renew it or check the clocks",
            Self::WrongName => "it does not carry the node id as a DNS name, or cannot be decoded",
            Self::WrongUsage => "its usage lacks server or client; issue it with both",
            Self::Revoked => "it was withdrawn",
            Self::NotAcceptable => "it is not acceptable as a broker's own, as an authority's is not",
            Self::BadSignature => "its holder does not have the key",
            Self::WrongProtocol => {
                return format!("{who} the connection: the brokers' protocol was not offered; is this the internal port?")
            }
            Self::Other => return format!("{who} the connection: the handshake failed"),
        };
        format!("{who} {whose}: {why}")
    }
}
