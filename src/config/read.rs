//! From text to a typed configuration; each value is judged alone here.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::ids::NodeId;
use crate::tls::PeerTlsPaths;

use super::cores::CoreSelection;
use super::error::{shown, ConfigError};
use super::gather::{Found, Values};
use super::model::{
    ClientSettings, Config, ExecutorSettings, ForwardSettings, PeerSettings, StorageSettings,
    SyncMethod,
};
use super::settings::{Absent, Kind, Setting};

/// A whole number; digits may be grouped with underscores.
pub(super) fn whole(text: &str) -> Option<u64> {
    text.trim().replace('_', "").parse().ok()
}

/// Hands out values by name and remembers mistakes and which settings were asked for.
pub(super) struct ValueReader<'a> {
    values: &'a Values,
    pub(super) errors: RefCell<Vec<ConfigError>>,
    pub(super) asked: RefCell<BTreeSet<&'static str>>,
}

impl<'a> ValueReader<'a> {
    pub(super) fn new(values: &'a Values) -> Self {
        Self {
            values,
            errors: RefCell::default(),
            asked: RefCell::default(),
        }
    }

    fn find(&self, name: &'static str) -> Option<&'a Found> {
        self.asked.borrow_mut().insert(name);
        let found = self.values.get(name);
        if let Some(empty) = found.filter(|found| found.text.trim().is_empty()) {
            self.wrong(
                name,
                empty,
                "must not be empty",
                "give it a value, or leave it out",
            );
            return None;
        }
        if let (None, Some(Absent::Required(example))) =
            (found, Setting::find(name).map(|setting| setting.absent))
        {
            self.errors.borrow_mut().push(ConfigError {
                key: name.to_string(),
                value: "(unset)".to_string(),
                origin: String::new(),
                rule: "must be set".to_string(),
                remedy: format!("give --{name}, for example --{name} {example}"),
            });
        }
        found
    }

    fn wrong(&self, name: &str, found: &Found, rule: impl Into<String>, remedy: impl Into<String>) {
        self.errors.borrow_mut().push(ConfigError {
            key: name.to_string(),
            value: shown(&found.text),
            origin: found.origin.to_string(),
            rule: rule.into(),
            remedy: remedy.into(),
        });
    }

    /// A number in its declared range. A wrong one is reported and the default stands in for
    /// it, so that the other checks go on with something sensible.
    fn whole(&self, name: &'static str) -> u64 {
        let Some(Kind::Whole(min, max)) = Setting::find(name).map(|setting| setting.kind) else {
            return 0;
        };
        let stand_in = match Setting::find(name).map(|setting| setting.absent) {
            Some(Absent::Default(text)) => whole(text).unwrap_or(min),
            _ => min,
        };
        let Some(found) = self.find(name) else {
            return stand_in;
        };
        let in_range = whole(&found.text).filter(|n| (min..=max).contains(n));
        in_range.unwrap_or_else(|| {
            let rule = format!("must be a whole number from {min} to {max}");
            self.wrong(name, found, rule, "choose a number in this range");
            stand_in
        })
    }

    fn size(&self, name: &'static str) -> usize {
        // The ranges fit a 64-bit machine, the only kind this runs on.
        usize::try_from(self.whole(name)).unwrap_or(usize::MAX)
    }

    fn small(&self, name: &'static str) -> u32 {
        u32::try_from(self.whole(name)).unwrap_or(u32::MAX)
    }

    fn ms(&self, name: &'static str) -> Duration {
        Duration::from_millis(self.whole(name))
    }

    fn us(&self, name: &'static str) -> Duration {
        Duration::from_micros(self.whole(name))
    }

    fn path(&self, name: &'static str) -> Option<PathBuf> {
        let found = self.find(name)?;
        if found.text.contains('\n') || found.text.contains("-----BEGIN") {
            self.wrong(
                name,
                found,
                "must be the path of a file",
                "write the text into a file and name that",
            );
            return None;
        }
        Some(PathBuf::from(&found.text))
    }

    fn address(&self, name: &'static str) -> SocketAddr {
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let Some(found) = self.find(name) else {
            return nowhere;
        };
        found.text.trim().parse().unwrap_or_else(|_| {
            let rule = "must be an IP address and a port";
            self.wrong(
                name,
                found,
                rule,
                "write it like 127.0.0.1:5000 or [::1]:5000",
            );
            nowhere
        })
    }

    fn switch(&self, name: &'static str) -> bool {
        let Some(found) = self.find(name) else {
            return false;
        };
        found.text.trim().parse().unwrap_or_else(|_| {
            self.wrong(name, found, "must be true or false", "write one of the two");
            false
        })
    }

    fn word(&self, name: &'static str) -> Option<&'static str> {
        let Some(Kind::Choice(words)) = Setting::find(name).map(|setting| setting.kind) else {
            return None;
        };
        let found = self.find(name)?;
        let word = words.iter().find(|word| **word == found.text.trim());
        if word.is_none() {
            let rule = format!("must be one of: {}", words.join(", "));
            self.wrong(name, found, rule, "write one of these words");
        }
        word.copied()
    }

    fn cores(&self, name: &'static str) -> CoreSelection {
        let Some(found) = self.find(name) else {
            return CoreSelection::Count(1);
        };
        found
            .text
            .parse()
            .unwrap_or_else(|error: super::CoreSelectionError| {
                let remedy = "write a number like 4, or a list of CPUs like 0-3,6 (one CPU: 6-6)";
                self.wrong(name, found, error.to_string(), remedy);
                CoreSelection::Count(1)
            })
    }

    /// The broker's name, `None` when it is missing or wrong.
    fn node_id(&self, name: &'static str) -> Option<NodeId> {
        let found = self.find(name)?;
        let is_address = found.text.parse::<std::net::IpAddr>().is_ok();
        match NodeId::new(&found.text) {
            Ok(node) if !is_address => Some(node),
            Ok(_) | Err(_) => {
                let rule = "must be a DNS name: the broker's certificate carries it";
                let remedy = "use letters, digits, '-' and '.', for example broker-1";
                self.wrong(name, found, rule, remedy);
                None
            }
        }
    }

    /// All of these paths, or none; a part of them is a mistake.
    fn together<const N: usize>(&self, names: [&'static str; N]) -> Option<[PathBuf; N]> {
        let found = names.map(|name| self.path(name));
        if found.iter().all(Option::is_none) {
            return None;
        }
        for (name, _) in names.iter().zip(&found).filter(|(_, path)| path.is_none()) {
            if self.values.contains_key(name) {
                continue;
            }
            let others: Vec<&str> = names
                .iter()
                .filter(|n| self.values.contains_key(*n))
                .copied()
                .collect();
            self.errors.borrow_mut().push(ConfigError {
                key: (*name).to_string(),
                value: "(unset)".to_string(),
                origin: String::new(),
                rule: format!("must be set when {} is", others.join(" and ")),
                remedy: format!("set all of {}, or none of them", names.join(", ")),
            });
        }
        let paths: Vec<PathBuf> = found.into_iter().flatten().collect();
        paths.try_into().ok()
    }
}

/// What was read. Where a setting is missing or wrong, which is reported, something stands in
/// for it, so that everything else can still be checked in the same run.
pub(super) struct Draft {
    pub config: Config,
    /// The node id is the operator's, not a stand-in.
    pub has_node_id: bool,
    /// The catalog's path is the operator's, not a stand-in.
    pub has_catalog: bool,
}

/// Reads every setting.
pub(super) fn read_config(reader: &ValueReader, values: &Values) -> Draft {
    let node_id = reader.node_id("node-id");
    let data_dir = reader.path("data-dir");
    let catalog = reader.path("catalog");
    let shutdown_deadline = reader.ms("shutdown-deadline-ms");
    let client_listen = reader.address("client-listen");
    let internal_listen = reader.address("internal-listen");
    let admin_listen = reader.address("admin-listen");
    let executor = read_executor(reader);
    let storage = read_storage(reader);
    let peer = read_peer(reader);
    let forward = ForwardSettings {
        attempts: reader.small("forward-attempts") as u8,
        budget: reader.ms("forward-budget-ms"),
    };
    let client = read_client(reader);
    let (has_node_id, has_catalog) = (node_id.is_some(), catalog.is_some());
    let stand_in = || NodeId::new("unset").expect("a DNS name");
    let config = Config {
        node_id: node_id.unwrap_or_else(stand_in),
        data_dir: data_dir.unwrap_or_default(),
        catalog: catalog.unwrap_or_default(),
        shutdown_deadline,
        client_listen,
        internal_listen,
        admin_listen,
        executor,
        storage,
        peer,
        forward,
        client,
        values: values.clone(),
    };
    Draft {
        config,
        has_node_id,
        has_catalog,
    }
}

fn read_executor(reader: &ValueReader) -> ExecutorSettings {
    ExecutorSettings {
        cores: reader.cores("cores"),
        queue_depth: reader.small("queue-depth"),
        io_memory_bytes: reader.size("io-memory-bytes"),
        preempt: reader.ms("preempt-ms"),
        spin: reader.us("spin-us"),
        lane_capacity: reader.size("lane-capacity"),
        stall: reader.ms("stall-ms"),
    }
}

fn read_storage(reader: &ValueReader) -> StorageSettings {
    StorageSettings {
        segment_bytes: reader.whole("segment-bytes"),
        commit_max_bytes: reader.size("commit-max-bytes"),
        commit_max_delay: reader.us("commit-max-delay-us"),
        commits_in_flight: reader.size("commits-in-flight"),
        sync_method: match reader.word("sync-method") {
            Some("fdatasync") => SyncMethod::Fdatasync,
            Some(_) | None => SyncMethod::Odsync,
        },
        max_queued_bytes: reader.size("max-queued-bytes"),
        prewritten_segments: reader.size("prewritten-segments"),
        recent_bytes: reader.size("recent-bytes"),
        reserve_bytes: reader.whole("reserve-bytes"),
        retention_bytes: reader.whole("retention-bytes"),
        retention_age: Duration::from_secs(reader.whole("retention-age-s")),
    }
}

fn read_peer(reader: &ValueReader) -> PeerSettings {
    let files = reader.together(["internal-tls-cert", "internal-tls-key", "internal-tls-ca"]);
    PeerSettings {
        tls: files.map(|[cert, key, ca]| PeerTlsPaths { cert, key, ca }),
        in_flight: reader.size("peer-in-flight"),
        in_flight_bytes: reader.whole("peer-in-flight-bytes"),
        rebuilds_at_once: reader.size("rebuilds-at-once"),
        streams: reader.small("peer-streams") as u8,
        inbound_in_flight: reader.size("peer-inbound-in-flight"),
        connections: reader.size("peer-connections"),
        connections_per_node: reader.size("peer-connections-per-node"),
        request_timeout: reader.ms("peer-request-timeout-ms"),
        connect_timeout: reader.ms("peer-connect-timeout-ms"),
        keep_alive: reader.ms("peer-keep-alive-ms"),
        idle_timeout: reader.ms("peer-idle-timeout-ms"),
        unused_close: reader.ms("peer-unused-close-ms"),
        backoff_min: reader.ms("peer-backoff-min-ms"),
        backoff_max: reader.ms("peer-backoff-max-ms"),
        refused_backoff: reader.ms("peer-refused-backoff-ms"),
        stream_window_bytes: reader.small("peer-receive-window-bytes"),
        connection_window_bytes: reader.small("peer-connection-window-bytes"),
        send_window_bytes: reader.whole("peer-send-window-bytes"),
    }
}

fn read_client(reader: &ValueReader) -> ClientSettings {
    let files = reader.together(["client-cert", "client-key"]);
    ClientSettings {
        cert_and_key: files.map(|[cert, key]| (cert, key)),
        require_alpn: reader.switch("require-alpn"),
        max_connections: reader.size("max-connections"),
        streams: reader.small("client-streams"),
        max_subscriptions: reader.size("max-subscriptions"),
        queued_bytes: reader.size("client-queued-bytes"),
        buffered_bytes: reader.size("client-buffered-bytes"),
        idle_timeout: reader.ms("client-idle-timeout-ms"),
        auth_timeout: reader.ms("auth-timeout-ms"),
        max_frame_bytes: reader.small("max-client-frame-bytes"),
        stream_window_bytes: reader.small("client-receive-window-bytes"),
        connection_window_bytes: reader.small("client-connection-window-bytes"),
        publish_answer_timeout: reader.ms("publish-answer-timeout-ms"),
        quorum_timeout: reader.ms("quorum-timeout-ms"),
        token_cache_entries: reader.size("token-cache-entries"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::gather::gather;
    use super::super::settings::SETTINGS;
    use super::super::ServeArgs;
    use super::*;

    #[test]
    fn every_setting_is_read_and_every_default_is_valid() {
        let mut args = ServeArgs::default();
        for (name, value) in [("node-id", "a"), ("data-dir", "/x"), ("catalog", "/c")] {
            assert!(args.set(name, value));
        }
        let mut errors = Vec::new();
        let values = gather(&args, &[], &mut errors);
        let reader = ValueReader::new(&values);
        let draft = read_config(&reader, &values);
        assert!(draft.has_node_id && draft.has_catalog);
        errors.extend(reader.errors.into_inner());
        assert_eq!(errors, []);
        let asked = reader.asked.into_inner();
        let declared: BTreeSet<&str> = SETTINGS.iter().map(|setting| setting.name).collect();
        assert_eq!(asked, declared);
        assert_eq!(declared.len(), SETTINGS.len(), "a name is declared twice");
    }
}
