//! A link in steady use while certificates are renewed and the peer is restarted again and again: memory,
//! descriptors and what is held stay flat, every publish is answered once, and what is acknowledged is in
//! order.
//!
//! `FELIX_SOAK_SECONDS` (6) sets the length and `FELIX_SOAK_RATE` (100) the publishes a second. Over a
//! minute certificates are renewed every 30 s and the peer restarted every 60 s; in a shorter run both
//! happen twice.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use felix_uring::tls::{DevCa, IssueRequest};
use felix_uring::wire::client::{PublishOutcome, RetryClass};

use crate::support::brokers::{Brokers, SECOND};
use crate::support::client::{Client, Stream};
use crate::support::{within, SOON};

const WINDOW: usize = 64;

fn number(name: &str, default: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(default, |n| n.parse().expect("a number"))
}

/// What the forwarding broker takes at one moment.
#[derive(Debug, Clone, Copy)]
struct Sample {
    resident_kib: u64,
    descriptors: u64,
    connections: u64,
    timers: u64,
    forwards: u64,
}

fn sample(brokers: &Brokers) -> Sample {
    let node = brokers.cluster.node(0);
    let pid = node.pid().expect("it runs");
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).expect("a process of ours");
    let pages: u64 = statm
        .split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("resident pages");
    let listed = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process of ours");
    let status = node.status().unwrap_or_else(|e| panic!("{e}"));
    let held = |what: &str| status["cores"][0]["held"][what].as_u64().expect("a number");
    Sample {
        resident_kib: pages * 4,
        descriptors: listed.count() as u64,
        connections: held("connections"),
        timers: held("timers"),
        forwards: held("forwards"),
    }
}

/// How the publishes ended.
#[derive(Debug, Default)]
struct Outcomes {
    accepted: u64,
    refused: u64,
    unknown: u64,
}

