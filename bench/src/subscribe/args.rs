//! The flags of `subscribe`.

use std::time::Duration;

use clap::Args;
use felix_uring::cli::CommandError;

use crate::record::RECORD_HEADER_BYTES;
use crate::run_args::{OutputArgs, ServeArgs};
use crate::units::{parse_bytes, parse_duration};

/// Largest payload bytes of a batch; a client frame holds them with room to spare.
const MAX_BATCH_BYTES: u64 = 8 << 20;

/// Flags of `subscribe`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # One publisher, ten subscribers, every delivery checked, beside a bare fan-out\n  \
    felix-bench subscribe\n\n  \
    # A hundred\n  \
    felix-bench subscribe --subscribers 100 --rounds 3\n\n  \
    # What idle connections and subscriptions cost in memory\n  \
    felix-bench subscribe --idle-connections 10000 --subscriptions 100000\n\n\
    The publisher has at most --in-flight batches that not every subscriber has, so broker and\n\
    bare fan-out are loaded alike. Between the rounds one record at a time goes from publisher to\n\
    subscriber, beside one durable write and two echoes.")]
pub struct SubscribeArgs {
    /// Subscribers, each with a connection of its own
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub subscribers: u32,
    /// Bytes of a record
    #[arg(long, default_value = "1K", value_name = "BYTES", value_parser = parse_bytes)]
    pub payload_bytes: u64,
    /// Records of a batch
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub batch: u32,
    /// Batches published that some subscriber does not have yet
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub in_flight: u32,
    /// Measured rounds
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub rounds: u32,
    /// Length of a round
    #[arg(long, default_value = "3s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Not measured, before each round
    #[arg(long, default_value = "1s", value_parser = parse_duration)]
    pub warmup: Duration,
    /// Length of each run with one record at a time
    #[arg(long, default_value = "1s", value_parser = parse_duration)]
    pub lone_duration: Duration,
    /// Neither bare fan-out nor echoes
    #[arg(long)]
    pub no_probe: bool,
    /// Data cores of the broker
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub cores_per_broker: u16,
    /// Instead: this many connections that do nothing but be there
    #[arg(long, value_name = "N", requires = "subscriptions")]
    pub idle_connections: Option<u32>,
    /// With --idle-connections: subscriptions, spread evenly over them
    #[arg(long, value_name = "N", requires = "idle_connections")]
    pub subscriptions: Option<u32>,
    /// With --idle-connections: authenticated streams of each; the published client opens 40
    #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    pub idle_streams: u32,
    /// With --idle-connections: how long they are left alone
    #[arg(long, default_value = "10s", value_parser = parse_duration)]
    pub quiet: Duration,
    /// Where data and report go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// What the brokers are told beside.
    #[command(flatten)]
    pub serve: ServeArgs,
}

impl SubscribeArgs {
    /// Refuses what contradicts itself.
    pub fn check(&self) -> Result<(), CommandError> {
        let fail = |why: String| Err(CommandError::usage(why));
        if self.payload_bytes < RECORD_HEADER_BYTES as u64 {
            return fail(format!(
                "--payload-bytes must be at least {RECORD_HEADER_BYTES}: a record carries what it is checked by"
            ));
        }
        if self.payload_bytes * u64::from(self.batch) > MAX_BATCH_BYTES {
            return fail(format!("a batch may have at most {MAX_BATCH_BYTES} bytes"));
        }
        if self.subscribers == 0 || self.batch == 0 || self.in_flight == 0 || self.rounds == 0 {
            return fail(
                "--subscribers, --batch, --in-flight and --rounds must be at least 1".into(),
            );
        }
        if self.duration.is_zero() || self.lone_duration.is_zero() {
            return fail("--duration and --lone-duration must be longer than 0".into());
        }
        if let (Some(connections), Some(subscriptions)) =
            (self.idle_connections, self.subscriptions)
        {
            if connections == 0 || subscriptions < connections {
                return fail(
                    "--subscriptions must be at least --idle-connections, and that at least 1"
                        .into(),
                );
            }
            if subscriptions.div_ceil(connections) > 1000 {
                return fail(
                    "a connection carries at most 1000 event streams; give more --idle-connections"
                        .into(),
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SubscribeArgs,
    }

    fn parse(line: &str) -> Result<SubscribeArgs, clap::Error> {
        let words = std::iter::once("subscribe").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.args)
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(parse("").unwrap().check().is_ok());
        assert!(parse("--idle-connections 10 --subscriptions 100")
            .unwrap()
            .check()
            .is_ok());
        for line in [
            "--subscribers 0",
            "--payload-bytes 3",
            "--payload-bytes 1M --batch 64",
            "--in-flight 0",
            "--lone-duration 0s",
            "--idle-connections 10 --subscriptions 9",
            "--idle-connections 1 --subscriptions 1001",
        ] {
            assert!(parse(line).unwrap().check().is_err(), "{line}");
        }
        assert!(parse("--subscriptions 5").is_err(), "needs connections");
    }
}
