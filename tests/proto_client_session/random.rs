//! Random sequences: each acked publish is answered once.

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Publish(u8),
    Settle(usize, bool),
    Request,
    Answer,
    Time(u8),
    ClientFinished,
    Drain,
    Bad(u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0u8..3).prop_map(Step::Publish),
        5 => (0usize..6, any::<bool>()).prop_map(|(i, ok)| Step::Settle(i, ok)),
        2 => Just(Step::Request),
        2 => Just(Step::Answer),
        2 => (0u8..5).prop_map(Step::Time),
        1 => Just(Step::ClientFinished),
        1 => Just(Step::Drain),
        1 => (0u8..3).prop_map(Step::Bad),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    /// Whatever happens, each acked publish is answered exactly once in its own form, nothing is
    /// answered that was not asked, and the stream finishes after the client has.
    #[test]
    fn every_acked_publish_is_answered_exactly_once(
        steps in prop::collection::vec(any_step(), 1..80),
    ) {
        let mut session = open();
        let mut time = now();
        let mut next_id = 0u64;
        let mut pending = Vec::new();
        let mut asked: HashMap<u64, bool> = HashMap::new();
        let mut answered: HashMap<u64, u32> = HashMap::new();
        let (mut served, mut finished, mut replies) = (0usize, false, Vec::new());
        for step in steps {
            match step {
                Step::Publish(form) | Step::Bad(form) if !finished => {
                    next_id += 1;
                    let (reply, is_json) = match form {
                        0 => (PublishReply::Silent, None),
                        1 => (PublishReply::Binary { request_id: next_id }, Some(false)),
                        _ => (PublishReply::Json { request_id: next_id }, Some(true)),
                    };
                    if let Some(is_json) = is_json {
                        asked.insert(next_id, is_json);
                    }
                    let frame = match step {
                        Step::Bad(_) => Incoming::BadPublish { reply, why: "bad".into() },
                        _ => Incoming::Publish(reply),
                    };
                    if let Verdict::Publish(id) = session.on_frame(time, frame) {
                        pending.push(id);
                    }
                }
                Step::Settle(index, ok) if index < pending.len() => {
                    // Sometimes kept, so that it is settled twice.
                    let id = if ok { pending.remove(index) } else { pending[index] };
                    session.settle(id, if ok { written(1) } else { Err(client_code::draining()) });
                }
                Step::Request if !finished => {
                    let frame = Incoming::Request(Requested::Repeated);
                    served += usize::from(session.on_frame(time, frame) == Verdict::Serve);
                }
                Step::Answer if served > 0 => {
                    served -= 1;
                    session.answer(Answer::PlainOk(PlainOk {}));
                }
                Step::Time(seconds) => {
                    time = time + Duration::from_secs(u64::from(seconds));
                    session.on_time(time);
                }
                Step::ClientFinished => {
                    finished = true;
                    session.on_client_finished();
                }
                Step::Drain => session.begin_drain(),
                Step::Publish(_) | Step::Bad(_) | Step::Settle(..) | Step::Request | Step::Answer => {}
            }
            replies.extend(drain(&mut session));
        }
        session.on_client_finished();
        for _ in 0..served {
            session.answer(Answer::PlainOk(PlainOk {}));
        }
        session.on_time(time + Duration::from_secs(60));
        replies.extend(drain(&mut session));
        prop_assert!(session.is_ended(), "SES-4");
        prop_assert_eq!(session.owed(), 0);
        prop_assert_eq!(replies.last(), Some(&StreamAction::Finish));
        for reply in &replies {
            let (id, is_json) = match reply {
                StreamAction::Write(Reply::Ack(ack)) => (ack.request_id, false),
                StreamAction::Write(Reply::Answer(Answer::PublishOk(ok))) => (ok.request_id, true),
                StreamAction::Write(Reply::Answer(Answer::PublishErrorAnswer(e))) => {
                    (e.request_id, true)
                }
                _ => continue,
            };
            prop_assert_eq!(asked.get(&id), Some(&is_json));
            *answered.entry(id).or_default() += 1;
        }
        prop_assert_eq!(answered.len(), asked.len(), "SES-1");
        prop_assert!(answered.values().all(|&n| n == 1), "SES-1");
    }
}