/// Publishes at a steady rate until told to stop; the offsets acknowledged must grow.
async fn publish(mut stream: Stream, rate: u64, stop: Arc<AtomicBool>) -> Outcomes {
    let mut outcomes = Outcomes::default();
    let mut outstanding: HashMap<u64, u64> = HashMap::new();
    let mut highest: Option<(u64, u64)> = None;
    let mut pace = tokio::time::interval(Duration::from_nanos(1_000_000_000 / rate.max(1)));
    let mut sequence = 0;
    loop {
        let stopping = stop.load(Ordering::Acquire);
        if stopping && outstanding.is_empty() {
            return outcomes;
        }
        let may_send = !stopping && outstanding.len() < WINDOW;
        tokio::select! {
            ack = stream.answers.ack(), if !outstanding.is_empty() => {
                let sent = outstanding.remove(&ack.request_id);
                let sent = sent.unwrap_or_else(|| panic!("answered twice: {ack:?}"));
                match ack.outcome {
                    PublishOutcome::Accepted { offset } => {
                        let offset = offset.expect("an offset");
                        if let Some((before, at)) = highest {
                            // Answers may come in any order; what was sent later lies behind.
                            assert_eq!(sent > before, offset > at, "{sent} at {offset}, {before} at {at}");
                        }
                        if highest.is_none_or(|(before, _)| sent > before) {
                            highest = Some((sent, offset));
                        }
                        outcomes.accepted += 1;
                    }
                    PublishOutcome::Failed(refusal) => match refusal.class() {
                        Some(RetryClass::OutcomeUnknown) => outcomes.unknown += 1,
                        Some(RetryClass::Retry | RetryClass::RetryAfter) => outcomes.refused += 1,
                        _ => panic!("{refusal:?}"),
                    },
                }
            }
            _ = pace.tick(), if may_send => {
                let id = stream.start_publish(SECOND, &[sequence.to_string()]).await;
                outstanding.insert(id, sequence);
                sequence += 1;
            }
            _ = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
    }
}

fn renew(brokers: &Brokers, ca: &DevCa) {
    for index in 0..2 {
        let name = format!("node-{}", index + 1);
        let issued = ca
            .issue(&IssueRequest::for_broker(&[name], 30))
            .expect("a certificate");
        // One after the other, as a renewal does: a pair that does not match is not taken meanwhile.
        std::fs::write(brokers.file(index, "peer-cert.pem"), issued.cert_pem).expect("a file");
        std::fs::write(brokers.file(index, "peer-key.pem"), issued.key_pem).expect("a file");
    }
}

fn median(samples: &[Sample], of: impl Fn(&Sample) -> u64) -> u64 {
    let mut values: Vec<u64> = samples.iter().map(of).collect();
    values.sort_unstable();
    values[values.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_run_with_renewals_and_restarts_stays_flat() {
    let seconds = number("FELIX_SOAK_SECONDS", 6);
    let rate = number("FELIX_SOAK_RATE", 100);
    let total = Duration::from_secs(seconds);
    let mut brokers = Brokers::start(2);
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).expect("a file");
    let ca = DevCa::from_pem(
        &read(brokers.cluster.ca().to_path_buf()),
        &read(brokers.cluster.dir().join("ca-key.pem")),
    )
    .expect("the authority");
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&brokers.token()).await;
    stream.must_publish(SECOND, b"warm").await;
    let stop = Arc::new(AtomicBool::new(false));
    let publishing = tokio::spawn(publish(stream, rate, stop.clone()));

    let every = |most: u64| Duration::from_secs(most).min(total / 3);
    let (renew_every, restart_every) = (every(30), every(60));
    let (mut renew_at, mut restart_at) = (renew_every, restart_every);
    let (mut renewals, mut restarts) = (0, 0);
    let mut samples = Vec::new();
    let started = Instant::now();
    while started.elapsed() < total {
        samples.push(sample(&brokers));
        if started.elapsed() >= renew_at {
            renew(&brokers, &ca);
            renewals += 1;
            renew_at += renew_every;
        }
        if started.elapsed() >= restart_at {
            let restarted = brokers.cluster.node_mut(1).restart();
            restarted.unwrap_or_else(|e| panic!("{e}"));
            restarts += 1;
            restart_at += restart_every;
        }
        tokio::time::sleep((total / 60).min(Duration::from_secs(5))).await;
    }
    stop.store(true, Ordering::Release);
    let outcomes = within(SOON, "the last answers", publishing).await;
    let outcomes = outcomes.expect("the publisher ends well");
    let (early, late) = (
        &samples[..samples.len() / 3],
        &samples[samples.len() * 2 / 3..],
    );
    let grown = |of: fn(&Sample) -> u64| (median(early, of), median(late, of));
    let resident = grown(|s| s.resident_kib);
    let descriptors = grown(|s| s.descriptors);
    let connections = grown(|s| s.connections);
    let timers = grown(|s| s.timers);
    let forwards = grown(|s| s.forwards);
    let reloads = brokers.metric(0, "felix_tls_reloads_total");
    eprintln!(
        "{seconds} s, {renewals} renewals ({reloads} taken up), {restarts} restarts: {outcomes:?}; first and last \
         third: resident {resident:?} KiB, descriptors {descriptors:?}, connections {connections:?}, timers \
         {timers:?}, forwards {forwards:?}"
    );
    assert!(renewals >= 1 && restarts >= 1, "{renewals} and {restarts}");
    assert!(outcomes.accepted > 0, "{outcomes:?}");
    let is_flat = |(first, last): (u64, u64), slack: u64| last <= first + first / 10 + slack;
    assert!(is_flat(resident, 16 << 10), "resident KiB {resident:?}");
    assert!(is_flat(descriptors, 3), "descriptors {descriptors:?}");
    assert!(is_flat(connections, 2), "connections {connections:?}");
    assert!(is_flat(forwards, WINDOW as u64), "forwards {forwards:?}");
    // Each forward may leave the timer of its longest patience behind.
    assert!(is_flat(timers, 200), "timers {timers:?}");
}
