//! The smallest HTTP client that can read our own admin endpoints: one GET, bounded in time and
//! size, no redirects, no TLS.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Longest answer read, in bytes.
const MAX_ANSWER_BYTES: usize = 32 << 20;

/// An answer, whatever its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpResponse {
    pub status: u16,
    pub body: String,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("{addr} cannot be reached: {source}")]
    Unreachable {
        addr: SocketAddr,
        source: std::io::Error,
    },
    #[error("{addr} did not answer within {timeout_ms} ms")]
    Timeout { addr: SocketAddr, timeout_ms: u64 },
    #[error("{addr} did not answer with HTTP: {why}")]
    NotHttp { addr: SocketAddr, why: &'static str },
}

/// Fetches `http://addr/path`.
pub fn get(addr: SocketAddr, path: &str, timeout: Duration) -> Result<HttpResponse, HttpError> {
    let deadline = Instant::now() + timeout;
    let failed = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => HttpError::Timeout {
            addr,
            timeout_ms: timeout.as_millis() as u64,
        },
        _ => HttpError::Unreachable { addr, source },
    };
    let mut stream = TcpStream::connect_timeout(&addr, timeout).map_err(failed)?;
    stream.set_write_timeout(Some(timeout)).map_err(failed)?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n"
    )
    .map_err(failed)?;
    let mut answer = Vec::new();
    let mut chunk = [0u8; 8192];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(failed(std::io::ErrorKind::TimedOut.into()));
        }
        stream.set_read_timeout(Some(left)).map_err(failed)?;
        match stream.read(&mut chunk).map_err(failed)? {
            0 => break,
            n => answer.extend_from_slice(&chunk[..n]),
        }
        if answer.len() > MAX_ANSWER_BYTES {
            return Err(HttpError::NotHttp {
                addr,
                why: "the answer is too long",
            });
        }
    }
    parse(&answer).map_err(|why| HttpError::NotHttp { addr, why })
}

fn parse(answer: &[u8]) -> Result<HttpResponse, &'static str> {
    let split = answer
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .ok_or("there is no end of headers")?;
    let head = std::str::from_utf8(&answer[..split]).map_err(|_| "the headers are not text")?;
    let mut lines = head.split("\r\n");
    let status_line = lines.next().unwrap_or_default();
    if !status_line.starts_with("HTTP/1.") {
        return Err("there is no status line");
    }
    let status = status_line
        .split(' ')
        .nth(1)
        .and_then(|s| s.parse().ok())
        .ok_or("the status is not a number")?;
    let body = &answer[split + 4..];
    let declared = lines
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse::<usize>().ok());
    if declared.is_some_and(|length| length != body.len()) {
        return Err("the body is not as long as declared");
    }
    let body = String::from_utf8(body.to_vec()).map_err(|_| "the body is not text")?;
    Ok(HttpResponse { status, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_parsed_and_cut_ones_refused() {
        let good = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 3\r\n\r\nno\n";
        let parsed = parse(good).unwrap();
        assert_eq!((parsed.status, parsed.body.as_str()), (503, "no\n"));
        assert!(parse(&good[..good.len() - 1]).is_err());
        assert!(parse(b"SSH-2.0-x\r\n\r\n").is_err());
        assert!(parse(b"HTTP/1.1 200 OK\r\n").is_err());
    }

    #[test]
    fn nobody_listening_is_unreachable() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        drop(listener);
        assert!(matches!(
            get(addr, "/live", Duration::from_secs(1)),
            Err(HttpError::Unreachable { .. })
        ));
    }
}
