//! Configuration mistakes: each is named with its key, value, rule and remedy, all in one run,
//! and nothing is created while checking.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{CommandFactory, Parser};
use felix_uring::auth::SigningKey;
use felix_uring::config::{
    load, reference, Config, ConfigErrors, CoreSelection, Loaded, ServeArgs, SyncMethod, SETTINGS,
};
use felix_uring::tls::{DevCa, IssueRequest};

fn now_s() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.expect("after 1970").as_secs()
}

/// A directory with a catalog and certificates, and the flags that use them.
struct Site {
    dir: tempfile::TempDir,
    args: ServeArgs,
    environment: Vec<(String, String)>,
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut site = Self {
            dir,
            args: ServeArgs::default(),
            environment: Vec::new(),
        };
        site.write_catalog(1);
        site.set("node-id", "broker-1");
        let data = site.file("data");
        site.set("data-dir", &data.display().to_string());
        let catalog = site.file("catalog.toml");
        site.set("catalog", &catalog.display().to_string());
        site
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn set(&mut self, name: &str, value: &str) {
        assert!(self.args.set(name, value), "{name}");
    }

    fn env(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_string(), value.to_string()));
    }

    fn write_catalog(&self, replicas: u16) {
        let x = SigningKey::generate().expect("random bytes").x();
        let text = format!(
            "[[node]]\nid = \"broker-1\"\nclient = \"127.0.0.1:5000\"\ninternal = \"127.0.0.1:5001\"\n\
             [[node]]\nid = \"broker-2\"\nclient = \"127.0.0.1:6000\"\ninternal = \"127.0.0.1:6001\"\n\
             [[tenant]]\nid = \"t1\"\n[[tenant.key]]\nkid = \"k1\"\nx = \"{x}\"\n\
             [[stream]]\ntenant = \"t1\"\nnamespace = \"ns\"\nname = \"s\"\nreplicas = {replicas}\n"
        );
        std::fs::write(self.file("catalog.toml"), text).expect("written");
    }

    fn write_certificates(&mut self) {
        let ca = DevCa::generate("ca").expect("made");
        let names = ["broker-1".to_string(), "localhost".to_string()];
        let issued = ca
            .issue(&IssueRequest::for_broker(&names, 90))
            .expect("issued");
        for (setting, name, text) in [
            ("internal-tls-cert", "cert.pem", issued.cert_pem.as_str()),
            ("internal-tls-key", "key.pem", issued.key_pem.as_str()),
            ("internal-tls-ca", "ca.pem", ca.cert_pem()),
        ] {
            std::fs::write(self.file(name), text).expect("written");
            let path = self.file(name).display().to_string();
            self.set(setting, &path);
        }
    }

    fn write_config(&mut self, text: &str) {
        std::fs::write(self.file("broker.toml"), text).expect("written");
        self.args.config = Some(self.file("broker.toml"));
    }

    fn load(&self) -> Result<Loaded, ConfigErrors> {
        let before = listing(self.dir.path());
        let loaded = load(&self.args, &self.environment, now_s());
        assert_eq!(
            listing(self.dir.path()),
            before,
            "checking made or removed a file"
        );
        loaded
    }

    /// The text of every mistake.
    fn faults(&self) -> Vec<String> {
        let errors = self.load().expect_err("refused");
        let list = errors.0.iter();
        list.map(|error| {
            assert!(
                !error.rule.is_empty() && !error.remedy.is_empty(),
                "{error:?}"
            );
            error.to_string()
        })
        .collect()
    }

    /// The text of the only mistake.
    fn only_fault(&self) -> String {
        let faults = self.faults();
        assert_eq!(faults.len(), 1, "{faults:#?}");
        faults.into_iter().next().unwrap_or_default()
    }
}

fn listing(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("readable");
    let mut paths: Vec<PathBuf> = entries.map(|e| e.expect("entry").path()).collect();
    paths.sort();
    paths
}

