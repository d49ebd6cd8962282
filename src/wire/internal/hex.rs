//! Lower-case hex, as captures and test vectors spell bytes.

/// Why a text is not hex.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HexError {
    #[error("{digits} hex digits are not a whole number of bytes")]
    OddLength { digits: usize },
    #[error("byte {at} of the text is not a hex digit")]
    NotHex { at: usize },
}

/// The bytes a text of hex digits, upper or lower case, stands for.
pub fn from_hex(text: &str) -> Result<Vec<u8>, HexError> {
    let digits = text.as_bytes();
    if digits.len() % 2 != 0 {
        return Err(HexError::OddLength {
            digits: digits.len(),
        });
    }
    let digit = |at: usize| -> Result<u8, HexError> {
        match digits.get(at) {
            Some(d @ b'0'..=b'9') => Ok(d - b'0'),
            Some(d @ b'a'..=b'f') => Ok(d - b'a' + 10),
            Some(d @ b'A'..=b'F') => Ok(d - b'A' + 10),
            _ => Err(HexError::NotHex { at }),
        }
    };
    (0..digits.len())
        .step_by(2)
        .map(|at| Ok(digit(at)? << 4 | digit(at + 1)?))
        .collect()
}

/// Lower-case hex of `bytes`.
pub fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}
