//! Tokens: every rule of the client protocol's token section, one bad token each.

use std::path::Path;

use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use base64::Engine;
use felix_uring::auth::{
    mint, Action, AuthError, Credential, MintError, MintRequest, Resource, SigningKey, Verifier,
};
use felix_uring::catalog::{parse_catalog, Catalog};
use ring::signature::Ed25519KeyPair;
use serde_json::{json, Value};

const NOW: u64 = 1_800_000_000;

fn catalog(keys: &[(&str, &SigningKey)]) -> Catalog {
    let keys: String = keys
        .iter()
        .map(|(kid, key)| format!("[[tenant.key]]\nkid = \"{kid}\"\nx = \"{}\"\n", key.x()))
        .collect();
    let text = format!(
        "[[node]]\nid = \"a\"\nclient = \"127.0.0.1:1\"\ninternal = \"127.0.0.1:2\"\n\
         [[tenant]]\nid = \"t1\"\n{keys}[[tenant]]\nid = \"t2\"\n{keys}"
    );
    parse_catalog(Path::new("c.toml"), &text, &mut |_| unreachable!()).expect("valid")
}

fn request() -> MintRequest {
    MintRequest {
        tenant: "t1".into(),
        sub: "principal".into(),
        iat: NOW,
        exp: NOW + 3600,
        nbf: None,
        kid: Some("k1".into()),
        perms: vec!["stream.publish:stream:t1/*".into()],
    }
}

/// Signs any header and claims, however wrong.
fn sign(key: &SigningKey, header: &Value, claims: &str) -> String {
    let encode = |text: &str| URL_SAFE_NO_PAD.encode(text);
    let signed = format!("{}.{}", encode(&header.to_string()), encode(claims));
    let pem = key.to_pem();
    let body: String = pem.lines().filter(|line| !line.starts_with("--")).collect();
    let der = base64::engine::general_purpose::STANDARD
        .decode(body)
        .expect("base64");
    let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der).expect("a v1 document");
    let signature = pair.sign(signed.as_bytes());
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn header() -> Value {
    json!({"alg": "EdDSA", "typ": "JWT"})
}

fn claims() -> Value {
    json!({
        "iss": "felix-auth", "aud": "felix-broker", "sub": "p", "tid": "t1",
        "exp": NOW + 10, "iat": NOW, "perms": []
    })
}

fn without(field: &str) -> Value {
    let mut value = claims();
    value.as_object_mut().expect("object").remove(field);
    value
}

fn with(field: &str, new: Value) -> Value {
    let mut value = claims();
    value[field] = new;
    value
}

#[test]
fn a_minted_token_verifies_and_is_remembered() {
    let key = SigningKey::generate().expect("random bytes");
    let mut verifier = Verifier::new(&catalog(&[("k1", &key)]), 64);
    let token = mint(&request(), &key).expect("minted");
    let grant = verifier.verify(&token, "t1", NOW).expect("verifies");
    assert_eq!((grant.sub.as_str(), grant.exp), ("principal", NOW + 3600));
    let stream = |tenant| Resource::Stream {
        tenant,
        namespace: "ns",
        stream: "s",
    };
    assert!(grant.allows(Action::StreamPublish, &stream("t1")));
    assert!(!grant.allows(Action::StreamSubscribe, &stream("t1")));
    assert!(!grant.allows(Action::StreamPublish, &stream("t2")));
    verifier.verify(&token, "t1", NOW).expect("verifies again");
    let stats = verifier.stats();
    assert_eq!((stats.verified, stats.remembered), (1, 1));
}

