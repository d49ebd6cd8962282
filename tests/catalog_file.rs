//! The catalog file: what is accepted, and every mistake with its line.

use std::path::Path;
use std::time::Duration;

use felix_uring::catalog::{parse_catalog, Catalog, CatalogErrors, Consistency, NodeIdx};
use felix_uring::wire::routing::Routing;

const X: &str = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";

fn parse(text: &str) -> Result<Catalog, CatalogErrors> {
    parse_catalog(Path::new("cat.toml"), text, &mut |path| {
        assert_eq!(path, Path::new("keys.json"));
        Ok(format!(
            "{{\"keys\":[{{\"kty\":\"RSA\",\"kid\":\"r\",\"n\":\"x\"}},{{\"kty\":\"OKP\",\"kid\":\"j1\",\
             \"alg\":\"EdDSA\",\"use\":\"sig\",\"crv\":\"Ed25519\",\"x\":\"{X}\"}}]}}"
        ))
    })
}

fn good() -> String {
    format!(
        r#"generation = 3

[[node]]
id = "a"
client = "127.0.0.1:5000"
internal = "127.0.0.1:5001"

[[node]]
id = "b.felix"
client = "b.felix:5000"
internal = "[::1]:5001"

[[tenant]]
id = "t1"
jwks_file = "keys.json"
[[tenant.key]]
kid = "k1"
x = "{X}"

[[stream]]
tenant = "t1"
namespace = "default"
name = "events"
shards = 4
replicas = 2
routing = "jump_hash"
consistency = "quorum"
durable = true
retention_bytes = 1073741824
retention_age = "7d"

[[cache]]
tenant = "t1"
namespace = "default"
name = "events"

[[assignment]]
kind = "stream"
tenant = "t1"
namespace = "default"
name = "events"
shard = 2
leader = "b.felix"
replicas = ["a", "b.felix"]
generation = 7
"#
    )
}

#[test]
fn a_good_file_says_what_it_says() {
    let catalog = parse(&good()).expect("valid");
    assert_eq!(catalog.nodes().len(), 2);
    assert_eq!(&*catalog.nodes()[1].client_addr, "b.felix:5000");
    assert_eq!(catalog.node_by_id("b.felix"), Some(NodeIdx(1)));
    let kids: Vec<&str> = catalog
        .tenant("t1")
        .expect("t1")
        .keys
        .iter()
        .map(|k| k.kid.as_str())
        .collect();
    assert_eq!(kids, ["k1", "j1"]);
    let stream = catalog.streams().next().expect("a stream");
    assert_eq!((stream.shards(), stream.replicas), (4, 2));
    assert_eq!(stream.routing, Routing::JumpHash);
    assert_eq!(stream.consistency, Consistency::Quorum);
    let week = Duration::from_secs(7 * 86_400);
    assert_eq!(stream.retention.bytes, Some(1 << 30));
    assert_eq!(stream.retention.age, Some(week));
    let generations: Vec<u64> = stream.assignments.iter().map(|a| a.generation.0).collect();
    assert_eq!(generations, [3, 3, 7, 3]);
    assert_eq!(*stream.assignments[2].replicas, [NodeIdx(1), NodeIdx(0)]);
    let cache = catalog.caches().next().expect("a cache");
    assert_eq!((cache.shards(), cache.replicas), (1, 1));
    assert_eq!(catalog.max_replicas(), 2);
}

/// The lines and causes of what is wrong with the good file after one replacement.
fn faults(from: &str, to: &str) -> Vec<(u32, String)> {
    let text = good();
    assert!(text.contains(from), "{from}");
    let errors = parse(&text.replacen(from, to, 1)).expect_err("refused");
    let list = errors.0.into_iter();
    list.map(|error| {
        assert!(!error.remedy.is_empty());
        assert_eq!(error.file, Path::new("cat.toml"));
        (error.line.unwrap_or(0), format!("{error}"))
    })
    .collect()
}

