//! Every setting of the broker, declared once.

use storage_uring::format::segment::smallest_segment_for;

use crate::limits;

/// What a setting's value looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any text.
    Text,
    /// A file or directory.
    Path,
    /// `address:port` to listen on.
    Address,
    /// A whole number from the first to the second, both included.
    Whole(u64, u64),
    /// `true` or `false`; a flag without a value means `true`.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A number of cores or a list of CPUs.
    Cores,
}

/// What happens when nobody sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absent {
    /// The broker does not start; the text is an example.
    Required(&'static str),
    /// It stays unset.
    Unset,
    /// This value.
    Default(&'static str),
}

/// One setting.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Its name as a flag (`--name`) and as a key of the file.
    pub name: &'static str,
    /// What its value looks like.
    pub kind: Kind,
    /// Its default.
    pub absent: Absent,
    /// The group it is shown in.
    pub heading: &'static str,
    /// What it does, with its unit.
    pub help: &'static str,
}

impl Setting {
    /// The environment variable: `FELIX_` and the name in capitals.
    pub fn variable(&self) -> String {
        let upper = self.name.to_ascii_uppercase().replace('-', "_");
        format!("FELIX_{upper}")
    }

    /// The setting of that name.
    pub fn find(name: &str) -> Option<&'static Setting> {
        SETTINGS.iter().find(|setting| setting.name == name)
    }
}

const fn setting(
    heading: &'static str,
    name: &'static str,
    kind: Kind,
    absent: Absent,
    help: &'static str,
) -> Setting {
    Setting {
        name,
        kind,
        absent,
        heading,
        help,
    }
}

use Absent::{Default, Required, Unset};
use Kind::{Address, Choice, Cores, Path, Switch, Text, Whole};

const BROKER: &str = "Broker";
const LISTEN: &str = "Listeners";
const TLS: &str = "Certificates";
const EXECUTOR: &str = "Cores";
const STORAGE: &str = "Storage";
const PEERS: &str = "Links between brokers";
const CLIENTS: &str = "Clients";

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MINUTE_MS: u64 = 60_000;
/// A record is never split over two segments.
const LEAST_SEGMENT_BYTES: u64 = smallest_segment_for(limits::MAX_RECORD_BYTES as u64);