#[test]
fn every_bad_token_is_refused_with_its_reason() {
    let key = SigningKey::generate().expect("random bytes");
    let other = SigningKey::generate().expect("random bytes");
    let mut verifier = Verifier::new(&catalog(&[("k1", &key)]), 64);
    let good = sign(&key, &header(), &claims().to_string());
    assert!(verifier.verify(&good, "t1", NOW).is_ok());
    let s = |claims: Value| sign(&key, &header(), &claims.to_string());
    let algorithm = |alg: &str| sign(&key, &json!({ "alg": alg }), &claims().to_string());
    let duplicate = format!("{{\"tid\":\"t1\",{}", &claims().to_string()[1..]);
    let (signed, signature) = good.rsplit_once('.').expect("three parts");
    let (head, _) = signed.split_once('.').expect("three parts");
    let unsigned_none = format!(
        "{}.{}.",
        URL_SAFE_NO_PAD.encode("{\"alg\":\"none\"}"),
        "e30"
    );
    let swapped = format!(
        "{head}.{}.{signature}",
        URL_SAFE_NO_PAD.encode(with("tid", json!("t2")).to_string())
    );
    use AuthError::*;
    let cases: Vec<(&str, String, AuthError)> = vec![
        ("empty", String::new(), Malformed),
        ("two parts", signed.to_string(), Malformed),
        ("four parts", format!("{good}.x"), Malformed),
        ("padding", format!("{good}="), Malformed),
        ("too long", "a".repeat(16_385), TooLong),
        (
            "no json header",
            format!("e3.{}", &good[head.len() + 1..]),
            Malformed,
        ),
        (
            "no alg",
            sign(&key, &json!({"typ": "JWT"}), &claims().to_string()),
            Malformed,
        ),
        ("alg none", unsigned_none, WrongAlgorithm),
        ("alg HS256", algorithm("HS256"), WrongAlgorithm),
        ("alg RS256", algorithm("RS256"), WrongAlgorithm),
        ("alg ES256", algorithm("ES256"), WrongAlgorithm),
        ("alg lower case", algorithm("eddsa"), WrongAlgorithm),
        (
            "crit",
            sign(
                &key,
                &json!({"alg": "EdDSA", "crit": ["b64"]}),
                &claims().to_string(),
            ),
            Malformed,
        ),
        (
            "other key",
            sign(&other, &header(), &claims().to_string()),
            BadSignature,
        ),
        ("claims swapped", swapped, BadSignature),
        ("no signature", format!("{signed}."), BadSignature),
        ("claims no json", sign(&key, &header(), "hello"), BadClaims),
        ("claim twice", sign(&key, &header(), &duplicate), BadClaims),
        ("no iss", s(without("iss")), BadClaims),
        ("iss", s(with("iss", json!("Felix-auth"))), WrongIssuer),
        ("no aud", s(without("aud")), BadClaims),
        (
            "aud control plane",
            s(with("aud", json!("felix-controlplane"))),
            WrongAudience,
        ),
        (
            "aud list",
            s(with("aud", json!(["felix-broker"]))),
            BadClaims,
        ),
        ("no sub", s(without("sub")), BadClaims),
        ("empty sub", s(with("sub", json!(""))), BadClaims),
        ("no tid", s(without("tid")), BadClaims),
        ("tid", s(with("tid", json!("t2"))), WrongTenant),
        ("no exp", s(without("exp")), BadClaims),
        (
            "exp fraction",
            s(with("exp", json!(NOW as f64 + 0.5))),
            BadClaims,
        ),
        ("exp text", s(with("exp", json!("1900000000"))), BadClaims),
        ("exp negative", s(with("exp", json!(-1))), BadClaims),
        ("expired", s(with("exp", json!(NOW - 61))), Expired),
        ("no iat", s(without("iat")), BadClaims),
        ("nbf", s(with("nbf", json!(NOW + 61))), NotYetValid),
        ("no perms", s(without("perms")), BadClaims),
        ("perms text", s(with("perms", json!("a:b"))), BadClaims),
        (
            "perm no colon",
            s(with("perms", json!(["stream.publish"]))),
            BadPermission,
        ),
        (
            "perm unknown",
            s(with("perms", json!(["stream.read:*"]))),
            BadPermission,
        ),
        (
            "perm one of two",
            s(with("perms", json!(["cache.read:*", "x:*"]))),
            BadPermission,
        ),
        ("jti number", s(with("jti", json!(1))), BadClaims),
    ];
    for (name, token, why) in cases {
        assert_eq!(
            verifier.verify(&token, "t1", NOW).err(),
            Some(why),
            "{name}"
        );
    }
    assert_eq!(
        verifier.verify(&good, "t9", NOW).err(),
        Some(WrongTenant),
        "remembered"
    );
    let fresh = s(with("sub", json!("q")));
    assert_eq!(
        verifier.verify(&fresh, "t9", NOW).err(),
        Some(UnknownTenant)
    );
    assert_eq!(verifier.verify(&fresh, "t2", NOW).err(), Some(WrongTenant));
}

#[test]
fn edges_that_are_accepted() {
    let key = SigningKey::generate().expect("random bytes");
    let second = SigningKey::generate().expect("random bytes");
    let mut verifier = Verifier::new(&catalog(&[("k1", &key), ("k2", &second)]), 64);
    let s = |claims: Value| sign(&second, &header(), &claims.to_string());
    let every: Vec<String> = Action::ALL
        .iter()
        .map(|a| format!("{}:*", a.as_str()))
        .collect();
    let kid = |kid: &str| {
        sign(
            &second,
            &json!({"alg": "EdDSA", "kid": kid}),
            &claims().to_string(),
        )
    };
    let accepted = [
        ("exp at the leeway", s(with("exp", json!(NOW - 60)))),
        ("nbf at the leeway", s(with("nbf", json!(NOW + 60)))),
        ("every action", s(with("perms", json!(every)))),
        ("unknown claim", s(with("extra", json!({"a": 1})))),
        ("kid of another key", kid("k1")),
        ("unknown kid", kid("k9")),
        ("jti", s(with("jti", json!("id")))),
    ];
    for (name, token) in accepted {
        assert_eq!(verifier.verify(&token, "t1", NOW).err(), None, "{name}");
    }
}

