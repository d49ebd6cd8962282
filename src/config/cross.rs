//! Values that are fine alone and wrong together.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use crate::limits::MAX_INTERNAL_BODY_BYTES;

use super::error::{shown, ConfigError};
use super::gather::Values;
use super::model::Config;

/// What precedes a frame's body, on both protocols.
const FRAME_HEADER_BYTES: u64 = 12;
/// Writes and segments are aligned to this.
const BLOCK_BYTES: u64 = 4096;

/// Collects mistakes about a setting, quoting its value and origin.
struct Rules<'a> {
    values: &'a Values,
    errors: Vec<ConfigError>,
}

impl Rules<'_> {
    fn require(&mut self, holds: bool, key: &str, rule: String, remedy: impl Into<String>) {
        if holds {
            return;
        }
        let found = self.values.get(key);
        self.errors.push(ConfigError {
            key: key.to_string(),
            value: found.map_or_else(|| "(unset)".to_string(), |found| shown(&found.text)),
            origin: found.map_or_else(String::new, |found| found.origin.to_string()),
            rule,
            remedy: remedy.into(),
        });
    }
}

/// Checks the values of a configuration against each other.
pub(super) fn check(config: &Config) -> Vec<ConfigError> {
    let mut rules = Rules {
        values: &config.values,
        errors: Vec::new(),
    };
    check_addresses(config, &mut rules);
    check_storage(config, &mut rules);
    check_peer(config, &mut rules);
    check_client(config, &mut rules);
    rules.errors
}

/// Two listeners get in each other's way on the same port of the same or of every interface.
/// Port 0 is chosen by the system and never meets another.
fn clash(a: SocketAddr, b: SocketAddr) -> bool {
    let same_ip = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && same_ip
}

fn check_addresses(config: &Config, rules: &mut Rules) {
    let listeners = [
        ("client-listen", config.client_listen),
        ("internal-listen", config.internal_listen),
        ("admin-listen", config.admin_listen),
    ];
    for (at, (key, address)) in listeners.iter().enumerate() {
        for (other_key, other) in &listeners[..at] {
            let rule = format!("must differ from {other_key} = {other}");
            rules.require(
                !clash(*address, *other),
                key,
                rule,
                "give each listener a port of its own",
            );
        }
    }
}

fn check_storage(config: &Config, rules: &mut Rules) {
    let storage = &config.storage;
    let commit = storage.commit_max_bytes as u64;
    let blocks = [
        ("segment-bytes", storage.segment_bytes),
        ("commit-max-bytes", commit),
    ];
    for (key, bytes) in blocks {
        let rule = format!("must be a multiple of {BLOCK_BYTES}");
        let remedy = format!("use {}", bytes.next_multiple_of(BLOCK_BYTES));
        rules.require(bytes % BLOCK_BYTES == 0, key, rule, remedy);
    }
    rules.require(
        commit <= storage.segment_bytes / 2,
        "commit-max-bytes",
        format!(
            "must be at most half of segment-bytes = {}",
            storage.segment_bytes
        ),
        format!("lower it, or raise segment-bytes to {} or more", commit * 2),
    );
    let least = commit * (storage.commits_in_flight as u64 + 1);
    rules.require(
        storage.max_queued_bytes as u64 >= least,
        "max-queued-bytes",
        format!(
            "must hold the group being filled and all in flight: {least} with commit-max-bytes = {commit} and commits-in-flight = {}",
            storage.commits_in_flight
        ),
        format!("raise it to {least} or more"),
    );
    // On a start that finds the disk full, what gives space back is itself written into a new segment.
    rules.require(
        storage.reserve_bytes >= storage.segment_bytes,
        "reserve-bytes",
        format!(
            "must hold one segment, segment-bytes = {}: a full disk could not give space back",
            storage.segment_bytes
        ),
        format!("raise it to {} or more", storage.segment_bytes),
    );
    if let Some(blocker) = existing_file_in(&config.data_dir) {
        rules.require(
            false,
            "data-dir",
            format!("must be a directory, and {} is a file", blocker.display()),
            "name a directory, or a path at which one can be made",
        );
    }
}

