//! Every short sequence of events against the invariants.

use super::*;

#[derive(Debug, Clone, Copy)]
enum Input {
    Request,
    Connected,
    HelloOk,
    WrongHelloOk,
    HelloRefused,
    AnswerOldest,
    AnswerForeignFamily,
    AnswerMalformed,
    LateAnswer,
    Unreadable,
    Unwritten,
    Lost,
    CertificateRefused,
    Tick,
    LongWait,
    ShutDown,
}

const ALPHABET: [Input; 16] = [
    Input::Request,
    Input::Connected,
    Input::HelloOk,
    Input::WrongHelloOk,
    Input::HelloRefused,
    Input::AnswerOldest,
    Input::AnswerForeignFamily,
    Input::AnswerMalformed,
    Input::LateAnswer,
    Input::Unreadable,
    Input::Unwritten,
    Input::Lost,
    Input::CertificateRefused,
    Input::Tick,
    Input::LongWait,
    Input::ShutDown,
];

fn apply(pair: &mut Pair, input: Input) {
    match input {
        Input::Request => {
            pair.request();
        }
        Input::Connected => pair.connected(),
        Input::HelloOk => pair.answer(HELLO_CORRELATION, hello_ok("b")),
        Input::WrongHelloOk => pair.answer(HELLO_CORRELATION, hello_ok("c")),
        Input::HelloRefused => pair.answer(HELLO_CORRELATION, refused(PeerCode::Unauthorized)),
        Input::AnswerOldest => {
            if let Some(id) = pair.oldest() {
                pair.answer(id, Answer::PublishOk(1));
            }
        }
        Input::AnswerForeignFamily => {
            if let Some(id) = pair.oldest() {
                pair.answer(id, Answer::CacheOk(1));
            }
        }
        Input::AnswerMalformed => {
            if let Some(id) = pair.oldest() {
                pair.answer(id, refused(PeerCode::Malformed));
            }
        }
        Input::LateAnswer => pair.answer(CorrelationId(u64::MAX), Answer::PublishOk(1)),
        Input::Unreadable => {
            pair.link.on_unreadable(pair.epoch, pair.now);
            pair.drain();
        }
        Input::Unwritten => {
            if let Some(id) = pair.oldest() {
                pair.link.on_unwritten(pair.epoch, pair.now, id);
                pair.drain();
            }
        }
        Input::Lost => pair.closed(CloseCause::ClosedByPeer),
        Input::CertificateRefused => pair.closed(CloseCause::CertificateRefused),
        Input::Tick => pair.wait(Duration::from_millis(30)),
        Input::LongWait => pair.wait(Duration::from_secs(61)),
        Input::ShutDown => {
            pair.link.shut_down(pair.now);
            pair.drain();
        }
    }
}

/// In these sequences every request has 100 bytes: none may be leaked or freed twice.
fn check_bytes(pair: &Pair) {
    let held = pair.link.in_flight() + pair.link.waiting();
    assert_eq!(pair.link.held_bytes(), 100 * held as u64);
}

/// Ends the world and checks that every request came out once, with a truthful result.
fn conclude(mut pair: Pair, sequence: &[Input]) {
    pair.closed(CloseCause::Transport);
    assert!(pair.sent.is_empty(), "LINK-4: {sequence:?}");
    check_bytes(&pair);
    pair.wait(Duration::from_secs(61));
    for token in 0..pair.next_token {
        let Some(result) = pair.result(token) else {
            panic!("LINK-1: {token} has no result after {sequence:?}");
        };
        let transmitted = pair.ever_transmitted.contains(&token);
        let unwritten = sequence.iter().any(|i| matches!(i, Input::Unwritten));
        match result {
            SendResult::NotSent(_) => {
                assert!(!transmitted || unwritten, "LINK-2: {sequence:?}")
            }
            SendResult::Unknown(_)
            | SendResult::Ok(_)
            | SendResult::Error(_)
            | SendResult::NotLeader(_) => assert!(transmitted, "{sequence:?}"),
        }
    }
}

fn run_all(prefix: &[Input], length: u32) {
    for code in 0..ALPHABET.len().pow(length) {
        let mut pair = Pair::new(small_limits());
        let mut sequence = prefix.to_vec();
        let mut rest = code;
        for _ in 0..length {
            sequence.push(ALPHABET[rest % ALPHABET.len()]);
            rest /= ALPHABET.len();
        }
        for &input in &sequence {
            apply(&mut pair, input);
            check_bytes(&pair);
        }
        conclude(pair, &sequence);
    }
}

#[test]
fn every_sequence_of_four_inputs_from_the_start() {
    run_all(&[], 4);
}

#[test]
fn every_sequence_of_four_inputs_from_an_up_link_with_a_request() {
    run_all(
        &[
            Input::Request,
            Input::Connected,
            Input::HelloOk,
            Input::Request,
        ],
        4,
    );
}

#[test]
fn every_sequence_of_four_inputs_after_a_loss() {
    run_all(
        &[
            Input::Request,
            Input::Connected,
            Input::HelloOk,
            Input::Lost,
            Input::LongWait,
        ],
        4,
    );
}

proptest! {
    #[test]
    fn long_random_sequences(indices in prop::collection::vec(0usize..15, 1..120)) {
        let mut pair = Pair::new(small_limits());
        let sequence: Vec<_> = indices.iter().map(|&i| ALPHABET[i]).collect();
        for &input in &sequence {
            apply(&mut pair, input);
            check_bytes(&pair);
        }
        conclude(pair, &sequence);
    }
}