/// All settings, in the order they are shown.
pub const SETTINGS: &[Setting] = &[
    setting(BROKER, "node-id", Text, Required("broker-1"),
        "Name of this broker: a DNS name, as in the catalog and in its certificate"),
    setting(BROKER, "data-dir", Path, Required("/var/lib/felix-uring"),
        "Directory of the logs, on a local file system"),
    setting(BROKER, "catalog", Path, Required("/etc/felix-uring/catalog.toml"),
        "File that names nodes, tenants, streams and caches"),
    setting(BROKER, "shutdown-deadline-ms", Whole(100, 10 * MINUTE_MS), Default("10000"),
        "Longest orderly stop in ms; what is left then is cut and counted"),
    setting(LISTEN, "client-listen", Address, Default("127.0.0.1:5000"),
        "Address (UDP) for clients"),
    setting(LISTEN, "internal-listen", Address, Default("127.0.0.1:5001"),
        "Address (UDP) for other brokers"),
    setting(LISTEN, "admin-listen", Address, Default("127.0.0.1:5002"),
        "Address (TCP) for health, status and metrics"),
    setting(TLS, "internal-tls-cert", Path, Unset,
        "This broker's certificate towards other brokers; with its key and the CA, or none of the three"),
    setting(TLS, "internal-tls-key", Path, Unset,
        "Private key of internal-tls-cert"),
    setting(TLS, "internal-tls-ca", Path, Unset,
        "Authorities that issue brokers' certificates; read once"),
    setting(TLS, "client-cert", Path, Unset,
        "Certificate shown to clients; without it one is made at start, for localhost and this broker's names"),
    setting(TLS, "client-key", Path, Unset,
        "Private key of client-cert"),
    setting(TLS, "require-alpn", Switch, Default("false"),
        "Refuse clients that do not offer the protocol felix/1"),
    setting(EXECUTOR, "cores", Cores, Default("1"),
        "Number of data cores, or the list of CPUs to pin them to (0-3,6; one CPU: 6-6)"),
    setting(EXECUTOR, "queue-depth", Whole(32, 32_768), Default("128"),
        "Submission entries of each ring of a core"),
    setting(EXECUTOR, "io-memory-bytes", Whole(64 * KIB, GIB), Default("1048576"),
        "Registered I/O memory of each ring; three times this a core must fit RLIMIT_MEMLOCK"),
    setting(EXECUTOR, "preempt-ms", Whole(1, 100), Default("1"),
        "Time slice of a busy core in ms"),
    setting(EXECUTOR, "spin-us", Whole(0, 100_000), Default("50"),
        "How long a core looks for work before it sleeps, in us, while looking pays; 0: it sleeps at once"),
    setting(EXECUTOR, "lane-capacity", Whole(64, 1 << 20), Default("4096"),
        "Messages one core may have waiting for another"),
    setting(EXECUTOR, "stall-ms", Whole(10, MINUTE_MS), Default("1000"),
        "A core whose loop has not turned for this long is reported as stalled, in ms"),
    setting(STORAGE, "segment-bytes", Whole(LEAST_SEGMENT_BYTES, 2 * GIB), Default("67108864"),
        "Size of a log segment; a multiple of 4096 that holds the largest record"),
    setting(STORAGE, "commit-max-bytes", Whole(64 * KIB, 64 * MIB), Default("1048576"),
        "A commit group takes no further record after this many bytes; a multiple of 4096"),
    setting(STORAGE, "commit-max-delay-us", Whole(0, 1_000_000), Default("0"),
        "How long a commit group may wait for more records, in us"),
    setting(STORAGE, "commits-in-flight", Whole(1, 4), Default("2"),
        "Commit groups on their way to the disk at once"),
    setting(STORAGE, "sync-method", Choice(&["odsync", "fdatasync"]), Default("odsync"),
        "How a commit reaches stable storage: O_DSYNC writes, or a write and fdatasync"),
    setting(STORAGE, "max-queued-bytes", Whole(MIB, 16 * GIB), Default("67108864"),
        "Bytes a core may hold that are not on disk yet; beyond it publishes are refused as overloaded"),
    setting(STORAGE, "prewritten-segments", Whole(1, 64), Default("4"),
        "Segments a core keeps ready in advance, zeroed as far as the disk has time for it"),
    setting(STORAGE, "recent-bytes", Whole(0, 64 * GIB), Default("67108864"),
        "Bytes of recent records a core keeps in memory for readers"),
    setting(STORAGE, "reserve-bytes", Whole(0, 1 << 40), Default("268435456"),
        "Free space kept on the data file system; below it writes are refused until there is more. At least segment-bytes, better as much for every core"),
    setting(STORAGE, "retention-bytes", Whole(0, limits::MAX_RETENTION_BYTES), Default("0"),
        "Bytes every shard of a stream keeps at least; older whole stretches go; 0: no bound. A stream may say otherwise in the catalog"),
    setting(STORAGE, "retention-age-s", Whole(0, limits::MAX_RETENTION_AGE_S), Default("0"),
        "How long every shard of a stream keeps its records at least, in s; then whole stretches go; 0: for ever. A stream may say otherwise in the catalog"),
    setting(PEERS, "peer-in-flight", Whole(1, 65_536), Default("1024"),
        "Unanswered requests per peer and core; beyond it requests are shed at once"),
    setting(PEERS, "peer-in-flight-bytes", Whole(MIB, 16 * GIB), Default("67108864"),
        "Bytes of unanswered requests per peer and core"),
    setting(PEERS, "peer-streams", Whole(1, 8), Default("4"),
        "QUIC streams a link spreads its requests over"),
    setting(PEERS, "peer-inbound-in-flight", Whole(1, 65_536), Default("512"),
        "Requests of all peers a core works on at once"),
    setting(PEERS, "peer-connections", Whole(1, 65_536), Default("1024"),
        "Connections of other brokers a core accepts; beyond it newcomers are refused"),
    setting(PEERS, "peer-connections-per-node", Whole(1, 65_536), Default("128"),
        "Of these, connections under one certificate; each core of a peer makes one"),
    setting(PEERS, "peer-request-timeout-ms", Whole(50, 10 * MINUTE_MS), Default("5000"),
        "How long a peer may take to answer, in ms; then the outcome is unknown"),
    setting(PEERS, "peer-connect-timeout-ms", Whole(50, MINUTE_MS), Default("2000"),
        "How long connecting and greeting may take, in ms"),
    setting(PEERS, "peer-keep-alive-ms", Whole(50, MINUTE_MS), Default("1000"),
        "A link is pinged after this long without traffic, in ms; below half of peer-idle-timeout-ms"),
    setting(PEERS, "peer-idle-timeout-ms", Whole(200, 10 * MINUTE_MS), Default("4000"),
        "A peer not heard from for this long is gone, in ms"),
    setting(PEERS, "peer-unused-close-ms", Whole(1_000, 60 * MINUTE_MS), Default("60000"),
        "A link without requests for this long is closed, in ms"),
    setting(PEERS, "peer-backoff-min-ms", Whole(1, MINUTE_MS), Default("50"),
        "First wait before dialling again, in ms; doubles, with jitter"),
    setting(PEERS, "peer-backoff-max-ms", Whole(10, 10 * MINUTE_MS), Default("5000"),
        "Longest wait before dialling again, in ms"),
    setting(PEERS, "peer-refused-backoff-ms", Whole(1_000, 60 * MINUTE_MS), Default("15000"),
        "First wait after a certificate or name was refused, in ms; doubles"),
    setting(PEERS, "peer-receive-window-bytes", Whole(64 * KIB, GIB), Default("71303168"),
        "Bytes a peer may send ahead on one stream; at least the largest frame"),
    setting(PEERS, "peer-connection-window-bytes", Whole(64 * KIB, 2 * GIB), Default("142606336"),
        "Bytes a peer may send ahead on one connection; at least peer-receive-window-bytes"),
    setting(PEERS, "peer-send-window-bytes", Whole(64 * KIB, GIB), Default("4194304"),
        "Bytes on their way to a peer on one link; small requests wait behind them, long paths need rate times round trip"),
    setting(PEERS, "rebuilds-at-once", Whole(0, 1024), Default("1"),
        "Followers this broker, as their leader, gives a new copy at once; 0: never by itself"),
    setting(PEERS, "forward-attempts", Whole(1, 20), Default("5"),
        "Times a forwarded request is sent at most, redirects included"),
    setting(PEERS, "forward-budget-ms", Whole(1, MINUTE_MS), Default("250"),
        "No attempt of a forwarded request begins later than this, in ms"),
    setting(CLIENTS, "max-connections", Whole(1, 1_000_000), Default("16384"),
        "Client connections of the broker; beyond it newcomers are refused"),
    setting(CLIENTS, "client-streams", Whole(128, 65_536), Default("256"),
        "Streams a client may have open at once on one connection; each takes about 50 bytes from the start"),
    setting(CLIENTS, "max-subscriptions", Whole(1, 10_000_000), Default("200000"),
        "Subscriptions of the broker; beyond it further ones are refused"),
    setting(CLIENTS, "client-queued-bytes", Whole(MIB, 1024 * GIB), Default("1073741824"),
        "Bytes queued for slow clients, all together, past which no further events are read for them"),
    setting(CLIENTS, "client-buffered-bytes", Whole(16 * MIB, 1024 * GIB), Default("1073741824"),
        "Bytes of clients' frames that have not come whole, all together; past it a stream with a large one is refused"),
    setting(CLIENTS, "client-idle-timeout-ms", Whole(6_000, 60 * MINUTE_MS), Default("30000"),
        "A client not heard from for this long is gone, in ms; not below the clients' own 6 s"),
    setting(CLIENTS, "auth-timeout-ms", Whole(100, 5 * MINUTE_MS), Default("10000"),
        "How long a connection may stay without a verified token, in ms"),
    setting(CLIENTS, "max-client-frame-bytes", Whole(64 * KIB, 16 * MIB), Default("16777216"),
        "Largest frame accepted from a client"),
    setting(CLIENTS, "client-receive-window-bytes", Whole(64 * KIB, GIB), Default("17825792"),
        "Bytes a client may send ahead on one stream; at least the largest frame"),
    setting(CLIENTS, "client-connection-window-bytes", Whole(64 * KIB, 2 * GIB), Default("33554432"),
        "Bytes a client may send ahead on one connection; at least client-receive-window-bytes"),
    setting(CLIENTS, "publish-answer-timeout-ms", Whole(100, 10 * MINUTE_MS), Default("10000"),
        "An acknowledged publish is answered within this time, in ms, as outcome unknown if need be; clients give up after 30 s"),
    setting(CLIENTS, "quorum-timeout-ms", Whole(100, 10 * MINUTE_MS), Default("5000"),
        "How long a quorum publish waits for a majority, in ms"),
    setting(CLIENTS, "token-cache-entries", Whole(16, 1 << 20), Default("4096"),
        "Verified tokens a core remembers"),
];