#[track_caller]
fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn defaults_and_warnings_of_a_plain_broker() {
    let loaded = Site::new().load().expect("good");
    let config = &loaded.config;
    assert_eq!(config.node_id.as_str(), "broker-1");
    assert_eq!(
        config.client_listen,
        "127.0.0.1:5000".parse().expect("address")
    );
    assert_eq!(config.storage.segment_bytes, 64 << 20);
    assert_eq!(config.storage.sync_method, SyncMethod::Odsync);
    assert_eq!(config.executor.cores, CoreSelection::Count(1));
    assert_eq!(config.peer.request_timeout, Duration::from_secs(5));
    assert!(config.peer.tls.is_none() && !loaded.peer_tls.is_authenticated());
    assert_eq!(loaded.catalog.catalog.nodes().len(), 2);
    assert_eq!(loaded.warnings.len(), 1, "{:?}", loaded.warnings);
    assert_has(
        &loaded.warnings[0],
        &["do not authenticate", "127.0.0.1:5001"],
    );
}

#[test]
fn flag_over_environment_over_file_over_default() {
    let mut site = Site::new();
    site.write_config(
        "queue-depth = 256\nspin-us = 10\nsegment-bytes = 0x2000000\ncores = \"0-1\"\n",
    );
    site.env("FELIX_SPIN_US", "20");
    site.env("FELIX_LANE_CAPACITY", "1_000");
    site.env("FELIX_LOG", "debug");
    site.env("UNRELATED", "x");
    site.set("lane-capacity", "2000");
    let config = site.load().expect("good").config;
    assert_eq!(config.executor.queue_depth, 256);
    assert_eq!(config.executor.spin, Duration::from_micros(20));
    assert_eq!(config.executor.lane_capacity, 2000);
    assert_eq!(config.executor.preempt, Duration::from_millis(1));
    assert_eq!(config.storage.segment_bytes, 32 << 20);
    assert_eq!(config.executor.cores, CoreSelection::List(vec![0, 1]));
    // The file may also be named by a variable.
    let path = site
        .args
        .config
        .take()
        .expect("set above")
        .display()
        .to_string();
    site.env("FELIX_CONFIG", &path);
    assert_eq!(site.load().expect("good").config.executor.queue_depth, 256);
}

#[test]
fn misspelt_keys_and_variables_are_named_with_the_nearest() {
    let mut site = Site::new();
    site.write_config("\nsegmnet-bytes = 1\n");
    assert_has(
        &site.only_fault(),
        &[
            "segmnet-bytes = 1",
            "broker.toml:2",
            "did you mean segment-bytes?",
        ],
    );
    site.write_config("segment_bytes = 67108864\n");
    assert_has(&site.only_fault(), &["did you mean segment-bytes?"]);
    site.write_config("colour = \"red\"\n");
    assert_has(&site.only_fault(), &["colour = red", "--help"]);
    site.write_config("queue-depth = 256\n");
    site.env("FELIX_QUEUE_DEPHT", "1");
    let fault = site.only_fault();
    assert_has(
        &fault,
        &["FELIX_QUEUE_DEPHT", "did you mean FELIX_QUEUE_DEPTH?"],
    );
    site.environment.clear();
    site.env("FELIX_TOKEN", "eyJhbGciOi.secret.secret");
    assert!(!site.only_fault().contains("secret"));
}