/// What works and may not in need.
pub(super) fn warnings(config: &Config) -> Vec<String> {
    let storage = &config.storage;
    let cores = config.executor.cores.count() as u64;
    let wanted = storage.segment_bytes.saturating_mul(cores);
    let is_short = (storage.segment_bytes..wanted).contains(&storage.reserve_bytes);
    // Whatever the first cores give back serves the others, but they may have nothing to give.
    is_short
        .then(|| {
            format!(
                "reserve-bytes = {} holds fewer segments than there are data cores: on a full disk a core may find \
                 no room to give records up; raise it to {wanted}",
                storage.reserve_bytes
            )
        })
        .into_iter()
        .collect()
}

/// The path itself or a parent of it that exists and is no directory.
fn existing_file_in(path: &Path) -> Option<&Path> {
    let nearest = path
        .ancestors()
        .find(|part| part.symlink_metadata().is_ok())?;
    (!nearest.is_dir()).then_some(nearest)
}

fn ms(duration: Duration) -> u128 {
    duration.as_millis()
}

fn check_peer(config: &Config, rules: &mut Rules) {
    let peer = &config.peer;
    rules.require(
        peer.keep_alive * 2 < peer.idle_timeout,
        "peer-keep-alive-ms",
        format!(
            "must be below half of peer-idle-timeout-ms = {}",
            ms(peer.idle_timeout)
        ),
        format!(
            "lower it to {} or less, or raise peer-idle-timeout-ms above {}",
            (ms(peer.idle_timeout).max(2) - 1) / 2,
            ms(peer.keep_alive) * 2
        ),
    );
    rules.require(
        peer.backoff_min <= peer.backoff_max,
        "peer-backoff-min-ms",
        format!(
            "must not exceed peer-backoff-max-ms = {}",
            ms(peer.backoff_max)
        ),
        "lower it, or raise peer-backoff-max-ms",
    );
    let largest = u64::from(MAX_INTERNAL_BODY_BYTES) + FRAME_HEADER_BYTES;
    window(
        rules,
        "peer-receive-window-bytes",
        peer.stream_window_bytes,
        largest,
        "between brokers",
    );
    rules.require(
        peer.connections_per_node <= peer.connections,
        "peer-connections-per-node",
        format!("must not exceed peer-connections = {}", peer.connections),
        "lower it, or raise peer-connections",
    );
    let (stream, connection) = (peer.stream_window_bytes, peer.connection_window_bytes);
    nested(
        rules,
        ["peer-receive-window-bytes", "peer-connection-window-bytes"],
        stream,
        connection,
    );
}

fn window(rules: &mut Rules, key: &str, bytes: u32, largest: u64, whose: &str) {
    rules.require(
        u64::from(bytes) >= largest,
        key,
        format!("must hold the largest frame {whose}, {largest} bytes"),
        format!("raise it to {largest} or more"),
    );
}

fn nested(rules: &mut Rules, [inner, outer]: [&str; 2], stream: u32, connection: u32) {
    rules.require(
        connection >= stream,
        outer,
        format!("must be at least {inner} = {stream}"),
        format!("raise it to {stream} or more"),
    );
}

fn check_client(config: &Config, rules: &mut Rules) {
    let client = &config.client;
    let largest = u64::from(client.max_frame_bytes) + FRAME_HEADER_BYTES;
    let (stream, connection) = (client.stream_window_bytes, client.connection_window_bytes);
    window(
        rules,
        "client-receive-window-bytes",
        stream,
        largest,
        "of a client",
    );
    nested(
        rules,
        [
            "client-receive-window-bytes",
            "client-connection-window-bytes",
        ],
        stream,
        connection,
    );
    let least = config.peer.request_timeout + config.forward.budget;
    rules.require(
        client.publish_answer_timeout >= least,
        "publish-answer-timeout-ms",
        format!(
            "must leave a forwarded publish its time: peer-request-timeout-ms = {} and forward-budget-ms = {}",
            ms(config.peer.request_timeout),
            ms(config.forward.budget)
        ),
        format!("raise it to {} or more", ms(least)),
    );
    rules.require(
        client.publish_answer_timeout >= client.quorum_timeout,
        "publish-answer-timeout-ms",
        format!(
            "must not be below quorum-timeout-ms = {}",
            ms(client.quorum_timeout)
        ),
        format!("raise it to {} or more", ms(client.quorum_timeout)),
    );
}
