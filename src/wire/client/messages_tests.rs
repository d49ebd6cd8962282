use super::*;
use crate::wire::client::blob::Blob;

fn request(text: &str) -> Result<Request, Malformed> {
    Request::decode(text.as_bytes())
}

#[test]
fn no_name_is_in_both_directions_or_twice() {
    let mut names: Vec<&str> = [Request::TYPES, Answer::TYPES].concat();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn an_unknown_type_is_not_a_malformed_message() {
    let unknown = request(r#"{"request_id":7,"type":"later","x":{"y":[]}}"#);
    let expected = Request::Unknown {
        type_name: "later".into(),
        request_id: Some(7),
    };
    assert_eq!(unknown, Ok(expected));
    let odd_id = request(r#"{"request_id":{"a":1},"type":"later"}"#);
    assert!(matches!(
        odd_id,
        Ok(Request::Unknown {
            request_id: None,
            ..
        })
    ));
}

#[test]
fn a_malformed_request_still_names_itself() {
    let error = request(r#"{"type":"counter_get","request_id":9,"key":1}"#).unwrap_err();
    assert_eq!(error.type_name.as_deref(), Some("counter_get"));
    assert_eq!(error.request_id, Some(9));
}

#[test]
fn the_whole_body_is_one_object() {
    for bad in [
        "",
        "null",
        "[]",
        "{}",
        r#"{"type":"ok"} x"#,
        r#"{"type":"ok"}{}"#,
        r#"{"type":"ok",}"#,
        r#"{"type":null}"#,
        r#"{"type":"ok","type":"ok"}"#,
        r#"{"type":"ok","ty\u0070e":"ok"}"#,
    ] {
        assert!(Answer::decode(bad.as_bytes()).is_err(), "{bad}");
    }
    assert!(Answer::decode(b" {\"type\":\"ok\"}\r\n\t ").is_ok());
    assert!(
        Answer::decode(b"{\"type\":\"ok\",\"x\":\"\xff\"}").is_err(),
        "text that is not UTF-8, even where it is ignored"
    );
}

#[test]
fn repeated_fields_are_refused_at_every_depth() {
    for bad in [
        r#"{"type":"cache_ok","request_id":1,"request_id":1}"#,
        r#"{"type":"error","message":"m","detail":{"reason":"a","reason":"b"}}"#,
        r#"{"type":"topology_view","brokers":[{"node_id":"a","node_id":"a","addr":"b"}]}"#,
    ] {
        assert!(Answer::decode(bad.as_bytes()).is_err(), "{bad}");
    }
    let change = r#"{"type":"commit","tenant_id":"t","namespace":"n","stream":"s","entity_key":"",
        "event":"","changes":[{"op":"delete","key":"a","key":"b"}],"request_id":1}"#;
    assert!(request(change).is_err());
}

/// The short way must not take what the long way refuses.
#[test]
fn what_is_read_once_is_what_is_read_twice() {
    let put = r#"{"type":"cache_put","tenant_id":"t","namespace":"n","cache":"c","key":KEY,"value":"aGk=","ttl_ms":null,"request_id":7}"#;
    for (key, is_plain) in [
        (r#""k""#, true),
        (r#""type""#, false),
        (r#""\"type\"""#, false),
        (r#""\u0041""#, false),
        (r#""k","type":"cache_get""#, false),
        (r#""k","\u0074ype":"cache_get""#, false),
        (r#""k","unknown":{"type":1}"#, false),
        (r#""k","unknown":{"x":[1,2]}"#, true),
        (r#""k","key":"again""#, true),
        (r#"7"#, true),
    ] {
        let text = put.replace("KEY", key);
        assert_eq!(plain_type(text.as_bytes()).is_some(), is_plain, "{text}");
        // The same with the type at another place, which is read twice.
        let moved = text.replacen(r#"{"type":"cache_put","#, "{", 1);
        let moved = format!(r#"{},"type":"cache_put"}}"#, moved.trim_end_matches('}'));
        assert_eq!(plain_type(moved.as_bytes()), None, "{moved}");
        match (request(&text), request(&moved)) {
            (Ok(once), Ok(twice)) => assert_eq!(once, twice, "{text}"),
            (Err(once), Err(twice)) => {
                let told = |error: Malformed| (error.type_name, error.request_id);
                assert_eq!(told(once), told(twice), "{text}");
            }
            (once, twice) => panic!("{text}: {once:?}, {twice:?}"),
        }
    }
    for text in [
        r#"{"type":"ping""#,
        r#"{"type":"ping"} x"#,
        r#"{"type":"ping"#,
        "{",
    ] {
        assert!(request(text).is_err(), "{text}");
    }
}

#[test]
fn numbers_are_exact_and_unsigned() {
    let id = |number: &str| {
        request(&format!(
            r#"{{"type":"producer_init","request_id":{number}}}"#
        ))
    };
    let max = id("18446744073709551615");
    assert_eq!(
        max,
        Ok(ProducerInit {
            request_id: u64::MAX
        }
        .into())
    );
    for bad in [
        "18446744073709551616",
        "-1",
        "-0",
        "1.0",
        "1e3",
        "\"1\"",
        "null",
        "true",
        "01",
    ] {
        assert!(id(bad).is_err(), "{bad}");
    }
}

#[test]
fn null_is_absent_except_where_it_is_the_value() {
    let put = r#"{"type":"cache_put","tenant_id":"t","namespace":"n","cache":"c","key":"k","value":"","ttl_ms":null,"request_id":null}"#;
    let Ok(Request::CachePut(put)) = request(put) else {
        panic!("not read");
    };
    assert_eq!((put.ttl_ms, put.request_id), (None, None));
    let text = serde_json::to_string(&put).unwrap();
    assert!(text.contains(r#""ttl_ms":null"#), "{text}");
    assert!(!text.contains("request_id"), "{text}");

    let miss = StateValue {
        value: None,
        version: None,
        as_of: None,
        request_id: 4,
    };
    let text = serde_json::to_string(&miss).unwrap();
    assert_eq!(
        text,
        r#"{"type":"state_value","value":null,"request_id":4}"#
    );
}

#[test]
fn zero_is_left_out_where_absent_means_zero() {
    let nack = GroupNack {
        tenant_id: "t".into(),
        namespace: "n".into(),
        stream: "s".into(),
        shard: 0,
        group: "g".into(),
        offset: 0,
        delay_ms: 0,
        attempts: 0,
        request_id: 0,
    };
    let text = serde_json::to_string(&nack).unwrap();
    assert!(
        !text.contains("delay_ms") && !text.contains("attempts"),
        "{text}"
    );
    assert!(text.contains(r#""offset":0"#), "{text}");
    assert_eq!(request(&text), Ok(nack.into()));
}

#[test]
fn a_scope_is_known_for_the_tenant_check() {
    let get = r#"{"type":"cache_get","tenant_id":"t","namespace":"n","cache":"c","key":"k"}"#;
    assert_eq!(request(get).unwrap().scope_tenant(), Some("t"));
    assert_eq!(
        request(r#"{"type":"topology"}"#).unwrap().scope_tenant(),
        None
    );
}

#[test]
fn an_acked_publish_needs_an_id() {
    let publish = |tail: &str| {
        let head = r#"{"type":"publish","tenant_id":"t","namespace":"n","stream":"s","payload":"""#;
        match request(&format!("{head}{tail}}}")) {
            Ok(Request::Publish(publish)) => publish.acked_id(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(publish(""), Ok(None));
    assert_eq!(publish(r#","request_id":3"#), Ok(None));
    assert_eq!(publish(r#","request_id":3,"ack":"none""#), Ok(None));
    assert_eq!(publish(r#","request_id":3,"ack":"per_batch""#), Ok(Some(3)));
    assert_eq!(publish(r#","ack":"per_message""#), Err(MissingRequestId));
}

#[test]
fn a_message_too_large_for_any_reader_is_not_written() {
    let event = Event {
        tenant_id: "t".into(),
        namespace: "n".into(),
        stream: "s".into(),
        payload: Blob(Bytes::from(vec![0; 13 << 20])),
        offset: None,
    };
    assert!(matches!(
        Answer::from(event).encode(),
        Err(EncodeError::BodyTooLarge { .. })
    ));
}

#[test]
fn explanations_are_short_whatever_was_sent() {
    let long = "é".repeat(100_000);
    let body = format!(r#"{{"type":"producer_init","request_id":"{long}"}}"#);
    let error = request(&body).unwrap_err();
    assert!(error.why.len() <= MAX_WHY_BYTES);
    assert!(request(&format!(r#"{{"type":"{long}"}}"#)).is_err());
}
