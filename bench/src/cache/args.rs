//! The flags of `cache`.

use std::time::Duration;

use clap::Args;
use felix_uring::cli::CommandError;
use serde::{Deserialize, Serialize};

use super::check::VALUE_HEAD_BYTES;
use crate::run_args::{OutputArgs, ServeArgs};
use crate::units::{parse_bytes, parse_duration};

/// Flags of `cache`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # Two brokers, everything forwarded, every answer checked\n  \
    felix-bench cache\n\n  \
    # At the owner itself, reads only, all keys alike\n  \
    felix-bench cache --direct --mix get=100 --theta 0\n\n  \
    # What a key costs in memory, and how long a million of them take to come back\n  \
    felix-bench cache --direct --brokers 1 --keys 1000000 --no-probe --reopen\n\n  \
    # Forwarded puts set against forwarded publishes of the same size\n  \
    felix-bench cache --beside-publishes --connections 4 --in-flight 256\n\n  \
    # What compaction does to everybody else: latencies while it copies, and while it does not\n  \
    felix-bench cache --compaction --mix get=50,put=50 --keys 2000 --value-bytes 1KiB --duration 20s\n\n  \
    # Ten million keys on two cores, and their way back after a kill\n  \
    felix-bench cache --direct --brokers 1 --cores-per-broker 2 --shards 2 --keys 10000000 --value-bytes 20 \\\n    \
    --in-flight 512 --connections 8 --duration 1s --no-probe --read-back 100000 --reopen\n\n\
    Each worker has one request on its way. A key is written by one worker, so what a read may see\n\
    is known. The ratio sets a lone get beside bare echoes over the same hops in the same run.")]
pub struct CacheArgs {
    /// Brokers; the keys live on all but the first
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub brokers: u16,
    /// Data cores of each broker
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub cores_per_broker: u16,
    /// Shards of the cache
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub shards: u32,
    /// Ask the broker that owns the keys
    #[arg(long)]
    pub direct: bool,
    /// Shares of the operations: get, put, delete, add
    #[arg(long, default_value = "get=80,put=15,delete=2,add=3", value_name = "SHARES", value_parser = Mix::parse)]
    pub mix: Mix,
    /// Keys, written once before the run
    #[arg(long, default_value_t = 10_000, value_name = "N")]
    pub keys: usize,
    /// Bytes of a value
    #[arg(long, default_value = "100", value_name = "BYTES", value_parser = parse_bytes)]
    pub value_bytes: u64,
    /// How unevenly keys are chosen (zipf); 0 is evenly
    #[arg(long, default_value_t = 0.99, value_name = "THETA")]
    pub theta: f64,
    /// Workers, each with a stream and one request on its way
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub in_flight: usize,
    /// Connections the workers share
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub connections: usize,
    /// Length of the measured load
    #[arg(long, default_value = "5s", value_parser = parse_duration)]
    pub duration: Duration,
    /// Not measured, before it
    #[arg(long, default_value = "1s", value_parser = parse_duration)]
    pub warmup: Duration,
    /// Length of each echo and of each run of lone gets
    #[arg(long, default_value = "1s", value_parser = parse_duration)]
    pub probe_duration: Duration,
    /// No echoes and lone gets
    #[arg(long)]
    pub no_probe: bool,
    /// Set operations during compaction beside the others; brings latencies apart, and the log over its
    /// bound by writing long enough
    #[arg(long)]
    pub compaction: bool,
    /// Keys read back at the end, evenly spread; all of them unless said
    #[arg(long, value_name = "N")]
    pub read_back: Option<usize>,
    /// Kill the owner at the end, start it again, and time its way to the first answer
    #[arg(long)]
    pub reopen: bool,
    /// Instead: puts and publishes of one size in turn, all forwarded, and the ratio of their rates
    #[arg(long, conflicts_with_all = ["direct", "reopen"])]
    pub beside_publishes: bool,
    /// Rounds of each with --beside-publishes
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub rounds: usize,
    /// Where data and report go.
    #[command(flatten)]
    pub output: OutputArgs,
    /// What the brokers are told beside.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// Shares of the operations; need not add up to anything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mix {
    pub get: u32,
    pub put: u32,
    pub delete: u32,
    pub add: u32,
}

impl Mix {
    fn parse(text: &str) -> Result<Self, String> {
        let mut mix = Self::default();
        for part in text.split(',') {
            let (name, share) = part.split_once('=').ok_or("write it like get=80,put=20")?;
            let share: u32 = share
                .parse()
                .map_err(|_| format!("{share:?} is not a share"))?;
            match name {
                "get" => mix.get = share,
                "put" => mix.put = share,
                "delete" => mix.delete = share,
                "add" => mix.add = share,
                other => return Err(format!("{other:?} is none of get, put, delete, add")),
            }
        }
        match mix.total() {
            0 => Err("every share is 0".into()),
            _ => Ok(mix),
        }
    }

    /// All shares together.
    pub fn total(&self) -> u64 {
        [self.get, self.put, self.delete, self.add]
            .into_iter()
            .map(u64::from)
            .sum()
    }
}

impl CacheArgs {
    /// Refuses what contradicts itself.
    pub fn check(&self) -> Result<(), CommandError> {
        let fail = |why: String| Err(CommandError::usage(why));
        if self.brokers == 0 || self.brokers == 1 && !self.direct {
            return fail("one broker owns every key; add --direct or more --brokers".into());
        }
        if self.value_bytes < VALUE_HEAD_BYTES as u64 {
            return fail(format!(
                "--value-bytes must be at least {VALUE_HEAD_BYTES}: a value carries what it is checked by"
            ));
        }
        if self.in_flight == 0 || self.connections == 0 || self.shards == 0 {
            return fail("--in-flight, --connections and --shards must be at least 1".into());
        }
        if self.beside_publishes && (self.shards != 1 || self.rounds == 0) {
            return fail("--beside-publishes takes one shard and at least one round".into());
        }
        if self.keys < self.in_flight {
            return fail(
                "--keys must be at least --in-flight: each worker writes keys of its own".into(),
            );
        }
        if !(0.0..=4.0).contains(&self.theta) || self.duration.is_zero() {
            return fail("--theta is 0 to 4, and --duration longer than 0".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_and_nonsense_is_refused() {
        let mix = Mix::parse("get=80,put=20").unwrap();
        assert_eq!((mix.get, mix.put, mix.total()), (80, 20, 100));
        for bad in ["", "get", "get=x", "take=1", "get=0"] {
            assert!(Mix::parse(bad).is_err(), "{bad}");
        }
    }
}
