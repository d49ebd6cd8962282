//! What a client is promised and what it is told of the rest.

use std::collections::BTreeSet;

use felix_uring::cluster::{NAMESPACE, TENANT};
use felix_uring::wire::client::Answer;
use serde_json::{json, Value};

use crate::support::brokers::{Brokers, FIRST};
use crate::support::client::{auth, publish_frame, Client, End, Stream};

fn frame(message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let mut bytes = b"FLX1\x00\x01\x00\x00".to_vec();
    bytes.extend((text.len() as u32).to_be_bytes());
    bytes.extend(text.as_bytes());
    bytes
}

async fn ask(stream: &mut Stream, message: &Value) -> Answer {
    stream.send(frame(message)).await;
    stream.answers.answer().await
}

fn code_of(answer: &Answer) -> String {
    match answer {
        Answer::ErrorAnswer(error) => {
            let code = error.code.as_ref();
            code.map_or("no code", |code| code.name()).to_owned()
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// The bits a table of docs/clients.md says are advertised: those of both words, the second shifted.
fn documented(heading: &str) -> BTreeSet<u64> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/clients.md");
    let text = std::fs::read_to_string(path).expect("docs/clients.md");
    let section = text.split(heading).nth(1).expect("the section");
    let section = section.split("\n### ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
        let bits = cells.next()?.strip_suffix('`')?.to_owned();
        let is_advertised = cells.nth(1)? == "yes";
        Some((bits, is_advertised))
    });
    let mut bits = BTreeSet::new();
    for (text, is_advertised) in rows {
        let (shift, digits) = match text.strip_prefix("hi 0x") {
            Some(digits) => (32, digits.to_owned()),
            None => (0, text.trim_start_matches("0x").to_owned()),
        };
        let bit = u64::from_str_radix(&digits, 16).expect("a bit") << shift;
        if is_advertised {
            assert!(bits.insert(bit), "{text} is there twice");
        }
    }
    bits
}

fn bits_of(word: u64) -> BTreeSet<u64> {
    (0..64)
        .map(|n| 1 << n)
        .filter(|bit| word & bit != 0)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_advertised_is_what_the_docs_say() {
    let brokers = Brokers::start(1);
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.open().await;
    stream.send(auth(TENANT, &brokers.token())).await;
    let Answer::AuthOk(ok) = stream.answers.answer().await else {
        panic!("refused");
    };
    let low = u64::from(ok.server_features.unwrap_or(0));
    let high = u64::from(ok.server_features_hi.unwrap_or(0));
    assert_eq!(bits_of(low | high << 32), documented("### Features"));
    assert_eq!(bits_of(u64::from(ok.server_flags)), documented("### Flags"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_not_served_are_named_and_cost_nothing() {
    let brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let scope = |kind: &str| {
        json!({"type": kind, "tenant_id": TENANT, "namespace": NAMESPACE, "stream": FIRST,
            "request_id": 5})
    };
    let mut read = scope("stream_read");
    read["shard"] = json!(0);
    read["from"] = json!(0);
    let extension = json!({"type": "extension", "name": "x.y", "request_id": 7});
    let unknown = json!({"type": "made_up", "request_id": 9});
    for (message, request_type, extension) in [
        (&read, "stream_read", None),
        (&extension, "extension", Some("x.y")),
        (&unknown, "made_up", None),
    ] {
        match ask(&mut stream, message).await {
            Answer::Unsupported(answer) => {
                assert_eq!(answer.request_type, request_type);
                assert_eq!(answer.extension.as_deref(), extension);
            }
            other => panic!("{request_type}: {other:?}"),
        }
    }
    // The same stream still publishes, and ends when the client ends it.
    stream.send(publish_frame(1, FIRST, &[b"x"])).await;
    stream.answers.ack().await;
    stream.send.finish().expect("a stream");
    assert_eq!(stream.answers.read_to_end().await.1, End::Finished);

    // A client that cannot read `unsupported` has its stream ended.
    let mut old = client.open().await;
    let hello = json!({"type": "auth", "tenant_id": TENANT, "token": token});
    assert!(matches!(ask(&mut old, &hello).await, Answer::PlainOk(_)));
    old.send(frame(&unknown)).await;
    let (frames, end) = old.answers.read_to_end().await;
    assert_eq!((frames.len(), end), (0, End::Finished));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_another_tenant_is_read_written_or_told() {
    let brokers = Brokers::start(1);
    // Whatever the patterns of the token cover: the tenant is not theirs.
    let token = brokers.token_of(|claims| {
        claims.perms = [
            "stream.publish",
            "stream.subscribe",
            "cache.read",
            "cache.write",
        ]
        .map(|action| format!("{action}:*"))
        .to_vec();
    });
    let client = Client::connect(&brokers, 0).await;
    let with = |kind: &str, more: Value| {
        let mut message = json!({"type": kind, "tenant_id": "t2", "namespace": NAMESPACE,
            "request_id": 1});
        let fields = more.as_object().expect("an object").clone();
        message.as_object_mut().expect("an object").extend(fields);
        message
    };
    let group = |kind: &str, more: Value| {
        let mut message = with(kind, json!({"stream": FIRST, "shard": 0, "group": "g"}));
        let fields = more.as_object().expect("an object").clone();
        message.as_object_mut().expect("an object").extend(fields);
        message
    };
    let key = json!({"cache": "primary", "key": "k"});
    let mut delta = key.clone();
    delta["delta"] = json!(1);
    let mut value = key.clone();
    value["value"] = json!("eA==");
    for message in [
        with("subscribe", json!({"stream": FIRST})),
        with("stream_shards", json!({"stream": FIRST})),
        with("cache_shards", json!({"cache": "primary"})),
        with("shard_owners", json!({"name": FIRST, "kind": "stream"})),
        with("cache_get", key.clone()),
        with("cache_put", value),
        with("cache_delete", key.clone()),
        with("counter_get", key),
        with("counter_add", delta),
        group("group_poll", json!({"max_records": 1, "wait_ms": 0})),
        group("group_ack", json!({"offset": 0})),
        group("group_nack", json!({"offset": 0})),
        group(
            "group_extend",
            json!({"offset": 0, "attempts": 1, "extend_ms": 1}),
        ),
        group("group_dead_letter", json!({"offset": 0})),
        group("group_dead_letters", json!({})),
        group("group_redrive", json!({"offset": 0})),
        group("group_discard", json!({"offset": 0})),
        group("group_seek", json!({"start": "earliest"})),
        group("group_describe", json!({})),
        group("group_delete", json!({})),
    ] {
        let mut stream = client.stream(&token).await;
        let answer = ask(&mut stream, &message).await;
        assert_eq!(code_of(&answer), "forbidden", "{message}");
    }
    let mut stream = client.stream(&token).await;
    let publish = with(
        "publish",
        json!({"stream": FIRST, "payload": "eA==", "ack": "per_message"}),
    );
    match ask(&mut stream, &publish).await {
        Answer::PublishErrorAnswer(error) => {
            assert_eq!(error.code.expect("a code").name(), "forbidden");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(brokers.metric(0, "felix_internal_faults_total"), 0.0);
}
