//! What a frame is taken for.

use super::*;

#[test]
fn frames_are_sorted_by_what_they_are() {
    let sorted = |json: &str| {
        classify(&ToBroker::Request(
            Request::decode(json.as_bytes()).unwrap(),
        ))
    };
    let scope = "\"tenant_id\":\"t\",\"namespace\":\"n\"";
    assert_eq!(
        sorted(&format!(
            "{{\"type\":\"publish\",{scope},\"stream\":\"s\",\"payload\":\"\"}}"
        )),
        Incoming::Publish(PublishReply::Silent)
    );
    assert_eq!(
        sorted(&format!(
            "{{\"type\":\"publish\",{scope},\"stream\":\"s\",\"payload\":\"\",\"ack\":\"per_batch\",\"request_id\":8}}"
        )),
        Incoming::Publish(JSON)
    );
    assert!(matches!(
        sorted(&format!(
            "{{\"type\":\"publish\",{scope},\"stream\":\"s\",\"payload\":\"\",\"ack\":\"per_batch\"}}"
        )),
        Incoming::Unreadable { .. }
    ));
    assert_eq!(
        sorted(&format!(
            "{{\"type\":\"subscribe\",{scope},\"stream\":\"s\"}}"
        )),
        Incoming::Request(Requested::OneShotAtLeader)
    );
    assert_eq!(
        sorted("{\"type\":\"wish\",\"request_id\":4}"),
        Incoming::Unserved {
            request_type: "wish".into(),
            extension: None,
            request_id: Some(4)
        }
    );
    assert_eq!(
        sorted("{\"type\":\"extension\",\"name\":\"x\",\"request_id\":4}"),
        Incoming::Unserved {
            request_type: "extension".into(),
            extension: Some("x".into()),
            request_id: Some(4)
        }
    );
}

fn frame_error(flags: u16, body: &[u8]) -> FrameError {
    let frame = Frame {
        flags: Flags::from_bits(flags).unwrap(),
        body: bytes::Bytes::copy_from_slice(body),
    };
    ToBroker::decode(frame).unwrap_err()
}

#[test]
fn a_damaged_publish_is_answered_by_id_when_it_has_one() {
    let mut body = 77u64.to_be_bytes().to_vec();
    body.push(1);
    assert!(matches!(
        classify_error(&frame_error(0x0009, &body)),
        Incoming::BadPublish {
            reply: PublishReply::Binary { request_id: 77 },
            ..
        }
    ));
    assert!(matches!(
        classify_error(&frame_error(0x0001, &[0])),
        Incoming::BadPublish {
            reply: PublishReply::Silent,
            ..
        }
    ));
    let json = b"{\"type\":\"publish\",\"request_id\":5,\"stream\":1}";
    assert!(matches!(
        classify_error(&frame_error(0, json)),
        Incoming::BadPublish {
            reply: PublishReply::Json { request_id: 5 },
            ..
        }
    ));
    for (flags, body) in [(0u16, &b"{"[..]), (0x0008, b""), (0x0010, b"")] {
        assert!(
            matches!(
                classify_error(&frame_error(flags, body)),
                Incoming::Unreadable { .. }
            ),
            "{flags:#x}"
        );
    }
}
