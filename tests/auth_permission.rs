//! What permissions cover: a table of patterns, the narrowing of group grants, and the matcher
//! against a slow one that is obviously right.

use std::time::{Duration, Instant};

use felix_uring::auth::{
    mint, Action, Grant, MintRequest, Pattern, Permission, PermissionError, Resource, SigningKey,
    Verifier,
};
use felix_uring::catalog::parse_catalog;
use felix_uring::ids::TenantId;
use proptest::prelude::*;

fn grant(perms: &[&str]) -> Grant {
    let perms = perms.iter().map(|text| Permission::parse(text));
    Grant {
        tenant: TenantId::new("t1").expect("a name"),
        sub: "p".into(),
        exp: 0,
        nbf: None,
        perms: perms.collect::<Result<_, _>>().expect("permissions"),
    }
}

fn stream(stream: &str) -> Resource<'_> {
    Resource::Stream {
        tenant: "t1",
        namespace: "ns",
        stream,
    }
}

fn group<'a>(stream: &'a str, group: &'a str) -> Resource<'a> {
    Resource::Group {
        tenant: "t1",
        namespace: "ns",
        stream,
        group,
    }
}

fn cache(cache: &str) -> Resource<'_> {
    Resource::Cache {
        tenant: "t1",
        namespace: "ns",
        cache,
    }
}

#[test]
fn patterns_cover_what_they_say() {
    use Action::*;
    let cases: Vec<(&str, Action, Resource, bool)> = vec![
        (
            "stream.publish:stream:t1/ns/orders",
            StreamPublish,
            stream("orders"),
            true,
        ),
        (
            "stream.publish:stream:t1/ns/orders",
            StreamPublish,
            stream("orders2"),
            false,
        ),
        (
            "stream.publish:stream:t1/ns/orders",
            StreamSubscribe,
            stream("orders"),
            false,
        ),
        (
            "stream.publish:stream:t1/ns/*",
            StreamPublish,
            stream("orders"),
            true,
        ),
        (
            "stream.publish:stream:t1/*/*",
            StreamPublish,
            stream("orders"),
            true,
        ),
        (
            "stream.publish:stream:t1/*",
            StreamPublish,
            stream("orders"),
            true,
        ),
        ("stream.publish:*", StreamPublish, stream("orders"), true),
        ("stream.publish:***", StreamPublish, stream("orders"), true),
        (
            "stream.publish:stream:*/orders",
            StreamPublish,
            stream("orders"),
            true,
        ),
        (
            "stream.publish:stream:t1/ns/or*rs",
            StreamPublish,
            stream("orders"),
            true,
        ),
        (
            "stream.publish:stream:t1/ns/or*x",
            StreamPublish,
            stream("orders"),
            false,
        ),
        (
            "stream.publish:stream:t1/ns/orders*",
            StreamPublish,
            stream("orders"),
            true,
        ),
        (
            "stream.publish:stream:t1/ns/ORDERS",
            StreamPublish,
            stream("orders"),
            false,
        ),
        (
            "stream.publish:stream:t1/ns",
            StreamPublish,
            stream("orders"),
            false,
        ),
        ("stream.publish:", StreamPublish, stream("orders"), false),
        (
            "stream.publish:cache:t1/ns/orders",
            StreamPublish,
            stream("orders"),
            false,
        ),
        (
            "stream.publish:stream:t1/ns/?rders",
            StreamPublish,
            stream("orders"),
            false,
        ),
        ("cache.read:cache:t1/ns/c", CacheRead, cache("c"), true),
        ("cache.read:cache:t1/ns/c", CacheWrite, cache("c"), false),
        ("cache.read:stream:t1/ns/c", CacheRead, cache("c"), false),
        ("cache.write:cache:t1/*", CacheWrite, cache("c"), true),
        ("node.view:cluster:*", NodeView, Resource::Cluster, true),
        ("node.view:*", NodeView, Resource::Cluster, false),
        ("node.view:cluster:**", NodeView, Resource::Cluster, false),
        ("node.manage:cluster:*", NodeView, Resource::Cluster, false),
        (
            "stream.subscribe:stream:t1/ns/s",
            GroupConsume,
            group("s", "g"),
            true,
        ),
        (
            "stream.subscribe:stream:t1/ns/s",
            GroupManage,
            group("s", "g"),
            false,
        ),
        (
            "stream.manage:stream:t1/ns/s",
            GroupManage,
            group("s", "g"),
            true,
        ),
        (
            "stream.manage:stream:t1/ns/s",
            StreamPublish,
            stream("s"),
            false,
        ),
        (
            "group.consume:stream:t1/ns/s",
            GroupConsume,
            group("s", "g"),
            true,
        ),
        (
            "group.consume:group:t1/ns/s/g",
            GroupConsume,
            group("s", "g"),
            true,
        ),
        (
            "group.consume:group:t1/ns/s/g",
            GroupConsume,
            group("s", "h"),
            false,
        ),
        (
            "group.consume:group:t1/ns/s/g",
            GroupManage,
            group("s", "g"),
            false,
        ),
        (
            "group.consume:stream:t1/ns/s",
            StreamSubscribe,
            stream("s"),
            false,
        ),
        ("tenant.manage:*", StreamPublish, stream("s"), false),
        ("ns.manage:*", GroupManage, group("s", "g"), false),
    ];
    for (permission, action, resource, expected) in cases {
        let allowed = grant(&[permission]).allows(action, &resource);
        assert_eq!(allowed, expected, "{permission} on {action:?} {resource:?}");
    }
}