#[test]
fn remembered_tokens_obey_time_and_key_changes() {
    let key = SigningKey::generate().expect("random bytes");
    let other = SigningKey::generate().expect("random bytes");
    let mut verifier = Verifier::new(&catalog(&[("k1", &key)]), 64);
    let token = sign(&key, &header(), &claims().to_string());
    assert!(verifier.verify(&token, "t1", NOW).is_ok());
    assert!(verifier.verify(&token, "t1", NOW + 70).is_ok());
    assert_eq!(
        verifier.verify(&token, "t1", NOW + 71).err(),
        Some(AuthError::Expired)
    );
    assert_eq!(verifier.remembered_size(), (0, 0));
    assert!(verifier.verify(&token, "t1", NOW).is_ok());
    verifier.replace_keys(&catalog(&[("k1", &key)]));
    assert_eq!(verifier.remembered_size().0, 1);
    verifier.replace_keys(&catalog(&[("k1", &other)]));
    assert_eq!(
        verifier.verify(&token, "t1", NOW).err(),
        Some(AuthError::BadSignature)
    );
}

#[test]
fn remembered_tokens_are_bounded_and_the_used_one_stays() {
    let key = SigningKey::generate().expect("random bytes");
    let mut verifier = Verifier::new(&catalog(&[("k1", &key)]), 16);
    let used = mint(&request(), &key).expect("minted");
    verifier.verify(&used, "t1", NOW).expect("verifies");
    for n in 0..100 {
        let sub = format!("p{n}");
        let token = mint(&MintRequest { sub, ..request() }, &key).expect("minted");
        verifier.verify(&token, "t1", NOW).expect("verifies");
        verifier.verify(&used, "t1", NOW).expect("verifies");
        assert!(verifier.remembered_size().0 <= 16);
    }
    assert_eq!(verifier.stats().verified, 101);
    // Long tokens are bounded by bytes, not by count.
    let mut verifier = Verifier::new(&catalog(&[("k1", &key)]), 100_000);
    for n in 0..600 {
        let perms = vec![format!("cache.read:{n}{}", "x".repeat(11_000))];
        let token = mint(&MintRequest { perms, ..request() }, &key).expect("minted");
        verifier.verify(&token, "t1", NOW).expect("verifies");
        assert!(verifier.remembered_size().1 <= 4 << 20);
    }
}

#[test]
fn nothing_shows_a_token_or_a_key() {
    let key = SigningKey::generate().expect("random bytes");
    let token = mint(&request(), &key).expect("minted");
    let credential = Credential::new(&token);
    assert_eq!(credential.expose(), token);
    assert!(!format!("{credential:?}").contains(&token[..10]));
    let pem = key.to_pem();
    let secret = pem.lines().nth(1).expect("a body");
    assert!(!format!("{key:?}").contains(&secret[20..40]));
    let mut verifier = Verifier::new(&catalog(&[("k1", &key)]), 16);
    verifier.verify(&token, "t1", NOW).expect("verifies");
    assert!(!format!("{verifier:?}").contains(&token[token.len() - 20..]));
    for error in AuthError::ALL {
        assert!(!error.client_text().is_empty() && !error.reason().is_empty());
    }
    assert_eq!(
        AuthError::UnknownTenant.client_text(),
        AuthError::BadSignature.client_text()
    );
}

#[test]
fn keys_round_trip_and_bad_ones_are_refused() {
    let key = SigningKey::generate().expect("random bytes");
    let again = SigningKey::from_pem(&key.to_pem()).expect("reads its own");
    assert_eq!(again.x(), key.x());
    let v2 = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).expect("generated");
    let body = base64::engine::general_purpose::STANDARD.encode(v2.as_ref());
    let pem = format!("-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n");
    assert!(SigningKey::from_pem(&pem).is_ok());
    for bad in [
        "",
        "x",
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    ] {
        assert_eq!(SigningKey::from_pem(bad).err(), Some(MintError::BadKey));
    }
    let perms = vec!["nope:*".to_string()];
    let refused = mint(&MintRequest { perms, ..request() }, &key);
    assert!(matches!(refused, Err(MintError::BadPermission { .. })));
}
