//! The flags of `forward`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, ValueEnum};
use felix_uring::cli::CommandError;
use felix_uring::driver::quic::SPIN_BUDGET;
use felix_uring::limits::{MAX_CLIENT_FRAME_BYTES, MAX_PAYLOADS, MAX_RECORD_BYTES};

use crate::record::RECORD_HEADER_BYTES;
use crate::run_args::{OutputArgs, ServeArgs};
use crate::units::{parse_bytes, parse_duration, parse_rate};

/// What the brokers' `--spin-us` is when nobody says.
pub const BROKER_SPIN_US: u64 = SPIN_BUDGET.as_micros() as u64;

/// How a record is made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Durability {
    /// Answered once it is on stable storage; the only mode there is.
    Fsync,
}

/// When a record is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Ack {
    /// Once the leader has it durably.
    Leader,
    /// Once a majority has.
    Quorum,
}

/// How the log is read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Verify {
    /// From the files of the stopped brokers; for a cluster of this tool's own.
    Log,
    /// By subscribing to the running brokers.
    Subscribe,
    /// Not at all; the report then says that nothing was checked.
    None,
}

/// Publish to brokers, check every record, report
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # Two brokers of its own; every batch is forwarded from one to the other\n  \
    felix-bench\n\n  \
    # The figure to quote: five rounds, each between two rounds of the relay probe\n  \
    felix-bench forward --rounds 5 --json run.json\n\n  \
    # 100-byte records, 16 connections with one outstanding each, sent to their owner\n  \
    felix-bench forward --direct --payload-bytes 100 --batch 1 --connections 16 --in-flight 1\n\n  \
    # One record at a time, beside what the hops and the write of its path take by themselves\n  \
    felix-bench forward --batch 1 --connections 1 --in-flight 1 --rounds 5\n\n  \
    # On a fixed schedule: latency counts from the moment a batch was due\n  \
    felix-bench forward --rate 50k --batch 10 --duration 30s\n\n  \
    # A cluster that runs already\n  \
    felix-bench forward --addr 127.0.0.1:5000 --ca ca.pem --token \"$TOKEN\" --stream events\n\n\
    --in-flight counts unanswered batches of one connection: 16 connections with --in-flight 1 have\n\
    16 outstanding in all, 8 with --in-flight 64 have 512. Exit status 0 means that everything\n\
    acknowledged was found once, unchanged and in order; 5 that it was not.")]
pub struct ForwardArgs {
    /// Broker processes to start
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    pub brokers: u16,
    /// Data cores of each
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub cores_per_broker: u16,
    /// Submissions in flight a core's ring can hold
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(32..=32_768))]
    pub queue_depth: u32,
    /// Shards of the stream; asked for when the cluster runs already
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub shards: u32,
    /// Size of a record
    #[arg(long, default_value = "1024", value_name = "BYTES", value_parser = parse_bytes)]
    pub payload_bytes: u64,
    /// Records of a batch
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub batch: u32,
    /// Client connections
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub connections: u16,
    /// Publish streams of each connection
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub streams: u16,
    /// Unanswered batches of each connection at most
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub in_flight: u32,
    /// Records a second on a fixed schedule; without it, as fast as answers come
    #[arg(long, value_name = "R/s", value_parser = parse_rate)]
    pub rate: Option<f64>,
    /// Length of a measured round
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Time before it that is not measured
    #[arg(long, default_value = "2s", value_parser = parse_duration)]
    pub warmup: Duration,
    /// Measured rounds, each between two of the relay probe
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Publish to the owner of a shard instead of a broker that has to forward
    #[arg(long)]
    pub direct: bool,
    /// Leave out the relay probe and the limits
    #[arg(long)]
    pub no_probe: bool,
    /// How a record is made durable
    #[arg(long, value_enum, default_value = "fsync")]
    pub durability: Durability,
    /// Copies of a record
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=9))]
    pub replicas: u16,
    /// When a record is answered
    #[arg(long, value_enum, default_value = "leader")]
    pub ack: Ack,
    /// Where data and report go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Leave the data where it is after the run
    #[arg(long)]
    pub keep_data: bool,
    /// How the records are read back [default: log, or subscribe with --addr]
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "log")]
    pub verify: Option<Verify>,
    /// A batch unanswered for this long is of unknown outcome
    #[arg(long, default_value = "30s", value_parser = parse_duration)]
    pub request_timeout: Duration,
    /// CPU of the load generator
    #[arg(long, value_name = "CPU")]
    pub client_cpu: Option<usize>,
    /// Client address of a broker of a running cluster
    #[arg(long, value_name = "ADDR", requires_all = ["ca", "token"])]
    pub addr: Option<SocketAddr>,
    /// CA file of the running cluster
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Token for the running cluster
    #[arg(
        long,
        value_name = "TOKEN",
        env = "FELIX_TOKEN",
        hide_env_values = true
    )]
    pub token: Option<String>,
    /// Admin addresses of the running cluster's brokers, for their accounts
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    pub admin: Vec<SocketAddr>,
    /// Tenant of the token
    #[arg(long, default_value = "t1", value_name = "NAME")]
    pub tenant: String,
    /// Namespace of the stream
    #[arg(long, default_value = "default", value_name = "NAME")]
    pub namespace: String,
    /// Stream of the running cluster
    #[arg(long, default_value = "events", value_name = "NAME")]
    pub stream: String,
    /// Name in the running brokers' certificates
    #[arg(long, default_value = "localhost", value_name = "NAME")]
    pub server_name: String,
    /// Keep the report under bench/runs, in a file of this name
    #[arg(long, value_name = "NAME")]
    pub record: Option<String>,
    /// What the brokers are told beside.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// The flags by themselves, as commands that start a cluster of their own need them.