#[test]
fn another_tenants_resources_are_never_covered() {
    let everything: Vec<String> = Action::ALL
        .iter()
        .map(|a| format!("{}:*", a.as_str()))
        .collect();
    let everything: Vec<&str> = everything.iter().map(String::as_str).collect();
    let grant = grant(&everything);
    let (tenant, namespace, name) = ("t2", "ns", "x");
    let (stream, cache) = (name, name);
    assert!(!grant.allows(
        Action::StreamPublish,
        &Resource::Stream {
            tenant,
            namespace,
            stream
        }
    ));
    assert!(!grant.allows(
        Action::CacheRead,
        &Resource::Cache {
            tenant,
            namespace,
            cache
        }
    ));
    let group = Resource::Group {
        tenant,
        namespace,
        stream,
        group: "g",
    };
    assert!(!grant.allows(Action::GroupConsume, &group));
}

#[test]
fn group_grants_narrow_stream_grants() {
    let on_stream = "stream.subscribe:stream:t1/ns/s";
    let on_all = "group.consume:stream:t1/*";
    let both = grant(&[on_stream, on_all, "group.consume:group:t1/ns/s/g"]);
    assert!(both.allows(Action::GroupConsume, &group("s", "g")));
    assert!(
        !both.allows(Action::GroupConsume, &group("s", "h")),
        "narrowed to g"
    );
    assert!(
        both.allows(Action::GroupConsume, &group("s2", "h")),
        "other streams are not"
    );
    assert!(
        both.allows(Action::StreamSubscribe, &stream("s")),
        "other actions are not"
    );
    // The implying action narrows as well, and a pattern counts when it could match.
    let implied = grant(&[on_all, "stream.subscribe:group:t1/ns/*/g"]);
    assert!(!implied.allows(Action::GroupConsume, &group("s", "h")));
    assert!(implied.allows(Action::GroupConsume, &group("s", "g")));
    // A group grant of the other action, of another stream, or of no group at all.
    for harmless in [
        "group.manage:group:t1/ns/s/g",
        "group.consume:group:t1/ns/other/g",
        "group.consume:group:t1/ns/s/",
        "group.consume:group:t1/ns/s",
        "stream.publish:group:t1/ns/s/g",
    ] {
        let grant = grant(&[on_all, harmless]);
        assert!(
            grant.allows(Action::GroupConsume, &group("s", "h")),
            "{harmless}"
        );
    }
    let two = grant(&[
        on_all,
        "group.consume:group:t1/ns/s/g",
        "group.consume:group:t1/ns/s/h*",
    ]);
    assert!(two.allows(Action::GroupConsume, &group("s", "h2")));
    assert!(!two.allows(Action::GroupConsume, &group("s", "x")));
    let every = grant(&["group.consume:group:*"]);
    assert!(every.allows(Action::GroupConsume, &group("s", "x")));
}

