//! Times and sizes on the command line.

use std::time::Duration;

/// `10s`, `500ms`, `250us`, `2m`; a plain number is seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number
        .parse()
        .map_err(|_| "must be a time such as 10s, 500ms or 2m".to_string())?;
    let seconds = match unit.trim() {
        "" | "s" => number,
        "ms" => number / 1e3,
        "us" => number / 1e6,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        other => {
            return Err(format!(
                "{other:?} is no unit of time; use us, ms, s, m or h"
            ))
        }
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| "is too long".to_string())
}

/// `1024`, `64K`, `1M`, `1GiB`: bytes, with binary multiples.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: u64 = number
        .parse()
        .map_err(|_| "must be a size such as 100, 64K or 1M".to_string())?;
    let shift = match unit.trim().trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        other => return Err(format!("{other:?} is no unit of size; use K, M or G")),
    };
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "is too large".to_string())
}

/// `1000`, `50k`, `1.5M`, with an optional `/s`: a rate, with decimal multiples.
pub fn parse_rate(text: &str) -> Result<f64, String> {
    let text = text.trim().trim_end_matches("/s");
    let (number, factor) = match text.chars().last() {
        Some('k' | 'K') => (&text[..text.len() - 1], 1e3),
        Some('m' | 'M') => (&text[..text.len() - 1], 1e6),
        _ => (text, 1.0),
    };
    match number.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate * factor),
        _ => Err("must be a rate such as 1000, 50k or 1.5M/s".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(parse_duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("250us"), Ok(Duration::from_micros(250)));
        assert!(parse_duration("10x").is_err() && parse_duration("s").is_err());
        assert_eq!(parse_bytes("1K"), Ok(1024));
        assert_eq!(parse_bytes("16KiB"), Ok(16_384));
        assert!(parse_bytes("99999999999G").is_err() && parse_bytes("").is_err());
        assert_eq!(parse_rate("50k/s"), Ok(50_000.0));
        assert!(parse_rate("0").is_err() && parse_rate("fast").is_err());
    }
}