#[test]
fn values_alone_are_judged_by_kind_and_range() {
    let cases = [
        ("commits-in-flight", "5", "from 1 to 4"),
        ("commits-in-flight", "two", "from 1 to 4"),
        ("commits-in-flight", "-1", "from 1 to 4"),
        ("sync-method", "none", "odsync, fdatasync"),
        ("client-listen", "localhost", "IP address and a port"),
        ("client-listen", "", "must not be empty"),
        ("require-alpn", "yes", "true or false"),
        ("cores", "0", "1 to 1024 cores"),
        ("cores", "3-1", "runs backwards"),
        ("node-id", "broker_1", "DNS name"),
        ("node-id", "10.0.0.1", "DNS name"),
        ("segment-bytes", "67108865", "multiple of 4096"),
        ("segment-bytes", "8388608", "from 11546624"),
        ("client-idle-timeout-ms", "5000", "from 6000"),
    ];
    for (key, value, rule) in cases {
        let mut site = Site::new();
        site.set(key, value);
        let faults = site.faults();
        let hit = faults
            .iter()
            .any(|fault| fault.starts_with(key) && fault.contains(rule));
        assert!(hit, "{key}={value}: {faults:#?}");
    }
    for (line, rule) in [
        ("queue-depth = \"256\"", "without quotes"),
        ("require-alpn = 1", "true or false"),
        ("node-id = 3", "text in quotes"),
        ("cores = [1]", "list of CPUs in quotes"),
        ("queue-depth = ", "not TOML"),
    ] {
        let mut site = Site::new();
        site.write_config(line);
        assert_has(&site.only_fault(), &["broker.toml:1", rule]);
    }
}

#[test]
fn required_settings_are_asked_for() {
    let errors = load(&ServeArgs::default(), &[], now_s()).expect_err("nothing is set");
    let text = errors.to_string();
    assert_has(&text, &["node-id", "--data-dir /var", "catalog = (unset)"]);
    assert_eq!(errors.0.len(), 3, "{text}");
    // What is missing hides nothing else.
    let mut site = Site::new();
    site.args.given.remove("node-id");
    site.args.given.remove("data-dir");
    site.set("peer-keep-alive-ms", "2000");
    site.set("client-cert", "/nowhere/cert.pem");
    site.set("client-key", "/nowhere/key.pem");
    std::fs::write(site.file("catalog.toml"), "x = 1\n").expect("written");
    let text = site.faults().join("\n");
    let parts = [
        "node-id",
        "data-dir",
        "peer-keep-alive-ms",
        "client-cert = /nowhere",
        "catalog.toml:1",
    ];
    assert_has(&text, &parts);
}

#[test]
fn values_that_are_wrong_together() {
    /// What is set, the setting that is blamed, and a part of the message.
    type Case = (
        &'static [(&'static str, &'static str)],
        &'static str,
        &'static str,
    );
    let cases: &[Case] = &[
        (
            &[("peer-keep-alive-ms", "2000")],
            "peer-keep-alive-ms = 2000",
            "lower it to 1999",
        ),
        (
            &[("peer-idle-timeout-ms", "2000")],
            "peer-keep-alive-ms = 1000",
            "raise peer-idle-timeout-ms above 2000",
        ),
        (
            &[("peer-receive-window-bytes", "67108864")],
            "peer-receive-window-bytes = 67108864",
            "67108876",
        ),
        (
            &[("client-receive-window-bytes", "16777216")],
            "client-receive-window-bytes",
            "16777228",
        ),
        (
            &[("peer-connection-window-bytes", "70000000")],
            "peer-connection-window-bytes",
            "peer-receive-window-bytes",
        ),
        (
            &[("peer-connections", "100")],
            "peer-connections-per-node",
            "peer-connections = 100",
        ),
        (
            &[("internal-listen", "127.0.0.1:5000")],
            "internal-listen = 127.0.0.1:5000",
            "differ from client-listen",
        ),
        (
            &[("internal-listen", "0.0.0.0:5000")],
            "internal-listen",
            "differ from client-listen",
        ),
        (
            &[("admin-listen", "[::]:5001")],
            "admin-listen",
            "differ from internal-listen",
        ),
        (
            &[
                ("commit-max-bytes", "16777216"),
                ("segment-bytes", "16777216"),
            ],
            "commit-max-bytes",
            "raise segment-bytes to 33554432",
        ),
        (
            &[("reserve-bytes", "0")],
            "reserve-bytes",
            "raise it to 67108864",
        ),
        (
            &[("segment-bytes", "536870912")],
            "reserve-bytes",
            "raise it to 536870912",
        ),
        (
            &[("commit-max-bytes", "32505856")],
            "max-queued-bytes",
            "97517568",
        ),
        (
            &[("peer-backoff-min-ms", "6000")],
            "peer-backoff-min-ms",
            "peer-backoff-max-ms = 5000",
        ),
        (
            &[("publish-answer-timeout-ms", "5100")],
            "publish-answer-timeout-ms",
            "5250",
        ),
        (
            &[("quorum-timeout-ms", "20000")],
            "publish-answer-timeout-ms",
            "20000",
        ),
    ];
    for (settings, key, rule) in cases {
        let mut site = Site::new();
        for (name, value) in *settings {
            site.set(name, value);
        }
        let fault = site.only_fault();
        assert!(fault.starts_with(key), "{fault}");
        assert_has(&fault, &[rule]);
    }
    let mut site = Site::new();
    for listener in ["client-listen", "internal-listen", "admin-listen"] {
        site.set(listener, "127.0.0.1:0");
    }
    site.load()
        .expect("the system chooses three different ports");
}