#[test]
fn permissions_are_parsed_strictly() {
    let parsed = Permission::parse("stream.publish:stream:t1/ns/a:b").expect("parses");
    assert_eq!(parsed.action, Action::StreamPublish);
    assert_eq!(parsed.pattern.as_str(), "stream:t1/ns/a:b");
    for action in Action::ALL {
        assert_eq!(Action::from_text(action.as_str()), Some(*action));
    }
    assert_eq!(Action::ALL.len(), 15);
    for bad in ["", "stream.publish", "stream.publish*"] {
        assert_eq!(
            Permission::parse(bad),
            Err(PermissionError::NoColon),
            "{bad}"
        );
    }
    for bad in [
        ":x",
        "Stream.publish:x",
        " stream.publish:x",
        "stream.*:x",
        "*:*",
    ] {
        assert_eq!(
            Permission::parse(bad),
            Err(PermissionError::UnknownAction),
            "{bad}"
        );
    }
}

/// Tries every length for every star.
fn naive(pattern: &[u8], text: &[u8]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        Some((b'*', rest)) => (0..=text.len()).any(|taken| naive(rest, &text[taken..])),
        Some((byte, rest)) => text.first() == Some(byte) && naive(rest, &text[1..]),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn matching_agrees_with_the_naive_matcher(
        pattern in "[ab/*]{0,10}",
        text in "[ab/*]{0,14}",
    ) {
        let expected = naive(pattern.as_bytes(), text.as_bytes());
        prop_assert_eq!(Pattern::new(&pattern).matches(text.as_bytes()), expected);
    }

    #[test]
    fn could_match_below_agrees_with_trying(
        pattern in "[ab*]{0,6}",
        prefix in "[ab]{0,4}",
    ) {
        // A pattern of n bytes that matches anything below a prefix matches something no more
        // than n bytes longer.
        let mut below = vec![Vec::new()];
        let mut expected = false;
        for _ in 0..pattern.len().max(1) {
            below = below
                .iter()
                .flat_map(|tail: &Vec<u8>| [b'a', b'b'].map(|byte| [&tail[..], &[byte]].concat()))
                .collect();
            expected |= below.iter().any(|tail| {
                naive(pattern.as_bytes(), &[prefix.as_bytes(), tail].concat())
            });
        }
        prop_assert_eq!(Pattern::new(&pattern).could_match_below(prefix.as_bytes()), expected);
    }
}

#[test]
fn hostile_patterns_cost_little() {
    let pattern = Pattern::new(&format!("{}b", "*a".repeat(500)));
    let text = "a".repeat(2_000);
    let started = Instant::now();
    assert!(!pattern.matches(text.as_bytes()));
    assert!(!Pattern::new(&"a*".repeat(500)).could_match_below(b"b"));
    assert!(
        started.elapsed() < Duration::from_secs(1),
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn a_remembered_token_and_its_permission_cost_well_under_a_microsecond() {
    let key = SigningKey::generate().expect("random bytes");
    let text = format!(
        "[[node]]\nid = \"a\"\nclient = \"127.0.0.1:1\"\ninternal = \"127.0.0.1:2\"\n\
         [[tenant]]\nid = \"t1\"\n[[tenant.key]]\nkid = \"k1\"\nx = \"{}\"\n",
        key.x()
    );
    let path = std::path::Path::new("c.toml");
    let catalog = parse_catalog(path, &text, &mut |_| unreachable!()).expect("valid");
    let mut verifier = Verifier::new(&catalog, 1024);
    let request = MintRequest {
        tenant: "t1".into(),
        sub: "a".repeat(64),
        iat: 1,
        exp: 1_000,
        nbf: None,
        kid: Some("k1".into()),
        perms: vec![
            "cache.read:*".into(),
            "stream.publish:stream:t1/ns/*".into(),
        ],
    };
    let token = mint(&request, &key).expect("minted");
    const ROUNDS: u32 = 20_000;
    let best = |work: &mut dyn FnMut()| {
        let times = (0..5).map(|_| {
            let started = Instant::now();
            (0..ROUNDS).for_each(|_| work());
            started.elapsed() / ROUNDS
        });
        times.min().expect("five rounds")
    };
    let cached = best(&mut || {
        verifier.verify(&token, "t1", 10).expect("verifies");
    });
    let grant = verifier.verify(&token, "t1", 10).expect("verifies");
    let allowed = best(&mut || assert!(grant.allows(Action::StreamPublish, &stream("orders"))));
    println!("remembered check {cached:?}, permission check {allowed:?}");
    // Generous: this is a debug build on a shared machine.
    assert!(cached < Duration::from_micros(5), "{cached:?}");
    assert!(allowed < Duration::from_micros(5), "{allowed:?}");
}
