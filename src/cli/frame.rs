//! `frame decode` and `frame encode`: captures and test vectors, a line at a time.
//!
//! One line in, one line out, in order; whatever is wrong with a line is said in its answer and
//! the next one is read. Memory is bounded by the longest legal line.

use std::io::{BufRead, BufReader, Read, Write};

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{json, Value};

use super::exit::{output_error, CommandError, Exit};
use crate::limits::MAX_INTERNAL_BODY_BYTES;
use crate::wire;

/// The longest line handled: the largest frame in hex, and room for the JSON around it.
const MAX_LINE_BYTES: usize = 2 * MAX_INTERNAL_BODY_BYTES as usize + (4 << 20);

#[derive(Debug, Args)]
pub struct FrameArgs {
    #[command(subcommand)]
    command: FrameCommand,
}

#[derive(Debug, Subcommand)]
enum FrameCommand {
    /// Read one hex frame a line, print one JSON object a line
    #[command(after_help = "Examples:\n  \
        # What is this answer of a broker?\n  \
        echo 464c58490001000200000018000000000000002a00000000000000640000000000000065 | felix-uring frame decode --protocol internal\n\n  \
        # The kinds in a capture\n  \
        felix-uring frame decode --protocol internal < capture.hex | jq .kind\n\n\
        A frame that does not decode prints {\"ok\":false,\"error\":..,\"handling\":..}: the name of the\n\
        fault and what a broker does about it. The exit status is 0 all the same.")]
    Decode(ProtocolArgs),
    /// Read one JSON object a line, print one hex frame a line
    #[command(after_help = "Examples:\n  \
        # Bytes to send to a broker by hand\n  \
        echo '{\"kind\":5,\"message\":{\"correlation_id\":\"1\",\"node_id\":\"node-1\"}}' | felix-uring frame encode --protocol internal\n\n  \
        # There and back\n  \
        felix-uring frame decode --protocol internal < a.hex | felix-uring frame encode --protocol internal\n\n\
        A line that gives no frame prints {\"ok\":false,\"error\":..} instead.")]
    Encode(ProtocolArgs),
}

#[derive(Debug, Args)]
struct ProtocolArgs {
    /// Which frames
    #[arg(long, value_enum)]
    protocol: Protocol,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Protocol {
    /// Between brokers
    Internal,
    /// Between a client and a broker
    Client,
}

/// Handles standard input until it ends.
pub fn run(args: &FrameArgs, input: impl Read, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let handle: fn(&str) -> String = match &args.command {
        FrameCommand::Decode(p) => match p.protocol {
            Protocol::Internal => |line| wire::internal::json::decode_line(line).to_string(),
            Protocol::Client => |line| wire::client::json::decode_line(line).to_string(),
        },
        FrameCommand::Encode(p) => match p.protocol {
            Protocol::Internal => |line| {
                wire::internal::json::encode_line(line).unwrap_or_else(|e| e.to_json().to_string())
            },
            Protocol::Client => {
                |line| wire::client::json::encode_line(line).unwrap_or_else(|e| e.to_string())
            }
        },
    };
    each_line(input, out, MAX_LINE_BYTES, handle)?;
    Ok(Exit::Done)
}

fn line_error(error: &str, detail: String) -> Value {
    json!({ "ok": false, "error": error, "handling": Value::Null, "detail": detail })
}

/// Calls `handle` for each line of at most `max_bytes` and writes what it gives as a line.
fn each_line(
    input: impl Read,
    out: &mut dyn Write,
    max_bytes: usize,
    handle: impl Fn(&str) -> String,
) -> Result<(), CommandError> {
    let mut input = BufReader::with_capacity(64 << 10, input);
    let mut line = Vec::new();
    loop {
        let length = read_line(&mut input, &mut line, max_bytes)
            .map_err(|e| CommandError::failed(format!("standard input: {e}")))?;
        let Some(length) = length else { break };
        let answer = if length > max_bytes {
            let detail = format!("a line of {length} bytes; at most {max_bytes} are read");
            line_error("line-too-long", detail).to_string()
        } else {
            match std::str::from_utf8(&line) {
                Ok(text) => handle(text),
                Err(e) => line_error("not-text", e.to_string()).to_string(),
            }
        };
        writeln!(out, "{answer}").map_err(output_error)?;
        // Answer at once when the next line is not here yet: somebody may be typing.
        if input.buffer().is_empty() {
            out.flush().map_err(output_error)?;
        }
    }
    out.flush().map_err(output_error)
}

/// Reads a line without its end; keeps at most `max_bytes` of it and gives its whole length.
/// `None` at the end of input.
fn read_line(
    input: &mut impl BufRead,
    line: &mut Vec<u8>,
    max_bytes: usize,
) -> std::io::Result<Option<usize>> {
    line.clear();
    let mut length = 0usize;
    let mut seen_any = false;
    loop {
        let chunk = match input.fill_buf() {
            Ok(chunk) => chunk,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        if chunk.is_empty() {
            return Ok(seen_any.then_some(length));
        }
        seen_any = true;
        let end = chunk.iter().position(|b| *b == b'\n');
        let part = &chunk[..end.unwrap_or(chunk.len())];
        let keep = part.len().min(max_bytes.saturating_sub(line.len()));
        line.extend_from_slice(&part[..keep]);
        length += part.len();
        let used = part.len() + usize::from(end.is_some());
        input.consume(used);
        if end.is_some() {
            if line.last() == Some(&b'\r') {
                line.pop();
                length -= 1;
            }
            return Ok(Some(length));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(input: &[u8], max_bytes: usize) -> Vec<String> {
        let mut out = Vec::new();
        each_line(input, &mut out, max_bytes, |line| format!("<{line}>")).unwrap();
        String::from_utf8(out)
            .unwrap()
            .lines()
            .map(str::to_string)
            .collect()
    }

    #[test]
    fn every_line_gets_one_answer_the_empty_ones_too() {
        assert_eq!(lines(b"a\n\nb\r\nc", 10), ["<a>", "<>", "<b>", "<c>"]);
        assert_eq!(lines(b"", 10), Vec::<String>::new());
        assert_eq!(lines(b"\n", 10), ["<>"]);
    }

    #[test]
    fn a_bad_line_does_not_stop_the_next() {
        let got = lines(b"0123456789\n\xff\nok\n", 5);
        assert!(got[0].contains("line-too-long"), "{got:?}");
        assert!(got[1].contains("not-text"), "{got:?}");
        assert_eq!(got[2], "<ok>");
    }

    #[test]
    fn a_long_line_is_not_kept() {
        let mut input = vec![b'a'; 1 << 20];
        input.extend_from_slice(b"\nb\n");
        let mut line = Vec::new();
        let mut reader = BufReader::new(&input[..]);
        let length = read_line(&mut reader, &mut line, 16).unwrap();
        assert_eq!((length, line.len()), (Some(1 << 20), 16));
        assert_eq!(read_line(&mut reader, &mut line, 16).unwrap(), Some(1));
    }
}