#[test]
fn a_reserve_below_a_segment_a_core_is_warned_about() {
    let mut site = Site::new();
    site.set("cores", "2");
    let said = |site: &Site| {
        let warnings = site.load().expect("works").warnings;
        warnings.iter().any(|text| text.contains("reserve-bytes"))
    };
    site.set("reserve-bytes", "134217728");
    assert!(!said(&site), "one segment a core");
    site.set("reserve-bytes", "134217727");
    assert!(said(&site));
    let warnings = site.load().expect("works").warnings.join("\n");
    assert_has(&warnings, &["134217727", "raise it to 134217728"]);
}

#[test]
fn a_data_directory_that_is_a_file() {
    let mut site = Site::new();
    let file = site.file("data");
    std::fs::write(&file, "x").expect("written");
    assert_has(&site.only_fault(), &["data-dir", "is a file"]);
    let below = file.join("deeper/still").display().to_string();
    site.set("data-dir", &below);
    assert_has(&site.only_fault(), &["data-dir", "is a file"]);
}

#[test]
fn peer_tls_is_all_or_nothing() {
    let mut site = Site::new();
    site.write_certificates();
    assert!(site.load().expect("all three").peer_tls.is_authenticated());
    let ca = site.args.given.remove("internal-tls-ca").expect("set");
    assert_has(
        &site.only_fault(),
        &["internal-tls-ca", "internal-tls-cert and internal-tls-key"],
    );
    site.env("FELIX_INTERNAL_TLS_CA", &ca);
    assert!(site
        .load()
        .expect("one from the environment")
        .warnings
        .is_empty());
    site.set("client-cert", "/x");
    assert_has(
        &site.faults().join("\n"),
        &["client-key = (unset)", "when client-cert is"],
    );
}

#[test]
fn replication_needs_peer_tls() {
    let mut site = Site::new();
    site.write_catalog(2);
    assert_has(
        &site.only_fault(),
        &["internal-tls-cert = (unset)", "stream t1/ns/s has replicas"],
    );
    site.write_certificates();
    site.load().expect("with certificates");
}

#[test]
fn certificate_and_catalog_faults_carry_their_setting() {
    let mut site = Site::new();
    site.write_certificates();
    std::fs::write(site.file("key.pem"), "").expect("written");
    assert_has(
        &site.only_fault(),
        &["internal-tls-key = ", "key.pem", "the file is empty"],
    );
    let mut site = Site::new();
    site.set("node-id", "broker-9");
    assert_has(
        &site.only_fault(),
        &["node-id = broker-9", "must be a [[node]]"],
    );
    let site = Site::new();
    std::fs::write(site.file("catalog.toml"), "[[node]]\nid = 3\n").expect("written");
    assert_has(
        &site.faults().join("\n"),
        &["catalog.toml:2: [[node]] id is integer"],
    );
    std::fs::remove_file(site.file("catalog.toml")).expect("removed");
    assert_has(&site.only_fault(), &["the catalog cannot be read"]);
    let mut site = Site::new();
    site.args.config = Some(site.file("nowhere.toml"));
    assert_has(
        &site.only_fault(),
        &["config", "nowhere.toml", "cannot be read"],
    );
}