#[derive(Parser)]
struct Alone {
    #[command(flatten)]
    args: ForwardArgs,
}

impl ForwardArgs {
    /// The defaults with some flags given.
    pub fn of(flags: &[&str]) -> Result<Self, clap::Error> {
        let words = std::iter::once("forward").chain(flags.iter().copied());
        Ok(Alone::try_parse_from(words)?.args)
    }

    /// What the flags mean together.
    pub fn check(&self) -> Result<(), CommandError> {
        let fail = |text: String| Err(CommandError::usage(text));
        if self.payload_bytes < RECORD_HEADER_BYTES as u64 {
            return fail(format!(
                "--payload-bytes {}: a record that can be checked has at least {RECORD_HEADER_BYTES}",
                self.payload_bytes
            ));
        }
        if self.payload_bytes > u64::from(MAX_RECORD_BYTES) || self.batch > MAX_PAYLOADS {
            return fail(format!(
                "--payload-bytes is at most {MAX_RECORD_BYTES} and --batch at most {MAX_PAYLOADS}"
            ));
        }
        let frame = u64::from(self.batch) * (self.payload_bytes + 4) + 1024;
        if frame > u64::from(MAX_CLIENT_FRAME_BYTES) {
            return fail(format!(
                "a batch of {} x {} bytes is larger than a frame may be ({MAX_CLIENT_FRAME_BYTES}); \
                 lower --batch",
                self.batch, self.payload_bytes
            ));
        }
        if self.streams as u32 > self.in_flight {
            return fail("--in-flight must be at least --streams, or streams stay idle".into());
        }
        if self.replicas > self.brokers && self.addr.is_none() {
            return fail(format!(
                "--replicas {} needs as many brokers; --brokers is {}",
                self.replicas, self.brokers
            ));
        }
        if self.brokers == 1 && !self.direct && self.addr.is_none() {
            return fail("one broker owns every shard; add --direct or more --brokers".into());
        }
        if self.addr.is_some() && self.verify == Some(Verify::Log) {
            return fail(
                "the files of a cluster that runs elsewhere cannot be read; use --verify subscribe"
                    .into(),
            );
        }
        if self.duration.is_zero() {
            return fail("--duration must be longer than 0".into());
        }
        Ok(())
    }

    /// How the records are read back.
    pub fn verify_mode(&self) -> Verify {
        self.verify.unwrap_or(match self.addr {
            Some(_) => Verify::Subscribe,
            None => Verify::Log,
        })
    }

    /// The brokers' `--spin-us`, which the relay probe has to share.
    pub fn broker_spin_us(&self) -> u64 {
        broker_spin_us(&self.serve.serve_flags)
    }

    /// Whether there is never more than one record on its way.
    pub fn is_one_outstanding(&self) -> bool {
        self.connections == 1 && self.in_flight == 1 && self.batch == 1 && self.rate.is_none()
    }

    /// Network hops of a publish.
    pub fn hops(&self) -> u32 {
        match self.direct {
            true => 1,
            false => 2,
        }
    }

    /// `forward` or `direct`.
    pub fn mode(&self) -> &'static str {
        match self.direct {
            true => "direct",
            false => "forward",
        }
    }
}

/// The `--spin-us` among flags for brokers, which what they are set against has to share.
pub fn broker_spin_us(serve_flags: &[String]) -> u64 {
    let mut flags = serve_flags.iter();
    while let Some(flag) = flags.next() {
        let value = match flag.strip_prefix("--spin-us") {
            Some("") => flags.next().map(String::as_str),
            Some(rest) => rest.strip_prefix('='),
            None => continue,
        };
        return value.and_then(|v| v.parse().ok()).unwrap_or(0);
    }
    BROKER_SPIN_US
}