#[test]
fn each_mistake_has_its_line_and_a_remedy() {
    let cases = [
        (
            "generation = 3",
            "generation = -1",
            1,
            "whole number from 0",
        ),
        ("generation = 3", "generation = ", 1, "not TOML"),
        (
            "generation = 3",
            "genration = 3",
            1,
            "did you mean generation?",
        ),
        ("id = \"a\"", "id = \"a_b\"", 4, "not a DNS name"),
        ("id = \"a\"", "id = \"10.0.0.1\"", 4, "not a DNS name"),
        ("id = \"a\"\n", "", 3, "has no id"),
        ("id = \"b.felix\"", "id = \"a\"", 8, "declared again"),
        ("127.0.0.1:5000", "0.0.0.0:5000", 5, "names every interface"),
        ("127.0.0.1:5000", "127.0.0.1", 5, "is not host:port"),
        ("127.0.0.1:5000", "127.0.0.1:0", 5, "port 0"),
        ("127.0.0.1:5001", "127.0.0.1:5000", 6, "used twice"),
        ("client = \"b", "cleint = \"b", 10, "did you mean client?"),
        ("id = \"t1\"", "id = \"\"", 14, "tenant id is empty"),
        ("id = \"t1\"", "id = \"t/1\"", 14, "contains '/'"),
        ("x = \"11q", "x = \"1q", 18, "x is not a public key"),
        ("kid = \"k1\"", "kid = \"j1\"", 15, "used twice"),
        ("shards = 4", "shards = 0", 24, "from 1 to"),
        ("shards = 4", "shards = \"4\"", 24, "is string"),
        ("shards = 4", "shards = 2", 37, "has no shard 2"),
        ("shards = 4", "shard = 4", 24, "did you mean shards?"),
        ("replicas = 2", "replicas = 3", 20, "use at most 2"),
        ("replicas = 2", "replicas = 1", 37, "2 nodes hold shard 2"),
        (
            "routing = \"jump_hash\"",
            "routing = \"jump\"",
            26,
            "use modulo or jump_hash",
        ),
        (
            "consistency = \"quorum\"",
            "consistency = \"all\"",
            27,
            "use leader or quorum",
        ),
        ("durable = true", "durable = false", 28, "durable is false"),
        (
            "retention_bytes = 1073741824",
            "retention_bytes = -1",
            29,
            "from 0 to",
        ),
        ("\"7d\"", "7", 30, "is integer"),
        ("\"7d\"", "\"7\"", 30, "with its unit"),
        ("\"7d\"", "\"d\"", 30, "with its unit"),
        ("\"7d\"", "\"+7d\"", 30, "with its unit"),
        ("\"7d\"", "\"7 days\"", 30, "with its unit"),
        ("\"7d\"", "\"4000d\"", 30, "up to 3660d"),
        ("\"7d\"", "\"99999999999999999999d\"", 30, "with its unit"),
        (
            "retention_age",
            "retention_ages",
            30,
            "did you mean retention_age?",
        ),
        (
            "[[cache]]\n",
            "[[cache]]\nretention_age = \"7d\"\n",
            33,
            "unknown key \"retention_age\"",
        ),
        ("tenant = \"t1\"", "tenant = \"t2\"", 20, "add a [[tenant]]"),
        (
            "[[cache]]\n",
            "[[cache]]\nrouting = \"modulo\"\n",
            33,
            "unknown key \"routing\"",
        ),
        ("[[cache]]", "[[stream]]", 32, "is declared again"),
        ("[[cache]]", "[[chache]]", 32, "did you mean cache?"),
        (
            "kind = \"stream\"",
            "kind = \"cache\"",
            37,
            "has no shard 2",
        ),
        ("leader = \"b.felix\"", "leader = \"c\"", 43, "not declared"),
        ("[\"a\", \"b.felix\"]", "[\"a\", \"a\"]", 44, "named twice"),
        ("[\"a\", \"b.felix\"]", "[\"a\", 3]", 44, "is integer"),
        ("[\"a\", \"b.felix\"]", "\"a\"", 44, "is string"),
        ("shard = 2", "shard = 9", 37, "has no shard 9"),
    ];
    for (from, to, line, text) in cases {
        let found = faults(from, to);
        let hit = found
            .iter()
            .any(|(at, message)| *at == line && message.contains(text));
        assert!(
            hit,
            "{from:?} -> {to:?}: wanted line {line} {text:?}, got {found:#?}"
        );
    }
}

#[test]
fn all_mistakes_are_reported_in_one_run() {
    let text = good()
        .replace("id = \"a\"", "id = \"a_\"")
        .replace("shards = 4", "shards = 0")
        .replace("durable = true", "durabel = true");
    let errors = parse(&text).expect_err("refused");
    let lines: Vec<Option<u32>> = errors.0.iter().map(|e| e.line).collect();
    for line in [4, 24, 28] {
        assert!(lines.contains(&Some(line)), "{lines:?}");
    }
    assert!(errors.to_string().contains("cat.toml:24: "));
}

#[test]
fn a_tenant_without_any_key_is_refused() {
    let text = good().replace("jwks_file = \"keys.json\"\n", "");
    let at = text.find("[[tenant.key]]").expect("there");
    let end = text.find("[[stream]]").expect("there");
    let text = format!("{}{}", &text[..at], &text[end..]);
    let errors = parse(&text).expect_err("refused");
    assert!(errors.to_string().contains("no key"), "{errors}");
}

#[test]
fn followers_nobody_named_are_chosen() {
    let text = good().replace("replicas = [\"a\", \"b.felix\"]\n", "");
    let catalog = parse(&text).expect("valid");
    let stream = catalog.streams().next().expect("a stream");
    assert_eq!(*stream.assignments[2].replicas, [NodeIdx(1), NodeIdx(0)]);
    for assignment in &stream.assignments {
        assert_eq!(assignment.replicas.len(), 2);
        assert_ne!(assignment.replicas[0], assignment.replicas[1]);
    }
}

#[test]
fn assignments_must_be_of_something_and_only_once() {
    let assignment = &good()[good().find("[[assignment]]").expect("there")..];
    let errors = parse(&(good() + assignment)).expect_err("twice");
    let text = errors.to_string();
    assert!(
        text.contains("cat.toml:46: shard 2 of stream t1/default/events is assigned again"),
        "{text}"
    );
    assert!(text.contains("line 37"), "{text}");
    let other = assignment.replace("\"events\"", "\"evnets\"");
    let text = parse(&(good() + &other)).expect_err("unknown").to_string();
    assert!(text.contains("names stream t1/default/evnets"), "{text}");
}

#[test]
fn an_empty_file_asks_for_nodes() {
    let text = parse("").expect_err("refused").to_string();
    assert!(text.contains("there is no [[node]]"), "{text}");
}

proptest::proptest! {
    /// Whatever an editor leaves behind, the answer is a catalog or a list of mistakes.
    #[test]
    fn damaged_files_never_panic(from in 0usize..1200, len in 0usize..80, insert in "[ -~\n]{0,6}") {
        let text = good();
        let from = from.min(text.len());
        let to = (from + len).min(text.len());
        let damaged = format!("{}{insert}{}", &text[..from], &text[to..]);
        let read = &mut |_: &Path| Err(std::io::Error::other("no file"));
        if let Err(errors) = parse_catalog(Path::new("cat.toml"), &damaged, read) {
            proptest::prop_assert!(!errors.0.is_empty());
        }
    }
}