#[test]
fn three_at_once_are_all_listed() {
    let mut site = Site::new();
    site.write_config("segmnet-bytes = 1\n");
    site.set("peer-keep-alive-ms", "10000");
    site.set("internal-listen", "127.0.0.1:5000");
    site.env("FELIX_SPINN_US", "1");
    std::fs::write(site.file("catalog.toml"), "x = 1\n").expect("written");
    let text = site.faults().join("\n");
    assert_has(
        &text,
        &[
            "segmnet-bytes",
            "peer-keep-alive-ms",
            "internal-listen",
            "FELIX_SPINN_US",
            "catalog.toml:1",
        ],
    );
}

#[test]
fn the_printed_configuration_can_be_fed_back_in() {
    let mut site = Site::new();
    site.write_certificates();
    site.set("spin-us", "007");
    site.set("require-alpn", "true");
    site.set("cores", "1-1");
    site.env("FELIX_QUEUE_DEPTH", "512");
    let first = Config::resolve(&site.args, &site.environment).expect("good");
    let printed = first.print();
    let key = std::fs::read_to_string(site.file("key.pem")).expect("readable");
    assert!(!printed.contains(key.lines().nth(1).expect("a body")));
    site.write_config(&printed);
    site.args.given.clear();
    site.environment.clear();
    let second = Config::resolve(&site.args, &[]).expect("what was printed is good");
    let values = |text: &str| -> Vec<String> {
        let lines = text
            .lines()
            .map(|line| line.split(" # ").next().unwrap_or(""));
        lines.map(str::to_string).collect()
    };
    assert_eq!(values(&second.print()), values(&printed));
    assert_eq!(second.executor, first.executor);
    assert_eq!(second.peer, first.peer);
    assert_eq!(second.executor.spin, Duration::from_micros(7));
    assert!(site.load().is_ok());
}

#[test]
fn a_key_in_place_of_a_path_is_refused_and_not_shown() {
    let mut site = Site::new();
    site.write_certificates();
    let key = std::fs::read_to_string(site.file("key.pem")).expect("readable");
    site.set("internal-tls-key", &key);
    let text = site.faults().join("\n");
    assert_has(&text, &["internal-tls-key", "must be the path of a file"]);
    assert!(
        !text.contains(key.lines().nth(1).expect("a body")),
        "{text}"
    );
}

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    serve: ServeArgs,
}

#[test]
fn flags_and_help_come_from_the_same_table() {
    Cli::command().debug_assert();
    let cli = Cli::try_parse_from([
        "x",
        "--config",
        "a.toml",
        "--check-config",
        "--require-alpn",
        "--node-id",
        "b",
        "--spin-us=5",
    ])
    .expect("parses");
    assert_eq!(cli.serve.config, Some(PathBuf::from("a.toml")));
    assert!(cli.serve.check_config && !cli.serve.print_config);
    let given: Vec<(&str, &str)> = cli
        .serve
        .given
        .iter()
        .map(|(k, v)| (*k, v.as_str()))
        .collect();
    assert_eq!(
        given,
        [("node-id", "b"), ("require-alpn", "true"), ("spin-us", "5")]
    );
    assert!(Cli::try_parse_from(["x", "--spin", "5"]).is_err());
    let help = Cli::command().render_long_help().to_string();
    let reference = reference();
    for setting in SETTINGS {
        assert!(
            help.contains(&format!("--{}", setting.name)),
            "{}",
            setting.name
        );
        assert!(reference.contains(&format!("`{}`", setting.name)));
    }
    let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_has(
        &flat,
        &["[default: 128] [from 32 to 32768] [env: FELIX_QUEUE_DEPTH]"],
    );
}
