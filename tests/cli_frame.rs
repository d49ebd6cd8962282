//! `frame decode` and `frame encode`: one answer a line, whatever the line.
#![cfg(feature = "runtime")]

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

fn frame(direction: &str, protocol: &str, input: &[u8]) -> Vec<String> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_felix-uring"))
        .args(["frame", direction, "--protocol", protocol])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let out = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert_eq!(out.status.code(), Some(0));
    String::from_utf8(out.stdout)
        .unwrap()
        .lines()
        .map(str::to_string)
        .collect()
}

fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))
}

const PUBLISH_OK: &str = "464c5849000100020000001\
    8000000000000002a00000000000000640000000000000065";

#[test]
fn a_frame_goes_there_and_back() {
    let decoded = frame("decode", "internal", format!("{PUBLISH_OK}\n").as_bytes());
    let value = json(&decoded[0]);
    assert_eq!(value["ok"], true);
    assert_eq!(value["kind"], 2);
    assert_eq!(value["message"]["correlation_id"], "42");
    assert_eq!(value["message"]["last_offset"], "101");
    let encoded = frame("encode", "internal", decoded[0].as_bytes());
    assert_eq!(encoded, [PUBLISH_OK]);
}

#[test]
fn bad_lines_get_error_lines_and_the_next_one_is_read() {
    let mut input = Vec::new();
    input.extend_from_slice(b"\nzz\n464c\n");
    input.extend_from_slice(b"464c5849000200020000000000\n");
    input.extend_from_slice(b"\xff\xfe\n");
    input.extend_from_slice(PUBLISH_OK.as_bytes());
    let lines = frame("decode", "internal", &input);
    assert_eq!(lines.len(), 6, "{lines:?}");
    let handling: Vec<Value> = lines.iter().map(|l| json(l)["handling"].clone()).collect();
    assert_eq!(handling[0], "need-more-bytes");
    assert_eq!(handling[2], "need-more-bytes");
    assert_eq!(handling[3], "close");
    assert!(
        lines[..5].iter().all(|l| json(l)["ok"] == false),
        "{lines:?}"
    );
    assert_eq!(json(&lines[5])["ok"], true);

    let lines = frame(
        "encode",
        "internal",
        b"{}\nnot json\n{\"kind\":99,\"message\":{}}\n[]",
    );
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert!(lines.iter().all(|l| json(l)["ok"] == false), "{lines:?}");
}

#[test]
fn client_frames_are_handled_alike() {
    let hello = "464c583100010000000000367b2274797065223a2261757468222c2274656e616e745f6964223a227431222c22746f6b656e223a226161612e6262622e636363227d";
    let lines = frame("decode", "client", format!("{hello}\nnope\n").as_bytes());
    let value = json(&lines[0]);
    assert_eq!(value["ok"], true);
    assert_eq!(value["message"]["type"], "auth");
    assert_eq!(json(&lines[1])["ok"], false);
    let back = frame("encode", "client", format!("nope\n{}", lines[0]).as_bytes());
    assert_eq!(json(&back[0])["ok"], false);
    assert!(back[1].starts_with("464c5831"), "{back:?}");
}

fn vectors(name: &str) -> Vec<Value> {
    let path = format!("{}/tests/vectors/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    text.lines().map(json).collect()
}

fn frames(vectors: &[Value]) -> Vec<u8> {
    let lines: Vec<&str> = vectors
        .iter()
        .map(|v| v["frame_hex"].as_str().unwrap())
        .collect();
    format!("{}\n", lines.join("\n")).into_bytes()
}

#[test]
fn valid_internal_vectors_decode_to_their_messages_and_back() {
    let vectors = vectors("internal-valid.jsonl");
    let lines = frame("decode", "internal", &frames(&vectors));
    assert_eq!(lines.len(), vectors.len());
    for (line, vector) in lines.iter().zip(&vectors) {
        let value = json(line);
        assert_eq!(value["message"], vector["message"], "{}", vector["name"]);
        assert_eq!(value["kind"], vector["kind"], "{}", vector["name"]);
    }
    let encoded = frame("encode", "internal", lines.join("\n").as_bytes());
    for (line, vector) in encoded.iter().zip(&vectors) {
        assert_eq!(
            Some(line.as_str()),
            vector["frame_hex"].as_str(),
            "{}",
            vector["name"]
        );
    }
}

#[test]
fn refused_internal_vectors_say_what_a_broker_does() {
    let vectors = vectors("internal-refused.jsonl");
    let lines = frame("decode", "internal", &frames(&vectors));
    assert_eq!(lines.len(), vectors.len());
    for (line, vector) in lines.iter().zip(&vectors) {
        let value = json(line);
        assert_eq!(value["ok"], false, "{}", vector["name"]);
        assert_eq!(value["handling"], vector["handling"], "{}", vector["name"]);
    }
}

#[test]
fn valid_client_vectors_decode_to_their_messages_and_back() {
    let vectors = vectors("client-valid.jsonl");
    let lines = frame("decode", "client", &frames(&vectors));
    assert_eq!(lines.len(), vectors.len());
    let encoded = frame("encode", "client", lines.join("\n").as_bytes());
    assert_eq!(encoded.len(), lines.len());
    for (at, vector) in vectors.iter().enumerate() {
        let name = vector["name"].as_str().unwrap();
        assert_eq!(json(&lines[at])["message"], vector["message"], "{name}");
        // What a reader takes and a writer does not make.
        if !name.starts_with("odd.") {
            assert_eq!(vector["frame_hex"], encoded[at].as_str(), "{name}");
        }
    }
}

#[test]
fn refused_client_vectors_are_refused() {
    let refused = vectors("client-refused.jsonl");
    let lines = frame("decode", "client", &frames(&refused));
    assert_eq!(lines.len(), refused.len());
    for (line, vector) in lines.iter().zip(&refused) {
        assert_eq!(json(line)["ok"], false, "{}: {line}", vector["name"]);
    }
}
